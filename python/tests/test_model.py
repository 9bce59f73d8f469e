"""weft.Model: text to tokens, logits, and the memory plan."""

import copy
import json
import pickle
import shutil
import tempfile
import unittest
import warnings

import numpy as np
from model_support import MODEL, REPOSITORY, ModelCase

import weft


class Models(ModelCase):
    def test_says_what_it_is(self) -> None:
        self.assertIn("6 gated delta + 2 attention layers", self.model.summary)
        self.assertIn(self.model.summary, repr(self.model))
        self.assertEqual((self.model.vocab_size, self.model.max_positions, self.model.begin_token), (6144, 32768, 0))
        self.assertTrue(self.model.has_tokenizer and self.model.is_end_token(0) and not self.model.is_end_token(100))
        self.assertEqual(self.model.warnings, [])

    def test_encodes_and_decodes(self) -> None:
        for text in ("", "The old house", "Straße, naïve — 你好 \0 end", "x" * 5000):
            tokens = self.model.encode(text)
            self.assertEqual(self.model.decode(tokens), text)
            self.assertEqual(self.model.decode(np.array(tokens, np.int64)), text)
        self.assertEqual(len(self.model.encode("The old house")), 3)

    def test_warnings_reach_people(self) -> None:
        folder = REPOSITORY / "cases/golden/models/tied/head_differs_flat"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = weft.Model(folder)
        self.assertEqual(len(model.warnings), 1)
        self.assertIn(model.warnings[0], str(caught[0].message))
        self.assertEqual(caught[0].filename, __file__)

    def test_refusals(self) -> None:
        self.refused("/no/such/model/config.json", weft.Model, "/no/such/model")
        end = next(token for token in range(6144) if self.model.is_end_token(token))
        for token in (end + 2**32, end - 2**32):
            self.refused(f"model_is_end_token: token is {token}, wanted -2147483648", self.model.is_end_token, token)
        self.refused("model_encode: text is 5, wanted a str", self.model.encode, 5)
        self.refused("model_load: path is 7, wanted a path", weft.Model, 7)
        self.refused("wanted a path without zero bytes", weft.Model, "a\0b")
        error = self.refused("model_decode: tokens has 1 dimensions of float64", self.model.decode, [1.5])
        self.assertEqual((error.code, error.op, error.argument), ("invalid_argument", "model_decode", "tokens"))
        self.refused("holds a number that needs more than 32 bits", self.model.decode, [2**40])
        self.refused("model append: inputs hold token 6144, wanted 0 to 6143", self.model.logits, [6144])

    def test_the_bundled_model(self) -> None:
        self.assertEqual(weft.Model().logits([1, 2]).tolist(), self.model.logits([1, 2]).tolist())

    def test_copies(self) -> None:
        self.assertIs(copy.copy(self.model), self.model)
        self.assertIs(copy.deepcopy([self.model])[0], self.model)
        loaded = pickle.loads(pickle.dumps(self.model))
        self.assertNotEqual(loaded.handle.value, self.model.handle.value)
        np.testing.assert_array_equal(loaded.logits([1, 2]), self.model.logits([1, 2]))

    def test_a_model_without_a_tokenizer(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for file in MODEL.iterdir():
                if file.name != "tokenizer.json":
                    shutil.copy(file, folder)
            model = weft.Model(folder)
            self.assertFalse(model.has_tokenizer)
            self.refused("tokenizer.json", model.encode, "a")
            done = model.generate([10, 20, 30], max_tokens=4, temperature=0)
            self.assertEqual((str(done), len(done.tokens)), ("", 4))


class Logits(ModelCase):
    def test_every_token_and_the_last(self) -> None:
        tokens = self.model.encode("It was a dark night, and the wind")
        every = self.model.logits(tokens, every_token=True)
        last = self.model.logits("It was a dark night, and the wind")
        self.assertEqual((every.shape, every.dtype, last.shape), ((len(tokens), 6144), np.float32, (6144,)))
        np.testing.assert_array_equal(every[-1], last)
        self.assertTrue(np.isfinite(every).all())

    def test_a_state_continues(self) -> None:
        tokens = self.model.encode("It was a dark night, and the wind")
        state = weft.State(self.model)
        parts = [self.model.logits(part, every_token=True, state=state) for part in (tokens[:3], tokens[3:])]
        np.testing.assert_array_equal(np.concatenate(parts), self.model.logits(tokens, every_token=True))
        self.assertEqual(state.tokens(), tokens)

    def test_a_state_that_has_a_token_to_read(self) -> None:
        state = weft.State(self.model)
        chosen = self.model.generate([10, 20, 30], state=state, max_tokens=1, temperature=0).tokens
        rows = self.model.logits([40, 50], state=state, every_token=True)
        self.assertEqual(state.tokens(), [10, 20, 30, *chosen, 40, 50])
        np.testing.assert_array_equal(rows, self.model.logits(state.tokens(), every_token=True)[-2:])

    def test_threads_do_not_change_bits(self) -> None:
        tokens = self.model.encode("It was a dark night, and the wind") * 20
        np.testing.assert_array_equal(self.model.logits(tokens, threads=1), self.model.logits(tokens, threads=2))

    def test_refusals(self) -> None:
        self.refused("logits: tokens are none", self.model.logits, [])
        state = weft.State(self.model, capacity=4)
        self.refused("capacity", self.model.logits, [1, 2, 3, 4, 5], state=state)
        self.assertEqual(state.tokens(), [])
        self.refused("logits: kv is '4v4', and the given state has its own", self.model.logits, [1], state=state, kv="4v4")
        self.refused("backend is 'tpu', wanted one of cpu", self.model.logits, [1], backend="tpu")
        self.refused("nonsense", self.model.logits, [1], kv="nonsense")


class Plan(ModelCase):
    def test_the_bytes_of_a_state(self) -> None:
        plan = weft.plan(self.model, context=128, batch=2, rollback=4, kv="8v4")
        state = weft.State(self.model, sequences=2, capacity=128, rollback=4)
        for sequence in range(2):
            self.model.logits([7] * 128, state=state, sequence=sequence)
        parts = ("recurrent_state", "conv_state", "kv_cache", "records")
        self.assertEqual(sum(plan[part] for part in parts), state.bytes)
        self.assertEqual(plan["total"], state.bytes + plan["weights"] + plan["scratch"])
        self.assertEqual(plan["kv_cache"], 2 * 128 * plan["bytes_per_token"])

    def test_a_path_gives_the_same(self) -> None:
        self.assertEqual(weft.plan(MODEL, kv="4v4", prompt=64), weft.plan(self.model, kv="4v4", prompt=64))
        self.assertLess(weft.plan(self.model, prompt=64)["scratch"], weft.plan(self.model)["scratch"])
        self.assertEqual(json.loads(json.dumps(weft.plan(self.model)))["context"], 4096)
        four = np.int64(4)
        self.assertEqual(json.loads(json.dumps(weft.plan(self.model, context=four, batch=four, prompt=four)))["prompt"], 4)

    def test_refusals(self) -> None:
        self.refused("model_plan: options.prompt is 65, wanted 0 to the context, 64", weft.plan, self.model, context=64, prompt=65)
        self.refused("model_plan: context is 0, wanted 1 to", weft.plan, self.model, context=0)
        self.refused("model_plan: kv is None, wanted a text", weft.plan, self.model, kv=None)
        self.refused("model_plan: batch is 1.5, wanted a whole number", weft.plan, self.model, batch=1.5)


if __name__ == "__main__":
    unittest.main()
