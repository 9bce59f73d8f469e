"""Weft inside transformers: delta layers and a compressed cache for hybrid models.

    import weft.transformers
    weft.transformers.patch(model, kv="8v4")
    model.generate(...)

docs/python.md names the models and versions.
"""

from .cache import HybridCache
from .patch import VERSIONS, patch, unpatch

__all__ = ["HybridCache", "VERSIONS", "patch", "unpatch"]
