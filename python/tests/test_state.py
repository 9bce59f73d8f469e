"""weft.State and weft.PrefixStore: fork, rollback, files, and beginnings that are computed once."""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import numpy as np
from model_support import MODEL, ModelCase

import weft

TEXT = [10 + 7 * i % 5000 for i in range(200)]


class States(ModelCase):
    def test_fork(self) -> None:
        state = weft.State(self.model, sequences=3)
        self.model.logits(TEXT[:70], state=state)
        state.fork(0, 2)
        self.assertEqual((state.tokens(0), state.tokens(1), state.tokens(2)), (TEXT[:70], [], TEXT[:70]))
        one, other = (self.model.logits(TEXT[70:90], state=state, sequence=sequence) for sequence in (0, 2))
        np.testing.assert_array_equal(one, other)
        self.model.logits([5], state=state, sequence=2)
        self.assertEqual((state.tokens(0), state.tokens(2)), (TEXT[:90], [*TEXT[:90], 5]))

    def test_rollback_has_the_bits_of_never_having_seen(self) -> None:
        state, other = weft.State(self.model, rollback=4), weft.State(self.model, rollback=4)
        for each, more in ((state, TEXT[90:93]), (other, [])):
            self.model.logits(TEXT[:90], state=each)
            if more:
                self.model.logits(more, state=each)
        self.assertEqual(state.rollable(), 3)
        state.rollback(3)
        np.testing.assert_array_equal(self.model.logits([5], state=state), self.model.logits([5], state=other))
        self.assertEqual(state.tokens(), other.tokens())

    def test_rollback_of_a_chosen_token(self) -> None:
        state = weft.State(self.model, rollback=4)
        self.model.generate(TEXT[:20], state=state, max_tokens=3, temperature=0)
        self.assertEqual((len(state.tokens()), state.rollable()), (23, 3))  # of three chosen tokens, two were read
        state.rollback(2)
        rolled = self.model.logits([5], state=state)
        plain = weft.State(self.model)
        self.model.logits(TEXT[:20], state=plain)
        self.model.logits(state.tokens()[20:21], state=plain)
        np.testing.assert_array_equal(rolled, self.model.logits([5], state=plain))

    def test_files(self) -> None:
        state, other = weft.State(self.model, rollback=4), weft.State(self.model, sequences=2)
        self.model.generate(TEXT[:40], state=state, max_tokens=3, temperature=0)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "a file – with a name.state")
            state.save(file)
            self.assertEqual(other.load(file, sequence=1), state.tokens())
            self.assertEqual((other.tokens(0), other.tokens(1)), ([], state.tokens()))
            one, two = (self.model.generate([7], state=each, sequence=sequence, max_tokens=8, temperature=0).tokens
                        for each, sequence in ((state, 0), (other, 1)))
            self.assertEqual(one, two)
            small = weft.State(self.model, capacity=16)
            self.refused("capacity", small.load, file)
            self.refused("keys weft1-8, values weft1-4; the state has", weft.State(self.model, kv="4v4").load, file)
            self.refused("no-such-file", other.load, os.path.join(folder, "no-such-file"))
            self.assertEqual(os.listdir(folder), [os.path.basename(file)])
        self.assertEqual(small.tokens(), [])

    def test_a_file_with_many_tokens_to_read(self) -> None:
        state, other = weft.State(self.model, capacity=4096), weft.State(self.model, capacity=8)

        def refuse(done: int, everything: int) -> None:
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):  # after the first step of the prompt
            self.model.generate(TEXT * 4, state=state, max_tokens=1, progress=refuse)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "prompt.state")
            state.save(file)
            self.refused("capacity", other.load, file)
            self.assertEqual(state.load(file), TEXT * 4)

    def test_reset(self) -> None:
        state = weft.State(self.model, sequences=2)
        for sequence in range(2):
            self.model.logits(TEXT, state=state, sequence=sequence)
        grown = state.bytes
        state.reset(1)
        self.assertEqual((state.tokens(0), state.tokens(1)), (TEXT, []))
        state.reset()
        self.assertEqual((state.tokens(0), state.tokens(1)), ([], []))
        self.model.logits(TEXT, state=state)
        self.assertEqual(state.bytes, grown)  # freed pages are used again

    def test_refusals(self) -> None:
        state = weft.State(self.model, sequences=2, rollback=2)
        self.refused("state_fork: sequence is 2, the state holds 2", state.fork, 0, 2)
        self.refused("state_tokens: sequence is -1, the state holds 2", state.tokens, -1)
        self.refused("state_rollback: tokens are 1, wanted 0 to 0, which rollable() returns", state.rollback, 1)
        self.refused("state_create: capacity is 0, wanted 1 to", weft.State, self.model, capacity=0)
        self.refused("rollback", weft.State, self.model, rollback=17)
        self.refused("kv is 4, wanted a text", weft.State, self.model, kv=4)
        self.refused("kv is None, wanted a text", weft.State, self.model, kv=None)
        self.refused("state_create: model is 5, wanted a weft.Model", weft.State, 5)
        self.refused("state_create: backend is 'tpu', wanted one of cpu", weft.State, self.model, backend="tpu")
        self.refused("file is None, wanted a path", state.save, None)

    def test_copies_are_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder, weft.StateLock(os.path.join(folder, "a.state")) as lock:
            for owner in (weft.State(self.model), weft.PrefixStore(1 << 20), lock):
                for function in (copy.copy, copy.deepcopy, pickle.dumps):
                    self.refused(f"copy: {type(owner).__name__} cannot be copied or pickled", function, owner)


