"""The JSON file of a sweep: rows with the facts of the machine above them, written after every row."""

import json
import pathlib
import statistics
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=_ROOT).stdout.strip()
    except OSError:
        return ""


def commit():
    """The commit of the working tree, with "-dirty" where tracked files differ from it; empty outside of a repository."""
    return _output("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")


def driver(cuda):
    """"580.65.06, CUDA 13.0"."""
    version = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return ", ".join(filter(None, (version, f"CUDA {cuda}")))


class Report:
    """Rows by key. A row that the file has already is replaced, and rows stay in the order of `keys`."""

    def __init__(self, path, header, keys, key_names):
        self.path, self.names = pathlib.Path(path), key_names
        self.order = {self.key(row): place for place, row in enumerate(keys)}
        before = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
        self.rows = {self.key(row): row for row in before["rows"] if self.key(row) in self.order}
        self.header = {"schema": 1, **header}

    def key(self, row):
        return tuple(row.get(name, default) for name, default in self.names.items())

    def add(self, row):
        self.rows[self.key(row)] = row
        rows = sorted(self.rows.values(), key=lambda each: self.order[self.key(each)])
        head = json.dumps(self.header, indent=1)[1:-2]
        lines = ",\n".join("  " + json.dumps(each) for each in rows)
        self.path.write_text("{" + head + ',\n "rows": [\n' + lines + "\n ]\n}\n")


def summary(rows):
    """"12 rows; ratio: least 0.9, median 1.2; 1 below 1; 0 by slow kernels", of rows of a sweep."""
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    return (f"{len(rows)} rows; ratio: least {min(ratios, default=0):.3f}, median {statistics.median(ratios or [0]):.2f}; "
            f"{sum(ratio < 1 for ratio in ratios)} below 1; {sum(row.get('speed') == 'slow' for row in rows)} by slow kernels")


def part(text, count):
    """The places that --rows A:B names."""
    if not text:
        return range(count)
    begin, _, end = text.partition(":")
    try:
        return range(count)[int(begin or 0):int(end or count)]
    except ValueError:
        sys.exit(f"--rows is {text!r}, wanted A:B")


def command():
    """This script's command, without what names files and a part."""
    words, left = [], iter(sys.argv)
    for word in left:
        if word in ("--rows", "--commit", "--warm", "--library"):
            next(left, None)
        elif word in ("--json", "--fla"):
            words += [word, "FILE" if word == "--json" else "fla-folder"]
            next(left, None)
        else:
            words.append(word)
    return "python3 " + " ".join(words)
