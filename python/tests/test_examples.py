"""The examples of examples/python that need no more than numpy run, and find what they say."""

import os
import subprocess
import sys
import unittest

from model_support import MODEL, REPOSITORY


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, REPOSITORY / "examples" / "python" / name, *arguments], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONWARNINGS": "error"})
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


class Examples(unittest.TestCase):
    def test_compress_a_cache(self) -> None:
        lines = run("compress_a_cache.py", "--tokens", "512").splitlines()
        rows = {words[0]: [float(word) for word in words[1:]] for words in map(str.split, lines[1:])}
        self.assertEqual(list(rows), ["f16", "8v8", "8v4", "6v6", "5v5", "4v4", "3v3", "2v2"])
        errors = [rows[recipe][4] for recipe in ("f16", "8v8", "6v6", "5v5", "4v4", "3v3", "2v2")]
        self.assertEqual(errors, sorted(errors))
        self.assertEqual(rows["4v4"][1], 8 * 132)

    def test_fork_a_conversation(self) -> None:
        out = run("fork_a_conversation.py", "--model", str(MODEL), "--tokens", "8")
        self.assertIn("the text continues in the same way", out)
        self.assertEqual(out.count("forked in"), 3)


if __name__ == "__main__":
    unittest.main()
