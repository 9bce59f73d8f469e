"""What arrays an op takes: strides, DLPack, read-only, misaligned, wrong dtypes and shapes, bf16; and which outputs it makes."""

import contextlib
import ctypes
import gc
import pickle
import types
import unittest
import unittest.mock
import weakref

import numpy as np
import plain
import weft
from support import SMALL_BAR, Case
from weft import _arrays, _dlpack, ops


class Shared:
    """An array that speaks DLPack and nothing else, in its version 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.array.__dlpack__(max_version=max_version) if max_version else self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class SharedEarlier(Shared):
    """The same of a library that knows no versions."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


class OnCuda:
    """An f16 array that claims to be on a GPU."""

    device = types.SimpleNamespace(id=0)

    def __init__(self, sizes, strides=None, read_only=False, **more):
        given = {"data": (4096, read_only), "shape": sizes, "strides": strides, "typestr": "<f2", "version": 3}
        self.__cuda_array_interface__ = {**given, **more}


class Somewhere(OnCuda):
    """The same of a library that does not say the device."""

    device = None


@contextlib.contextmanager
def pretended(name, **members):
    """A library of arrays that is not installed."""
    with unittest.mock.patch.dict("sys.modules", {name: types.SimpleNamespace(**members)}):
        yield


class Strides(Case):
    def test_views_give_the_bits_of_copies(self):
        """q, k and v as columns of one packed row, as a convolution leaves them."""
        tokens, heads, size = 20, 2, 16
        packed = self.normal(tokens, 3 * heads * size)
        q, k, v = (packed[:, i * heads * size : (i + 1) * heads * size].reshape(tokens, heads, size) for i in range(3))
        self.assertTrue(np.shares_memory(q, packed))
        gates = {"g": self.uniform(-1, 0, 2 * tokens, heads)[::2], "beta": self.uniform(0, 1, heads, tokens).T.copy()}
        shared = {"gates": gates, "l2_norm": True}
        wanted = weft.gated_delta_rule_prefill(q=q.copy(), k=k.copy(), v=v.copy(), **shared)
        np.testing.assert_array_equal(weft.gated_delta_rule_prefill(q=q, k=k, v=v, **shared), wanted)
        for wrap in (Shared, SharedEarlier):
            out = np.empty_like(wanted)
            got = weft.gated_delta_rule_prefill(q=wrap(q), k=wrap(k), v=wrap(v), o=wrap(out), **shared)
            self.assertIsInstance(got, wrap)
            np.testing.assert_array_equal(out, wanted)

    def test_strided_output(self):
        x, wide = self.normal(6, 4, 8), np.full((6, 4, 16), 7, np.float32)
        weft.l2_norm(x=x, y=wide[..., :8])
        np.testing.assert_array_equal(wide[..., :8], weft.l2_norm(x=x))
        self.assertTrue((wide[..., 8:] == 7).all())

    def test_refused_strides(self):
        x = self.normal(4, 8)
        self.assert_refused("stride", "x", weft.l2_norm, x=x[:, ::2])
        self.assert_refused("stride -8", "x", weft.l2_norm, x=x[::-1])
        records = np.zeros((4, 8), np.dtype([("x", "f4"), ("y", "u1")]))
        self.assert_refused("multiples of its elements' 4 bytes", "x", weft.l2_norm, x=records["x"])

    def test_misaligned(self):
        memory = np.zeros(4 * 8 + 1, np.uint8)
        x = memory[1:].view(np.float32)
        self.assert_refused("aligned", "x", weft.l2_norm, x=x)


