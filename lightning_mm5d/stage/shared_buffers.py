"""Buffers that every stage's run of the user's step would write, on a rank that runs several stages.

A counter in the step would count once for each stage there. So all stages of the rank but one write to copies, which
are thrown away. The last one writes to the buffers, because it runs most of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class SharedBuffers:
    """The buffers of a module that stages write beside each other.

    Args:
        root: the LightningModule.
        names: of these buffers.
    """

    def __init__(self, root: nn.Module, names: Collection[str]) -> None:
        self._places = [(root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Put copies in place of the buffers meanwhile."""
        kept = [(module._buffers, name, module._buffers[name]) for module, name in self._places]
        copies: dict[int, Tensor] = {}
        for buffers, name, buffer in kept:
            if buffer is not None:
                copy = copies.get(id(buffer))
                buffers[name] = copies[id(buffer)] = buffer.clone() if copy is None else copy
        try:
            yield
        finally:
            for buffers, name, buffer in kept:
                buffers[name] = buffer
