"""What a data set sees as rank and world size: those of the replica that it is read for.

Streams shard themselves by rank: WebDataset's `split_by_node`, `split_dataset_by_node` of datasets, a
`DistributedSampler` without arguments. All ranks of a replica must read the same samples. So while a replica's batches
are read, and in workers for as long as they live, `torch.distributed.get_rank` and `get_world_size`, ``RANK`` and
``WORLD_SIZE`` of the environment, and the trainer's `global_rank` and `world_size` answer the number of the replica and
how many there are. ``LOCAL_RANK`` still tells the rank's device.

Only the thread that reads sees them so, and neither torch.distributed nor Lightning does, whose collectives are between
ranks. A rank that was read before (in a script, in `setup`) is not changed; see `trainer.turns`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lightning_mm5d.config.errors import private

_DEFAULT_GROUP = "_get_default_group"  # what `get_rank` and `get_world_size` ask, however they were imported
_NAMES = vars(distributed_c10d)
_KNOW_RANKS = ("torch.distributed.", "lightning_mm5d.", "lightning.", "pytorch_lightning.")


class ReplicaView:
    """Stands for the default process group where `get_rank` and `get_world_size` ask for it, in one thread.

    Args:
        replica: that is read for.
        num_replicas: that share the data.
    """

    def __init__(self, replica: int, num_replicas: int) -> None:
        self.replica, self.num_replicas = replica, num_replicas
        self.thread = threading.get_ident()
        self.before: Any = _default_group()

    def __call__(self) -> Any:
        """Return what takes the place of the default group for who asks."""
        # frames: this one, then `get_rank`, or `_get_group_size` and `get_world_size`, then who asks
        asked: Any = sys._getframe(1)
        if asked.f_code is private(distributed_c10d, "_get_group_size").__code__:
            asked = asked.f_back
        answers = (distributed_c10d.get_rank.__code__, distributed_c10d.get_world_size.__code__)
        if threading.get_ident() != self.thread or asked.f_code not in answers:
            return self.before()
        group, asker = asked.f_locals.get("group"), f"{asked.f_back.f_globals.get('__name__')}."
        if asker.startswith(_KNOW_RANKS) or group not in (None, dist.group.WORLD):
            return self.before()
        self.before()  # raises where there is no group
        return self

    def rank(self) -> int:
        return self.replica

    def size(self) -> int:
        return self.num_replicas


@contextmanager
def as_replica(replica: int, num_replicas: int) -> Iterator[None]:
    """Let this thread see replica `replica` of `num_replicas` as its rank and world size."""
    names = ("RANK", "WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    view = _show(replica, num_replicas)
    try:
        yield
    finally:
        _hide(view)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def become_replica(replica: int, num_replicas: int, worker: int, num_workers: int) -> None:
    """Let a worker process see that replica until it ends, and itself as one of the replica's own workers.

    Args:
        replica: that it reads for.
        num_replicas: that share the data.
        worker: its number among those of the replica.
        num_workers: of the replica.
    """
    _show(replica, num_replicas)
    info = get_worker_info()
    assert info is not None
    if (info.id, info.num_workers) != (worker, num_workers):
        private(torch_worker, "_worker_info")
        vars(torch_worker)["_worker_info"] = type(info)(
            id=worker, num_workers=num_workers, seed=info.seed - info.id + worker, dataset=info.dataset
        )


def seen_replica() -> tuple[int, int] | None:
    """Return the replica that this thread reads for, and how many there are; None where it reads for none."""
    view = next((view for view in _views() if view.thread == threading.get_ident()), None)
    return None if view is None else (view.replica, view.num_replicas)


def is_shown() -> bool:
    """Whether any thread of this process reads for a replica, so that the environment tells that one."""
    return next(_views(), None) is not None


def _default_group() -> Any:
    if _DEFAULT_GROUP not in _NAMES:
        private(distributed_c10d, _DEFAULT_GROUP)  # says that it has moved
    return _NAMES[_DEFAULT_GROUP]


def _views() -> Iterator[ReplicaView]:
    group = _default_group()
    while isinstance(group, ReplicaView):
        yield group
        group = group.before


def _show(replica: int, num_replicas: int) -> ReplicaView:
    view = ReplicaView(replica, num_replicas)
    _NAMES[_DEFAULT_GROUP] = view
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(replica), str(num_replicas)
    return view


def _hide(view: ReplicaView) -> None:
    above = next((other for other in _views() if other.before is view), None)
    if above is None:
        _NAMES[_DEFAULT_GROUP] = view.before
    else:  # another thread has begun to read meanwhile
        above.before = view.before
