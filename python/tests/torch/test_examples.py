"""The examples that use torch."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_speed_up_transformers() -> None:
    path = os.pathsep.join(each for each in sys.path if each)  # the weft that these tests have imported
    example = ROOT / "examples" / "python" / "speed_up_transformers.py"
    run = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    assert "cache: " in run.stdout and "patched " in run.stdout, run.stdout


def test_the_benchmark_runs_and_reports(tmp_path: pathlib.Path) -> None:
    path, out = os.pathsep.join(each for each in sys.path if each), tmp_path / "out.json"
    small = "--layers 4 --vocabulary 100 --prompt 64 --decode 2 --cache 128 --repeat 1 --dtypes f32 --threads 1".split()
    command = [sys.executable, str(ROOT / "bench" / "python_transformers.py"), "--json", str(out), *small]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    assert out.exists() and "| f32 | decode, 2 tokens |" in run.stdout, run.stdout
