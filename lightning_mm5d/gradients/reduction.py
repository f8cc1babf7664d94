"""One sum of all gradients over ranks, whose buckets are sent while backwards still run.

Buckets are sent in one order on all ranks, each as soon as its gradients are final and all buckets before it were sent;
what is left is sent at the end. So ranks may disagree about when a gradient is final, or whether it comes at all: that
changes when a message leaves, and never which message.

What is sent is taken out of its parameter. If a backward adds to that parameter again (a layer that is checkpointed
with reentrance and used twice), the addition stays there. The last message of each group says whether a rank has such
additions, and all of its ranks then sum them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_mm5d.gradients.buckets import Bucket, Sum


class Buckets:
    """Buckets in the order in which they are sent.

    Args:
        buckets: of each group, with a key of the group; the last one of a group is late.
    """

    def __init__(self, buckets: Sequence[tuple[Hashable, Bucket]]) -> None:
        self.all = [bucket for _, bucket in buckets]
        self.groups = [group for group, _ in buckets]
        self.of: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.all):
            for piece in bucket.pieces:
                self.of.setdefault(id(piece.parameter), []).append(number)


class Reduction:
    """One sum of all gradients.

    Args:
        buckets: what is summed.
        is_early: whether buckets are sent before `finish`; the others are not told.
        stages: the parameters of each stage of this rank.

    Attributes:
        final: identities of parameters in the order in which their gradients were final.
        repeated: identities of parameters that got more of a gradient that had been sent.
    """

    def __init__(
        self, buckets: Buckets, *, is_early: bool, stages: Mapping[Hashable, Sequence[nn.Parameter]] | None = None
    ) -> None:
        self.final: dict[int, None] = {}
        self.repeated: list[int] = []
        self._buckets, self._is_early, self._stages = buckets, is_early, stages or {}
        self._missing = [len(bucket.pieces) for bucket in buckets.all]
        self._started: list[Sum] = []
        self._early = 0  # buckets that were sent before `finish`
        self._ended: set[Hashable] = set()

    @contextmanager
    def watched(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Enter around the last backward that gives gradients to `parameters`."""
        found = [one for one in parameters if one.requires_grad and id(one) in self._buckets.of]
        nodes = [get_gradient_edge(one).node for one in found]  # they live as long as somebody holds them
        with ExitStack() as stack:
            for one, node in zip(found, nodes, strict=True):
                # after the node has added to the gradient, and after hooks that are the user's
                handle = node.register_hook(partial(self._is_final, id(one)))
                stack.callback(handle.remove)
            yield

    @contextmanager
    def ending(self, stage: Hashable, put_off: Iterable[nn.Parameter] | None) -> Iterator[None]:
        """Enter around the last action of this rank's `stage` that gives gradients.

        Args:
            stage: a key of `stages`.
            put_off: the only ones that get gradients in it; None for any.
        """
        self._ended.add(stage)
        others = {id(p) for key, found in self._stages.items() if key not in self._ended for p in found}
        own = [parameter for parameter in self._stages.get(stage, ()) if id(parameter) not in others]
        wanted = own
        if put_off is not None:
            due = {id(parameter) for parameter in put_off}
            wanted = [parameter for parameter in own if id(parameter) in due]
            for parameter in own:
                if id(parameter) not in due:
                    self._is_final(id(parameter))
        with self.watched(wanted):
            yield
        for parameter in own:
            self._is_final(id(parameter))

    def finish(self, factor: float = 1.0) -> dict[int, Tensor]:
        """Send what is left, and set the gradients of all parameters but the shared ones; collective.

        Args:
            factor: of each sum.

        Returns:
            The gradients of the rows that this rank owns, by identity of their parameter.
        """
        buckets, rows = self._buckets, dict[int, Tensor]()
        self._early = len(self._started)
        last = {group: number for number, group in enumerate(buckets.groups)}
        more = {buckets.groups[number] for number in range(self._early) if self._has_more(buckets.all[number])}
        for number in range(self._early, len(buckets.all)):
            group = buckets.groups[number]
            self._started.append(buckets.all[number].start(more=group in more and last[group] == number))
        totals = _totals(self._started)
        flags = self._flags(totals)
        again = {group for group, number in last.items() if flags[number][-1]}
        if again:
            self._add(totals, [number for number, one in enumerate(buckets.groups) if one in again])
            flags = self._flags(totals)
        for bucket, total, present in zip(buckets.all, totals, flags, strict=True):
            values = total[: -len(present)]
            bucket.take(values if factor == 1.0 else values.mul_(factor), present[:-1], rows)
        return rows

    def _is_final(self, key: int, *_: object) -> None:
        if key in self.final:
            return
        self.final[key] = None
        for number in self._buckets.of.get(key, ()):
            self._missing[number] -= 1
        if not self._is_early:
            return
        number = len(self._started)
        while number < len(self._missing) and not self._missing[number] and not self._buckets.all[number].is_late:
            self._started.append(self._buckets.all[number].start(more=False))
            number += 1
            for one in self._started:
                one.advance()

    def _has_more(self, bucket: Bucket) -> bool:
        found = [id(piece.parameter) for piece in bucket.pieces if piece.parameter.grad is not None]
        self.repeated += found
        return bool(found)

    def _add(self, totals: list[Tensor], numbers: Iterable[int]) -> None:
        """Sum what came after the buckets `numbers` were sent; late ones had all of it."""
        found = [number for number in numbers if not self._buckets.all[number].is_late]
        for number, total in zip(
            found, _totals([self._buckets.all[number].start(more=False) for number in found]), strict=True
        ):
            totals[number] += total

    def _flags(self, totals: Sequence[Tensor]) -> list[list[float]]:
        """The flags of each bucket, read at once: a device is waited for a single time."""
        counts = [len(bucket.pieces) + 1 for bucket in self._buckets.all]
        if not totals:
            return []
        flat = torch.cat([total[-count:].double() for count, total in zip(counts, totals, strict=True)])
        found = iter(flat.tolist())
        return [[next(found) for _ in range(count)] for count in counts]


def _totals(started: Sequence[Sum]) -> list[Tensor]:
    for one in started:
        one.summed()
    return [one.wait() for one in started]
