"""Weft's C interface (include/weft/c.h) for ctypes: only the ops and members that the peer scripts call."""

import ctypes
import pathlib
from ctypes import byref, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import numpy as np

ISAS = ["best", "scalar", "avx2", "avx512", "avx512_vnni", "neon"]
C_ABI = 2  # WEFT_C_ABI, whose structs are declared here
UNSUPPORTED = 2
TILE_TOKENS = 64
_DTYPES = {"float32": 0, "float16": 1, "int32": 3, "int64": 4, "uint8": 5, "uint32": 6}
_SCRATCH_ALIGNMENT = 256
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Struct(ctypes.Structure):
    """A struct of c.h; one that begins with struct_size gets it filled in, all else is zero unless given."""

    def __init__(self, **members):
        super().__init__(**members)
        if self._fields_[0][0] == "struct_size":
            self.struct_size = ctypes.sizeof(self)


def _struct(name, *fields):
    return type(name, (Struct,), {"_fields_": list(fields)})


def _several(type_, names):
    return [(name, type_) for name in names.split()]


Status = _struct("Status", ("struct_size", c_size_t), ("code", c_int32), ("op", c_char * 60), ("argument", c_char * 64),
                 ("message", c_char * 512))
Stream = _struct("Stream", ("struct_size", c_size_t), ("backend", c_int32), ("device", c_int32), ("queue", c_void_p),
                 ("threads", c_int32), ("isa", c_int32))
Tensor = _struct("Tensor", ("data", c_void_p), ("sizes", c_int64 * 5), ("strides", c_int64 * 5),
                 *_several(c_int32, "rank dtype place device"))
Sequences = _struct("Sequences", ("cu_seqlens", Tensor), ("count", c_int64), ("max_tokens", c_int64))
Gates = _struct("Gates", *_several(Tensor, "g alpha a a_log dt_bias beta b"), ("double_beta", c_int32), ("reserved", c_int32))
States = _struct("States", *_several(Tensor, "in out in_slots out_slots has_initial"), ("layout", c_int32),
                 ("reserved", c_int32))
Record = _struct("Record", *_several(Tensor, "k delta g"))
_RULE = [("struct_size", c_size_t), *_several(Tensor, "q k v"), ("gates", Gates), ("o", Tensor), ("has_scale", c_int32),
         ("scale", c_float), ("l2_norm", c_int32), ("head_map", c_int32), ("sequences", Sequences), ("states", States)]
PrefillArgs = _struct("PrefillArgs", *_RULE, ("checkpoints", Tensor), ("checkpoint_every", c_int64), ("schedule", c_int32),
                      ("reserved", c_int32))
DecodeArgs = _struct("DecodeArgs", *_RULE, ("record", Record))
RecipeArgs = _struct("RecipeArgs", ("struct_size", c_size_t), ("name", c_char_p), ("k_head_dim", c_int64),
                     ("v_head_dim", c_int64), ("seed", c_uint64), ("k_mean", Tensor), ("v_mean", Tensor))
SideInfo = _struct("SideInfo", *_several(c_int64, "head_dim code_bytes gains gain_bytes tile_bytes"),
                   *_several(c_int32, "codes_dtype gains_dtype bits passthrough"))
RecipeInfo = _struct("RecipeInfo", ("struct_size", c_size_t), ("id", c_char * 64), ("k", SideInfo), ("v", SideInfo),
                     ("bytes_per_token", c_int64))
Side = _struct("Side", ("codes", Tensor), ("gains", Tensor))
Cache = _struct("Cache", ("recipe", c_void_p), ("k", Side), ("v", Side), *_several(c_int32, "layout tile_order kind reserved"),
                ("pinned", c_int64), *_several(Tensor, "slots page_table lengths"))
EncodeArgs = _struct("EncodeArgs", ("struct_size", c_size_t), *_several(Tensor, "k v positions"), ("sequences", Sequences),
                     ("cache", Cache))
KvDecodeArgs = _struct("KvDecodeArgs", ("struct_size", c_size_t), ("cache", Cache), ("positions", Tensor),
                       ("sequences", Sequences), ("k", Tensor), ("v", Tensor), ("domain", c_int32), ("reserved", c_int32))
Queries = _struct("Queries", ("q", Tensor), ("positions", Tensor), ("sequences", Sequences), ("domain", c_int32),
                  ("has_scale", c_int32), ("scale", c_float), ("reserved", c_int32))
Mask = _struct("Mask", ("not_causal", c_int32), ("has_window", c_int32), ("window", c_int64), ("has_softcap", c_int32),
               ("softcap", c_float))
AttentionArgs = _struct("AttentionArgs", ("struct_size", c_size_t), ("queries", Queries), ("cache", Cache), ("mask", Mask),
                        ("sinks", Tensor), ("precision", c_int32), ("schedule", c_int32), ("o", Tensor), ("lse", Tensor))
