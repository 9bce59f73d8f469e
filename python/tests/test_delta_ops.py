"""The ops of the gated delta network against float64 in numpy."""

import unittest

import numpy as np
import plain
import weft
from support import BACKENDS, SMALL_BAR, Case, delta_bar

LENGTHS = [70, 0, 1, 33]  # of four ragged sequences
BOUNDS = np.cumsum([0, *LENGTHS]).astype(np.int32)
T, HK, HV, K, V, CHUNK = int(BOUNDS[-1]), 2, 4, 16, 24, 32
RAGGED = {"cu_seqlens": BOUNDS, "count": len(LENGTHS), "max_tokens": max(LENGTHS)}


def double(*arrays):
    return [array.astype(np.float64) for array in arrays]


class Preprocess(Case):
    def test_delta_gates(self):
        for per_channel in (False, True):
            sizes = (T, HV, K) if per_channel else (T, HV)
            a, b, a_log, dt_bias = self.normal(*sizes), self.normal(T, HV), self.normal(HV), self.normal(*sizes[1:])
            wanted = plain.delta_gates(*double(a, b, a_log, dt_bias), double_beta=True)
            for backend in BACKENDS:
                got = weft.delta_gates(a=a, b=b, a_log=a_log, dt_bias=dt_bias, beta=True, double_beta=True, backend=backend)
                self.assert_close(got.g, wanted[0], SMALL_BAR, backend)
                self.assert_close(got.beta, wanted[1], SMALL_BAR, backend)

    def test_short_conv(self):
        channels, width = 40, 4
        x, weight, bias = self.normal(T, channels), self.normal(channels, width), self.normal(channels)
        state = self.normal(len(LENGTHS), width - 1, channels)
        wanted = np.zeros((T, channels))
        after = np.zeros(state.shape)
        for n, (begin, end) in enumerate(zip(BOUNDS, BOUNDS[1:])):
            wanted[begin:end], after[n] = plain.short_conv(*double(x[begin:end], weight, bias, state[n]))
        for backend in BACKENDS:
            out = np.full_like(state, np.nan)
            y = weft.short_conv(x=x, weight=weight, bias=bias, sequences=RAGGED, state_in=state, state_out=out, backend=backend)
            self.assert_close(y, wanted, SMALL_BAR, backend)
            self.assert_close(out, after, 0)

    def test_l2_norm(self):
        for sizes in ((7,), (5, 3), (2, 3, 4, 5, 6)):
            x = self.normal(*sizes)
            for backend in BACKENDS:
                self.assert_close(weft.l2_norm(x=x, eps=1e-3, backend=backend), plain.l2_norm(*double(x), eps=1e-3), SMALL_BAR)

    def test_gated_rms_norm(self):
        x, z, weight = self.normal(9, 3, 64), self.normal(9, 3, 64), self.normal(64)
        for name, gate in (("silu", plain.silu), ("sigmoid", plain.sigmoid)):
            wanted = plain.gated_rms_norm(*double(x, z, weight), gate)
            for backend in BACKENDS:
                self.assert_close(weft.gated_rms_norm(x=x, z=z, weight=weight, gate=name, backend=backend), wanted, SMALL_BAR)