class Writing(Case):
    def test_read_only_inputs_are_read(self):
        x = self.normal(3, 8)
        wanted = weft.l2_norm(x=x)
        x.flags.writeable = False
        np.testing.assert_array_equal(weft.l2_norm(x=x), wanted)
        np.testing.assert_array_equal(weft.l2_norm(x=np.frombuffer(x.tobytes(), np.float32).reshape(3, 8)), wanted)

    def test_read_only_outputs_are_refused(self):
        x, y = self.normal(3, 8), np.zeros((3, 8), np.float32)
        y.flags.writeable = False
        self.assert_refused("is read-only", "y", weft.l2_norm, x=x, y=y)
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # older ones do not share read-only arrays at all
            self.assert_refused("is read-only", "y", weft.l2_norm, x=x, y=Shared(y))
        self.assert_refused("cannot be shared by DLPack", "y", weft.l2_norm, x=x, y=SharedEarlier(y))
        self.assertTrue((y == 0).all())

    def test_outputs_that_are_inputs(self):
        x = self.normal(3, 8)
        wanted = weft.l2_norm(x=x)
        self.assertIs(weft.l2_norm(x=x, y=x), x)
        np.testing.assert_array_equal(x, wanted)
        p = self.normal(1, 1, 4, 4)
        self.assert_refused("", "p", weft.gated_delta_rule_compose, p1=p, q1=p.copy(), p2=p.copy(), q2=p.copy(), p=p)

    def test_a_refused_call_writes_nothing(self):
        y = np.full((3, 8), 5, np.float32)
        self.assert_refused("[4, 8]", "y", weft.l2_norm, x=self.normal(4, 8), y=y)
        self.assertTrue((y == 5).all())

    def test_arrays_that_never_change(self):
        """JAX: inputs are shared, outputs are computed in numpy and become arrays of JAX when they are complete."""

        class Array(Shared):
            __module__ = "jaxlib"

        x = self.normal(3, 8)
        with pretended("jax", numpy=types.SimpleNamespace(asarray=lambda array: Array(array.copy()))):
            got = weft.l2_norm(x=Array(x))
            self.assertIsInstance(got, Array)
            np.testing.assert_array_equal(got.array, weft.l2_norm(x=x))
            self.assert_refused("is read-only", "y", weft.l2_norm, x=x, y=Array(x))


class Capsules(Case):
    """What __dlpack__ may return or raise."""

    def shared(self, export):
        """An array of [3, 8] f32 whose __dlpack__ is a function of that array and of its keywords."""
        array = self.normal(3, 8)
        members = {"__dlpack__": lambda _, **options: export(array, **options), "__dlpack_device__": lambda _: (1, 0)}
        return type("Shared", (), members)()

    def test_copies(self):
        """An output is written in place: libraries are asked for no copy, and a copy is refused."""
        asked = []

        def export(array, **options):
            asked.append(options)
            return array.__dlpack__()

        x = self.normal(3, 8)
        weft.l2_norm(x=x, y=self.shared(export))
        self.assertEqual(asked, [{"max_version": (1, 0), "copy": False}])
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            self.skipTest("this numpy makes no copies by DLPack")
        copied = self.shared(lambda array, **_: array.__dlpack__(max_version=(1, 0), copy=True))
        self.assert_refused("by DLPack as a copy", "y", weft.l2_norm, x=x, y=copied)
        weft.l2_norm(x=copied)

    def test_faults(self):
        def used(array, **_):
            capsule = array.__dlpack__()
            np.from_dlpack(self.shared(lambda *_, **__: capsule))
            return capsule

        def failing(array, **_):
            raise ValueError("of my own")

        def lanes(array, **_):
            capsule = array.__dlpack__()
            tensor = _dlpack._Managed.from_address(_dlpack._pointer(capsule, b"dltensor")).tensor
            tensor.code, tensor.bits, tensor.lanes = 4, 16, 2  # pairs of bfloat16
            return capsule

        for export, words in ((used, "unused capsule"), (failing, "of my own"), (lanes, "2 lanes"), (lambda *_, **__: 5, "returned a int")):
            self.assert_refused("cannot be shared by DLPack: ", "x", weft.l2_norm, x=self.shared(export))
            self.assert_refused(words, "x", weft.l2_norm, x=self.shared(export))


