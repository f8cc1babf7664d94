"""The frozen parameters of an encoder, which are in host memory between their uses.

A parameter stays one object: its ``data`` is the tensor on the device, or the copy on the host, which is what reads of
it get between steps. The copy is made once: nothing trains these parameters. It is made again after a write in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from lightning_mm5d.engine.host_memory import HostMemory, Stored


class OffloadedParameters:
    """The frozen parameters of one modality on this rank.

    Args:
        modality: its name, for messages.
        parameters: that this modality alone uses, and that nothing trains.
        memory: of the host.
    """

    def __init__(self, modality: str, parameters: Sequence[nn.Parameter], memory: HostMemory) -> None:
        self._modality, self._memory = modality, memory
        self._parameters = parameters
        self._stored: list[tuple[nn.Parameter, Stored, int]] = []
        self._is_away = False
        self._stays = False

    def leave(self) -> None:
        """Show the copies on the host, and free the device's memory."""
        if self._is_away or self._stays or self._is_trained():
            return
        known = {id(parameter): (stored, version) for parameter, stored, version in self._stored}
        self._stored = []
        for parameter in self._parameters:
            stored, version = known.get(id(parameter), (None, 0))
            if stored is None or version != parameter._version:
                stored = self._memory.store(parameter.detach())
            self._stored.append((parameter, stored, parameter._version))
        for parameter, stored, _ in self._stored:
            parameter.data = stored.wait()
        self._is_away = True

    def fetch(self) -> None:
        """Begin to copy them to the device."""
        if self._is_away:
            for _, stored, _ in self._stored:
                stored.fetch()

    def arrive(self) -> None:
        """Show the tensors on the device."""
        self.fetch()
        if self._is_away:
            for parameter, stored, _ in self._stored:
                parameter.data = stored.take()
                stored.drop()
            self._is_away = False

    def _is_trained(self) -> bool:
        """Whether somebody has begun to train them since; they stay on the device from then on."""
        trained = any(parameter.requires_grad for parameter in self._parameters)
        if trained and not self._stays:
            warnings.warn(
                f"modalities.{self._modality}.offload: parameters of {self._modality} require a gradient now, so all "
                "of them stay on the device from here on",
                stacklevel=2,
            )
        self._stays |= trained
        return self._stays
