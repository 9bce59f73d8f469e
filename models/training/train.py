"""Trains the model for a given time: the learning rate decays to zero at the end of the time."""

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

import delta_rule
import model as our_model
from corpus import read_documents
from optimizer import Optimizer
from pack import load, pack


class Windows:
    """Batches of windows [B, T + 1] over the token stream: each epoch cuts it at a new phase and shuffles the windows."""

    def __init__(self, tokens, seed):
        self.tokens = tokens
        self.random = torch.Generator().manual_seed(seed)
        self.starts, self.length, self.seen = torch.empty(0, dtype=torch.long), 0, 0

    def next(self, batch, length):
        if length != self.length or len(self.starts) < batch:
            phase = torch.randint(length, (), generator=self.random)
            starts = torch.arange(int(phase), len(self.tokens) - length, length)
            self.starts = starts[torch.randperm(len(starts), generator=self.random)]
            self.length = length
        starts, self.starts = self.starts[:batch], self.starts[batch:]
        self.seen += batch * length
        device = self.tokens.device
        index = starts.to(device, non_blocking=True)[:, None] + torch.arange(length + 1, device=device)
        return self.tokens[index].long()


@torch.no_grad()
def validate(model, tokens, length, precision):
    """Nats per token over consecutive windows; the last, short window is left out here. Not compiled: shapes vary."""
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length).long()
    targets = tokens[1 : count * length + 1].view(count, length).long()
    total, group = 0.0, max(1, 65536 // length)
    for i in range(0, count, group):
        with precision():
            hidden = our_model.hidden_states(model, inputs[i : i + group], our_model.block)
            loss = our_model.token_loss(hidden, model.lm_head.weight, targets[i : i + group])
        total += loss.item() * len(inputs[i : i + group])
    return total / count


def schedule(progress, step, warm_steps, hold):
    """Warm-up by steps, then constant, then linear decay to zero at the end of the time."""
    return min(1.0, (step + 1) / warm_steps) * min(1.0, (1 - progress) / (1 - hold))


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, help="packed training tokens")
    parser.add_argument("--valid", required=True, help="held-out text")
    parser.add_argument("--tokenizer", required=True, help="directory of tokenizer.json")
    parser.add_argument("--out", required=True, help="directory for model, log and summary")
    parser.add_argument("--init", help="directory of an exported model to start from")
    parser.add_argument("--seconds", type=float, default=1290, help="training time after compilation")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--long-length", type=int, default=8192, help="window length of the last part")
    parser.add_argument("--long-from", type=float, default=0.85, help="where that part starts; 1 for never")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=0.02, help="peak for the matrices")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    parser.add_argument("--other-lr", type=float, default=3e-3, help="peak for embedding, norms, convolutions")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--hold", type=float, default=0.3, help="part of the time at the peak rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100, help="steps")
    parser.add_argument("--validate-every", type=float, default=60, help="seconds")
    parser.add_argument("--save-every", type=float, default=240, help="seconds")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the script")
    return parser.parse_args()


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        delta_rule.install(modeling)
        tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
        sizes = dict(hidden=64, layers=4, heads=2, kv_heads=1, linear_heads=(1, 2), head=32, ffn=96) if args.tiny else {}
        if args.init:
            model = modeling.Qwen3_5ForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        else:
            model = our_model.create(our_model.config(tokenizer.get_vocab_size(), **sizes))
        self.model = model.to(args.device)
        self.parameters = list(model.parameters())
        assert tokenizer.get_vocab_size() <= 32768  # ids are kept as int16
        self.windows = Windows(torch.from_numpy(load(args.tokens).astype("int16")).to(args.device), args.seed)
        documents = read_documents(args.valid)
        valid = pack(tokenizer, documents)
        self.valid = torch.from_numpy(valid.astype("int16")).to(args.device)
        self.characters_per_token = sum(map(len, documents)) / len(valid)
        self.block, self.loss = our_model.block, our_model.token_loss
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            self.block = torch.compile(our_model.block, dynamic=False)
            self.loss = torch.compile(our_model.token_loss, dynamic=False)
            self.model.model.norm.compile(dynamic=False)
        self.optimizer = Optimizer(self.model, args.optimizer, args.lr, args.decay, args.other_lr)
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows = []

    def precision(self):
        return torch.autocast(self.args.device.split(":")[0], dtype=torch.bfloat16)

    def synchronise(self):
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()

    def backward(self, length):
        batch = self.windows.next(max(1, self.args.batch_tokens // length), length)
        with self.precision():
            hidden = our_model.hidden_states(self.model, batch[:, :-1], self.block, self.args.dropout)
            loss = self.loss(hidden, self.model.lm_head.weight, batch[:, 1:])
        loss.backward()
        return loss.detach()

    def lengths(self):
        return [self.args.length] + ([self.args.long_length] if self.args.long_from < 1 else [])

    def compile_all(self):
        """Runs every shape that training uses once, so that compilation is over when the clock starts."""
        start = time.time()
        for length in self.lengths():
            self.backward(length)
            for weight in self.parameters:
                weight.grad = None
        validate(self.model, self.valid, self.args.length, self.precision)
        self.synchronise()
        self.windows.seen = 0
        print(f"compiled in {time.time() - start:.0f} s", flush=True)

    def record(self, **row):
        row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        self.rows.append(row)
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        with open(self.out / "log.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, self.rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def save(self):
        """Replaces the exported model in one step, so that a reader never sees an incomplete model."""
        fresh, final, old = self.out / "model.new", self.out / "model", self.out / "model.old"
        our_model.export(self.model, fresh)
        if final.exists():
            os.rename(final, old)
        os.rename(fresh, final)
        if old.exists():
            for path in old.iterdir():
                path.unlink()
            old.rmdir()

    def train(self):
        args = self.args
        self.compile_all()
        start = now = time.time()
        next_valid, next_save, step, losses = args.validate_every, args.save_every, 0, []
        mark, mark_seen, train_loss, speed = start, 0, math.nan, 0.0
        while (now - start) < args.seconds:
            progress = (now - start) / args.seconds
            length = args.long_length if progress >= args.long_from else args.length
            losses.append(self.backward(length))
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            rate = schedule(progress, step, args.warm_steps, args.hold)
            self.optimizer.step(rate)
            step += 1
            if step % 20 == 0:
                self.synchronise()  # the clock decides the rate, so the host must not run far ahead
            now = time.time()
            if step % args.log_every == 0:
                self.synchronise()
                train_loss = torch.stack(losses).mean().item()
                losses = []
                speed = (self.windows.seen - mark_seen) / (time.time() - mark)
                mark, mark_seen = time.time(), self.windows.seen
                print(f"{now - start:.0f} s step {step} rate {rate:.3f} train {train_loss:.4f} norm {norm.item():.3f} "
                      f"{speed / 1e3:.0f}k tokens/s", flush=True)
                if not math.isfinite(train_loss):
                    raise SystemExit("the loss is not finite")
            if now - start >= next_valid:
                next_valid += args.validate_every
                self.report(now - start, step, rate, train_loss, speed)
            if now - start >= next_save:
                next_save += args.save_every
                self.save()
        self.synchronise()
        row = self.report(time.time() - start, step, 0.0, train_loss, speed)
        self.save()
        summary = {"parameters": sum(w.numel() for w in self.parameters), **row, "options": vars(args)}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    def report(self, seconds, step, rate, train_loss, speed):
        nats = validate(self.model, self.valid, self.args.length, self.precision)
        bits = nats / math.log(2) / self.characters_per_token
        row = {"seconds": round(seconds, 1), "step": step, "tokens": self.windows.seen, "rate": rate,
               "train_nats": train_loss, "valid_nats": nats, "valid_bits_per_char": bits, "tokens_per_second": int(speed)}
        self.record(**row)
        return row


if __name__ == "__main__":
    Trainer(parse()).train()
