"""What the engine needs to know of a step that it runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import Microbatch


class Scope(Protocol):
    """Something that belongs to one microbatch at a time."""

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""


class Step(Protocol):
    """One step of the user's module, run once for every stage and microbatch of this rank.

    Attributes:
        microbatches: by the replicas that this rank serves.
        random_key: what random state depends on, beside the microbatch; None leaves generators alone.
        epoch: of the run.
        trains: whether backwards follow.
        fails: whether a pipeline cannot run it; the engine sets it.
        forgives: the errors by which it fails, and which end nothing else.
        scopes: what belongs to one microbatch at a time.
    """

    microbatches: Mapping[int, list[Microbatch]]
    random_key: tuple[int | str, ...] | None
    epoch: int
    trains: bool
    fails: bool
    forgives: tuple[type[Exception], ...]
    scopes: Sequence[Scope]

    def structure(self, batch: Any) -> Hashable:
        """Return a key that is equal for batches that take the same way through the model."""

    def context(self) -> AbstractContextManager[Any]:
        """Enter around each run: the precision of the forward."""

    def run(self, microbatch: Microbatch, index: int) -> Any:
        """Run the user's step on microbatch `index` of a replica; its result counts in the last stage only."""

    def reads(self) -> AbstractContextManager[list[str]]:
        """Enter around a run of the user's step; gives a list, empty unless the run asks which step it is."""

    def finish(self, result: Any, index: int) -> Tensor | None:
        """Keep the last stage's result of a microbatch; return its scaled loss in training, else None."""

    def uncounted(self) -> AbstractContextManager[Any]:
        """Enter around a run whose metric updates must not count, because another stage's run counts them."""


def count_of(step: Step) -> int:
    """Return how many microbatches each replica has, which must be equal on replicas that share this rank."""
    counts = {replica: len(parts) for replica, parts in step.microbatches.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} of replica {replica}" for replica, count in sorted(counts.items()))
        rule = "Replicas that share ranks have equal numbers of microbatches in a step"
        fix = "Give them batches of equal sizes, or with num_microbatches of that many samples and more"
        raise ConfigError("batching.num_microbatches", each, rule, fix)
    return max(counts.values())
