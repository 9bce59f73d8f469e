"""ctypes structures and enums of the C interface, built from the schema that the library returns."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Dict, List, Tuple, Type

Schema = Dict[str, Any]

_NUMBERS: Dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "weft_code": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "char": ctypes.c_char,
    "void*": ctypes.c_void_p,
    "const char*": ctypes.c_char_p,
    "const weft_kv_recipe*": ctypes.c_void_p,
}


def _c_type(name: str, known: Dict[str, Any]) -> Any:
    """The ctypes type of "int64_t[5]", "void*" or "weft_tensor"."""
    array = re.fullmatch(r"(\w+)\[(\d+)\]", name)
    if array:
        return _c_type(array[1], known) * int(array[2])
    return _NUMBERS.get(name) or known[name]


def _build(listed: Dict[str, Any], known: Dict[str, Any]) -> Type[ctypes.Structure]:
    members = [member for member in listed["members"] if "." not in member["path"]]
    fields: List[Tuple[str, Any]] = [(member["path"], _c_type(member["type"], known)) for member in members]
    made = type(listed["struct"], (ctypes.Structure,), {"_fields_": fields})
    layout = [(member["path"], member["offset"]) for member in members]
    if ctypes.sizeof(made) != listed["size"] or layout != [(name, getattr(made, name).offset) for name, _ in fields]:
        raise ImportError(f"weft: ctypes lays out {listed['struct']} differently from the library")
    return made


def structures(schema: Schema) -> Dict[str, Type[ctypes.Structure]]:
    """Every struct of the schema by name: "weft_tensor", "weft_l2_norm_args"."""
    known: Dict[str, Any] = {}
    waiting = [*schema["structs"], *schema["ops"]]
    while waiting:  # ctypes needs the members' structs before a struct
        later = []
        for listed in waiting:
            try:
                known[listed["struct"]] = _build(listed, known)
            except KeyError:
                later.append(listed)
        if len(later) == len(waiting):
            raise ImportError(f"weft: the schema lacks a struct that {later[0]['struct']} holds")
        waiting = later
    return known


def enums(schema: Schema) -> Dict[str, Dict[str, int]]:
    """Every enum of the schema: {"HeadMap": {"grouped": 0, "tiled": 1}}."""
    return {listed["enum"]: {value["name"]: value["value"] for value in listed["values"]} for listed in schema["enums"]}
