#!/usr/bin/env python3
"""Tests libggml-weft.so in llama.cpp, as `make test-llama` does after scripts/llama.sh --tests.

    .venv-llama/bin/python tests/llama/run.py [unittest's options]

Three programs do the work: llama.cpp's own test-backend-ops, tests/llama/backend.cc and tests/llama/drive.cc.
"""
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import binaries_test

BUILD = ROOT / "build-llama"
PLUGIN = BUILD / "libggml-weft.so"
# The same library, which also takes L2_NORM and single tokens of few heads: without L2_NORM, llama.cpp skips the cases of GATED_DELTA_NET.
PLUGIN_OF_TESTS = BUILD / "weft/libggml-weft-op-tests.so"
# Cases of test-backend-ops that its ggml has and the plug-in takes. Convolutions of 9 taps, of fewer than 4 tokens and with a bias are not
# taken. The cases of GATED_DELTA_NET normalise keys with L2_NORM, which only the library of the tests takes.
OP_CASES = {"GATED_DELTA_NET": 36, "SSM_CONV": 18, "SSM_CONV_BIAS_SILU": 18}
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
# Of the deviation of the logits, for every logit. Both sides compute in f32 and differ by about 3e-6.
LOGIT_BAR = 1e-4


def environment(plugin, **more):
    """The environment of a program that loads the plug-in, or none."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GGML_BACKEND_PATH", "GGML_WEFT_STATS", "LD_PRELOAD")}
    return {**clean, **({"GGML_BACKEND_PATH": str(plugin)} if plugin else {}), **more}


def run(command, plugin, **more):
    return subprocess.run([str(part) for part in command], env=environment(plugin, **more), input="\n", capture_output=True, text=True)


def counted(stderr, op):
    """The ops and tokens that GGML_WEFT_STATS=1 reports."""
    found = re.search(rf"weft: computed {op}: (\d+) ops, (\d+) tokens", stderr)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


class Ops(unittest.TestCase):
    def test_ops_of_llama_cpp(self):
        for op, wanted in OP_CASES.items():
            with self.subTest(op=op):
                done = run([BUILD / "bin/test-backend-ops", "test", "-b", "Weft", "-o", op], PLUGIN_OF_TESTS)
                text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
                found = re.search(r"(\d+)/(\d+) tests passed", text)
                self.assertTrue(found, text + done.stderr)
                print(f"test-backend-ops {op}: {found.group(0)}", file=sys.stderr)
                self.assertEqual((int(found.group(1)), int(found.group(2))), (wanted, wanted), text)
                self.assertEqual(done.returncode, 0)

    def check_backend(self, part, plugin):
        done = run([BUILD / "backend", BUILD / "bin", part], plugin)
        print(f"backend {part}: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stderr

    def test_forms(self):
        self.check_backend("forms", PLUGIN_OF_TESTS)

    def test_refusals_failures_threads_memory(self):
        self.assertIn("weft: a graph failed: ADD of node", self.check_backend("limits", PLUGIN))


class Binary(unittest.TestCase):
    def test_exports_and_hardening(self):
        binaries_test.check_binary(PLUGIN)
        self.assertEqual(binaries_test.faults, [])
        self.assertEqual(binaries_test.exported(PLUGIN), [("T", "ggml_backend_init")])


class Logits(unittest.TestCase):
    """Whole models of random weights, with and without the plug-in."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.models = {}
        for arch in ARCHITECTURES:
            cls.models[arch] = pathlib.Path(cls.folder.name) / f"{arch}.gguf"
            subprocess.run([sys.executable, ROOT / "scripts/random_gguf.py", "--arch", arch, cls.models[arch]], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def drive(self, model, plugin, threads):
        """Logits by scenario, and what the program said."""
        file = pathlib.Path(self.folder.name) / "logits"
        done = run([BUILD / "drive", model, BUILD / "bin", threads, "logits", file], plugin, GGML_WEFT_STATS="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        numbers, scenarios, at = numpy.fromfile(file, numpy.float32), [], 0
        for line in done.stdout.splitlines():
            name, count = line.split()
            scenarios.append((name, numbers[at:at + int(count)]))
            at += int(count)
        self.assertEqual(at, len(numbers))
        return scenarios, done.stderr

    def test_logits(self):
        for arch, model in self.models.items():
            plain, _ = self.drive(model, None, 1)
            names = {name for name, _ in plain}
            self.assertLessEqual({"prefill", "decode", "continued", "equal_sequences", "unequal_sequences"}, names)
            if arch != "qwen3next":  # llama.cpp keeps no snapshots for it, so it cannot roll back
                self.assertLessEqual({"rollback", "reused_slot"}, names)
            for plugin, threads in itertools.product((PLUGIN, PLUGIN_OF_TESTS), (1, 2)):
                with self.subTest(arch=arch, plugin=plugin.name, threads=threads):
                    mixed, stderr = self.drive(model, plugin, threads)
                    self.assertEqual([name for name, _ in mixed], [name for name, _ in plain])
                    worst = 0
                    for (name, wanted), (_, got) in zip(plain, mixed):
                        self.assertTrue(numpy.isfinite(got).all(), name)
                        worst = max(worst, float(numpy.abs(got - wanted).max() / wanted.std()))
                    # Three of the four layers have both ops.
                    ops = {op: counted(stderr, op) for op in ("GATED_DELTA_NET", "SSM_CONV")}
                    print(f"{arch}, {plugin.name}, {threads} threads: logits differ by {worst:.1e} of their deviation, ops and tokens: {ops}", file=sys.stderr)
                    self.assertLessEqual(worst, LOGIT_BAR)
                    for op, (count, _) in ops.items():
                        self.assertGreater(count, 0, op)
                        self.assertEqual(count % 3, 0, op)

    def test_a_ggml_of_another_version_continues_without(self):
        done = run([BUILD / "drive", self.models["qwen35"], BUILD / "bin", 1, "time", 20, 0], PLUGIN, GGML_WEFT_STATS="1",
                   LD_PRELOAD=str(BUILD / "other_version.so"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"weft: this plug-in was built for ggml [0-9.]+, and the program has 0\.99\.0; build it for .*")
        self.assertEqual(counted(done.stderr, "GATED_DELTA_NET"), (0, 0))

    def test_statistics_are_silent_unless_wanted(self):
        file = pathlib.Path(self.folder.name) / "logits"
        done = run([BUILD / "drive", self.models["qwen35"], BUILD / "bin", 1, "logits", file], PLUGIN)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("weft:", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
