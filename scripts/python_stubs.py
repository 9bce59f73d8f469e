#!/usr/bin/env python3
"""Writes the type stubs and docstrings of weft.ops from the schema of the C interface and the words of the public headers.

  weft ops --schema | scripts/python_stubs.py [--check]     python/weft/ops.pyi and python/weft/_words.py; --check only compares
"""

import json
import keyword
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "weft"
MADE = "made by scripts/python_stubs.py from `weft ops --schema` and the public headers"
WHERE = [  # what every op takes beside its members: python/weft/ops.py
    ("threads", "Optional[int]"),
    ("backend", 'Optional[Literal["cpu", "reference", "cuda"]]'),
    ("device", "Optional[int]"),
    ("stream", "Any"),
    ("isa", "Optional[str]"),
    ("dtype", 'Optional[Literal["bf16"]]'),
]
NUMBERS = {"flag": "bool", "f32": "float", "i64": "int", "i32": "int", "recipe": "KvRecipe", "tensor": "Array"}


def read_headers():
    """({struct: words}, {(struct, member): words}, {op: struct of its arguments})."""
    structs, members, ops = {}, {}, {}
    for path in sorted((ROOT / "include" / "weft").glob("*.h")):
        text = path.read_text()
        ops.update(re.findall(r"^WEFT_OP\((\w+), (\w+)\);", text, re.M))
        for words, name, body in re.findall(r"((?:^///[^\n]*\n)*)^struct (\w+) \{\n(.*?)^\};", text, re.M | re.S):
            structs[name] = re.sub(r"^/// ?", "", words, flags=re.M).strip()
            pattern = r"((?:^ *///[^<].*\n)*)^ *[\w:<>,]+\s+(\w+)(?:\s*=[^;]+|\{\})?;(?: *///< (.*))?"
            for before, member, after in re.findall(pattern, body, re.M):
                before = " ".join(re.findall(r"/// (.*)", before))
                members[name, member] = after or before
    return structs, members, ops


STRUCTS, MEMBERS, OPS = read_headers()


def camel(c_name):
    return "".join(part.capitalize() for part in c_name[len("weft_") :].split("_"))


HEADER_NAMES = {"Partials": "AttentionPartials"}  # C structs that another name of C++ stands for


def schema_words(member):
    """What the schema says of a member that no header has."""
    words = " or ".join(member.get("shapes", [])) + " " + " ".join(member.get("dtypes", []))
    default = f"default {member['default']}" if member.get("default") else ""
    return "; ".join(filter(None, [words.strip() or member.get("legal", ""), default]))


def words_of(header_struct, member):
    name = member["path"].rpartition(".")[2]
    return MEMBERS.get((header_struct, name)) or schema_words(member) or {"recipe": "the formats of both sides"}.get(member["kind"], "")


def visible(member):
    announces = member["kind"] == "flag" and member.get("of")
    return not announces and member["kind"] not in ("size", "reserved") and member.get("role") != "unused"


def type_of(member, enums):
    if member["kind"] == "enum":
        return "Literal[" + ", ".join(f'"{name}"' for name in enums[member["of"]]) + "]"
    if member["kind"] == "struct":
        return camel(member["of"]) + "Dict"
    return NUMBERS[member["kind"]]


def structs_of(schema, enums):
    """A TypedDict per nested struct."""
    nested = {member["of"] for op in schema["ops"] for member in op["members"] if member["kind"] == "struct"}
    waiting = [made for made in schema["structs"] if made["struct"] in nested]
    written = []
    while waiting:
        made = next(each for each in waiting if not any(m.get("of") in [w["struct"] for w in waiting if w is not each]
                                                        for m in each["members"] if m["kind"] == "struct"))
        waiting.remove(made)
        name = camel(made["struct"])
        header = HEADER_NAMES.get(name, name)
        lines = [f"# {line}".rstrip() for line in STRUCTS.get(header, "").split("\n") if line]
        lines.append(f'{name}Dict = TypedDict("{name}Dict", {{')
        for member in made["members"]:
            if visible(member):
                lines += textwrap.wrap(words_of(header, member), 130, initial_indent="    # ", subsequent_indent="    # ")
                lines.append(f'    "{member["path"]}": Optional[{type_of(member, enums)}],')
        written.append("\n".join(lines + ["}, total=False)"]))
    return written


