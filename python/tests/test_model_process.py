"""Threads, forked children, signals, and interpreters that end while objects live. Every program here must end by itself."""

import threading
import unittest

from model_support import ModelCase, workers

import weft

BEGIN = """
import os, signal, sys, threading, time
import weft
model = weft.Model(sys.argv[1])
"""
# A child that hangs is killed by an alarm, which the parent reports.
IN_CHILD = """
if os.fork() == 0:
    signal.alarm(30)
    try:
        {}
    finally:
        sys.stdout.flush()
        os._exit(0)
print("child", os.wait()[1])
"""


class Threads(ModelCase):
    def test_one_model_and_store_in_several_threads(self) -> None:
        prompts = [[10 + i] * 100 for i in range(4)]
        wanted = [self.model.generate(prompt, max_tokens=8, temperature=0).tokens for prompt in prompts]
        store, found = weft.PrefixStore(64 << 20, every=64), {}

        def work(index: int) -> None:
            for _ in range(2):
                found[index] = self.model.generate(prompts[index], max_tokens=8, temperature=0, store=store, threads=1).tokens

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([found[index] for index in range(4)], wanted)

    def test_one_state_in_two_threads_is_refused(self) -> None:
        state, errors = weft.State(self.model), []
        pieces = self.model.generate("x", stream=True, state=state, max_tokens=100)
        next(pieces)

        def work() -> None:
            try:
                self.model.logits([1], state=state)
            except weft.Error as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        pieces.close()
        self.assertEqual(len(errors), 1)
        self.assertIn("logits: state is in use by another thread", errors[0])
        self.assertEqual(workers(), [])

    def test_the_interpreter_runs_on(self) -> None:
        """While the library computes, other threads of Python run."""
        ticks, done = [0], threading.Event()

        def tick() -> None:
            while not done.is_set():
                ticks[0] += 1
                done.wait(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        self.model.logits([7] * 800)
        seen = ticks[0]
        done.set()
        thread.join()
        self.assertGreater(seen, 5)


class Processes(ModelCase):
    def test_a_forked_child_computes(self) -> None:
        work = """print(model.generate("The", max_tokens=5, temperature=0), int(model.logits([1, 2, 3]).argmax()), flush=True)"""
        out = self.run_python(BEGIN + work + IN_CHILD.format(work))
        lines = out.splitlines()
        self.assertEqual((lines[0], lines[2]), (lines[1], "child 0"))

    def test_a_forked_child_has_no_iterator(self) -> None:
        program = BEGIN + """
state = weft.State(model)
pieces = model.generate("The", state=state, stream=True, max_tokens=500)
next(pieces)
""" + IN_CHILD.format("""
        for use in (lambda: next(pieces), lambda: model.logits([1], state=state)):
            try:
                use()
            except weft.Error as error:
                print(error)
        pieces.close()
""") + "print(next(pieces).token is not None)"
        lines = self.run_python(program).splitlines()
        self.assertIn("generate: iterator belongs to the process that this one was forked from", lines[0])
        self.assertIn("logits: state is in use by the process that this one was forked from", lines[1])
        self.assertEqual(lines[2:], ["child 0", "True"])

    def test_a_forked_child_refuses_what_a_thread_used(self) -> None:
        """The thread is inside of a call when the process is forked, where it may hold a lock of the library."""
        program = BEGIN + """
import gc
import weft.model, weft.state
store, idle, inside, leave = weft.PrefixStore(1 << 20), weft.PrefixStore(1 << 20), threading.Semaphore(0), threading.Event()
other = weft.Model(sys.argv[1])
call = weft._library.call
def slow(*arguments):
    inside.release()
    leave.wait()
    return call(*arguments)
weft.model.call = weft.state.call = slow
uses = (lambda: weft.plan(model), lambda: store.stats())
threads = [threading.Thread(target=use) for use in uses]
for thread in threads:
    thread.start()
    inside.acquire()
weft.model.call = weft.state.call = call
""" + IN_CHILD.format("""
        for use in (*uses, lambda: model.logits([1]), lambda: model.generate("x", store=store), lambda: weft.State(model)):
            try:
                use()
                print("used")
            except weft.Error as error:
                print(error)
        print(idle.stats().hits, len(other.generate("x", max_tokens=2, store=idle, ignore_end_tokens=True).tokens))
        del model, store, uses, use
        gc.collect()
""") + """
leave.set()
for thread in threads:
    thread.join()
print(store.stats().hits, model.logits([1]).shape)
"""
        lines = self.run_python(program).splitlines()
        in_use = "is in use by the process that this one was forked from; wanted one that was idle at the fork"
        self.assertEqual(lines[:2], [f"model_plan: model {in_use}", f"prefix_store_read_stats: store {in_use}"])
        self.assertEqual(lines[2:], [f"state_create: model {in_use}"] * 3 + ["0 2", "child 0", "0 (6144,)"])

    def test_a_forked_child_computes_beside_an_iterator(self) -> None:
        program = BEGIN + """
store = weft.PrefixStore(1 << 20)
pieces = model.generate("The", stream=True, max_tokens=500, store=store)
next(pieces)
""" + IN_CHILD.format("""print(store.stats().hits, len(model.generate("x", max_tokens=2, store=store, ignore_end_tokens=True).tokens))""")
        self.assertEqual(self.run_python(program).splitlines(), ["0 2", "child 0"])

    def test_exit_with_live_objects(self) -> None:
        program = BEGIN + """
state, store = weft.State(model), weft.PrefixStore(1 << 20)
cache = weft.KvCache("4v4", 2, 64, 64)
begun = model.generate("The", state=state, stream=True, max_tokens=500)
next(begun)
waiting = model.generate("The", stream=True)
reading = model.generate([7] * 4000, stream=True, max_tokens=1)
writing = model.generate("The", stream=True, max_tokens=100000, ignore_end_tokens=True, threads=1)
for pieces in (reading, writing):
    threading.Thread(target=lambda pieces=pieces: [None for _ in pieces], daemon=True).start()

def again():
    try:
        while True:
            model.generate("The", max_tokens=1, threads=1)
    except weft.Error:  # the interpreter is ending
        pass

threading.Thread(target=again, daemon=True).start()
time.sleep(0.2)
print("end")
"""
        self.assertEqual(self.run_python(program), "end\n")

    def test_exit_in_an_iteration(self) -> None:
        self.assertEqual(self.run_python(BEGIN + "for piece in model.generate('The', stream=True): print(1); sys.exit()"), "1\n")

    def test_a_signal_interrupts(self) -> None:
        program = BEGIN + """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
def later():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
for arguments in ({"prompt": "The", "max_tokens": 100000, "ignore_end_tokens": True}, {"prompt": [7] * 30000, "max_tokens": 1}):
    state = weft.State(model, capacity=140000)
    threading.Thread(target=later).start()
    try:
        model.generate(state=state, **arguments)
        print("not interrupted")
    except KeyboardInterrupt:
        state.reset()  # the state is free again
        print("interrupted", [thread.name for thread in threading.enumerate() if thread.name.startswith("weft")])
"""
        self.assertEqual(self.run_python(program), "interrupted []\n" * 2)


if __name__ == "__main__":
    unittest.main()
