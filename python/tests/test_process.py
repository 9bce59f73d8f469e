"""Threads, forked children, the end of the interpreter, and the command."""

import json
import subprocess
import sys
import threading
import unittest

import numpy as np
import weft
from support import Case
from weft import _library


def run(script, *arguments, seconds=120):
    """A script in a process of its own; a hanging one fails."""
    quiet = ["-W", "ignore:This process:DeprecationWarning"]  # Python 3.12 and later warn of every fork beside threads
    return subprocess.run([sys.executable, *quiet, "-c", script, *arguments], capture_output=True, text=True, timeout=seconds)


INPUTS = """
import os, sys, threading
import numpy as np
import weft

random = np.random.default_rng(1)
normal = lambda *sizes: random.standard_normal(sizes).astype(np.float32)
q, k, v = (normal(512, 4, 64) for _ in range(3))
gates = {"g": -np.abs(normal(512, 4)), "beta": random.random((512, 4)).astype(np.float32)}
prefill = lambda **where: weft.gated_delta_rule_prefill(q=q, k=k, v=v, gates=gates, l2_norm=True, **where)
"""

FORK = INPUTS + """
wanted = prefill(threads=2)  # the parent has a team of workers now
child = os.fork()
if child == 0:
    same = all((prefill(threads=threads) == wanted).all() for threads in (None, 1, 2))
    os._exit(0 if same else 3)
status = os.waitpid(child, 0)[1]
assert (prefill(threads=2) == wanted).all()
sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 4)
"""

POOL = INPUTS + """
import multiprocessing
def work(n):
    return float(prefill()[n].sum())
wanted = [float(prefill(threads=2)[n].sum()) for n in range(4)]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(4)) == wanted
"""

EXIT = INPUTS + """
recipe = weft.KvRecipe("4v4", 64, k_mean=normal(4, 64))
weft.kept = [recipe, weft.l2_norm, prefill(threads=2)]  # alive when modules are torn down
recipe.itself = recipe  # only the garbage collector could free it
class Late:
    def __del__(self):
        prefill(threads=1)
late = Late()
started = threading.Event()
def forever():
    while True:
        prefill(threads=1)
        started.set()
threading.Thread(target=forever, daemon=True).start()
started.wait()
"""


class Threads(Case):
    def setUp(self):
        super().setUp()
        self.arguments = {name: self.normal(300, 4, 32) for name in "qkv"}
        self.arguments["gates"] = {"g": self.uniform(-1, 0, 300, 4), "beta": self.uniform(0, 1, 300, 4)}

    def test_bits_do_not_depend_on_threads(self):
        wanted = weft.gated_delta_rule_prefill(**self.arguments, l2_norm=True, threads=1)
        for threads in (2, 3, None):
            np.testing.assert_array_equal(weft.gated_delta_rule_prefill(**self.arguments, l2_norm=True, threads=threads), wanted)

    def test_calls_at_the_same_time(self):
        """Every thread has scratch of its own."""
        wanted = weft.gated_delta_rule_prefill(**self.arguments, l2_norm=True)
        faults = []

        def work():
            for _ in range(20):
                if not (weft.gated_delta_rule_prefill(**self.arguments, l2_norm=True, threads=1) == wanted).all():
                    faults.append("different bits")

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertEqual(faults, [])

    def test_the_interpreter_runs_on(self):
        """Python code of this thread runs during a call of another thread."""
        x = self.normal(4000, 1000)
        started = threading.Event()

        def work():
            started.set()
            weft.l2_norm(x=x, backend="reference")

        worker = threading.Thread(target=work)
        switched = sys.getswitchinterval()
        sys.setswitchinterval(100)  # the interpreter is then passed on only where a call gives it up
        try:
            worker.start()
            started.wait()
            turns = 0
            while worker.is_alive():
                turns += 1
                threading.Event().wait(0.001)
        finally:
            sys.setswitchinterval(switched)
        self.assertGreater(turns, 1)


class Processes(unittest.TestCase):
    def check(self, script):
        done = run(script)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_forked_child_computes(self):
        self.check(FORK)

    def test_pool_of_forked_workers(self):
        self.check(POOL)

    def test_exit_with_live_objects(self):
        self.check(EXIT)


class Command(unittest.TestCase):
    def command(self, *arguments):
        return subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, timeout=120)

    def test_schema(self):
        done = self.command("ops", "--schema")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout), _library.SCHEMA)

    def test_exit_status(self):
        self.assertNotEqual(self.command("no-such-command").returncode, 0)


if __name__ == "__main__":
    unittest.main()
