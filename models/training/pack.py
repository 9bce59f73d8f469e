"""Tokenises a text into one stream of little-endian 16-bit token ids, each document followed by <|endoftext|>."""

import argparse
import lzma
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from corpus import END_OF_TEXT, read_documents


def pack(tokenizer, documents):
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = []
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        stream.append(np.array(encoding.ids + [end], dtype="<u2"))
    return np.concatenate(stream)


def load(path):
    data = Path(path).read_bytes()
    if Path(path).suffix == ".xz":
        data = lzma.decompress(data)
    return np.frombuffer(data, dtype="<u2")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="directory of tokenizer.json")
    parser.add_argument("--text", required=True, help="text, plain or .xz")
    parser.add_argument("--out", required=True, help="file to write; compressed when it ends in .xz")
    args = parser.parse_args()

    documents = read_documents(args.text)
    tokens = pack(Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json")), documents)
    data = tokens.tobytes()
    if args.out.endswith(".xz"):
        data = lzma.compress(data, preset=6)
    Path(args.out).write_bytes(data)
    characters = sum(map(len, documents))
    print(f"{len(documents)} documents, {characters} characters, {len(tokens)} tokens, "
          f"{characters / len(tokens):.3f} characters per token")


if __name__ == "__main__":
    main()
