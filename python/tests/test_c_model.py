"""The ctypes structures and parameters of weft._c_model are those of include/weft/c_model.h."""

import ctypes
import re
import unittest

from model_support import REPOSITORY

from weft import _c_model

HEADER = re.sub(r"/\*.*?\*/", "", (REPOSITORY / "include/weft/c_model.h").read_text(), flags=re.S)
NUMBERS = {"size_t": "n", "int64_t": "l", "int32_t": "i", "uint64_t": "u", "double": "d", "float": "f"}
LETTERS = {ctypes.c_size_t: "nu", ctypes.c_int64: "l", ctypes.c_int32: "i", ctypes.c_double: "d", ctypes.c_float: "f"}
RETURNED = {"weft_code": ctypes.c_int32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "void": None}  # weft_code is an enum


def letter(c_type: str) -> str:
    if "*" in c_type or c_type.endswith("_callback"):
        return "p"
    return NUMBERS[c_type]


def members(body: str) -> list:
    found = []
    for line in filter(None, (line.strip() for line in body.split(";"))):
        c_type, names = re.fullmatch(r"((?:const )?\w+(?:\*| const\*)* ?)(.+)", line).groups()
        found += [(name.strip(), letter(c_type.strip())) for name in names.split(",")]
    return found


class CModel(unittest.TestCase):
    def test_structs(self) -> None:
        structs = re.findall(r"typedef struct weft_(\w+) \{(.*?)\} weft_\1;", HEADER, flags=re.S)
        self.assertGreater(len(structs), 9)
        for name, body in structs:
            made = getattr(_c_model, "".join(word.capitalize() for word in name.split("_")))
            wanted = members(body)
            self.assertEqual([field for field, _ in made._fields_], [field for field, _ in wanted], name)
            for (field, kind), (_, code) in zip(made._fields_, wanted):
                self.assertIn(code, LETTERS.get(kind, "p"), f"{name}.{field}")

    def test_functions(self) -> None:
        found = re.findall(r"^(\w+) weft_(\w+)\(([^()]*)\);", HEADER, flags=re.M)
        functions = {name: (returned, parameters) for returned, name, parameters in found}
        self.assertGreater(len(functions), 30)
        for name, (returned, letters) in _c_model._FUNCTIONS.items():
            wanted, texts = functions[name]
            self.assertIs(returned, RETURNED[wanted], name)
            parameters = [re.sub(r"\s+", " ", text).strip().rpartition(" ")[0] for text in texts.split(",")]
            self.assertEqual("".join(map(letter, parameters)), letters, name)

    def test_stop_reasons(self) -> None:
        values = re.findall(r"WEFT_STOP_(\w+) = (\d+)", HEADER)
        self.assertEqual([name.lower() for name, _ in values], list(_c_model.STOP_REASONS))
        self.assertEqual([int(value) for _, value in values], list(range(len(values))))


if __name__ == "__main__":
    unittest.main()
