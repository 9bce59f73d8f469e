"""A running `weft serve` for the Python tests."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def served(*arguments):
    """Starts the server on a free port and yields its URL; afterwards SIGTERM must end it with status 0."""
    command = [os.environ.get("WEFT_COMMAND", str(ROOT / "build/weft")), "serve", "--port", "0", "--model", str(ROOT / "models/weft-11m"),
               *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_WAIT_POLICY": "passive"})
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if not found:
            raise RuntimeError(f"the server did not start: {line} {process.stderr.read()}")
        yield found.group(0)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        if process.returncode != 0:
            raise RuntimeError(f"the server ended with status {process.returncode}: {errors}")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
