"""Shared by the golden-vector scripts: writing one case, comparing sources, and running upstream torch code in float64."""
import importlib.metadata
import inspect
import json
import types
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
DTYPES = {np.dtype(t) for t in (np.float32, np.float64, np.int32, np.int64, np.uint8, np.uint32)}


def version(package):
    return package + " " + importlib.metadata.version(package)


def bf16(x):
    """Round to the nearest bf16 value (ties to even), kept as float32."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def f32(x):
    """Round to float32 and widen again, so that every source starts from the same stored numbers."""
    return np.asarray(x, np.float32).astype(np.float64)


def relative_rms(x, ref):
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, (x.shape, ref.shape)
    if x.size == 0:
        return 0.0
    return float(np.sqrt(np.mean((x - ref) ** 2)) / (np.sqrt(np.mean(ref ** 2)) + 1e-30))


def agree(name, x, ref, bound):
    """Two sources must agree; a case whose sources do not is never written."""
    assert np.isfinite(x).all() and np.isfinite(ref).all(), name
    err = relative_rms(x, ref)
    assert err <= bound or np.abs(np.asarray(x) - np.asarray(ref)).max() < 1e-12, "%s: %.3g > %.3g" % (name, err, bound)


def save(name, op, source, tolerance, args, inputs, outputs, infinities=False):
    """Write data/<name>.safetensors. Floats are stored as float32 unless wrapped in keep64()."""
    tensors = {}
    for key, value in {**inputs, **outputs}.items():
        if value is None:
            continue
        if isinstance(value, Keep64):
            value = value.value
        else:
            value = np.asarray(value)
            if value.dtype == np.float64:
                value = value.astype(np.float32)
        value = np.ascontiguousarray(value)
        assert value.dtype in DTYPES, (name, key, value.dtype)
        assert infinities or value.dtype.kind != "f" or np.isfinite(value).all(), (name, key)
        tensors[key] = value
    metadata = {"op": op, "source": source, "tolerance": tolerance, "args": json.dumps(args, sort_keys=True),
                "outputs": ",".join(k for k, v in outputs.items() if v is not None)}
    DATA.mkdir(exist_ok=True)
    path = DATA / (name + ".safetensors")
    save_file(tensors, path, metadata=metadata)
    sort_metadata(path)
    back = load_file(path)
    assert all((back[k] == v).all() or infinities for k, v in tensors.items())
    print("%-40s %-28s %7d bytes" % (name, op, path.stat().st_size))


def sort_metadata(path):
    """The library writes __metadata__ in random order; sort it so that regenerating gives the same bytes."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + size:])


class Keep64:
    def __init__(self, value):
        self.value = np.asarray(value, np.float64)


def keep64(x):
    return Keep64(x)


class _DoubleTorch:
    """Stands in for the name `torch` inside an upstream function: its float32 is float64."""

    def __init__(self, torch):
        self._torch = torch
        self.float32 = self.float = torch.float64

    def __getattr__(self, name):
        return getattr(self._torch, name)


def plain(function):
    """The reference torch body of an upstream function, without dispatch to an accelerated kernel."""
    return inspect.unwrap(function)


def doubled(function):
    """The same unmodified body, with every cast to float32 made a cast to float64."""
    body = plain(function)
    scope = dict(body.__globals__)
    scope["torch"] = _DoubleTorch(scope["torch"])
    copy = types.FunctionType(body.__code__, scope, body.__name__, body.__defaults__, body.__closure__)
    copy.__kwdefaults__ = body.__kwdefaults__
    return copy
