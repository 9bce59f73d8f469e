"""Weft: the token mixers of hybrid language models, on numpy arrays and anything that speaks DLPack.

The ops are weft.ops.NAME and weft.NAME; docs/python.md is the guide.
"""

from . import ops
from ._library import VERSION as __version__
from ._library import Error
from .generation import Completion, Generation, Piece
from .kv_cache import KvCache
from .kv_recipe import KvRecipe, KvSideInfo
from .model import Model, plan
from .ops import *  # noqa: F403
from .state import PrefixStore, PrefixStoreStats, State
from .state_lock import StateLock

__all__ = [
    "Completion",
    "Error",
    "Generation",
    "KvCache",
    "KvRecipe",
    "KvSideInfo",
    "Model",
    "Piece",
    "PrefixStore",
    "PrefixStoreStats",
    "State",
    "StateLock",
    "__version__",
    "ops",
    "plan",
    *ops.__all__,
]
