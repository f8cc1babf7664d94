"""What a step does after the last layer, in a stage that is not the last and only looks for what later stages need."""

from __future__ import annotations

from torch import nn

from lightning_mm5d.sharded.remote_value import RemoteValue, make_plain


class Tail:
    """Remembers, where it is made, the attributes and buffers that the rest of a step may write.

    Lists and other objects that the step changes in place stay changed.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self._attributes = root, dict(vars(root))
        self._buffers = [(buffer, buffer._version, buffer.clone()) for buffer in root.buffers()]

    def undo(self) -> None:
        """Put all back."""
        vars(self._root).clear()
        vars(self._root).update(self._attributes)
        for buffer, version, before in self._buffers:
            if isinstance(buffer, RemoteValue):
                make_plain(buffer)
            if buffer._version != version:
                buffer.data.copy_(before)
