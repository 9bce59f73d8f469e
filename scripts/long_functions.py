#!/usr/bin/env python3
"""Names functions of more than 120 lines outside tests, kernels included; exit status 1 if there are any.

    scripts/long_functions.py [--most LINES] [--root FOLDER]

A function is a block in braces at namespace or class level that is no type, namespace or table of values.
"""
import argparse
import os
import re
import sys

from layering import list_sources

NO_FUNCTION = re.compile(r"\b(namespace|struct|class|enum|union|extern)\b[^();]*$|=\s*$")


def without_comments_and_texts(source):
    source = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group(0).count("\n"), source, flags=re.S)
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', "", source)


def functions(source):
    """Yields (first line, lines, beginning) of every function."""
    line, head, open_blocks = 1, "", []
    for character in without_comments_and_texts(source):
        if character == "\n":
            line += 1
        if character == "{":
            text = " ".join(head.split())
            open_blocks.append((line, text, bool(NO_FUNCTION.search(text))))
            head = ""
        elif character == "}":
            if open_blocks:
                first, text, encloses = open_blocks.pop()
                if not encloses and all(block[2] for block in open_blocks):
                    yield first, line - first + 1, text
            head = ""
        elif character == ";":
            head = ""
        else:
            head += character


def main():
    parser = argparse.ArgumentParser(description="Names functions that are too long to see whole.")
    parser.add_argument("--most", type=int, default=120)
    parser.add_argument("--root", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    flags = parser.parse_args()
    found = 0
    for name in list_sources(flags.root):
        if name.startswith(("tests/", "fuzz/")):
            continue
        path = os.path.join(flags.root, name)
        with open(path, encoding="utf-8") as source:
            for first, lines, text in functions(source.read()):
                if lines > flags.most:
                    print(f"{name}:{first}: {lines} lines, at most {flags.most}: {text[-100:]}", file=sys.stderr)
                    found += 1
    if found:
        sys.exit(f"long_functions: {found} function(s) to split")


if __name__ == "__main__":
    main()
