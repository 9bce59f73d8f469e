"""Loss of an exported model on a text, by transformers' own code in f32, and a passage written by the model."""

import argparse
import json
import math

import plain_transformers  # noqa: F401  before transformers
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import read_documents
from pack import pack


@torch.no_grad()
def loss_sum(model, tokens, length, device):
    """Nats over all tokens but the first, each predicted from at most `length` tokens before it in its window."""
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        ids = tokens[start : start + length + 1].to(device)
        logits = model(ids[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the exported model")
    parser.add_argument("--text", help="text to measure")
    parser.add_argument("--bytes", type=int, help="only the start of the text, cut at a blank line")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048], help="window lengths to measure at")
    parser.add_argument("--prompt", help="write a passage after this")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()

    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.text:
        documents = read_documents(args.text)
        if args.bytes:
            start = documents[0].encode()[: args.bytes].decode(errors="ignore")
            documents = [start[: start.rfind("\n\n")]]
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        tokens = torch.from_numpy(pack(backend, documents)[:-1].astype("int64"))
        characters = sum(map(len, documents))
        for length in args.lengths:
            total = loss_sum(model, tokens, length, args.device)
            nats = total / (len(tokens) - 1)
            print(json.dumps({
                "window": length, "characters": characters, "tokens": len(tokens), "nats_per_token": round(nats, 5),
                "perplexity": round(math.exp(nats), 3), "bits_per_char": round(total / math.log(2) / characters, 5),
            }), flush=True)
    if args.prompt:
        torch.manual_seed(args.seed)
        ids = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
        out = model.generate(ids, max_new_tokens=args.new_tokens, do_sample=True, temperature=0.8, top_p=0.95, top_k=0)
        print(tokenizer.decode(out[0]))


if __name__ == "__main__":
    main()
