"""scripts/layering.py accepts this tree and rejects planted faults: a forbidden include, a file in no room, a circle of rooms."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = """# Design

| room | what lives there | may include |
|---|---|---|
| `include/weft` | public headers | |
| `src/core` | the core | `include/weft` |
| `src/cpu` | a backend | `include/weft`, `src/core` |
| `tools` | the command | `include/weft`, `src/core/open.h` |
| `tests` | tests | everything |
"""
FILES = {
    "include/weft/tensor.h": "#pragma once\n#include <cstdint>\n",
    "src/core/check.h": '#include "weft/tensor.h"\n',
    "src/core/open.h": '#include "core/check.h"\n',
    "src/cpu/kernel.cc": '#include "core/check.h"\n',
    "tools/main.cc": '#include "core/open.h"\n#include "weft/tensor.h"\n',
    "tests/all_test.cc": '#include "core/check.h"\n#include "cpu/kernel.cc"\n',
}


def run(root):
    return subprocess.run([sys.executable, ROOT / "scripts" / "layering.py", "--root", root], capture_output=True, text=True)


class Layering(unittest.TestCase):
    def tree(self, extra=None, table=TABLE):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = pathlib.Path(folder.name)
        (root / "DESIGN.md").write_text(table)
        for name, text in {**FILES, **(extra or {})}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return run(root)

    def test_this_tree_is_accepted(self):
        result = run(ROOT)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_small_tree_is_accepted(self):
        result = self.tree()
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_forbidden_include_is_named(self):
        result = self.tree({"tools/spy.cc": '#include <vector>\n#include "core/check.h"\n'})
        self.assertEqual(result.returncode, 1)
        self.assertIn("tools/spy.cc:2: room tools may not include src/core/check.h (room src/core)", result.stderr)

    def test_upward_include_is_named(self):
        result = self.tree({"src/core/cheat.cc": '#include "cpu/kernel.cc"\n'})
        self.assertEqual(result.returncode, 1)
        self.assertIn("src/core/cheat.cc:1", result.stderr)

    def test_file_without_a_room_is_named(self):
        result = self.tree({"stray/file.cc": "int x;\n"})
        self.assertEqual(result.returncode, 1)
        self.assertIn("stray/file.cc: lies in no room", result.stderr)

    def test_circle_of_rooms_is_named(self):
        result = self.tree(table=TABLE.replace("| `src/core` | the core | `include/weft` |",
                                               "| `src/core` | the core | `include/weft`, `src/cpu` |"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("in a circle", result.stderr)

    def test_unknown_entry_is_named(self):
        result = self.tree(table=TABLE.replace("`src/core/open.h`", "`src/core/gone.h`"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("`src/core/gone.h`, which is neither a room nor a file", result.stderr)


if __name__ == "__main__":
    unittest.main()
