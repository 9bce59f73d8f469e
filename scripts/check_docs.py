#!/usr/bin/env python3
"""Fails if a document links to a file or a heading that does not exist. Links to other hosts are not followed."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text):
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)", "", head)).strip().lower().replace(" ", "-") for head in heads}


def broken(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target}: no such file"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{page.relative_to(ROOT)}: {target}: no such heading"


def main():
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        pages = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        pages = [page for page in ROOT.rglob("*.md") if not any(part.startswith((".", "build")) for part in page.relative_to(ROOT).parts)]
    errors = [error for page in pages if page.exists() for error in broken(page)]
    print("\n".join(errors) or f"{len(pages)} documents, every link resolves")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
