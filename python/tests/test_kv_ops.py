"""The KV codec and attention over a compressed cache against float64 in numpy."""

import unittest

import numpy as np
import plain
import weft
from support import ATTENTION_BAR, BACKENDS, INTEGER_BAR, SMALL_BAR, Case

D, HK, HQ, SEED, CAPACITY = 64, 2, 6, 3, 128
DTYPES = {"u8": np.uint8, "f16": np.float16, "f32": np.float32}
TINY_ROUNDING = 2.0**-11  # the gain of a row is stored in f16


def storage(recipe, blocks, layout="rows"):
    """Empty codes and gains of both sides, as docs/formats.md lays them out."""
    made = {}
    for name in "kv":
        side = getattr(recipe, name)
        if layout == "tiles":
            memory = np.zeros(blocks * HK * (CAPACITY // 64) * side.tile_bytes + 64, np.uint8)
            aligned = memory[-memory.ctypes.data % 64 :][: len(memory) - 64]
            made[name] = {"codes": aligned.reshape(blocks, HK, CAPACITY // 64, side.tile_bytes)}
        elif side.passthrough:
            made[name] = {"codes": np.zeros((blocks, HK, CAPACITY, D), DTYPES[side.codes_dtype])}
        else:
            made[name] = {"codes": np.zeros((blocks, HK, CAPACITY, side.code_bytes), np.uint8),
                          "gains": np.zeros((blocks, HK, CAPACITY, side.gains), DTYPES[side.gains_dtype])}
    return {"recipe": recipe, **made, "layout": layout}


class Codec(Case):
    def test_rotate(self):
        x = self.normal(5, 3, D)
        recipe = weft.KvRecipe("4v4", D, seed=SEED)
        wanted = x.astype(np.float64) @ plain.rotation(SEED, D).T
        for backend in BACKENDS:
            y = weft.kv_rotate(x=x, recipe=recipe, side="v", backend=backend)
            self.assert_close(y, wanted, SMALL_BAR, backend)
            self.assert_close(weft.kv_rotate(x=y, recipe=recipe, inverse=True, backend=backend), x, SMALL_BAR, backend)

    def test_encode_and_decode(self):
        tokens = 100
        k, v = self.normal(tokens, HK, D), self.normal(tokens, HK, D)
        positions = np.arange(tokens, dtype=np.int32)
        for k_bits, v_bits in ((8, 4), (4, 2)):
            recipe = weft.KvRecipe(f"{k_bits}v{v_bits}", D, seed=SEED)
            for backend in BACKENDS:
                cache = storage(recipe, 1)
                weft.kv_encode(k=k, v=v, positions=positions, cache=cache, backend=backend)
                got = weft.kv_decode(cache=cache, positions=positions, k=True, v=True, backend=backend)
                for name, rows, bits in (("k", k, k_bits), ("v", v, v_bits)):
                    self.check_side(name, rows, bits, cache[name], getattr(got, name))

    def check_side(self, name, rows, bits, side, decoded):
        codes, gains = plain.encode(rows.astype(np.float64), bits, SEED)
        stored = plain.unpack(side["codes"][0, :, : len(rows)].swapaxes(0, 1), bits, D)
        # A number on the boundary of two codes may take either: f32 rounds it to one side.
        self.assertLessEqual(np.abs(stored - codes).max(), 1, name)
        self.assertLess((stored != codes).mean(), 1e-3, name)
        kept = side["gains"][0, :, : len(rows)].swapaxes(0, 1).astype(np.float64)
        self.assert_close(kept, gains, TINY_ROUNDING + SMALL_BAR, name)
        self.assert_close(decoded, plain.decode(stored, kept, bits, SEED), SMALL_BAR, name)

    def test_mean(self):
        mean, k = self.normal(HK, D), self.normal(10, HK, D)
        recipe = weft.KvRecipe("8v8", D, seed=SEED, k_mean=mean)
        cache, positions = storage(recipe, 1), np.arange(10, dtype=np.int32)
        weft.kv_encode(k=k, v=k, positions=positions, cache=cache)
        codes, gains = plain.encode(k.astype(np.float64) - mean, 8, SEED)
        got = weft.kv_decode(cache=cache, positions=positions, k=True)
        self.assert_close(got, plain.decode(codes, gains.astype(np.float16), 8, SEED) + mean, TINY_ROUNDING)

    def test_repack(self):
        k, positions = self.normal(CAPACITY, HK, D), np.arange(CAPACITY, dtype=np.int32)
        recipe = weft.KvRecipe("4v8", D, seed=SEED)
        for backend in BACKENDS:
            rows, tiles, back = storage(recipe, 1), storage(recipe, 1, "tiles"), storage(recipe, 1)
            weft.kv_encode(k=k, v=k, positions=positions, cache=rows)
            weft.kv_repack(from_=rows, to=tiles, backend=backend)
            weft.kv_repack(from_=tiles, to=back, backend=backend)
            for side in "kv":
                for part in ("codes", "gains"):
                    np.testing.assert_array_equal(rows[side][part], back[side][part])
            # Token-major tiles: 64 rows of codes, then 64 rows of gains.
            tile = tiles["k"]["codes"][0, 0, 0]
            codes = rows["k"]["codes"][0, 0, :64].tobytes()
            self.assertEqual(tile[: len(codes)].tobytes(), codes)
            self.assertEqual(tile[len(codes) :].tobytes(), rows["k"]["gains"][0, 0, :64].tobytes())

    def test_recipe(self):
        recipe = weft.KvRecipe("4v2", D)
        self.assertEqual(recipe.id, "weft1-4v2")
        self.assertEqual((recipe.k.bits, recipe.v.bits, recipe.k.code_bytes, recipe.v.code_bytes), (4, 2, D // 2, D // 4))
        self.assertEqual(recipe.bytes_per_token, D // 2 + 2 + D // 4 + 2)
        self.assertTrue(weft.KvRecipe("f16", D).k.passthrough)
        self.assert_refused("9v9", "name", weft.KvRecipe, name="9v9", k_head_dim=D)


class Attention(Case):
    """Two sequences with 90 and 128 cached tokens; the queries are their last 5 tokens each."""

    def setUp(self):
        super().setUp()
        self.lengths, self.tokens = np.array([90, 128], np.int32), 5
        self.q, self.sinks = self.normal(2 * self.tokens, HQ, D), self.normal(HQ)
        self.bounds = [(0, self.tokens), (self.tokens, 2 * self.tokens)]

    def cache(self, name):
        """A filled cache, and what it decodes to, from codes that numpy reads."""
        recipe = weft.KvRecipe(name, D, seed=SEED)
        cache = storage(recipe, 2)
        keys, values = (self.normal(int(self.lengths.sum()), HK, D) for _ in range(2))
        positions = np.concatenate([np.arange(length) for length in self.lengths]).astype(np.int32)
        bounds = np.array([0, *np.cumsum(self.lengths)], np.int32)
        weft.kv_encode(k=keys, v=values, positions=positions, cache=cache,
                       sequences={"cu_seqlens": bounds, "count": 2, "max_tokens": 128})
        return {**cache, "lengths": self.lengths}, [self.decoded(cache, n) for n in range(2)]

    def decoded(self, cache, block):
        """Keys and values of one sequence, [tokens, Hk, D]."""
        sides = []
        for name in "kv":
            side, codes = getattr(cache["recipe"], name), cache[name]["codes"][block, :, : self.lengths[block]].swapaxes(0, 1)
            if side.passthrough:
                sides.append(codes.astype(np.float64))
                continue
            gains = cache[name]["gains"][block, :, : self.lengths[block]].swapaxes(0, 1).astype(np.float64)
            sides.append(plain.decode(plain.unpack(codes, side.bits, D), gains, side.bits, SEED))
        return sides

    def queries(self):
        return {"q": self.q, "sequences": {"count": 2}}

    def scores(self, sides, **options):
        """[T, Hq, tokens] of each sequence."""
        made = []
        for n, (begin, end) in enumerate(self.bounds):
            positions = np.arange(self.lengths[n] - self.tokens, self.lengths[n])
            made.append(plain.attention_scores(self.q[begin:end].astype(np.float64), sides[n][0], positions, **options))
        return made

    def bar(self, recipe, backend):
        return INTEGER_BAR if backend == "cpu" and not recipe.startswith("f") else ATTENTION_BAR

    def each(self):
        for recipe in ("f16", "f32v4", "8v4", "4v2"):
            cache, sides = self.cache(recipe)
            for backend in BACKENDS:
                yield cache, sides, backend, self.bar(recipe, backend)

    def test_attention(self):
        mask = {"window": 60, "softcap": 5.0}
        for cache, sides, backend, bar in self.each():
            found = [plain.attention(scores, sides[n][1], self.sinks) for n, scores in enumerate(self.scores(sides, **mask))]
            got = weft.compressed_attention(queries=self.queries(), cache=cache, mask=mask, sinks=self.sinks, lse=True, backend=backend)
            self.assert_close(got.o, np.concatenate([o for o, _ in found]), bar, (cache["recipe"], backend))
            self.assert_close(got.lse, np.concatenate([lse for _, lse in found]), bar, (cache["recipe"], backend))

    def test_scores_and_values(self):
        for cache, sides, backend, bar in self.each():
            scores = np.empty((2 * self.tokens, HQ, CAPACITY), np.float32)
            weft.attention_scores(queries=self.queries(), cache=cache, scores=scores, backend=backend)
            weights = np.zeros_like(scores)
            for n, wanted in enumerate(self.scores(sides)):
                got = scores[slice(*self.bounds[n])]
                self.assertTrue(np.isneginf(got[..., self.lengths[n] :]).all())
                got = got[..., : self.lengths[n]]
                np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
                seen = np.isfinite(wanted)
                self.assert_close(got[seen], wanted[seen], bar, (cache["recipe"], backend))
                weights[slice(*self.bounds[n]), :, : self.lengths[n]] = np.exp(wanted - wanted.max(-1, keepdims=True))
            o = weft.attention_values(weights=weights, sequences={"count": 2}, cache=cache, threshold=0.05, backend=backend)
            kept = np.where(weights >= np.float32(0.05), weights, 0).astype(np.float64)
            for n, (begin, end) in enumerate(self.bounds):
                values = np.repeat(sides[n][1], HQ // HK, axis=1)
                wanted = np.einsum("thj,jhd->thd", kept[begin:end, :, : self.lengths[n]], values)
                self.assert_close(o[begin:end], wanted, bar, (cache["recipe"], backend))

    def test_partials_and_merge(self):
        blocks, rows = 4, 2 * self.tokens
        for cache, sides, backend, bar in self.each():
            found = [plain.attention(scores, sides[n][1], self.sinks) for n, scores in enumerate(self.scores(sides))]
            partials = {"count": blocks, "o": np.empty((rows, HQ, blocks, D), np.float32),
                        "m": np.empty((rows, HQ, blocks), np.float32), "l": np.empty((rows, HQ, blocks), np.float32)}
            weft.attention_partials(queries=self.queries(), cache=cache, block_tokens=32, partials=partials, backend=backend)
            top = np.concatenate([self.block_tops(scores, blocks) for scores in self.scores(sides)])
            np.testing.assert_array_equal(np.isneginf(partials["m"]), np.isneginf(top))
            self.assert_close(partials["m"][np.isfinite(top)], top[np.isfinite(top)], bar)
            got = weft.attention_merge(partials=partials, recipe=cache["recipe"], sinks=self.sinks, kv_heads=HK, lse=True, backend=backend)
            self.assert_close(got.o, np.concatenate([o for o, _ in found]), bar, (cache["recipe"], backend))
            self.assert_close(got.lse, np.concatenate([lse for _, lse in found]), bar, (cache["recipe"], backend))

    def block_tops(self, scores, blocks):
        wide = np.full((*scores.shape[:2], 32 * blocks), -np.inf)
        wide[..., : scores.shape[-1]] = scores
        return wide.reshape(*scores.shape[:2], blocks, 32).max(-1)

    def test_paged(self):
        """Pages in another order hold the same tokens, and give the same bits."""
        cache, _ = self.cache("8v4")
        direct = weft.compressed_attention(queries=self.queries(), cache=cache)
        table = np.array([[1], [0]], np.int32)
        swapped = {side: {part: np.ascontiguousarray(array[::-1]) for part, array in cache[side].items()} for side in "kv"}
        paged = {**cache, **swapped, "kind": "paged", "page_table": table}
        np.testing.assert_array_equal(weft.compressed_attention(queries=self.queries(), cache=paged), direct)


if __name__ == "__main__":
    unittest.main()
