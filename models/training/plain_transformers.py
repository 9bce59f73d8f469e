"""Import this before transformers: without a GPU, transformers must not choose FLA's kernels, which need one."""

import sys

import torch

if not torch.cuda.is_available():
    sys.modules["fla"] = None
