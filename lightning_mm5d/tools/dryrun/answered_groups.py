"""Process groups of one rank alone: other ranks are answered for by what this rank has itself.

The backend is registered at torch's public door. A sum, a largest or a gathered value is made of this rank's own, so
that agreements are kept; a broadcast leaves what is there. Torch's ``fake`` backend leaves gathered values unset, on
which agreements would fail. Results of steps that end on another rank are answered. Everything is counted by group and
operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.engine.run_groups import Groups, Wish

BACKEND = "mm5d_dryrun"


Messages = dict[tuple[str, Any, str], tuple[int, int]]
"""number and bytes of what a rank sends, by what a group is for, its ranks and the operation; payloads by rank"""


def add(messages: Messages, key: tuple[str, Any, str], count: int, size: int) -> None:
    """Count some messages, with all of their bytes."""
    before, bytes_before = messages.get(key, (0, 0))
    messages[key] = before + count, bytes_before + size


class _Done(dist.Work):
    """What has ended as it began."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class AnsweredGroup(dist.ProcessGroup):
    """A process group in which this rank is alone.

    Args:
        options: of torch.
        messages: counts.
        results: returns the messages by which a rank would learn the result of a step.
    """

    def __init__(self, options: Any, messages: Messages, results: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._messages, self._results, self._due = messages, results, deque[Tensor]()

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch keeps it in a backend, of which this group has none
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def shutdown(self) -> None:
        pass

    def _did(self, operation: str, tensors: Iterable[Tensor]) -> _Done:
        add(self._messages, (self.group_desc, self._ranks, operation), 1, sum(one.nbytes for one in tensors))
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return self._did("all_reduce", tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        if opts.rootRank != self.rank() and self.group_desc.startswith("replica "):
            self._due.extend(() if self._due else self._results())
            tensors[0].copy_(self._due.popleft())
        return self._did("broadcast", tensors)

    def barrier(self, opts: Any = None) -> _Done:
        return self._did("barrier", ())

    def allgather(self, outputs: Any, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        for one in outputs[0]:
            one.copy_(tensors[0])
        return self._did("all_gather", tensors)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        output.view(self.size(), *tensor.shape).copy_(tensor)
        return self._did("all_gather", [tensor])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        output.copy_(tensor.view(self.size(), *output.shape)[self.rank()])
        return self._did("reduce_scatter", [tensor])

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *_: Any) -> _Done:
        output.copy_(tensor.flatten()[:1].expand(output.numel()).view(output.shape))
        return self._did("all_to_all", [tensor])

    def _unanswered(self, *_: Any, **__: Any) -> _Done:
        rule = "A dry run answers collectives and payloads of stages, and nobody is there for other messages"
        raise ConfigError("dryrun", f"a message on the group {self.group_desc!r}", rule, "Ask mm5d inspect")

    send = recv = _unanswered


class AnsweredGroups(Groups):
    """Makes the groups that one rank is in, all over the backend of dry runs."""

    def make(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            if (key := (wish.ranks, wish.tag)) not in self._made:
                here = dist.get_rank() in wish.ranks
                made = dist.new_group(list(wish.ranks), backend=BACKEND, group_desc=wish.tag or None) if here else None
                self._made[key] = made


@contextmanager
def answered(messages: Messages, results: Callable[[], Iterable[Tensor]]) -> Generator[None, None, None]:
    """Enter where process groups are made, which ranks take for those of gloo; statements of ranks agree.

    Args:
        messages: counts what goes over them.
        results: as for `AnsweredGroup`.
    """

    def made(options: Any, _: Any) -> dist.ProcessGroup:
        return AnsweredGroup(options, messages, results)

    dist.Backend.register_backend(BACKEND, made, extended_api=True, devices=["cpu"])
    gloo, agree = (
        patch.object(dist, "get_backend_config", lambda group=None: "cpu:gloo"),
        patch.object(Agreement, "check"),
    )
    with gloo, agree:
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