class Kinds(Case):
    def test_dtypes(self):
        x = self.normal(3, 8)
        wanted = "wanted one of float32"
        self.assert_refused("float64", "x", weft.l2_norm, x=x.astype(np.float64))
        self.assert_refused(wanted, "x", weft.l2_norm, x=x.astype(np.complex64))
        self.assert_refused('dtype="bf16"', "x", weft.l2_norm, x=x.astype(np.uint16))
        self.assert_refused("byte order", "x", weft.l2_norm, x=x.astype(">f4"))
        self.assert_refused("i32", "x", weft.l2_norm, x=x.astype(np.int32))
        self.assert_refused("elements of int16", "x", weft.l2_norm, x=Shared(x.astype(np.int16)))
        for value in ([1.0], "text", 3.0, object()):
            self.assert_refused("wanted an array", "x", weft.l2_norm, x=value)

    def test_shapes(self):
        self.assert_refused("[32], wanted [D=64]", "weight", weft.gated_rms_norm, x=self.normal(2, 2, 64), z=self.normal(2, 2, 64),
                            weight=self.normal(32))
        self.assert_refused("6 dimensions", "x", weft.l2_norm, x=self.normal(1, 1, 1, 1, 1, 8))
        self.assert_refused("0 dimensions", "x", weft.l2_norm, x=np.zeros((), np.float32))
        self.assertEqual(weft.l2_norm(x=self.normal(0, 8)).shape, (0, 8))

    def test_absent(self):
        self.assert_refused("x is absent", "x", weft.l2_norm)
        x = self.normal(4, 2, 8)
        cache = {"recipe": weft.KvRecipe("f32", 8), "k": {"codes": self.normal(1, 2, 16, 8)}, "v": {"codes": self.normal(1, 2, 16, 8)},
                 "lengths": np.array([16], np.int32)}
        self.assert_refused("do not follow from the inputs", "scores", weft.attention_scores, queries={"q": x}, cache=cache)

    def test_names(self):
        x = self.normal(4, 8)
        self.assert_refused("is no argument, wanted one of x, y, eps", "z", weft.l2_norm, x=x, z=x)
        self.assert_refused("is no argument", "gates.gamma", weft.gated_delta_rule_summarize, k=x, v=x, gates={"gamma": x})
        self.assert_refused("wanted a dict", "gates", weft.gated_delta_rule_summarize, k=x, v=x, gates=x)
        self.assert_refused("wanted one of silu, sigmoid", "gate", weft.gated_rms_norm, gate="tanh")
        self.assert_refused("wanted a number", "eps", weft.l2_norm, x=x, eps="small")
        self.assert_refused("wanted an integer", "chunk", weft.chunk_cumsum, g=x, chunk=1.5)
        self.assert_refused("fits i64", "chunk", weft.chunk_cumsum, g=x, chunk=1 << 70)
        self.assert_refused("wanted", "eps", weft.l2_norm, x=x, eps=1e300)
        for eps in (10**400, 10**5000):
            self.assert_refused("fits f32", "eps", weft.l2_norm, x=x, eps=eps)
        self.assert_refused("wanted one of cpu, reference, cuda", "backend", weft.l2_norm, x=x, backend="tpu")
        self.assert_refused("wanted a weft.KvRecipe", "recipe", weft.kv_rotate, x=x, recipe="4v4")
        with self.assertRaises(TypeError):
            weft.l2_norm(x)

    def test_where(self):
        x = self.normal(4, 8)
        for name, most in (("threads", 2**31 - 1), ("device", 2**31 - 1), ("stream", 2**64 - 1)):
            for value in (-1, most + 1, 10**5000):
                self.assert_refused(f"wanted 0 to {most}", name, weft.l2_norm, x=x, **{name: value})
            for value in ("4", "cuda:0", 1.5, ""):
                self.assert_refused("wanted", name, weft.l2_norm, x=x, **{name: value})
        weft.l2_norm(x=x, threads=np.int64(2), device=np.int32(0))

    def test_errors_can_be_pickled(self):
        try:
            weft.l2_norm()
        except weft.Error as error:
            self.assertEqual(f"{type(error).__module__}.{type(error).__qualname__}", "weft.Error")
            copy = pickle.loads(pickle.dumps(error))
            self.assertEqual((copy.code, copy.op, copy.argument, str(copy)), ("invalid_argument", "l2_norm", "x", str(error)))
        else:
            self.fail("a call without arguments was accepted")

    def test_numbers_of_numpy(self):
        x = self.normal(4, 8)
        np.testing.assert_array_equal(weft.l2_norm(x=x, eps=np.float32(0.25)), weft.l2_norm(x=x, eps=0.25))
        g = self.uniform(-1, 0, 32, 2)
        np.testing.assert_array_equal(weft.chunk_cumsum(g=g, chunk=np.int64(16)), weft.chunk_cumsum(g=g, chunk=16))


