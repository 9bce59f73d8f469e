"""Times the gated delta rule of Weft against onnxruntime's LinearAttention and ggml's GATED_DELTA_NET on the same inputs.

All three get f32 inputs with normalised keys, log decays and sigmoided beta, in 64-byte aligned memory. Prefill is one sequence from a
non-zero state. Decode is one token for each of many layers, whose states together are more than four times the last-level cache, so
every state comes from memory: onnxruntime and ggml run a graph of such layers, Weft one call per layer. Weft and onnxruntime update
the state in place; ggml writes the new one elsewhere (one buffer for all layers), and its copy back into the cache is not timed.
"""

import sys

try:
    import common  # before numpy, whose threads it forbids

    import ggml_peer
    import numpy as np
    import ort_peer
    import weft_c
except ImportError as error:
    raise SystemExit(f"gated_delta_rule.py wants what bench/peers/requirements.txt lists, which scripts/peers.sh installs: {error}") from error

SHAPES = {"16/32/128": (16, 32, 128), "2/4/64": (2, 4, 64)}
LAYERS_PER_RUN = 64
SAME = 1e-4  # results further apart than this are not the same computation, and their times mean nothing


class Inputs:
    """Random tokens of one shape and a starting state, in the grouped head order and [Hv, V, K] states of Weft."""

    def __init__(self, shape, tokens, seed=1):
        self.key_heads, self.heads, self.width = SHAPES[shape]
        random = np.random.default_rng(seed)

        def gaussian(*sizes):
            return weft_c.aligned_copy(random.standard_normal(sizes, np.float32))

        self.tokens = tokens
        self.q, self.k = gaussian(tokens, self.key_heads, self.width), gaussian(tokens, self.key_heads, self.width)
        for array in (self.q, self.k):
            array /= np.linalg.norm(array, axis=-1, keepdims=True)
        self.v = gaussian(tokens, self.heads, self.width)
        self.g, self.beta = gaussian(tokens, self.heads), gaussian(tokens, self.heads)
        self.g[...] = -0.1 * np.log1p(np.exp(self.g))
        self.beta[...] = 1 / (1 + np.exp(-self.beta))
        self.state = gaussian(self.heads, self.width, self.width)
        self.state *= 0.1

    def double_reference(self):
        """o and the final state, token by token in float64."""
        state, repeat = self.state.astype(np.float64), self.heads // self.key_heads
        o = np.empty(self.v.shape, np.float64)
        for t in range(self.tokens):
            q, k = (np.repeat(array[t].astype(np.float64), repeat, axis=0) for array in (self.q, self.k))
            state = state * np.exp(self.g[t].astype(np.float64))[:, None, None]
            delta = self.beta[t].astype(np.float64)[:, None] * (self.v[t] - np.einsum("hvk,hk->hv", state, k))
            state = state + delta[:, :, None] * k[:, None, :]
            o[t] = np.einsum("hvk,hk->hv", state, q) * self.width**-0.5
        return o, state


# Each contender has a starting state in its own layout, offers prefill() and decode(states), which give functions to be timed, and
# result(): o and the new state of the last run in Weft's layout, where decode's state is what it was given.


class WeftRule:
    def __init__(self, inputs, options, threads):
        self.inputs, self.weft = inputs, weft_c.Weft(weft_c.find_library(options.library), threads, options.isa)
        self.start = inputs.state
        self.o, self.final = weft_c.aligned(inputs.v.shape), weft_c.aligned(inputs.state.shape)

    def _call(self, op, state_in, state_out):
        x = self.inputs
        gates = weft_c.Gates(g=weft_c.view(x.g), beta=weft_c.view(x.beta))
        states = weft_c.States(**{"in": weft_c.view(state_in[None]), "out": weft_c.view(state_out[None])})
        return self.weft.call(op, q=weft_c.view(x.q), k=weft_c.view(x.k), v=weft_c.view(x.v), gates=gates, o=weft_c.view(self.o),
                              sequences=weft_c.one_sequence(), states=states)

    def prefill(self):
        return self._call("gated_delta_rule_prefill", self.start, self.final)

    def result(self, decoded=None):
        return self.o, self.final if decoded is None else decoded

    def decode(self, states):
        calls = [self._call("gated_delta_rule_decode", state, state) for state in states]

        def run():
            for call in calls:
                call()

        return run


