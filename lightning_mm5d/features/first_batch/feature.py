"""Compares what first batches give with what their microbatches give: losses, logged numbers and results of steps.

It warns where the loss of the first training batch is not the mean of its microbatches' losses, and where a training,
validation or test step logs or returns something else for a batch than what is made of its microbatches.

A schedule trains the weighted mean of the losses of microbatches. That is the loss of the batch only where this is a
mean over samples, or over what ``loss_weight`` counts: not a sum, not a comparison of samples with each other, not
what batch statistics or counters change. Nobody would see the difference in a falling loss. Nor would anybody see that
a logged count is halved, or that one number for each class is taken for one row for each sample, because there are by
chance as many. Phases, once in a run for each step and dataloader, after the first batch:

1. Each stage runs, without gradients, the first two microbatches, both as one, and the first one again
   (`joined_step.py`).
2. The first rank where the first replica's step ends compares (`joined_step.py`); where the first microbatch has two
   losses, nothing.
3. What the runs have changed is put back: buffers, attributes, metrics, parameters, random generators.
4. Where a step has written to buffers, all of it once more: these begin with other values, so that averages
   of weights show which begin as a copy of them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Mapping

from lightning_mm5d.data.loader import split_replicas
from lightning_mm5d.data.microbatch import Microbatch
from lightning_mm5d.features.first_batch.joined_step import (
    SEE,
    JoinedStep,
    compare,
    put_back,
    tell_of_buffers,
    unlike_buffers,
)
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import plain
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.process_group import decided
from lightning_mm5d.trainer.steps import FirstBatch

_log = logging.getLogger("lightning.pytorch")  # shows what it is told, where Lightning does


class FirstBatchChecks(Feature):
    """Looks at the first batch of each fit that begins with untrained weights, and at the first of each evaluation."""

    def attach(self, running: Running) -> Attached:
        """Watch the first step of each kind."""
        return _Checks(running)


class _Checks(Attached):
    def __init__(self, running: Running) -> None:
        self._module, self._device, self._layout = running.module, running.device, running.plan.layout
        self._rank, self._ownership = running.rank, running.plan.ownership
        self._steps = running.steps
        self.put_attribute(running.steps, "first", self)

    def stepped(self, first: FirstBatch) -> None:
        """Compare, if all ranks can, what two microbatches give with what both as one give; or say why not."""
        joined = self._joined(first) if first.counts and not first.is_gathered else {}
        lacks = self._anywhere(len(joined) < len(first.parts))
        why = self._why_lacking(first) if lacks else self._compares(first, joined)
        is_told = self._steps.writes and any(len(parts) > 1 for parts in first.parts.values())
        if why and first.counts and is_told:
            of_step = "the loss of a batch is the mean of its microbatches' losses"
            if first.name != "training_step":
                of_step = f"{first.name} logs and returns of a batch what is made of its microbatches"
            _log.info(f"Not checked: whether {of_step}, because {why}. {SEE}")

    def _joined(self, first: FirstBatch) -> dict[int, list[Microbatch]]:
        """Return the first two microbatches, both as one and the first again, of replicas where these are known."""
        batch_parts = self._steps.batch_parts
        is_equal = self._layout.num_replicas == 1 or batch_parts.is_equal_everywhere()
        if batch_parts.is_compiled or not is_equal or self._has_file():
            return {}
        batches = zip(first.parts.items(), split_replicas(first.batch, len(first.parts)), strict=True)
        joined = {number: (parts, batch_parts.joined(batch, parts)) for (number, parts), batch in batches}
        return {number: [*parts[:2], both, parts[0]] for number, (parts, both) in joined.items() if both is not None}

    def _has_file(self) -> bool:
        """Whether a module keeps an open file, to which its step may write."""
        return any(isinstance(value, io.IOBase) for module in self._module.modules() for value in vars(module).values())

    def _compares(self, first: FirstBatch, joined: Mapping[int, list[Microbatch]]) -> str:
        """Run the joined step, and compare; return what stood in the way, "" for nothing."""
        step = self._run(first, joined)
        if self._anywhere(step.lacks_graph):
            step = self._run(first, joined, has_graph=True)
        if self._steps.writes:
            compare(self._module, step)
        self._compare_buffers(first, joined, step)
        if step.opens:
            return f"{first.name} opens a file to write it"
        return f"{first.name} draws random numbers, or fails on a batch of another size" if step.fails else ""

    def _anywhere(self, holds: bool) -> bool:
        """Whether something holds on any rank."""
        return decided(holds, all_ranks=False, device=message_device(self._device))

    def _run(
        self, first: FirstBatch, joined: Mapping[int, list[Microbatch]], others: Collection[str] = (), **options: bool
    ) -> JoinedStep:
        """Run the step on both microbatches and on both as one; `others` begin with other values than they have."""
        given = self._module, first.name, first.arguments, joined, first.weights
        with meanwhile(self._steps, writes=False), put_back(self._module, self._device) as state:
            step = JoinedStep(*given, state=state, others=others, **options, **first.options)
            with step.uncounted(repeats=True):
                self._steps.run(step, frozenset())
                step.keep_logs()
        return step

    def _compare_buffers(self, first: FirstBatch, joined: Mapping[int, list[Microbatch]], step: JoinedStep) -> None:
        """Compare what is left in buffers, on all ranks if any has written to such."""
        unlike = self._unlike(step)
        with plain():
            buffers = dict(self._module.named_buffers())
        written = set() if step.fails else {name for name in step.written if buffers[name].is_floating_point()}
        if self._anywhere(any(map(self._is_primary, written - unlike))):
            unlike |= self._unlike(self._run(first, joined, written, has_graph=step.has_graph))
        tell_of_buffers(step, unlike)

    def _unlike(self, step: JoinedStep) -> set[str]:
        """Return what this rank saves, and microbatches leave otherwise than both as one."""
        # a replica of an encoder that takes turns with others runs a part of these
        if step.fails or not step.buffers.keys() >= {0, 1, 2}:
            return set()
        return {name for name in unlike_buffers(self._module, step) if self._is_primary(name)}

    def _is_primary(self, name: str) -> bool:
        """Whether the value that is saved of a buffer or parameter is that of this rank."""
        return self._ownership.primary_ranks(name)[:1] == (self._rank,)

    def _why_lacking(self, first: FirstBatch) -> str:
        """Say why two microbatches and both as one are not known, or must not run."""
        if first.is_gathered:
            return "parameters are gathered within a step (zero_stage: 3)"
        if self._steps.batch_parts.is_compiled:
            return "modules are compiled"
        if self._has_file():
            return "a module keeps an open file"
        return "two of them cannot be joined to one, or replicas may have batches of unlike sizes"


FEATURE = FirstBatchChecks
