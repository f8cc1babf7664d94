"""What features do around the actions of a step: the door of the engine.

The engine knows no feature. Whoever appends to `Engine.around` is asked at the start of each step, and is then called
around its actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_mm5d.engine.flight import Forward
from lightning_mm5d.engine.step import Scope, Step
from lightning_mm5d.schedule import Action
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.stage import Run


class Course(NamedTuple):
    """A step that is about to run on this rank.

    Attributes:
        step: what runs.
        actions: of this rank, in their order.
        trainable: names of the parameters that require a gradient; empty for evaluation.
        num_microbatches: of each replica in this step.
    """

    step: Step
    actions: Sequence[Action]
    trainable: frozenset[str]
    num_microbatches: int


class SideBySide(Protocol):
    """Computes several microbatches of a stage side by side."""

    @property
    def thread(self) -> int | None:
        """Identifier of the thread that computes in place of the main thread now; None where that does."""

    def applies(self, step: Step, stage: StageKey, batches: Sequence[Any], *, known: bool) -> bool:
        """Whether forwards of `batches` run side by side; `known` says whether what their stage promises is."""

    def watching(self, step: Step, stage: StageKey, batch: Any) -> AbstractContextManager[None]:
        """Return what is entered around a forward that runs by itself."""

    def run(self, stage: StageKey, functions: Sequence[Any], scopes: Sequence[Scope], *, backward: bool) -> list[Any]:
        """Return the results of functions of a stage; of `scopes` each has its own."""


class AroundStep:
    """Is called around the actions of one step; what a subclass leaves out does nothing."""

    def before(self, numbers: range) -> None:
        """The actions with these `numbers`, one or several side by side, are about to run."""

    def starts(self) -> None:
        """An action has everything that it waited for; of several that run side by side, each says so."""

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Return what is entered around the user's step in a forward."""
        return nullcontext()

    def ran(self, made: Forward, passed: Sequence[Tensor]) -> None:
        """A forward has run and passed on its results, in which are the tensors `passed`."""

    def after(self, numbers: range) -> None:
        """The actions with these `numbers`, one or several side by side, have run and passed on their results."""

    def end(self) -> None:
        """All actions have run, and everything is sent. Not called where a step fails."""


class AroundSteps:
    """Is asked for each step, training or evaluation, what goes on around it."""

    def step(self, course: Course) -> AroundStep | None:
        """Return what is called around the actions of a step; None for a step that is of no interest."""

    def unscheduled(self) -> AbstractContextManager[None]:
        """Return what is entered around a step that runs without a schedule, in an order that nothing knows."""
        return nullcontext()