_OPS = {"gated_delta_rule_prefill": PrefillArgs, "gated_delta_rule_decode": DecodeArgs, "kv_encode": EncodeArgs,
        "kv_decode": KvDecodeArgs, "compressed_attention": AttentionArgs}

Choice = _struct("Choice", ("struct_size", c_size_t), ("kernel", c_char * 128), ("plan", c_char * 512), ("speed", c_int32),
                 ("reserved", c_int32))
LAYOUT_ROWS, LAYOUT_TILES, TILE_ORDER_LANES, CACHE_PAGED = 0, 1, 1, 2
SPEEDS = ["fast", "portable", "slow"]
PRECISIONS = ["exact_scores", "fast"]


class WeftError(RuntimeError):
    """What the library said, and its code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def view(array):
    """A numpy array as a tensor; the array must outlive every call that uses it."""
    sizes = (c_int64 * 5)(*array.shape)
    strides = (c_int64 * 5)(*(stride // array.itemsize for stride in array.strides))
    return Tensor(data=array.ctypes.data, sizes=sizes, strides=strides, rank=array.ndim, dtype=_DTYPES[array.dtype.name])


def one_sequence():
    return Sequences(count=1)


def aligned(shape, dtype=np.float32, alignment=64):
    """Zeroed memory that begins at a multiple of alignment bytes."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(count + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start:start + count].view(dtype).reshape(shape)


def aligned_copy(array):
    """The same numbers, dense and aligned to 64 bytes."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def host_scratch(count):
    """Memory of so many bytes: its owner and its address."""
    memory = aligned((count,), np.uint8, _SCRATCH_ALIGNMENT)
    return memory, memory.ctypes.data


class Weft:
    """The shared library, the stream (backend, threads, instruction set) of its calls, and where their scratch memory is from."""

    def __init__(self, library, threads=0, isa="best", backend=0, allocate=host_scratch):
        self.lib = ctypes.CDLL(str(library))
        if (abi := self.lib.weft_c_abi()) != C_ABI:
            raise SystemExit(f"{library} has the C ABI {abi}, these structs are those of {C_ABI}")
        self.stream = Stream(backend=backend, threads=threads, isa=ISAS.index(isa))
        self.allocate = allocate
        self.lib.weft_version.restype = c_char_p
        self.version = self.lib.weft_version().decode()
        if not hasattr(self.lib, "weft_c_abi") or self.lib.weft_c_abi() != C_ABI:
            raise SystemExit(f"{library} (weft {self.version}) does not have C ABI {C_ABI}, which these scripts declare.")
        self.lib.weft_kv_recipe_destroy.restype = None

    def call(self, op, **members):
        """A function that performs op on these arguments; all is prepared here, so that it is the library call and little else."""
        args, status, wanted = _OPS[op](**members), Status(), c_size_t()

        def check(code):
            if code:
                raise WeftError(code, status.message.decode())

        ask = getattr(self.lib, f"weft_{op}_scratch_bytes")
        check(ask(byref(self.stream), byref(args), byref(wanted), byref(status)))
        scratch, address = self.allocate(max(wanted.value, 1))
        function = getattr(self.lib, f"weft_{op}")
        given = (byref(self.stream), byref(args), c_void_p(address), wanted, byref(status))

        def run(keep=(self, scratch)):
            if function(*given):
                check(status.code)

        return run


    def choose(self, op, **members):
        """The kernel that a call would run, and the class of its speed."""
        args, status, choice = _OPS[op](**members), Status(), Choice()
        if getattr(self.lib, f"weft_{op}_choose")(byref(self.stream), byref(args), byref(choice), byref(status)):
            raise WeftError(status.code, status.message.decode())
        return choice.kernel.decode(), SPEEDS[choice.speed]


class Recipe:
    """A named KV recipe: its handle and what a caller needs to allocate caches."""

    def __init__(self, weft, name, head_dim):
        self._weft, self.handle, status = weft, c_void_p(), Status()
        args = RecipeArgs(name=name.encode(), k_head_dim=head_dim, v_head_dim=head_dim)
        if code := weft.lib.weft_kv_recipe_create(byref(args), byref(self.handle), byref(status)):
            raise WeftError(code, status.message.decode())
        self.info = RecipeInfo()
        if code := weft.lib.weft_kv_recipe_describe(self.handle, byref(self.info), byref(status)):
            raise WeftError(code, status.message.decode())

    def __del__(self):
        self._weft.lib.weft_kv_recipe_destroy(self.handle)


def find_library(given, preset="shared"):
    """The path of --library, or of what a preset builds: shared, or shared-cuda with the cuda backend."""
    path = pathlib.Path(given) if given else _ROOT / f"build-{preset}" / "libweft.so"
    if not path.exists():
        raise SystemExit(f"{path} does not exist. Build it with\n"
                         f"  cmake --preset {preset} && cmake --build --preset {preset}\n"
                         "or name another with --library.")
    return path
