"""Weft beside PyTorch on one CUDA device: its tensors as Weft's, calls on its current stream, times of walks captured into graphs."""

import pathlib
import statistics
import sys

try:
    import torch
except ModuleNotFoundError:
    torch = None  # --help does without

import weft_c

_BACKEND, _PLACE = 2, 1  # both cuda
LEAST_CALLS = 8  # of a graph, so that its start counts for little
_DTYPES = {"torch.float32": 0, "torch.float16": 1, "torch.bfloat16": 2, "torch.int32": 3, "torch.int64": 4, "torch.uint8": 5}


def require():
    """Ends the script with a sentence where PyTorch or a device that it sees is missing."""
    script = pathlib.Path(sys.argv[0]).name
    if torch is None:
        raise SystemExit(f"{script} needs PyTorch, which this Python does not have.")
    if not torch.cuda.is_available():
        raise SystemExit(f"{script} needs a CUDA device, and PyTorch sees none here.")


def view(tensor):
    """A torch tensor on the device as Weft sees it; it must outlive every call that uses it."""
    sizes, strides = (weft_c.c_int64 * 5)(*tensor.shape), (weft_c.c_int64 * 5)(*tensor.stride())
    return weft_c.Tensor(data=tensor.data_ptr(), sizes=sizes, strides=strides, rank=tensor.dim(), dtype=_DTYPES[str(tensor.dtype)],
                         place=_PLACE, device=tensor.device.index or 0)


def _scratch(count):
    memory = torch.empty(count, dtype=torch.uint8, device="cuda")
    return memory, memory.data_ptr()


class Weft(weft_c.Weft):
    """A shared libweft with the cuda backend (--library, or that of preset shared-cuda), on torch's current stream."""

    def __init__(self, library):
        super().__init__(weft_c.find_library(library, "shared-cuda"), backend=_BACKEND, allocate=_scratch)

    def call(self, op, **members):
        enqueue = super().call(op, **members)

        def run():
            self.stream.queue = torch.cuda.current_stream().cuda_stream
            enqueue()

        return run


def medians_us(walks, replays):
    """Microseconds of a call of each walk, which is a list of calls: each is captured into a graph, and their replays take turns.

    What the captured calls return is kept until the end, so that each writes memory of its own.
    """
    queue, graphs, kept = torch.cuda.Stream(), [], []
    queue.wait_stream(torch.cuda.current_stream())
    walks = [calls * -(-LEAST_CALLS // len(calls)) for calls in walks]
    for calls in walks:
        with torch.cuda.stream(queue):
            for call in calls:
                call()
        queue.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=queue):
            kept += [call() for call in calls]
    times = [[] for _ in walks]
    for _ in range(replays + 2):  # the first two are not counted
        for calls, graph, taken in zip(walks, graphs, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return [statistics.median(taken[2:]) for taken in times]
