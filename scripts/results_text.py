"""Text of measurements: numbers, tables in Markdown, and the lines that say where a table comes from."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASELINES = ROOT / "bench" / "baselines"


def load(name):
    return json.loads((BASELINES / f"{name}.json").read_text())


def number(value):
    """Three significant digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def ratio(value):
    return "" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def percent(value):
    return "" if value is None else f"{value:.0f} %"


def span(values, text):
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


def table(heads, rows):
    """Markdown; a head that ends in ":" marks a column of numbers."""
    rule = ["---:" if head.endswith(":") else "---" for head in heads]
    lines = [[head.rstrip(":") for head in heads], rule, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- |", "|---|")


def plain_rules(text):
    return re.sub(r"^\|[ :|-]+\|$", lambda rule: rule.group(0).replace(" ", ""), text, flags=re.M)


def source(name, command=None, note=True):
    """The lines above a table: file, commit, command and the file's own note."""
    data = load(name)
    if "commit" in data:
        of = f"commit {data['commit'][:7]}"
    elif "printed_in" in data:
        of = f"figures as printed in commit {data['printed_in'][:7]}"
    else:
        of = f"version {data['version']}"
    command = command or data.get("command")
    line = f"From [`{name}.json`](baselines/{name}.json), {of}"
    line += f":\n\n    {command}\n" if command else ".\n"
    return line + (f"\n{data['note']}\n" if note and "note" in data else "") + "\n"
