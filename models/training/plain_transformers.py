"""Import before transformers: on a machine without a GPU it must not choose FLA's kernels, which need one."""

import sys

import torch

if not torch.cuda.is_available():
    sys.modules["fla"] = None
