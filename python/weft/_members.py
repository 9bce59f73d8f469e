"""The members of an op's arguments as a tree, from the schema. A member writes its value at its place in the bytes of the C struct."""

from __future__ import annotations

import keyword
import operator
import struct
from typing import Any, Dict, Iterator, List, Mapping, Tuple, Union

from ._library import enum_value, refuse, shown

_HIDDEN = ("size", "reserved", "struct")
_CODES = {"f32": "f", "i32": "i", "flag": "i", "enum": "i", "i64": "q", "recipe": "P"}


class Member:
    """A tensor, number, flag, enum or recipe."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        self.path: str = listed["path"]
        self.name: str = self.path.rpartition(".")[2]
        self.kind: str = listed["kind"]
        self.offset: int = listed["offset"]
        self.output: bool = listed.get("role") == "out"
        self.optional: bool = listed.get("optional", False)
        self.of: str = listed.get("of", "")
        self.dtypes: List[str] = listed.get("dtypes", [])
        self.shapes: List[str] = listed.get("shapes", [])
        self.letters: Tuple[Tuple[str, ...], ...] = tuple(tuple(shape.strip("[]").split(", ")) for shape in self.shapes)
        self.default: str = listed.get("default", "")
        self.legal: str = listed.get("legal", "")
        self.flag_offset = -1  # offset of the has_ member that announces the number; -1: there is none
        self.returned = self.output and not self.optional and "." not in self.path
        self._code = _CODES.get(self.kind, "")

    def write(self, op: str, value: Any, args: Any) -> None:
        """Writes a number, flag, enum or recipe into the bytes of the arguments."""
        try:
            struct.pack_into(self._code, args, self.offset, self._number(op, value))
        except (struct.error, OverflowError):
            raise refuse(op, self.path, f"is {shown(value)}, wanted a number that fits {self.kind}") from None
        if self.flag_offset >= 0:
            struct.pack_into("i", args, self.flag_offset, 1)

    def _number(self, op: str, value: Any) -> Union[int, float]:
        if self.kind == "enum":
            return enum_value(self.of, value, op, self.path)
        if self.kind == "recipe":
            handle = getattr(value, "handle", None)
            if not isinstance(handle, int):
                raise refuse(op, self.path, f"is a {type(value).__name__}, wanted a weft.KvRecipe")
            return handle
        try:
            if self.kind == "f32":
                return float(value)
            return int(bool(value)) if self.kind == "flag" else operator.index(value)
        except (TypeError, ValueError):
            wanted = "a number" if self.kind == "f32" else "True or False" if self.kind == "flag" else "an integer"
            raise refuse(op, self.path, f"is {shown(value)}, wanted {wanted}") from None


class Group:
    """A struct of members, or of groups."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.members: Dict[str, Union[Member, Group]] = {}

    def find(self, op: str, name: str) -> Union[Member, Group]:
        """The member of that name. A name that is a word of Python may carry a trailing underscore."""
        found = self.members.get(name) or self.members.get(name.rstrip("_"))
        if found is None:
            where = f"{self.path}.{name}" if self.path else name
            raise refuse(op, where, f"is no argument, wanted one of {', '.join(self.keywords())}")
        return found

    def leaves(self) -> Iterator[Member]:
        """All members, those of groups included."""
        for member in self.members.values():
            if isinstance(member, Group):
                yield from member.leaves()
            else:
                yield member

    def keywords(self) -> Iterator[str]:
        """The names as keywords of a function."""
        return (name + "_" if keyword.iskeyword(name) else name for name in self.members)


def tree_of(entry: Mapping[str, Any]) -> Group:
    """The arguments of an op of the schema."""
    root = Group("")
    flags: List[Mapping[str, Any]] = []
    for listed in entry["members"]:
        group, name = _group_of(root, listed["path"])
        if listed["kind"] == "struct":
            group.members[name] = Group(listed["path"])
        elif listed["kind"] == "flag" and listed.get("of"):
            flags.append(listed)
        elif listed["kind"] not in _HIDDEN and listed.get("role") != "unused":
            group.members[name] = Member(listed)
    for listed in flags:
        announced = _group_of(root, listed["path"])[0].members[listed["of"]]
        assert isinstance(announced, Member)
        announced.flag_offset = listed["offset"]
    return root


def _group_of(root: Group, path: str) -> Tuple[Group, str]:
    *groups, name = path.split(".")
    for each in groups:
        inner = root.members[each]
        assert isinstance(inner, Group)
        root = inner
    return root, name
