"""Refuses calls of layers that cannot compute on blocks of hidden states: what a model's code alone does not tell.

Layers on a grid ask in every call, and the planner in the one step that it traces, on full tensors.

It refuses hidden states that are not ``[B, S, D]``, arguments that need gradients, and caches that are reordered (beam
search).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.hidden_state import Place, at, hidden_place
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.tensor_parallel.grid.grid_norms import Norm
from lightning_mm5d.tensor_parallel.grid.grid_shape import GridShape

_REORDERS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "batch_split")


class GridChecks:
    """The layers of one modality.

    Args:
        modality: its name.
        shape: the grid.
    """

    def __init__(self, modality: str, shape: GridShape) -> None:
        self._modality, self._shape = modality, shape
        self._ids: dict[int, tuple[int, ...]] = {}  # shapes of what embeddings took
        self._has_samples_first = False

    def note_ids(self, module: nn.Module, args: tuple) -> None:
        """Note what an embedding takes, which tells the order of samples and tokens; a forward pre-hook."""
        self._ids[id(module)] = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()

    def given(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Place, Tensor]:
        """Return the hidden state among the arguments of a layer, and where it is.

        Raises:
            ConfigError: the arguments cannot be in blocks.
        """
        place = hidden_place(args, kwargs)
        hidden = None if place is None else at(place, args, kwargs)
        if place is None or hidden is None or hidden.dim() != 3:
            found = None if hidden is None else tuple(hidden.shape)
            raise self.error(module, found, "The hidden state of a layer on a grid is [samples, sequence, width]")
        self._check_order(module, hidden)
        self._check_others(module, hidden, args, kwargs)
        return place, hidden

    def made(self, module: nn.Module, first: object, shape: tuple[int, ...]) -> None:
        """Refuse a layer whose first result is no hidden state of `shape`."""
        if not isinstance(first, Tensor) or tuple(first.shape) != tuple(shape):
            got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            rule = f"A layer on a grid returns its hidden state, here {tuple(shape)}, first"
            raise self.error(module, got, rule)

    def normed(self, module: nn.Module, norm: Norm | None, input: Tensor, columns: int, width: int) -> None:
        """Refuse a norm of something else than the hidden state.

        Args:
            module: the norm.
            norm: how it norms, where that is known.
            input: what it takes.
            columns: those that `input` has of a hidden state.
            width: of the hidden state.
        """
        if (norm is not None and norm.width != width) or input.shape[-1] != columns:
            rule = f"It takes a hidden state, here of {columns} columns on this rank"
            raise self.error(module, tuple(input.shape), rule)

    @contextmanager
    def told(self, module: nn.Module) -> Iterator[None]:
        """Add to an error of torch in a layer what the layer has of its arguments, which code around may not know."""
        try:
            yield
        except (RuntimeError, IndexError) as error:
            kind = type(module).__name__
            error.add_note(
                f"{self._field}={self._shape.mode!r}: {kind} computes on this rank's samples and columns of its hidden "
                "state, and other arguments are whole outside of its attention. With tp_mode='1d' its state is whole."
            )
            raise

    def error(self, module: nn.Module, got: object, rule: str) -> ConfigError:
        """Return the error for a module that breaks a rule."""
        fix = f"{type(module).__name__} needs tp_mode='1d' for this modality"
        return ConfigError(self._field, f"{self._shape.mode}, and {got}", rule, fix)

    def _check_order(self, module: nn.Module, hidden: Tensor) -> None:
        """Refuse hidden states [sequence, samples, width]: rows would be tokens, which attend to each other."""
        shape, seen = tuple(hidden.shape[:2]), set(self._ids.values())
        if shape not in seen and shape[::-1] in seen:
            raise self.error(module, tuple(hidden.shape), "Its hidden states are [sequence, samples, width]")
        self._has_samples_first |= shape in seen and shape[0] != shape[1]
        if shape in seen and shape[0] == shape[1] > 1 and not self._has_samples_first:
            rule = "The first batch has as many samples as tokens, so that its hidden states may be either way round"
            raise self.error(module, tuple(hidden.shape), rule)

    def _check_others(self, module: nn.Module, hidden: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> None:
        samples, length, width = hidden.shape
        for value in tree_leaves((args, {name: one for name, one in kwargs.items() if one is not None})):
            if value is hidden or value is None:
                continue
            for name in _REORDERS:
                if hasattr(value, name) and name not in vars(value):
                    setattr(value, name, self._no_reordering)
            if type(value).__name__ == "BlockMask":
                raise self.error(module, "a BlockMask", "A mask of an attention on a grid is a tensor")
            if not isinstance(value, Tensor):
                continue
            got = tuple(value.shape)
            if value.requires_grad or isinstance(value, Sharded):
                raise self.error(module, got, "Beside its hidden state a layer on a grid takes no trained values")
            is_real = value.is_floating_point() or value.is_complex()
            if is_real and value.dim() == 3 and value.shape[-1] == width and samples in (value.shape[0], 1):
                raise self.error(module, got, "A layer on a grid takes one hidden state")
            is_table = value.dim() == 2 or (value.dim() == 3 and value.shape[1] not in (1, length))
            may_be_mask = is_real or value.dtype is torch.bool  # integers are positions of samples
            if may_be_mask and is_table and value.shape[0] == samples == length > 1:
                rule = "With as many samples as tokens its first dim may be either, and its rows are unknown"
                raise self.error(module, got, rule)

    def _no_reordering(self, *_: Any, **__: Any) -> None:
        rule = "Caches of layers on a grid hold this rank's samples, and beam search would reorder those of all"
        raise ConfigError(self._field, self._shape.mode, rule, "Generate with num_beams=1, or use tp_mode='1d'")

    @property
    def _field(self) -> str:
        return f"modalities.{self._modality}.tp_mode"
