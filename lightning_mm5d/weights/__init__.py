"""How a rank comes to its own weights while no rank ever holds the full model.

Modules are built under `DeferredInit`, which records what makes their weights. `DeferredWeights.materialize` makes
them later, one tensor at a time. `initializers` does the same for modules that were built on the meta device.
"""

from lightning_mm5d.weights.deferred_init import DeferredInit
from lightning_mm5d.weights.deferred_weights import DeferredWeights
from lightning_mm5d.weights.initializers import initialize_meta

__all__ = ["DeferredInit", "DeferredWeights", "initialize_meta"]
