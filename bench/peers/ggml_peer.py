"""ggml for ctypes: its gated delta op and its flash attention, through exported functions only (no struct layout is assumed).

The library is any shared object that exports ggml and its CPU backend: the one inside the PyPI wheel xllamacpp (found by itself), or
one you built, given by path; where ggml is split over several files, name libggml-cpu and let the loader find the rest.
"""

import ctypes
import importlib.util
import pathlib
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
OLDEST = (0, 21)  # gated_delta_net takes the number of state snapshots since then
_ALIGNMENT = 64  # ggml asks for 32 or 64, depending on its version
_FEATURES = ["avx2", "avx512", "avx512_vnni", "neon", "dotprod", "sve"]


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


_SIGNATURES = {
    "ggml_version": (c_char_p, []),
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_new_tensor_4d": (c_void_p, [c_void_p, c_int] + [c_int64] * 4),
    "ggml_permute": (c_void_p, [c_void_p, c_void_p] + [c_int] * 4),
    "ggml_gated_delta_net": (c_void_p, [c_void_p] * 7 + [c_int64]),
    "ggml_flash_attn_ext": (c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_alloc": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
}


def find_library():
    """The ggml inside xllamacpp, without importing the package; None where it is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else []
    return next((file for folder in folders for file in pathlib.Path(folder).glob("xllamacpp*.so")), None)


class Ggml:
    """The library, one CPU backend with its threads, and what it was built for."""

    def __init__(self, library, threads):
        self.lib = ctypes.CDLL(str(library))
        if missing := [name for name in _SIGNATURES if not hasattr(self.lib, name)]:
            raise SystemExit(f"{library} does not export {', '.join(missing)}: it is no ggml, or too old a one")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.version = self.lib.ggml_version().decode()
        if tuple(int(part) for part in self.version.split(".")[:2]) < OLDEST:
            raise SystemExit(f"{library} is ggml {self.version}, wanted {OLDEST[0]}.{OLDEST[1]} or newer")
        self.features = [name for name in _FEATURES if getattr(self.lib, f"ggml_cpu_has_{name}")()]
        self.backend = self.lib.ggml_backend_cpu_init()
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, threads)

    def __del__(self):
        if hasattr(self, "backend"):
            self.lib.ggml_backend_free(self.backend)


class Graph:
    """Nodes over memory that numpy owns; calling it computes them in order."""

    def __init__(self, ggml, nodes):
        self.ggml, self.lib = ggml, ggml.lib
        size = self.lib.ggml_graph_overhead() + 16 * nodes * self.lib.ggml_tensor_overhead()
        self.context = self.lib.ggml_init(_InitParams(size, None, True))
        self.graph = self.lib.ggml_new_graph(self.context)
        self.buffers = []

    def __del__(self):
        for _, buffer in self.buffers:
            self.lib.ggml_backend_buffer_free(buffer)
        self.lib.ggml_free(self.context)

    def place(self, tensor, array):
        """Gives a tensor the memory of an array, which must be large enough."""
        wanted = self.lib.ggml_nbytes(tensor)
        if array.nbytes < wanted or array.ctypes.data % _ALIGNMENT:
            raise ValueError(f"ggml wants {wanted} bytes aligned to {_ALIGNMENT}, got {array.nbytes} at {array.ctypes.data:#x}")
        buffer = self.lib.ggml_backend_cpu_buffer_from_ptr(array.ctypes.data, array.nbytes)
        if self.lib.ggml_backend_tensor_alloc(buffer, tensor, array.ctypes.data):
            raise RuntimeError("ggml_backend_tensor_alloc failed")
        self.buffers.append((array, buffer))
        return tensor

    def tensor(self, array, sizes, type_="f32"):
        """A new tensor over an array, sizes innermost first."""
        sizes = list(sizes) + [1] * (4 - len(sizes))
        return self.place(self.lib.ggml_new_tensor_4d(self.context, TYPES[type_], *sizes), array)

    def add(self, node, output):
        self.lib.ggml_build_forward_expand(self.graph, self.place(node, output))

    def gated_delta_net(self, q, k, v, g, beta, state, output):
        """q, k [T, Hk, K], v [T, Hv, V], g, beta [T, Hv], state [Hv, V, K]; output takes o and then the new state.

        Value head h reads key head h mod Hk.
        """
        tokens, key_heads, width = k.shape
        heads = v.shape[1]
        inputs = [self.tensor(q, [width, key_heads, tokens]), self.tensor(k, [width, key_heads, tokens]),
                  self.tensor(v, [width, heads, tokens]), self.tensor(g, [1, heads, tokens]),
                  self.tensor(beta, [1, heads, tokens]), self.tensor(state, [width, width, heads])]
        self.add(self.lib.ggml_gated_delta_net(self.context, *inputs, 1), output)

    def flash_attention(self, q, k, v, type_, context, kv_heads, token_major, output):
        """q [Hq, D]; k and v raw rows of type_, [context, kv_heads] rows (token_major, as llama.cpp has them) or [kv_heads, context]."""
        heads, width = q.shape
        rows = [kv_heads, context] if token_major else [context, kv_heads]
        sides = [self.tensor(side, [width, *rows], type_) for side in (k, v)]
        if token_major:
            sides = [self.lib.ggml_permute(self.context, side, 0, 2, 1, 3) for side in sides]
        query = self.tensor(q, [width, 1, heads])
        self.add(self.lib.ggml_flash_attn_ext(self.context, query, *sides, None, width**-0.5, 0.0, 0.0), output)

    def __call__(self):
        if self.lib.ggml_backend_graph_compute(self.ggml.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")


def quantized(ggml, rows, type_):
    """f32 rows [n, D] in a ggml type, as bytes [n, row bytes]."""
    rows = np.ascontiguousarray(rows, np.float32)
    count, width = rows.shape
    out = np.zeros((count, ggml.lib.ggml_row_size(TYPES[type_], width)), np.uint8)
    ggml.lib.ggml_quantize_chunk(TYPES[type_], rows.ctypes.data, out.ctypes.data, 0, count, width, None)
    return out


def dequantized(rows, type_):
    """Rows [..., row bytes] of a ggml type as float32 [..., D]."""
    if type_ == "f16":
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    blocks = rows.reshape(*rows.shape[:-1], -1, {"q8_0": 34, "q4_0": 18}[type_])  # an f16 scale, then 32 numbers
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(blocks[..., 2:])
    values = codes.view(np.int8) if type_ == "q8_0" else np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int8) - 8
    return (values * scale).reshape(*rows.shape[:-1], -1)
