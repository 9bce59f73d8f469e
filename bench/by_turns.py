#!/usr/bin/env python3
"""Compares two builds of the command on a machine that is not quiet: runs their benchmarks by turns and prints the ratio of each case.

  bench/by_turns.py BEFORE AFTER [--rounds 5] [-- OPTIONS OF weft bench]

BEFORE and AFTER are weft commands. Every round times both, the order alternating. A case's time is the smallest median of its rounds, because
other work on the machine only adds time. The spread is that of the rounds' own ratios: a ratio inside it says nothing.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile


def bench(command, options, file):
    subprocess.run([command, "bench", *options, "--json", file], check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(pathlib.Path(file).read_text())["rows"]
    return {(row["op"], row["case"]): row["median_us"] for row in rows if row.get("median_us")}


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args(sys.argv[1:split])
    options = sys.argv[split + 1:] or ["--backend", "cpu", "--summary", "--hot", "--threads", "1"]
    times = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                times[name].append(bench(getattr(args, name), options, f"{folder}/out.json"))
    results = []
    for key in times["before"][0]:
        pairs = [(b[key], a[key]) for b, a in zip(times["before"], times["after"]) if key in b and key in a]
        if not pairs:
            continue
        ratios = sorted(a / b for b, a in pairs)
        before, after = min(b for b, _ in pairs), min(a for _, a in pairs)
        results.append({"op": key[0], "case": key[1], "before_us": before, "after_us": after, "ratio": after / before, "round_ratios": ratios})
        print(f"{after / before:6.3f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})  {before:10.1f} us  {after:10.1f} us  {key[0]} {key[1]}")
    print(f"{statistics.geometric_mean(r['ratio'] for r in results):6.3f}  geometric mean of {len(results)} cases, {args.rounds} rounds")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
