"""The members of an op's arguments as a tree, from the schema."""

from __future__ import annotations

import keyword
import operator
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from ._library import refuse

_HIDDEN = ("size", "reserved", "struct")


class Member:
    """A tensor, number, flag, enum or recipe."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        self.path: str = listed["path"]
        self.name: str = self.path.rpartition(".")[2]
        self.kind: str = listed["kind"]
        self.role: str = listed.get("role", "")
        self.optional: bool = listed.get("optional", False)
        self.of: str = listed.get("of", "")
        self.dtypes: List[str] = listed.get("dtypes", [])
        self.shapes: List[str] = listed.get("shapes", [])
        self.letters: List[Tuple[str, ...]] = [tuple(shape.strip("[]").split(", ")) for shape in self.shapes]
        self.default: str = listed.get("default", "")
        self.legal: str = listed.get("legal", "")
        self.flag = ""  # the has_ member that announces the number
        self.implied: Optional[int] = 1 if self.path.endswith("sequences.count") else None  # as in weft::Sequences

    def number(self, op: str, value: Any) -> Union[int, float]:
        try:
            if self.kind == "f32":
                return float(value)
            return int(bool(value)) if self.kind == "flag" else operator.index(value)
        except (TypeError, ValueError):
            wanted = "a number" if self.kind == "f32" else "True or False" if self.kind == "flag" else "an integer"
            raise refuse(op, self.path, f"is {value!r}, wanted {wanted}") from None


class Group:
    """A struct of members, or of groups."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.members: Dict[str, Union[Member, Group]] = {}

    def named(self, op: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The given values by the names of the C struct. A name that is a word of Python may carry a trailing underscore."""
        values = {}
        for name, value in given.items():
            bare = name[:-1] if name.endswith("_") and name[:-1] in self.members else name
            if bare not in self.members:
                where = f"{self.path}.{name}" if self.path else name
                raise refuse(op, where, f"is no argument, wanted one of {', '.join(self.members)}")
            values[bare] = value
        return values

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
        group, name = _group_of(root, listed["path"])
        announced = group.members[listed["of"]]
        assert isinstance(announced, Member)
        announced.flag = name
    return root


def _group_of(root: Group, path: str) -> Tuple[Group, str]:
    *groups, name = path.split(".")
    for each in groups:
        inner = root.members[each]
        assert isinstance(inner, Group)
        root = inner
    return root, name
