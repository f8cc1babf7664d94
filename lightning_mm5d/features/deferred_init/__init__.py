"""Weights that are made after the module is built, so that no rank ever holds the full model.

Modules are built under `deferred_init.DeferredInit`, which records what makes their weights.
`deferred_weights.DeferredWeights.materialize` makes them later, one tensor at a time; `initializers.initialize_meta`
does the same for modules that were built on the meta device. With `pretrained.from_pretrained` weights stay in their
files until each rank reads its own. `construction` is the door to all of it: how a run builds modules and comes to
weights.
"""