class Locks(ModelCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = os.path.join(folder.name, "story.state")

    def test_from_load_to_save(self) -> None:
        state = weft.State(self.model)
        with weft.StateLock(self.file) as lock:
            self.assertFalse(lock.exists)
            self.model.logits(TEXT[:10], state=state)
            state.save(lock)
            self.assertTrue(lock.exists)
            other = weft.State(self.model)
            self.assertEqual((other.load(lock), other.load(self.file)), (TEXT[:10], TEXT[:10]))
            self.refused(f"held by process {os.getpid()}", weft.StateLock, self.file, wait=0)
        self.refused("state_load: lock is closed, wanted one that is held", state.load, lock)
        self.assertEqual(os.listdir(os.path.dirname(self.file)), ["story.state"])

    def test_another_writer_waits(self) -> None:
        state, told, saved = weft.State(self.model), [], threading.Event()
        lock = weft.StateLock(self.file)

        def write() -> None:
            with weft.StateLock(self.file, on_wait=told.append) as second:
                state.save(second)
            saved.set()

        thread = threading.Thread(target=write)
        thread.start()
        begin = time.monotonic()
        while not told and time.monotonic() - begin < 30:
            time.sleep(0.05)
        self.assertFalse(saved.is_set())
        lock.close()
        thread.join(30)
        self.assertTrue(saved.is_set())
        self.assertEqual(len(told), 1)
        self.assertIn(f"held by process {os.getpid()}", told[0])

    def test_close_waits_for_a_save(self) -> None:
        state, held = weft.State(self.model), []
        lock = weft.StateLock(self.file)

        def slow(*arguments) -> None:
            closer.start()
            closer.join(0.3)
            held.append(lock._close.alive)
            weft._library.call(*arguments)

        closer = threading.Thread(target=lock.close)
        with mock.patch("weft.state.call", slow):
            state.save(lock)
        closer.join(30)
        self.assertEqual((held, lock._close.alive, closer.is_alive()), ([True], False, False))
        self.assertEqual(weft.State(self.model).load(self.file), [])

    def test_two_processes_lose_no_turn(self) -> None:
        program = """
import sys, weft
model = weft.Model(sys.argv[1])
for turn in range(6):
    with weft.StateLock(sys.argv[2], wait=300) as lock:
        state = weft.State(model, threads=1)
        if lock.exists:
            state.load(lock)
        model.logits([int(sys.argv[3])], state=state)
        state.save(lock)
"""
        writers = [subprocess.Popen([sys.executable, "-c", program, MODEL, self.file, str(number)]) for number in (11, 12)]
        self.assertEqual([writer.wait(300) for writer in writers], [0, 0])
        tokens = weft.State(self.model).load(self.file)
        self.assertEqual((tokens.count(11), tokens.count(12), len(tokens)), (6, 6, 12))

    def test_a_lock_stays_with_its_process(self) -> None:
        lock = weft.StateLock(self.file)
        child = os.fork()
        if child == 0:
            try:
                os._exit(2 if lock.exists else 4)
            except weft.Error as error:
                lock.close()
                os._exit(0 if "belongs to the process that this one was forked from" in str(error) else 3)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.refused(f"held by process {os.getpid()}", weft.StateLock, self.file, wait=0)
        lock.close()

    def test_refusals(self) -> None:
        self.refused("no-such-folder", weft.StateLock, "/no-such-folder/story.state", wait=5)
        self.refused("state_lock_open: file is 3, wanted a path", weft.StateLock, 3)
        begin = time.monotonic()
        self.refused("no folder held by process 1", weft.StateLock, "/no folder held by process 1/story.state", wait=30)
        self.assertLess(time.monotonic() - begin, 20)
        self.refused("state_lock_open: wait is nan, wanted seconds", weft.StateLock, self.file, wait=float("nan"))
        self.refused("state_lock_open: wait is 'long', wanted a number", weft.StateLock, self.file, wait="long")
        self.refused("state_lock_open: on_wait is 5, wanted a function", weft.StateLock, self.file, on_wait=5)
        with weft.StateLock(self.file):
            self.assertEqual(self.refused("held by", weft.StateLock, self.file, wait=0).argument, "wait")


class Stores(ModelCase):
    def test_a_beginning_is_computed_once(self) -> None:
        store = weft.PrefixStore(64 << 20, every=64)
        cold = self.model.generate(TEXT, store=store, max_tokens=6, temperature=0)
        warm = self.model.generate(TEXT, store=store, max_tokens=6, temperature=0)
        self.assertEqual((cold.restored_tokens, warm.restored_tokens, warm.tokens), (0, 192, cold.tokens))
        stats = store.stats()
        self.assertEqual((stats.hits, stats.misses, stats.tokens), (1, 1, 192))
        self.assertTrue(0 < stats.bytes <= 64 << 20 and stats.drift == 0)

    def test_restore_and_insert(self) -> None:
        store, state = weft.PrefixStore(64 << 20), weft.State(self.model)
        self.assertEqual(store.restore(state, TEXT), 0)
        self.model.logits(TEXT[:64], state=state)
        wanted = self.model.logits([5], state=state)
        state.reset()
        self.model.logits(TEXT[:64], state=state)
        store.insert(state)
        other = weft.State(self.model)
        self.assertEqual((store.restore(other, TEXT, most=63), store.restore(other, TEXT)), (0, 64))
        self.assertEqual(other.tokens(), TEXT[:64])
        np.testing.assert_array_equal(self.model.logits([5], state=other), wanted)

    def test_fewer_bits_drift(self) -> None:
        drifts = []
        for storage in ("f32", "f16", "int8"):
            store = weft.PrefixStore(64 << 20, recurrent=storage)
            self.model.generate(TEXT, store=store, max_tokens=1)
            drifts.append(store.stats().drift)
        self.assertTrue(drifts[0] == 0 < drifts[1] < drifts[2] < 0.05, drifts)

    def test_refusals(self) -> None:
        self.refused("prefix_store: every is 65", weft.PrefixStore, 1 << 20, every=65)
        self.refused("prefix_store_create: recurrent is 'f8', wanted one of f32, f16, bf16, int8", weft.PrefixStore, 1, recurrent="f8")
        self.refused("prefix_store_create: bytes is 1.5, wanted a whole number", weft.PrefixStore, 1.5)
        store = weft.PrefixStore(1 << 20)
        self.refused("prefix_store_restore: state is 5, wanted a weft.State", store.restore, 5, TEXT)
        self.refused("prefix_store_insert: state is 5, wanted a weft.State", store.insert, 5)


if __name__ == "__main__":
    unittest.main()