class Chunks(Case):
    """The stages one after the other: each op reads what numpy computed, and every chunk and head is compared."""

    def setUp(self):
        super().setUp()
        self.q, self.k = plain.l2_norm(self.normal(T, HK, K)), plain.l2_norm(self.normal(T, HK, K))
        self.v, self.beta, self.g = self.normal(T, HV, V), self.uniform(0, 1, T, HV), self.uniform(-0.5, 0, T, HV)
        self.state = self.normal(len(LENGTHS), HV, V, K)
        self.rows = []  # (sequence, begin, end) of every chunk
        for n, (begin, end) in enumerate(zip(BOUNDS, BOUNDS[1:])):
            self.rows += [(n, at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]
        names = ("total", "a", "inverse", "w", "u", "corrected", "o")
        widths = (1, CHUNK, CHUNK, K, V, V, V)
        self.wanted = {name: np.zeros((T, HV, width)) for name, width in zip(names, widths)}
        self.entries = np.zeros((len(self.rows), HV, V, K))
        self.final = self.state.astype(np.float64)
        for h in range(HV):
            for index, row in enumerate(self.rows):
                self.one_chunk(h, index, *row)

    def one_chunk(self, h, index, n, begin, end):
        hk, at, size = plain.key_head(h, HV, HK), slice(begin, end), end - begin
        q, k, v, beta, g = double(self.q[at, hk], self.k[at, hk], self.v[at, h], self.beta[at, h], self.g[at, h])
        total = np.cumsum(g)
        a = plain.chunk_kkt(k, beta, total)
        inverse = plain.chunk_inverse(a)
        w, u = plain.chunk_wu(k, v, beta, total, inverse)
        self.entries[index, h] = self.final[n, h]
        corrected, after = plain.chunk_state(k, w, u, total, self.final[n, h])
        o = plain.chunk_output(q, k, corrected, self.final[n, h], total, K**-0.5)
        self.final[n, h] = after
        self.wanted["total"][at, h, 0] = total
        self.wanted["a"][at, h, :size], self.wanted["inverse"][at, h, :size] = a, inverse
        for name, value in (("w", w), ("u", u), ("corrected", corrected), ("o", o)):
            self.wanted[name][at, h] = value

    def single(self, name):
        return self.wanted[name].astype(np.float32)

    def test_stages(self):
        total = self.single("total")[..., 0]
        shared = {"sequences": RAGGED, "chunk": CHUNK}
        h = np.zeros((len(self.rows), HV, V, K), np.float32)
        capacity = np.zeros((T // CHUNK + len(LENGTHS), HV, V, K), np.float32)
        for backend in BACKENDS:
            shared["backend"] = backend
            self.assert_close(weft.chunk_cumsum(g=self.g, **shared), self.wanted["total"][..., 0], SMALL_BAR)
            a = weft.chunk_kkt(k=self.k, beta=self.beta, g_cumsum=total, **shared)
            self.assert_close(a, self.wanted["a"], SMALL_BAR, backend)
            inverse = weft.chunk_tri_inverse(a=self.single("a"), **shared)
            self.assert_close(inverse, self.wanted["inverse"], delta_bar(CHUNK), backend)
            made = weft.chunk_wu(k=self.k, v=self.v, beta=self.beta, g_cumsum=total, a_inv=self.single("inverse"), **shared)
            self.assert_close(made.w, self.wanted["w"], delta_bar(CHUNK), backend)
            self.assert_close(made.u, self.wanted["u"], delta_bar(CHUNK), backend)
            out, capacity[:] = np.empty_like(self.state), 0
            v_new = weft.chunk_state(k=self.k, w=self.single("w"), u=self.single("u"), g_cumsum=total, state_in=self.state, h=capacity,
                                     state_out=out, **shared).v_new
            self.assert_close(v_new, self.wanted["corrected"], delta_bar(CHUNK), backend)
            self.assert_close(capacity[: len(h)], self.entries, delta_bar(T), backend)
            self.assert_close(out, self.final, delta_bar(T), backend)
            h[:] = self.entries
            capacity[: len(h)] = h
            o = weft.chunk_output(q=self.q, k=self.k, v_new=self.single("corrected"), h=capacity, g_cumsum=total, **shared)
            self.assert_close(o, self.wanted["o"], delta_bar(CHUNK), backend)


class Rule(Case):
    def inputs(self, tokens, per_channel=False):
        q, k, v = self.normal(tokens, HK, K), self.normal(tokens, HK, K), self.normal(tokens, HV, V)
        g = self.uniform(-0.3, 0, *((tokens, HV, K) if per_channel else (tokens, HV)))
        return q, k, v, g, self.uniform(0, 1, tokens, HV)

    def test_prefill(self):
        for per_channel, head_map in ((False, "grouped"), (True, "tiled")):
            q, k, v, g, beta = self.inputs(T, per_channel)
            state = self.normal(len(LENGTHS), HV, V, K)
            wanted, after = np.zeros((T, HV, V)), state.astype(np.float64)
            for n, (begin, end) in enumerate(zip(BOUNDS, BOUNDS[1:])):
                at = slice(begin, end)
                inputs = double(q[at], k[at], v[at], g[at], beta[at], state[n])
                wanted[at], states, _ = plain.delta_rule(*inputs, normalise=True, head_map=head_map)
                after[n] = states[-1] if end > begin else state[n]
            for backend in BACKENDS:
                out = np.empty_like(state)
                o = weft.gated_delta_rule_prefill(q=q, k=k, v=v, gates={"g": g, "beta": beta}, l2_norm=True, head_map=head_map,
                                                  sequences=RAGGED, states={"in": state, "out": out}, backend=backend)
                self.assert_close(o, wanted, delta_bar(T), backend)
                self.assert_close(out, after, delta_bar(T), backend)

    def test_prefill_checkpoints_and_layout(self):
        q, k, v, g, beta = self.inputs(130)
        wanted, states, _ = plain.delta_rule(*double(q, plain.l2_norm(k), v, g, beta), np.zeros((HV, V, K)), scale=0.5)
        checkpoints, out = np.empty((1, 2, HV, K, V), np.float32), np.empty((1, HV, K, V), np.float32)
        o = weft.gated_delta_rule_prefill(q=q, k=plain.l2_norm(k), v=v, gates={"alpha": np.exp(g), "beta": beta}, scale=0.5,
                                          states={"out": out, "layout": "kv"}, checkpoints=checkpoints, checkpoint_every=64)
        self.assert_close(o, wanted, delta_bar(130))
        self.assert_close(out[0], states[-1].swapaxes(1, 2), delta_bar(130))
        self.assert_close(checkpoints[0], states[[63, 127]].swapaxes(2, 3), delta_bar(130))

    def test_decode_and_replay(self):
        """Three sequences of four tokens; replay applies the first tokens of each again."""
        count, tokens, accepted = 3, 4, np.array([0, 4, 2], np.int32)
        q, k, v, g, beta = self.inputs(count * tokens)
        pool = self.normal(count, HV, V, K)
        results = [plain.delta_rule(*double(*(x[n * tokens : (n + 1) * tokens] for x in (q, k, v, g, beta)), pool[n]), normalise=True)
                   for n in range(count)]
        replayed = [results[n][1][size - 1] if size else pool[n] for n, size in enumerate(accepted)]
        for backend in BACKENDS:
            out = np.empty_like(pool)
            made = weft.gated_delta_rule_decode(q=q, k=k, v=v, gates={"g": g, "beta": beta}, l2_norm=True, sequences={"count": count},
                                                states={"in": pool, "out": out}, record={"k": True, "delta": True, "g": True},
                                                backend=backend)
            self.assert_close(made.o, np.concatenate([result[0] for result in results]), delta_bar(tokens), backend)
            self.assert_close(out, np.stack([result[1][-1] for result in results]), delta_bar(tokens), backend)
            self.assert_close(made.record_delta, np.concatenate([result[2] for result in results]), delta_bar(tokens), backend)
            self.assert_close(made.record_k, plain.l2_norm(*double(k)), SMALL_BAR, backend)
            self.assert_close(made.record_g, g, 0)
            record = {"k": made.record_k, "delta": made.record_delta, "g": made.record_g}
            weft.gated_delta_rule_replay(record=record, accepted=accepted, sequences={"count": count},
                                         states={"in": pool, "out": out}, backend=backend)
            self.assert_close(out, np.stack(replayed), delta_bar(tokens), backend)

    def test_affine_maps(self):
        """A sequence in two ranges: both maps, their composition, and the state that it leads to."""
        tokens, heads = 40, 2
        k, v = plain.l2_norm(self.normal(2 * tokens, heads, K)), self.normal(2 * tokens, heads, V)
        g, beta = self.uniform(-0.3, 0, 2 * tokens, heads), self.uniform(0, 1, 2 * tokens, heads)
        halves = [plain.affine_map(*double(*(x[at] for x in (k, v, g, beta)))) for at in (slice(0, tokens), slice(tokens, None))]
        p, q = plain.affine_map(*double(k, v, g, beta))
        pool = self.normal(1, heads, V, K)
        for backend in BACKENDS:
            made = weft.gated_delta_rule_summarize(k=k, v=v, gates={"g": g, "beta": beta}, sequences={"count": 2}, backend=backend)
            for n in range(2):
                self.assert_close(made.p[n], halves[n][0], delta_bar(tokens), backend)
                self.assert_close(made.q[n], halves[n][1], delta_bar(tokens), backend)
            parts = {name + str(n + 1): getattr(made, name)[n : n + 1] for name in "pq" for n in range(2)}
            both = weft.gated_delta_rule_compose(**parts, backend=backend)
            self.assert_close(both.p[0], p, delta_bar(2 * tokens), backend)
            self.assert_close(both.q[0], q, delta_bar(2 * tokens), backend)
            out = np.empty_like(pool)
            weft.gated_delta_rule_apply(p=both.p, q=both.q, states={"in": pool, "out": out}, backend=backend)
            self.assert_close(out[0], pool[0].astype(np.float64) @ p + q, delta_bar(2 * tokens), backend)


if __name__ == "__main__":
    unittest.main()
