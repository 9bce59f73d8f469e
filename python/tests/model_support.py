"""What the tests of models share."""

import os
import pathlib
import subprocess
import sys
import threading
import unittest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # several tests share the cores, so waiting threads must sleep
import weft  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "models" / "weft-11m"
_model = None


def model() -> weft.Model:
    """The bundled model, loaded once."""
    global _model
    if _model is None:
        _model = weft.Model(MODEL)
    return _model


def workers() -> list:
    """The threads that compute generations."""
    return [thread for thread in threading.enumerate() if thread.name == "weft-generate"]


class ModelCase(unittest.TestCase):
    def setUp(self) -> None:
        self.model = model()

    def refused(self, sentence: str, function, *arguments, **options) -> weft.Error:
        """The Error of a call, whose text is or contains the sentence."""
        with self.assertRaises(weft.Error) as caught:
            function(*arguments, **options)
        self.assertIn(sentence, str(caught.exception))
        return caught.exception

    def run_python(self, program: str, timeout: float = 60) -> str:
        """The output of a program in a process of its own, which must end well and say nothing on stderr."""
        done = subprocess.run([sys.executable, "-c", program, str(MODEL)], capture_output=True, text=True, timeout=timeout)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout
