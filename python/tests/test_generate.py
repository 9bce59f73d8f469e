"""Model.generate: whole texts, pieces, stop rules, log probabilities, drafts, progress, and iterators that end early."""

import copy
import gc
import pickle
import threading
import unittest

import numpy as np
from model_support import REPOSITORY, ModelCase, workers

import weft

PROMPT = "the sea, the sea, the sea"


class Generate(ModelCase):
    def greedy(self, tokens: int, **options) -> weft.Completion:
        return self.model.generate(PROMPT, max_tokens=tokens, temperature=0, **options)

    def test_equals_logits_step_by_step(self) -> None:
        state, chosen = weft.State(self.model), []
        next_tokens = self.model.encode(PROMPT)
        for _ in range(12):
            next_tokens = [int(self.model.logits(next_tokens, state=state).argmax())]
            chosen += next_tokens
        done = self.greedy(12)
        self.assertEqual((done.tokens, str(done)), (chosen, self.model.decode(chosen)))
        self.assertEqual((done.stop, done.prompt_tokens, done.restored_tokens), ("length", len(self.model.encode(PROMPT)), 0))
        self.assertTrue(done.prefill_seconds > 0 and done.decode_seconds > 0 and done.steps == 11)

    def test_pieces_make_the_text(self) -> None:
        pieces = self.model.generate(PROMPT, stream=True, max_tokens=12, temperature=0, logprobs=3)
        self.assertIsNone(pieces.result)
        seen = list(pieces)
        whole = self.greedy(12, logprobs=3)
        self.assertEqual("".join(map(str, seen)), str(whole))
        self.assertEqual((pieces.result, pieces.result.tokens, pieces.text), (whole, whole.tokens, str(whole)))
        self.assertEqual([piece.logprob for piece in seen if piece.token is not None], whole.logprobs)
        for piece, top in zip(seen, whole.top):
            self.assertEqual((piece.top, len(top)), (top, 3))
            self.assertEqual(piece.top[0], (piece.token, piece.logprob))  # greedy
            self.assertTrue(top[0][1] >= top[1][1] >= top[2][1])
        self.assertEqual(list(pieces), [])

    def test_logprobs_are_of_the_softmax(self) -> None:
        logits = self.model.logits(PROMPT).astype(np.float64)
        wanted = logits - np.logaddexp.reduce(logits)
        token, logprob = self.greedy(1, logprobs=1).top[0][0]
        # The library sums exponentials of f32 in double: each is right to 2 units (2.4e-7), and its argument x - max, which is below 32,
        # is rounded to f32 (32 * 2**-24 = 1.9e-6).
        self.assertLess(abs(logits - logits.max()).max(), 32)
        self.assertAlmostEqual(logprob, wanted[token], delta=2.2e-6)
        self.assertIsNone(next(self.model.generate(PROMPT, stream=True, max_tokens=1)).logprob)

    def test_sampling(self) -> None:
        def draw(**options) -> list:
            return self.model.generate(PROMPT, max_tokens=24, **{"temperature": 1.5, "top_p": 1.0, **options}).tokens

        self.assertEqual(draw(seed=3), draw(seed=3))
        self.assertNotEqual(draw(seed=3), draw(seed=4))
        greedy = self.greedy(24).tokens
        for option in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0}):
            self.assertEqual(draw(seed=5, **option), greedy, option)
        self.assertNotEqual(self.greedy(24, repetition_penalty=2.0).tokens, greedy)
        self.assertNotEqual(self.greedy(24, presence_penalty=50.0).tokens, greedy)
        self.assertEqual(len(set(self.greedy(24, frequency_penalty=50.0).tokens)), 24)

    def test_stop_rules(self) -> None:
        done = self.greedy(40, stop=["no such text", "sea"])
        self.assertEqual((done.stop, done.stop_index), ("stop_string", 1))
        self.assertNotIn("sea", done)
        self.assertEqual(self.greedy(40, stop="sea"), done)
        tokens = self.greedy(3).tokens
        done = self.greedy(40, stop_tokens=[6000, tokens[2]])
        self.assertEqual((done.stop, done.stop_index, done.tokens), ("stop_token", 1, tokens[:2]))
        for limit in (4, 40, 10**11, 2**63 - 1):
            state = weft.State(self.model, capacity=len(self.model.encode(PROMPT)) + 2)
            done = self.greedy(limit, state=state)
            self.assertEqual((done.stop, len(done.tokens)), ("capacity", 3), limit)  # the third is not read
        state = weft.State(self.model, capacity=len(self.model.encode(PROMPT)) + 2)
        self.assertEqual(self.greedy(3, state=state).stop, "length")
        done = self.model.generate(PROMPT, max_tokens=200, sentence_after=1, seed=1)
        self.assertEqual((done.stop, done.rstrip("\"')”’")[-1:] in ".!?…"), ("sentence_end", True))

    def test_drafts_change_nothing(self) -> None:
        done = self.greedy(40, draft=4)
        self.assertEqual(done.tokens, self.greedy(40).tokens)
        self.assertGreater(done.draft_accepted, 0)
        self.assertGreaterEqual(done.draft_proposed, done.draft_accepted)
        self.refused("generator: draft is 4, the state can roll back 0 tokens", self.greedy, 4, draft=4, state=weft.State(self.model))

    def test_suggestions_of_the_model(self) -> None:
        done = self.model.generate("x", ignore_end_tokens=True, seed=1)
        self.assertEqual((done.stop, len(done.tokens)), ("length", 200))  # max_new_tokens of generation_config.json
        self.assertEqual(len(self.model.generate(max_tokens=3, ignore_end_tokens=True).tokens), 3)  # the model's begin token
        self.assertEqual(self.model.generate("x", max_tokens=0), "")

    def test_a_state_holds_the_conversation(self) -> None:
        state = weft.State(self.model)
        first = self.model.generate("It was", state=state, max_tokens=6, temperature=0)
        second = self.model.generate(" The end", state=state, max_tokens=6, temperature=0)
        text = self.model.encode("It was") + first.tokens + self.model.encode(" The end") + second.tokens
        self.assertEqual(state.tokens(), text)
        self.assertEqual(second.prompt_tokens, 1 + len(self.model.encode(" The end")))  # the last token was chosen, not read
        again = self.model.generate(text[: -len(second.tokens)], max_tokens=6, temperature=0, kv="8v4")
        self.assertEqual(again.tokens, second.tokens)

    def test_completions_are_texts(self) -> None:
        done = self.greedy(4)
        copy = pickle.loads(pickle.dumps(done))
        self.assertIsInstance(done, str)
        self.assertEqual((copy, copy.tokens, copy.stop), (done, done.tokens, "length"))

    def test_refusals(self) -> None:
        self.refused("generator: sampling.temperature is -1", self.model.generate, "x", temperature=-1)
        self.refused("generate: temperature is 'hot', wanted a number", self.model.generate, "x", temperature="hot")
        self.refused("generator: max_tokens is -1", self.model.generate, "x", max_tokens=-1)
        self.refused("generate: max_tokens is 18446744073709551616", self.model.generate, "x", max_tokens=2**64)
        self.refused("generate: seed is -1, wanted 0 to 18446744073709551615", self.model.generate, "x", seed=-1)
        self.refused("generate: logprobs is 4294967296, wanted -2147483648 to", self.model.generate, "x", logprobs=2**32)
        self.refused("generate: stop holds 'a\\x00b', wanted texts without zero bytes", self.model.generate, "x", stop=["a\0b"])
        self.refused("generate: sequence is 1, the state holds 1", self.model.generate, "x", state=weft.State(self.model), sequence=1)
        self.refused("generate: progress is a int", self.model.generate, "x", progress=3)
        self.refused("generator: max_tokens is -1", self.model.generate, PROMPT, max_tokens=-1)
        self.refused("plan.capacity is 1000000000000001, wanted 1 to", self.model.generate, "x", max_tokens=10**15)
        self.refused("generate: max_tokens is a number of 20001 bits", self.model.generate, "x", max_tokens=2**20000)
        self.refused("generate: temperature is too large for a double", self.model.generate, "x", temperature=10**400)
        self.refused("generate: store is 5, wanted a weft.PrefixStore", self.model.generate, "x", store=5)
        self.refused("generate: state is 5, wanted a weft.State", self.model.generate, "x", state=5)
        self.refused("logits: state is 5, wanted a weft.State", self.model.logits, "x", state=5)
        self.refused("generate: prompt has 0 dimensions of object", self.model.generate, None)
        self.refused("generate: stop is 5, wanted a text or a list", self.model.generate, "x", stop=5)
        self.refused("generate: prompt is not one list of numbers", self.model.generate, [[1, 2], [3]])
        self.assertEqual(self.greedy(3, stop=None, stop_tokens=None), self.greedy(3))
        state = weft.State(self.model)
        self.model.logits([1, 2], state=state)
        self.refused("generator: tokens are 2, and the state holds 2; wanted at least one more", self.model.generate, state=state)
        self.assertEqual(state.tokens(), [1, 2])


    def test_a_state_of_another_model_is_refused(self) -> None:
        state = weft.State(weft.Model(REPOSITORY / "cases/golden/models/qwen3_5"))
        for function in (self.model.generate, self.model.logits):
            error = self.refused("state", function, [1, 2, 3], state=state)
            self.assertEqual((error.code, error.argument, state.tokens()), ("invalid_argument", "state", []))

    def test_a_failure_has_no_result(self) -> None:
        pieces = self.model.generate([6144], stream=True, max_tokens=3)
        self.refused("token 6144", next, pieces)
        self.assertIsNone(pieces.result)

    def test_an_iterator_cannot_be_copied(self) -> None:
        pieces = self.model.generate(PROMPT, stream=True)
        for function in (copy.copy, copy.deepcopy, pickle.dumps):
            self.refused("copy: Generation cannot be copied or pickled", function, pieces)


class Progress(ModelCase):
    PROMPT = [10 + i % 1000 for i in range(800)]  # several steps of the model

    class Bar:
        """What tqdm has of a bar."""

        made: list = []

        def __init__(self, total=None, unit="it", desc=None) -> None:
            self.total, self.n, self.closed = total, 0, False
            self.made.append(self)

        def update(self, count) -> None:
            self.n += count

        def close(self) -> None:
            self.closed = True

    def test_a_function(self) -> None:
        seen, threads = [], set()

        def report(done: int, everything: int) -> None:
            seen.append((done, everything))
            threads.add(threading.current_thread())

        self.model.generate(self.PROMPT, max_tokens=1, progress=report)
        self.assertGreater(len(seen), 1)
        self.assertEqual((seen[-1], sorted(seen)), ((800, 800), seen))
        self.assertEqual(threads, {threading.current_thread()})

    def test_a_class_and_a_bar(self) -> None:
        self.model.generate(self.PROMPT, max_tokens=1, progress=self.Bar)
        bar = self.Bar.made.pop()
        self.assertEqual((bar.total, bar.n, bar.closed), (800, 800, True))
        bar = self.Bar()
        self.model.generate(self.PROMPT, max_tokens=1, progress=bar)
        self.assertEqual((bar.total, bar.n, bar.closed), (800, 800, False))

    def test_with_a_store(self) -> None:
        store, seen = weft.PrefixStore(64 << 20, every=0), []
        for prompt in (self.PROMPT, [*self.PROMPT, 5]):
            self.model.generate(prompt, max_tokens=1, store=store, progress=lambda *counts: seen.append(counts))
        self.assertEqual(seen[:2], [(512, 800), (800, 800)])  # steps of 512 tokens
        self.assertEqual(seen[2:], [(801, 801)])  # 800 tokens were restored

        def refuse(done: int, everything: int) -> None:
            raise ZeroDivisionError

        prompt, state = self.PROMPT[1:], weft.State(self.model)
        before = store.stats()
        with self.assertRaises(ZeroDivisionError):
            self.model.generate(prompt, max_tokens=1, store=store, state=state, progress=refuse)
        after = store.stats()
        self.assertEqual((after.inserted - before.inserted, state.tokens(), workers()), (1, prompt, []))
        done = self.model.generate(state=state, max_tokens=4, temperature=0)
        self.assertEqual(done.prompt_tokens, 799 - 512)
        self.assertEqual(done.tokens, self.model.generate(prompt, max_tokens=4, temperature=0).tokens)

    def test_a_bar_that_cannot_be_closed(self) -> None:
        class Broken(self.Bar):
            def close(self) -> None:
                raise ValueError("I/O operation on closed file")

        state = weft.State(self.model)
        pieces = self.model.generate(self.PROMPT, stream=True, state=state, max_tokens=1, progress=Broken)
        with self.assertRaisesRegex(ValueError, "I/O operation"):
            next(pieces)
        self.assertEqual(workers(), [])
        state.reset()  # the state is free again
        self.Bar.made.clear()

    def test_an_exception_stops_the_prompt(self) -> None:
        state = weft.State(self.model)

        def refuse(done: int, everything: int) -> None:
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.model.generate(self.PROMPT, state=state, max_tokens=1, progress=refuse)
        self.assertEqual((state.tokens(), workers()), (self.PROMPT, []))
        rest = self.model.generate([], state=state, max_tokens=4, temperature=0)
        self.assertEqual(rest.tokens, self.model.generate(self.PROMPT, max_tokens=4, temperature=0).tokens)


