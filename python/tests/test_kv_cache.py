"""weft.KvCache against attention in float64."""

import copy
import gc
import pickle
import threading
import unittest
import unittest.mock

import numpy as np
from model_support import ModelCase

import weft

RECIPES = ("f32", "f16", "bf16", "8v8", "8v4", "4v4", "3v2", "f16v4", "aura4v4")


def attention(q, k, v, causal=True, window=None, softcap=None, sinks=None):
    """Softmax attention of the last tokens, in float64. q [T, Hq, D], k and v [N, Hk, D]."""
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    scores = np.einsum("thd,nhd->thn", q, k) / np.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position, token = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))[None]
    allowed = np.ones((len(q), len(k)), bool)
    if causal:
        allowed &= token <= position
    if window:
        allowed &= token + window > position
    scores = np.where(allowed[:, None], scores, -np.inf)
    denominator = np.exp(scores).sum(-1)
    if sinks is not None:
        denominator += np.exp(sinks)
    return np.einsum("thn,nhd->thd", np.exp(scores), v) / denominator[..., None], np.log(denominator)


def error(got, wanted) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


class Caches(ModelCase):
    def setUp(self) -> None:
        rng = np.random.default_rng(1)
        self.k, self.v = (rng.standard_normal((2, 150, 2, 64), dtype=np.float32) for _ in range(2))
        self.q = rng.standard_normal((2, 5, 4, 64), dtype=np.float32)

    def filled(self, recipe: str, **options) -> weft.KvCache:
        cache = weft.KvCache(recipe, heads=2, head_dim=64, capacity=200, **options)
        k, v = (self.k, self.v) if cache.batch == 2 else (self.k[0], self.v[0])
        for part in (slice(0, 100), slice(100, 150)):
            cache.encode(*(each[..., part, :, :] for each in (k, v)))
        return cache

    def test_attention_is_that_of_the_decoded_values(self) -> None:
        for recipe in RECIPES:
            # The bars of the ops: 1e-5 for f32 arithmetic, 1e-3 where scores are computed with integers.
            bar = 1e-5 if recipe.startswith(("f", "bf", "aura")) else 1e-3
            for layout in ("fastest", "rows", "tiles"):
                cache = self.filled(recipe, layout=layout)
                k, v = cache.decode()
                o, lse = cache.attend(self.q[0], lse=True)
                wanted, wanted_lse = attention(self.q[0], k, v)
                self.assertLess(error(o, wanted), bar, (recipe, layout))
                self.assertLess(error(lse, wanted_lse), bar, (recipe, layout))
                np.testing.assert_array_equal(cache.attend(self.q[0]), o)

    def test_codes_lose_what_their_bits_say(self) -> None:
        """The error of a Lloyd-Max code of N(0, 1) by bits, about 0.34, 0.19, 0.097 of the standard deviation; plus the gain."""
        errors = [error(self.filled(f"{bits}v{bits}").decode()[0], self.k[0]) for bits in (2, 3, 4, 5, 6, 8)]
        for got, wanted in zip(errors, (0.343, 0.186, 0.0975, 0.050, 0.0257, 0.0088)):
            self.assertTrue(0.85 * wanted < got < 1.15 * wanted, errors)
        self.assertEqual(error(self.filled("f32").decode()[1], self.v[0]), 0)

    def test_masks_and_sinks(self) -> None:
        cache, sinks = self.filled("f32"), np.linspace(-1, 2, 4, dtype=np.float32)
        for options in ({"causal": False}, {"window": 20}, {"softcap": 2.0}, {"sinks": sinks}, {"scale": 1.0}):
            given = self.q[0] * (8 if "scale" in options else 1)
            wanted = attention(given, self.k[0], self.v[0], **{name: value for name, value in options.items() if name != "scale"})[0]
            self.assertLess(error(cache.attend(self.q[0], **options), wanted), 1e-5, options)

    def test_batches(self) -> None:
        for recipe in ("f16", "8v4"):
            both, one = self.filled(recipe, batch=2), self.filled(recipe)
            o = both.attend(self.q)
            self.assertEqual((o.shape, both.lengths), ((2, 5, 4, 64), [150, 150]))
            np.testing.assert_array_equal(o[0], one.attend(self.q[0]))
            np.testing.assert_array_equal(both.decode()[0][0], one.decode()[0])

    def test_dtypes(self) -> None:
        k, v, q = (each[0].astype(np.float16) for each in (self.k, self.v, self.q))
        cache = weft.KvCache("f16", heads=2, head_dim=64, capacity=200)
        cache.encode(k, v)
        np.testing.assert_array_equal(cache.decode()[0], k.astype(np.float32))
        self.assertEqual(cache.attend(q).dtype, np.float16)
        bits = lambda each: (each.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # noqa: E731  truncated to bf16
        cache = weft.KvCache("f32", heads=2, head_dim=64, capacity=200)
        cache.encode(bits(k), bits(v), dtype="bf16")
        np.testing.assert_array_equal(cache.decode()[0], (bits(k).astype(np.uint32) << 16).view(np.float32))
        self.assertEqual(cache.attend(bits(q), dtype="bf16").dtype, np.uint16)

    def test_bytes(self) -> None:
        cache = weft.KvCache("4v4", heads=8, head_dim=128, capacity=4000)
        self.assertEqual((cache.bytes_per_token, cache.capacity, cache.layout), (8 * 132, 4032, "tiles"))  # 2 * (64 + 2) per head
        self.assertEqual(cache.bytes, 4032 * cache.bytes_per_token)
        rows = weft.KvCache("4v4", heads=8, head_dim=(128, 64), capacity=4000, layout="rows")
        self.assertEqual((rows.capacity, rows.bytes), (4000, 4000 * 8 * (66 + 34)))

    def test_reset(self) -> None:
        cache = self.filled("8v4")
        before = cache.attend(self.q[0])
        cache.reset()
        self.assertEqual(cache.lengths, [0])
        cache.encode(self.k[0], self.v[0])
        np.testing.assert_array_equal(cache.attend(self.q[0]), before)

    def test_refusals(self) -> None:
        cache = self.filled("8v4")
        self.refused("kv_encode: k has 150 tokens, the cache holds 150 of 256", cache.encode, self.k[0], self.v[0])
        self.refused("kv_encode: k is [150, 2, 32], wanted [tokens, 2, 64]", cache.encode, self.k[0, ..., :32], self.v[0])
        self.refused("kv_encode: v has 149 tokens, k has 150", cache.encode, self.k[0], self.v[0, 1:])
        self.refused("compressed_attention: q is [5, 4, 32], wanted [tokens, heads, 64]", cache.attend, self.q[0, ..., :32])
        self.refused("wanted [2, tokens, 2, 64]", self.filled("8v4", batch=2).encode, self.k[:1], self.v[:1])
        self.refused("kv_cache: layout is 'columns', wanted one of fastest, rows, tiles", weft.KvCache, "8v4", 2, 64, 64, layout="columns")
        self.refused("kv_cache: heads is 0, wanted 1 to 2147483584", weft.KvCache, "8v4", 0, 64, 64)
        self.refused("kv_recipe: name is \"nonsense\", wanted", weft.KvCache, "nonsense", 2, 64, 64)
        self.refused("head_dim is 32, the recipe is for 64", weft.KvCache, weft.KvRecipe("8v4", 64), 2, 32, 64)
        self.assertEqual(cache.lengths, [150])

    def test_refused_sizes(self) -> None:
        for name in ("heads", "capacity", "batch"):
            for value in (2**40, 2**70, True, 1.5):
                arguments = {"recipe": "8v4", "heads": 2, "head_dim": 64, "capacity": 64, name: value}
                self.assertEqual(self.refused(f"kv_cache: {name} is {value}, wanted", weft.KvCache, **arguments).argument, name)
        refused = self.refused("cannot be allocated", weft.KvCache, "8v4", 2**30, 64, 2**30)
        self.assertEqual((refused.code, refused.argument), ("out_of_memory", "capacity"))
        self.refused("head_dim is [64], wanted one number", weft.KvCache, "8v4", 2, [64], 64)
        self.refused("k_head_dim is '64', wanted a whole number", weft.KvCache, "8v4", 2, "64", 64)
        self.refused("threads is 4294967297, wanted", weft.KvCache, "8v4", 2, 64, 64, threads=2**32 + 1)
        self.refused("wanted an array of numpy", weft.KvCache, "8v4", 2, 64, 64, like=[1])
        cache = weft.KvCache("8v4", np.int64(2), [np.int64(64), 32], np.int32(64))
        self.assertEqual((cache.heads, cache.recipe.k.head_dim, cache.recipe.v.head_dim, cache.capacity), (2, 64, 32, 64))
        lists = self.k[0].tolist()
        self.refused("kv_encode: k is a list, wanted an array", cache.encode, lists, lists)
        self.refused("compressed_attention: q is a list, wanted an array", cache.attend, lists)

    def test_copies_have_memory_of_their_own(self) -> None:
        for recipe in ("f32", "bf16", "8v4"):
            for layout in ("rows", "tiles"):
                cache = self.filled(recipe, layout=layout)
                wanted = cache.attend(self.q[0])
                copies = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
                cache.reset()
                cache.encode(self.v[0], self.k[0])
                del cache
                gc.collect()
                for each in copies:
                    self.assertEqual(each.lengths, [150])
                    np.testing.assert_array_equal(each.attend(self.q[0]), wanted)
                    each.encode(self.k[0, :20], self.v[0, :20])
                    self.assertTrue(all(array.ctypes.data % 256 == 0 for side in each._sides.values() for array in side.values()))

    def test_one_call_at_a_time(self) -> None:
        cache = self.filled("8v4")
        calls = (lambda: cache.encode(self.k[0, :1], self.v[0, :1]), lambda: cache.attend(self.q[0]), cache.decode, cache.reset,
                 lambda: copy.deepcopy(cache))
        inside, done = threading.Event(), threading.Event()

        def slow(**_) -> None:
            inside.set()
            done.wait(60)

        with unittest.mock.patch.object(weft.ops, "kv_encode", slow):
            worker = threading.Thread(target=calls[0])
            worker.start()
            inside.wait(60)
            try:
                for call in calls:
                    self.refused("cache is in use by another thread", call)
            finally:
                done.set()
                worker.join()
        self.assertEqual(cache.lengths, [151])
        cache.attend(self.q[0])

    def test_strided_arrays(self) -> None:
        """Views are read where they are; only a batch that does not merge with its tokens is copied, as the docstring says."""
        cache = weft.KvCache("f32", heads=2, head_dim=64, capacity=200, batch=2)
        wide = np.concatenate([self.k, self.v], axis=2)
        packed = cache._packed("op", "k", wide[:, :, :2], 2, 64)[0]
        self.assertTrue(np.shares_memory(packed, wide))
        self.assertFalse(np.shares_memory(cache._packed("op", "k", self.k[:, ::2][:, :7], 2, 64)[0], self.k))
        cache.encode(wide[:, :, :2], np.ascontiguousarray(self.v.swapaxes(0, 1)).swapaxes(0, 1))
        for got, wanted in zip(cache.decode(), (self.k, self.v)):
            np.testing.assert_array_equal(got, wanted)
        self.assertIn("are copied", weft.KvCache.__doc__)

    def test_output_has_the_type_of_the_query(self) -> None:
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        for recipe in ("bf16", "f16", "bf16v4"):
            cache = self.filled(recipe)
            q = self.q[0].astype(ml_dtypes.bfloat16)
            o = cache.attend(q)
            self.assertEqual(o.dtype, q.dtype, recipe)
            bits = cache.attend(q.view(np.uint16), dtype="bf16")
            self.assertEqual(bits.dtype, np.uint16, recipe)
            np.testing.assert_array_equal(o.view(np.uint16), bits)
            self.assertEqual(cache.attend(self.q[0]).dtype, np.float32, recipe)


if __name__ == "__main__":
    unittest.main()
