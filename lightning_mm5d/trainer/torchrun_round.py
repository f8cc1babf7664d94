"""The name of a round of torchrun's workers, which all of them know and no other round has.

torchrun's agents keep one store over all restarts, in which keys of earlier rounds remain. The environment does not
tell rounds apart: a restart after nodes have come or gone is not counted, and agents count for themselves. So the
workers agree on a name through that store:

1. ask: each rank publishes a number that it has drawn.
2. answer: rank 0 publishes its own number, the name, under the number of every rank. It also answers numbers of earlier
   rounds, which nobody reads any more, and goes on until every rank of this round says that it has heard.
3. hear: each rank reads the name under its own number, and says so under the name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from lightning_mm5d.config.errors import RankLostError
from lightning_mm5d.engine.agreement import pauses, ranks_of

NAMED = "LIGHTNING_MM5D_ROUND"
"""variable of a process: its number, and the name of its round"""


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the store that workers meet at."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def round_name(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return the name of the round that this process belongs to; the first call waits for all ranks.

    Arguments and errors are those of `agreed_name`.
    """
    process, _, name = os.environ.get(NAMED, "").partition(" ")
    if process != str(os.getpid()):  # that of a process above this one
        name = agreed_name(store, rank=rank, world_size=world_size, timeout=timeout)
        os.environ[NAMED] = f"{os.getpid()} {name}"
    return name


def agreed_name(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name, equal on all ranks; waits for all of them.

    Args:
        store: the agents' own, with the same keys in every round.
        rank: global rank in this round.
        world_size: number of ranks in this round.
        timeout: how long to wait for other ranks.

    Raises:
        RankLostError: a rank did not come within the timeout.
    """
    own = uuid.uuid4().hex
    end = time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"asks {rank}", own)
        for pause in pauses():
            if store.check([f"answer {own}"]):
                name = store.get(f"answer {own}").decode()
                store.set(f"{name} heard by {rank}", "")
                return name
            if time.monotonic() > end:
                raise RankLostError(f"rank 0 did not come to this round of torchrun within {timeout}")
            time.sleep(pause)
    away = set(range(1, world_size))
    for pause in pauses():
        for other in sorted(away):
            if store.check([f"{own} heard by {other}"]):
                away.remove(other)
            elif store.check([f"asks {other}"]):
                store.set(f"answer {store.get(f'asks {other}').decode()}", own)
        if not away:
            return own
        if time.monotonic() > end:
            raise RankLostError(f"{ranks_of(sorted(away))} did not come to this round of torchrun within {timeout}")
        time.sleep(pause)
    raise AssertionError("pauses never end")
