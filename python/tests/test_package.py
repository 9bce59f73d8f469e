"""The package itself: names, types, docstrings, and the syntax of Python 3.9."""

import ast
import inspect
import pathlib
import unittest

import weft
from weft import _library

PACKAGE = pathlib.Path(weft.__file__).parent
TESTS = pathlib.Path(__file__).parent


class Package(unittest.TestCase):
    def test_every_op_of_the_schema_is_a_function(self):
        names = [entry["op"] for entry in _library.SCHEMA["ops"]]
        self.assertEqual(names, weft.ops.__all__)
        for name in names:
            self.assertIs(getattr(weft, name), getattr(weft.ops, name))

    def test_every_op_is_tested(self):
        tests = "".join(path.read_text() for path in TESTS.glob("test_*_ops.py"))
        for name in weft.ops.__all__:
            self.assertIn(f"weft.{name}(", tests)

    def test_stubs_and_docstrings_are_those_of_the_library(self):
        self.assertTrue((PACKAGE / "py.typed").exists())
        tree = ast.parse((PACKAGE / "ops.pyi").read_text())
        stubs = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.assertEqual(list(stubs), weft.ops.__all__)
        for name, stub in stubs.items():
            function = getattr(weft.ops, name)
            self.assertEqual([argument.arg for argument in stub.args.kwonlyargs], list(inspect.signature(function).parameters))
            self.assertEqual(ast.get_docstring(stub), inspect.getdoc(function))

    def test_syntax_of_python_3_9(self):
        for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *TESTS.glob("*.py")]:
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))

    def test_version(self):
        self.assertEqual(weft.__version__, _library.LIB.weft_version().decode())


if __name__ == "__main__":
    unittest.main()
