"""The random states from which one process would draw the orders of its epochs.

A sampler without a generator of its own draws from the global random state, of which each pass over a dataloader takes
some numbers. To see the batches of one process, ranks draw from such a state too: that of rank 0 when training begins,
advanced as one process advances it. It is not the ranks' own global state, which code on some ranks alone may advance.
It is advanced once an epoch and once a validation, also where callbacks read the dataloader: it is equal on all ranks.

What the steps draw on the CPU does not advance it, so orders equal those of one process up to the first such step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from lightning_mm5d.data.random_state import CPU, all_states, kept_random_state, pack_states, unpack_states

_KEY = "order stream"  # among states of generators


class OrderStream:
    """Where orders are drawn from, equal on all ranks.

    Args:
        state: packed, with which training begins.
    """

    def __init__(self, state: Tensor) -> None:
        self._first = self._state = state
        self._begun: tuple[int, Tensor] | None = None
        self._advanced: int | None = None

    @classmethod
    def begun(cls, before: dict[str, Any], epoch: int) -> OrderStream | None:
        """Return the stream that drew an epoch's order, from the state `before` it; None where a seed drew it."""
        if _KEY not in before:
            return None
        stream = cls(before[_KEY])
        stream._begun, stream._advanced = (epoch, before[_KEY]), epoch
        return stream

    def states(self, epoch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint keeps: the state before the order of `epoch` was drawn, and that of now."""
        begun = self._state if self._begun is None or self._begun[0] != epoch else self._begun[1]
        return {_KEY: begun}, {_KEY: self._state}

    def resume(self, before: dict[str, Any], now: dict[str, Any], epoch: int | None) -> bool:
        """Go on from `states`, in the midst of `epoch` if any; return whether they were among what was saved."""
        if _KEY not in now:
            return False
        self._state, self._begun, self._advanced = now[_KEY], None, None
        if epoch is not None:
            self._begun, self._advanced = (epoch, before[_KEY]), epoch
        return True

    @contextmanager
    def drawing(self, epoch: int, *, seeds_workers: bool) -> Iterator[None]:
        """Enter where the first item of an epoch's order is drawn.

        Args:
            epoch: of the order; the same one is drawn again where it was drawn before.
            seeds_workers: whether the dataloader draws a seed for its workers first, also where it has none.
        """
        if self._begun is None or self._begun[0] != epoch:
            self._begun = epoch, self._state
        with kept_random_state():
            unpack_states(self._begun[1], CPU)
            if seeds_workers:
                _draw_seed()
            yield
            if self._advanced != epoch:
                self._advanced, self._state = epoch, packed_state()

    def leave(self) -> None:
        """Advance the process's global random state as this one, where it is still as training began."""
        if torch.equal(packed_state(), self._first):
            unpack_states(self._state, CPU)

    def pass_over(self, orders: Iterable[Any]) -> None:
        """Advance it by what passes over dataloaders draw, of which these are the samplers or batch samplers."""
        with kept_random_state():
            unpack_states(self._state, CPU)
            for order in orders:
                _draw_seed()
                sampler = getattr(order, "sampler", order)
                if type(sampler) is RandomSampler and sampler.generator is None:
                    _draw_seed()
            self._state = packed_state()


def packed_state() -> Tensor:
    """Return the process's global random state."""
    return pack_states(all_states(CPU))


def _draw_seed() -> None:
    torch.empty((), dtype=torch.int64).random_()