def docstring(op):
    header = OPS[op["op"]]
    summary = re.sub(rf"^Arguments of {op['op']}\(\): ?", "", STRUCTS[header])
    if re.match(r"[a-z]{2,} (?!=)|a ", summary):  # a word, not the left side of an equation
        summary = summary[0].upper() + summary[1:]
    lines = [summary, "", f"Legal shapes: {op['shapes']}.", "", "Arguments:"]
    for member in op["members"]:
        if "." in member["path"] or not visible(member):
            continue
        name = member["path"] + ("_" if keyword.iskeyword(member["path"]) else "")
        nested = [each for each in op["members"] if each["path"].startswith(member["path"] + ".") and visible(each)]
        inner = [each["path"].rpartition(".")[2] for each in nested if each["path"].count(".") == 1]
        text = f"{name}: {words_of(header, member)}" + (f"; a dict of {', '.join(inner)}" if inner else "")
        lines += textwrap.wrap(text, 126, initial_indent="    ", subsequent_indent="        ")
    lines.append(f"    {', '.join(name for name, _ in WHERE)}: see weft.ops")
    return "\n".join(lines)


def returns(op):
    outputs = [member for member in op["members"] if member.get("role") == "out" and member["kind"] == "tensor"]
    returned = [member for member in outputs if not member["optional"] and "." not in member["path"]]
    return "Array" if len(returned) == len(outputs) == 1 else "Any"


def function(op, enums):
    lines = [f"def {op['op']}(", "    *,"]
    for member in op["members"]:
        if "." in member["path"] or not visible(member):
            continue
        name = member["path"] + ("_" if keyword.iskeyword(member["path"]) else "")
        kind = type_of(member, enums)
        if member.get("role") == "out":
            kind = f"Union[{kind}, Literal[True]]"
        lines.append(f"    {name}: Optional[{kind}] = ...,")
    lines += [f"    {name}: {kind} = ...," for name, kind in WHERE]
    lines.append(f") -> {returns(op)}:")
    text = docstring(op).replace("\\", "\\\\")
    lines += ['    r"""' + text.replace("\n", "\n    ") + "\n    " + '"""', "    ..."]
    return re.sub(r"[ \t]+$", "", "\n".join(lines), flags=re.M)


def stubs(schema):
    enums = {made["enum"]: [value["name"] for value in made["values"]] for made in schema["enums"]}
    head = f'''# Types of weft.ops: {MADE}.
from typing import Any, Callable, Dict, List, Literal, Optional, TypedDict, Union

from .kv_recipe import KvRecipe

Array = Any  # of numpy, torch, CuPy, JAX, or any object with __dlpack__ or __cuda_array_interface__

FUNCTIONS: Dict[str, Callable[..., Any]]
__all__: List[str]
'''
    return "\n\n".join([head.rstrip("\n"), *structs_of(schema, enums), *(function(op, enums) for op in schema["ops"])]) + "\n"


def words(schema):
    lines = [f'"""Docstrings of the ops: {MADE}."""', "", "from typing import Dict", "", "WORDS: Dict[str, str] = {}"]
    for op in schema["ops"]:
        lines += [f'WORDS["{op["op"]}"] = """' + docstring(op).replace("\\", "\\\\") + "\n" + '"""']
    return re.sub(r"[ \t]+$", "", "\n".join(lines), flags=re.M) + "\n"


def main():
    schema = json.load(sys.stdin)
    stale = []
    for name, text in (("ops.pyi", stubs(schema)), ("_words.py", words(schema))):
        path = PACKAGE / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text)
    for name in stale if "--check" in sys.argv else []:
        print(f"python/weft/{name} is out of date: run make update-docs")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