class Memory(Case):
    """Outputs and scratch that are too large, and scratch of nested calls."""

    def test_outputs_too_large(self):
        k = self.normal(64, 2, 8)
        gates = {"g": np.zeros((64, 2), np.float32), "beta": np.ones((64, 2), np.float32)}
        for count in (10**12, 2**62):
            self.assert_refused("wanted 0 to 1048576", "sequences.count", weft.gated_delta_rule_summarize, k=k, v=k, gates=gates,
                                sequences={"count": count})

    def test_no_memory(self):
        x = self.normal(3, 8)
        for error in (MemoryError(), ValueError("array is too big"), RuntimeError("cannot allocate")):
            with unittest.mock.patch.object(_arrays.np, "empty", side_effect=error), self.assertRaises(weft.Error) as caught:
                weft.l2_norm(x=x)
            self.assertEqual((caught.exception.code, caught.exception.argument), ("out_of_memory", "y"))
            self.assertIn("l2_norm: y of [3, 8] f32 cannot be allocated: ", caught.exception.message)

    def delta(self, tokens, heads):
        q = self.normal(tokens, heads, 32)
        return {"q": q, "k": q, "v": q, "gates": {"g": self.uniform(-1, 0, tokens, heads), "beta": self.uniform(0, 1, tokens, heads)}}

    def test_a_nested_call_leaves_the_scratch_of_the_outer_one(self):
        """As a signal handler or a finalizer calls, between the address of the scratch and the op."""
        ops._kept.__dict__.pop("memory", None)
        memory, address = ops._host_scratch(1000)
        memory[: len(memory)] = b"\x5a" * len(memory)
        weft.gated_delta_rule_prefill(**self.delta(600, 8), l2_norm=True)
        self.assertIsNot(ops._kept.memory, memory)
        self.assertTrue(ctypes.addressof(memory) <= address <= ctypes.addressof(memory) + len(memory) - 1000)
        self.assertEqual(memory.raw, b"\x5a" * len(memory))

    def test_a_call_holds_its_scratch(self):
        held = []

        def observed(function, *arguments):
            kept = ops._kept.__dict__.pop("memory", None)
            if kept is not None:
                held.append(weakref.ref(kept))
            del kept
            gc.collect()
            held.append(held[-1]() is not None)
            return call(function, *arguments)

        made, call = self.delta(64, 2), ops.call
        with unittest.mock.patch.object(ops, "call", side_effect=lambda f, *a: observed(f, *a) if len(a) == 4 else call(f, *a)):
            weft.gated_delta_rule_prefill(**made, l2_norm=True)
        self.assertEqual(held[1:], [True])

    def test_large_scratch_is_released(self):
        ops._kept.__dict__.pop("memory", None)
        memory = weakref.ref(ops._host_scratch((64 << 20) + 1)[0])
        self.assertIsNone(memory())
        memory = weakref.ref(ops._host_scratch(64 << 20)[0])
        self.assertIsNotNone(memory())
        del ops._kept.memory


