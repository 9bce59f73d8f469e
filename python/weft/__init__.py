"""Weft: the token mixers of hybrid language models, on numpy arrays and anything that speaks DLPack.

The ops are weft.ops.NAME and weft.NAME; docs/python.md is the guide.
"""

from . import ops
from ._library import VERSION as __version__
from ._library import Error
from .kv_recipe import KvRecipe, KvSideInfo
from .ops import *  # noqa: F403

__all__ = ["Error", "KvRecipe", "KvSideInfo", "__version__", "ops", *ops.__all__]