class OrtRule:
    def __init__(self, inputs, options, threads):
        x, self.threads = inputs, threads
        self.inputs = {name: array.reshape(1, x.tokens, -1) for name, array in
                       {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta}.items()}
        self.start = weft_c.aligned_copy(x.state.transpose(0, 2, 1))
        self.final = weft_c.aligned(x.state.shape)
        self.o = weft_c.aligned((1, x.tokens, x.heads * x.width))
        self.shape, self.heads = x.v.shape, {"q_num_heads": x.key_heads, "kv_num_heads": x.heads}
        self.sessions = {}

    def _run(self, states_in, states_out):
        layers = range(len(states_in))
        inputs = self.inputs | {f"in{i}": states_in[i][None] for i in layers}
        outputs = {f"out{i}": states_out[i][None] for i in layers} | {"o": self.o}
        if len(layers) not in self.sessions:
            nodes = [ort_peer.node("LinearAttention", ["q", "k", "v", f"in{i}", "g", "beta"],
                                   ["o" if i == len(layers) - 1 else f"o{i}", f"out{i}"], **self.heads) for i in layers]
            self.sessions[len(layers)] = ort_peer.Session(nodes, inputs, outputs, self.threads)
        return self.sessions[len(layers)].run_on(inputs, outputs)

    def prefill(self):
        return self._run([self.start], [self.final])

    def result(self, decoded=None):
        return self.o.reshape(self.shape), (self.final if decoded is None else decoded).transpose(0, 2, 1)

    def decode(self, states):
        return self._run(states, states)


class GgmlRule:
    def __init__(self, inputs, options, threads):
        self.ggml, x = common.ggml_for(options, threads), inputs
        # Weft's value head of ggml's head j * Hk + hk, which reads key head hk.
        order = np.arange(x.heads).reshape(x.key_heads, -1).T.reshape(-1)
        self.tokens = [x.q, x.k, *(weft_c.aligned_copy(array[:, order]) for array in (x.v, x.g, x.beta))]
        self.start = weft_c.aligned_copy(x.state[order])
        self.output = weft_c.aligned((x.v.size + x.state.size,))
        self.shapes, self.back = (x.v.shape, x.state.shape), np.argsort(order)

    def _graph(self, states):
        graph = ggml_peer.Graph(self.ggml, len(states))
        for state in states:
            graph.gated_delta_net(*self.tokens, state, self.output)
        return graph

    def prefill(self):
        return self._graph([self.start])

    def result(self, decoded=None):
        o, state = np.split(self.output, [int(np.prod(self.shapes[0]))])
        return o.reshape(self.shapes[0])[:, self.back], state.reshape(self.shapes[1])[self.back]

    def decode(self, states):
        return self._graph(states)


def contenders(inputs, options, threads):
    kinds = {"weft": WeftRule, "onnxruntime": OrtRule}
    if common.ggml_for(options, 1):
        kinds["ggml"] = GgmlRule
    return {name: kind(inputs, options, threads) for name, kind in kinds.items()}


def time_prefill(report, options, shape, tokens, threads):
    entries = contenders(Inputs(shape, tokens), options, threads)
    runs = {name: [entry.prefill()] for name, entry in entries.items()}
    times = common.race(runs, options)
    case = {"work": "prefill", "Hk/Hv/D": shape, "T": tokens, "threads": threads}
    report.timed(case, "us/token", tokens * 1e-6, times)
    for name, entry in entries.items():
        apart = max(common.relative_rms(*pair) for pair in zip(entry.result(), entries["weft"].result()))
        if apart > SAME:
            sys.exit(f"{name} and weft are {apart:.1e} apart in {case}: not the same work")


def time_decode(report, options, shape, threads):
    inputs = Inputs(shape, 1)
    wanted = int(4 * options.l3_mib * 2**20 / inputs.state.nbytes) + 1
    runs_wanted = -(-wanted // LAYERS_PER_RUN)
    layers = -(-wanted // runs_wanted)
    runs, keep = {}, []
    for name, entry in contenders(inputs, options, threads).items():
        pool = weft_c.aligned((runs_wanted, layers, *inputs.state.shape))
        pool[...] = entry.start
        keep.append((entry, pool))
        runs[name] = [entry.decode(list(states)) for states in pool]
    times = common.race(runs, options)
    case = {"work": "decode, cold state", "Hk/Hv/D": shape, "T": 1, "threads": threads}
    report.timed(case, "us/token", layers * 1e-6, times)


def measure_errors(report, options, shape):
    for work, tokens in {"prefill": 64, "decode": 1}.items():
        inputs = Inputs(shape, tokens)
        wanted = inputs.double_reference()
        for name, entry in contenders(inputs, options, 1).items():
            state = weft_c.aligned_copy(entry.start) if work == "decode" else None
            run = entry.prefill() if state is None else entry.decode([state])
            run()
            errors = [common.relative_rms(*pair) for pair in zip(entry.result(state), wanted)]
            report.error({"work": work, "Hk/Hv/D": shape, "T": tokens, "who": name},
                         **{"o against float64": errors[0], "state against float64": errors[1]})
            if max(errors) > SAME:
                sys.exit(f"{name} is {max(errors):.1e} away from float64 in {work}, {shape}: not the same work")


def main():
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=common.numbers, default=[512, 2048], help="prefill lengths, e.g. 512,2048")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="Hk/Hv/D, some of: " + ", ".join(SHAPES))
    options = parser.parse_args()
    report = common.Report(options, {"onnxruntime": ort_peer.version()}, ours=["weft"])
    for shape in options.shapes.split(","):
        measure_errors(report, options, shape)
        for threads in options.threads:
            for tokens in options.tokens:
                time_prefill(report, options, shape, tokens, threads)
            time_decode(report, options, shape, threads)
    report.print()


if __name__ == "__main__":
    main()