class EarlyEnds(ModelCase):
    def pieces(self, state: weft.State) -> weft.Generation:
        return self.model.generate(PROMPT, stream=True, state=state, max_tokens=1000, temperature=0)

    def seen(self, count: int) -> list:
        return self.model.encode(PROMPT) + self.model.generate(PROMPT, max_tokens=count, temperature=0).tokens

    def test_close(self) -> None:
        state = weft.State(self.model)
        pieces = self.pieces(state)
        for _ in range(5):
            next(pieces)
        pieces.close()
        self.assertEqual((workers(), state.tokens()), ([], self.seen(5)))
        self.assertEqual((pieces.result.stop, len(pieces.result.tokens)), ("callback", 5))
        self.assertEqual(list(pieces), [])
        pieces.close()

    def test_with_and_exceptions(self) -> None:
        state = weft.State(self.model)
        with self.assertRaises(ZeroDivisionError), self.pieces(state) as pieces:
            for index, _ in enumerate(pieces):
                if index == 2:
                    raise ZeroDivisionError
        self.assertEqual((workers(), state.tokens()), ([], self.seen(3)))

    def test_dropped(self) -> None:
        state = weft.State(self.model)
        for _ in self.pieces(state):
            break
        gc.collect()
        self.assertEqual((workers(), state.tokens()), ([], self.seen(1)))

    def test_never_begun(self) -> None:
        state = weft.State(self.model)
        pieces = self.pieces(state)
        pieces.close()
        self.assertEqual((state.tokens(), list(pieces), workers()), ([], [], []))

    def test_close_from_another_thread(self) -> None:
        pieces, count = self.pieces(weft.State(self.model)), 0
        timer = threading.Timer(0.3, pieces.close)
        for _ in pieces:
            if count == 0:
                timer.start()
            count += 1
        timer.join()
        self.assertTrue(0 < count < 1000)
        self.assertEqual((pieces.result.stop, len(pieces.result.tokens), workers()), ("callback", count, []))

    def test_many_begun_and_dropped(self) -> None:
        state, shuffled = weft.State(self.model, capacity=1 << 14), np.random.default_rng(0)
        for _ in range(40):
            for index, _ in enumerate(self.model.generate("the sea", stream=True, state=state, max_tokens=20, threads=1)):
                if index == shuffled.integers(6):
                    break
        self.assertEqual(workers(), [])

    def test_collected_in_the_thread_of_another(self) -> None:
        """The garbage collector runs in any thread, also in one that computes."""
        before = gc.get_threshold()
        for _ in range(5):
            pieces = self.pieces(weft.State(self.model, threads=1))
            next(pieces)
            cycle = [pieces]
            cycle.append(cycle)
            del pieces, cycle
            gc.set_threshold(1, 1, 1)
            try:
                self.model.generate(PROMPT, max_tokens=8, threads=1, logprobs=100)
            finally:
                gc.set_threshold(*before)
        gc.collect()
        self.assertEqual(workers(), [])

    def test_a_state_in_use_is_refused(self) -> None:
        state = weft.State(self.model, sequences=2)
        pieces = self.pieces(state)
        next(pieces)
        in_use = "is in use by another thread, or by an iterator of pieces that is not closed"
        for function in (state.reset, state.rollable, lambda: state.fork(0, 1), lambda: state.save("never"), lambda: state.bytes,
                         lambda: self.model.logits([1], state=state), lambda: next(self.pieces(state))):
            self.refused(in_use, function)
        pieces.close()
        state.fork(0, 1)

    def test_an_error_leaves_no_cycle(self) -> None:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                self.refused("generator: draft", self.model.generate, "x", draft=4, state=weft.State(self.model))
            self.assertEqual([each for each in gc.get_objects() if isinstance(each, weft.State)], [])
        finally:
            gc.enable()


if __name__ == "__main__":
    unittest.main()
