#!/usr/bin/env python3
"""Input filter of Doxygen: prints a header with its // and /* comments as documentation, or a guide with links that Doxygen can follow.

The comment at the top of a header gets one more line, "\\file": warnings name the line after the one that they mean.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^\s*```")


def prose(text):
    """A comment line with characters that Doxygen would read as markup made harmless; code and quoted text stay."""
    if re.match(r" {2,}\S", text):
        return "    " + text  # an example: a code block in Markdown
    pieces = re.split(r'(`[^`]*`|"[^"]*")', text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([\\@#$%])", r"\\\1", pieces[i]).replace("<", "&lt;").replace(">", "&gt;")
        pieces[i] = re.sub(r"(?<![\w`])(\w*_\w+(?:\(\))?)", r"`\1`", pieces[i]) if "_" in pieces[i] else pieces[i]
        pieces[i] = pieces[i].replace("*", "&lowast;").replace("|", "&#124;").replace("~", "&sim;")
    return "".join(pieces)


def slashes(lines):
    """Comments of C++: the block at the top describes the file, a block before a declaration that, a comment behind a member that member."""
    out, top = [], True
    for line in lines:
        block = re.match(r"^(\s*)//(?!/)(.*)$", line)
        trailing = re.match(r"^(.*\S)(\s+)//(?!/) ?(.*)$", line)
        if block:
            text = prose(block.group(2)[1:] if block.group(2).startswith(" ") else block.group(2))
            if top and not out:
                out.append("/// \\file")
            out.append(f"{block.group(1)}/// {text}".rstrip())
            continue
        top = False
        if trailing and not re.search(r'"[^"]*//[^"]*"', line) and not line.lstrip().startswith("#"):
            text = prose(trailing.group(3).lstrip())
            if re.search(r"[;,{]\s*$|^\s*\w+(\s*=\s*[\w-]+)?\s*$", trailing.group(1)):
                out.append(f"{trailing.group(1)}{trailing.group(2)}///< {text}")
            else:
                out.append(trailing.group(1))
            continue
        out.append(line)
    return continued(out)


def continued(lines):
    """A comment that continues a trailing one, on a line of its own further right, belongs to the same member."""
    out = []
    for line in lines:
        block = re.match(r"^(\s{8,})/// (.*)$", line)
        if block and out and "///<" in out[-1]:
            line = f"{block.group(1)}///< {block.group(2)}"
        out.append(line)
    return out


def stars(text):
    """Comments of the C header."""
    def made(match):
        before, body = match.group(1), match.group(2)
        if body.startswith(" ----"):  # the title of a part of the header
            return match.group(0)
        mark = "/**<" if re.search(r"[;,}{\w]\s*$", before) and "\n" not in before.rstrip(" ") and before.strip() else "/**"
        lines = body.split("\n")
        lines = [prose(lines[0].strip())] + [" * " + prose(re.sub(r"^\s*\* ?", "", line)) for line in lines[1:]]
        return f"{before}{mark} " + "\n".join(lines).rstrip() + " */"

    text = re.sub(r"^(.*?)/\*(?!\*)(.*?)\*/", made, text, flags=re.S | re.M)
    return text.replace("/** ", "/** \\file\n * ", 1)


def guide(page, lines):
    """Markdown: links to files that are no part of the reference become text, anchors are dropped, headings keep their names."""
    out, code = [], False

    def link(match):
        words, target = match.group(1), match.group(2)
        if re.match(r"[a-z]+:", target):
            return match.group(0)
        path = target.partition("#")[0]
        if not path:
            return words
        file = (page.parent / path).resolve()
        if file.suffix != ".md" or not file.exists():
            return words
        return f"[{words}]({file.relative_to(ROOT)})"

    for line in lines:
        if FENCE.match(line):
            code = not code
        elif not code and not line.startswith("    "):
            line = re.sub(r"!\[([^\]]*)\]\((?:[^)]*/)?([^)/]+)\)", r"![\1](\2)", line)
            line = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, line)
            line = re.sub(r"^<!-- .* -->$", "", line)
            if "'" in line:  # Doxygen pairs a single backtick with a quote
                line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        out.append(line)
    return out


def main():
    page = pathlib.Path(sys.argv[1]).resolve()
    text = page.read_text()
    if page.suffix == ".md":
        print("\n".join(guide(page, text.split("\n"))))
    elif page.name.startswith("c") and "extern \"C\"" in text:
        print(stars(text))
    else:
        print("\n".join(slashes(text.split("\n"))))


if __name__ == "__main__":
    main()