class Sixteen(Case):
    """f16 and bf16."""

    def test_f16(self):
        x = self.normal(5, 32).astype(np.float16)
        y = weft.l2_norm(x=x)
        self.assertEqual(y.dtype, np.float16)
        self.assert_close(y, plain.l2_norm(x.astype(np.float64)), 2.0**-11)

    def test_bf16_as_uint16(self):
        bits = (self.normal(5, 32).view(np.uint32) >> 16).astype(np.uint16)
        y = weft.l2_norm(x=bits, dtype="bf16")
        self.assertEqual(y.dtype, np.uint16)
        self.assert_close(as_float(y), plain.l2_norm(as_float(bits)), 2.0**-8)
        mixed = weft.l2_norm(x=bits, y=np.empty((5, 32), np.float32), dtype="bf16")
        self.assert_close(mixed, plain.l2_norm(as_float(bits)), SMALL_BAR)
        self.assert_refused('wanted "bf16"', "dtype", weft.l2_norm, x=bits, dtype="f16")

    def test_bf16_of_ml_dtypes(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        x = self.normal(5, 32).astype(ml_dtypes.bfloat16)
        y = weft.l2_norm(x=x)
        self.assertEqual(y.dtype, x.dtype)
        self.assert_close(y.astype(np.float64), plain.l2_norm(x.astype(np.float64)), 2.0**-8)


def as_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Cuda(Case):
    """No GPU is needed: the address is only passed on, and refused by a library without the cuda backend or without a device."""

    def test_interface(self):
        dense = _arrays.view(OnCuda((3, 8)), "op", "x")
        self.assertEqual(dense[1:7], (4096, (3, 8), (8, 1), "f16", 0, False))
        strided = _arrays.view(OnCuda((3, 8), (64, 2), True), "op", "x")
        self.assertEqual((strided.strides, strided.read_only), ((32, 1), True))

    def test_device_is_taken_from_the_arrays(self):
        with self.assertRaises(weft.Error) as caught:
            weft.l2_norm(x=OnCuda((3, 8)), y=OnCuda((3, 8)))
        self.assertIn(caught.exception.code, ("unsupported", "device_error"))
        self.assert_refused("cannot allocate", "y", weft.l2_norm, x=OnCuda((3, 8)))

    def test_device_that_no_array_says(self):
        self.assert_refused("does not say its device", "x", weft.l2_norm, x=Somewhere((3, 8)), y=Somewhere((3, 8)))
        self.assert_refused("wanted a whole number", "device", weft.l2_norm, x=Somewhere((3, 8)), device="cuda:0")
        self.assertEqual(_arrays.view(Somewhere((3, 8)), "op", "x", device=3).device, 3)
        self.assertEqual(_arrays.view(OnCuda((3, 8)), "op", "x", device=3).device, 0)

    def test_refused_interfaces(self):
        self.assert_refused("has a mask", "x", weft.l2_norm, x=OnCuda((3, 8), mask=OnCuda((3, 8))))
        for stream in (0, -1, 2**64, "7"):
            self.assert_refused("wanted a handle", "x", weft.l2_norm, x=OnCuda((3, 8), stream=stream))
        self.assert_refused("cannot be read", "x", weft.l2_norm, x=OnCuda((3, 8), typestr="nonsense"))
        self.assert_refused("cannot be read", "x", weft.l2_norm, x=OnCuda((3, 8), data=None))

    def queue(self, x, y, **where):
        """The stream that l2_norm would compute on."""
        made = []

        def kept(op, backend, device, queue, *rest):
            made.append(queue)
            return new_stream(op, backend, device, queue, *rest)

        new_stream = ops.new_stream
        with unittest.mock.patch.object(ops, "new_stream", kept), self.assertRaises(weft.Error) as caught:
            weft.l2_norm(x=x, y=y, **where)
        if not made:
            raise caught.exception
        return made[0]

    def test_stream_of_the_interface(self):
        """Work on an array has the order of one stream: the call takes the one that an array names, and never joins two."""
        plain, two, seven = OnCuda((3, 8)), OnCuda((3, 8), stream=2), OnCuda((3, 8), stream=7)
        self.assertEqual([self.queue(plain, plain), self.queue(two, plain), self.queue(plain, two), self.queue(seven, seven)], [0, 2, 2, 7])
        self.assertEqual([self.queue(seven, plain, stream=7), self.queue(plain, plain, stream=9)], [7, 9])
        self.assert_refused("is in use on CUDA stream 7, the call on 2", "y", self.queue, x=two, y=seven)
        self.assert_refused("is in use on CUDA stream 7, the call on 9", "x", self.queue, x=seven, y=plain, stream=9)

    def test_allocation_and_waits_of_jax(self):
        """JAX is asked for the output, and its arrays are complete before a call reads their memory. JAX learns of no stream."""
        asked = []

        class Array(Shared):
            __module__ = "jaxlib"
            device = "a GPU"

            def __dlpack_device__(self):
                return (_dlpack.CUDA, 0)

            def block_until_ready(self):
                asked.append("wait")

        def empty(sizes, dtype, device):
            asked.append((sizes, dtype, device))
            return Array(np.zeros(sizes, dtype))

        with pretended("jax", numpy=types.SimpleNamespace(empty=empty)), self.assertRaises(weft.Error) as caught:
            weft.l2_norm(x=Array(self.normal(3, 8)))
        self.assertEqual(asked, ["wait", ((3, 8), np.dtype(np.float32), "a GPU"), "wait"])
        self.assertIn(caught.exception.code, ("unsupported", "device_error"))
        with pretended("jax", numpy=types.SimpleNamespace(empty=empty)):
            self.assert_refused("wanted one of numpy, torch or CuPy", "like", weft.KvCache, recipe="8v4", heads=1, head_dim=64, capacity=64,
                                like=Array(self.normal(3, 8)))

    def test_allocation_and_stream_of_cupy(self):
        """CuPy is asked for the output and its current stream, both on the device of the input."""
        asked = []

        class Array(OnCuda):
            __module__ = "cupy"
            device = types.SimpleNamespace(id=3)

        def empty(sizes, dtype):
            asked.append((sizes, dtype))
            return Array(sizes)

        def current():
            asked.append("stream")
            return types.SimpleNamespace(ptr=77)

        @contextlib.contextmanager
        def device(ordinal):
            asked.append(f"enter {ordinal}")
            yield
            asked.append("leave")

        cuda = types.SimpleNamespace(Device=device, get_current_stream=current)
        with pretended("cupy", empty=empty, cuda=cuda), self.assertRaises(weft.Error) as caught:
            weft.l2_norm(x=Array((3, 8)))
        self.assertEqual(asked, ["enter 3", "stream", "leave", "enter 3", ((3, 8), np.dtype(np.float16)), "leave"])
        self.assertIn(caught.exception.code, ("unsupported", "device_error"))

    def test_mixed_places(self):
        self.assert_refused("", "y", weft.l2_norm, x=self.normal(3, 8), y=OnCuda((3, 8)), backend="cpu")


if __name__ == "__main__":
    unittest.main()
