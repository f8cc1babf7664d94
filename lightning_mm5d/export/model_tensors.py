"""The tensors of one model in a checkpoint, by the names that the model itself has for them.

A tied tensor may stand in the checkpoint under any of its names. A tensor that is missing, or left over, is refused: a
folder that lacks it would load with random numbers in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.storage.source import TensorSource


class ModelTensors:
    """Reads a model's tensors from the tensors of the module around it.

    Args:
        source: tensors by their names in the LightningModule.
        path: of the model in the LightningModule.
        same: names of the LightningModule that stand for one tensor, group by group.
    """

    def __init__(self, source: TensorSource, path: str, same: Iterable[Sequence[str]] = ()) -> None:
        self._source, self._prefix = source, f"{path}." if path else ""
        self._known = set(source.names())
        self._same = {name: group for group in same for name in group}

    @classmethod
    def of(cls, source: TensorSource, record: Mapping[str, Any], model: Mapping[str, Any]) -> ModelTensors:
        """Return those of a model in the record of a checkpoint."""
        return cls(source, model["path"], record["same"])

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model."""
        return self._source.read(self._found(name))

    def empty(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype on the meta device."""
        found = self._found(name)
        return torch.empty(self._source.shape(found), dtype=self._source.dtype(found), device="meta")

    def check(self, names: Sequence[str], others: Iterable[str] | None = None) -> None:
        """Compare the names in the checkpoint with those of the model.

        Args:
            names: of the tensors that are needed.
            others: names that the checkpoint may have besides; None where it may have any.

        Raises:
            ConfigError: tensors are missing, or are left over.
        """
        missing = [name for name in names if not self._names(name)]
        if missing:
            rule = f"The checkpoint lacks {_some(missing)}"
            raise ConfigError("CHECKPOINT", self._prefix or "the module", rule, "Save the whole module")
        if others is None:
            return
        known = {*names, *others}
        own = (name.removeprefix(self._prefix) for name in self._known if name.startswith(self._prefix))
        more = sorted(name for name in own if name not in known)
        if more:
            rule = f"The model that the checkpoint describes has no {_some(more)}"
            raise ConfigError("CHECKPOINT", self._prefix or "the module", rule, "Give the model's own --config")

    def _names(self, name: str) -> list[str]:
        """The names under which the checkpoint has the tensor."""
        full = self._prefix + name
        return [each for each in (full, *self._same.get(full, ())) if each in self._known]

    def _found(self, name: str) -> str:
        return self._names(name)[0]


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"
