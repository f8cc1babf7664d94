"""Says which rank has the value of a buffer that several stages write.

Every stage runs the user's step, up to the layer where it ends. So several ranks write a buffer that no module with
parameters holds (a mean of features, a counter). The last of its stages runs the whole step, and its value is taken,
unless what it wrote depends on values of other ranks. Then it is the value of a stage that made the same writes and had
what they need. Where no rank had it, `sources` refuses the buffer by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import RemoteValue, is_remote, make_plain


class BufferState:
    """The buffers of a module on one rank, since the run began.

    Args:
        root: the LightningModule, before its first step.
        plan: all stages.
    """

    def __init__(self, root: nn.Module, plan: Plan) -> None:
        self._root, self._plan = root, plan
        self._stages = [plan.topology.instances(stage)[0][0] for stage in plan.topology.members]
        shared = frozenset(plan.ownership.written_by_all)
        self._start = {
            name: (buffer, _writes(buffer))
            for name, buffer in root.named_buffers(remove_duplicate=False)
            if name in shared
        }

    def sources(self, device: torch.device) -> Mapping[str, int]:
        """Return the rank that has the value of each buffer whose primary rank has not; collective.

        Args:
            device: where messages of the default group live.

        Raises:
            ConfigError: no rank had all that a write to a buffer needs.
        """
        if not self._start or not self._plan.topology.edges:
            return {}
        now = dict(self._root.named_buffers(remove_duplicate=False))
        own = torch.tensor([self._figures(name, now.get(name)) for name in self._start], device=device)
        everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, own)
        by_rank = torch.stack(everywhere).tolist()  # [rank, buffer, (writes, is new, is remote)]
        found: dict[str, int] = {}
        for index, name in enumerate(self._start):
            primary = self._plan.ownership.primary_ranks(name)[0]
            writes, is_new, is_absent = by_rank[primary][index]
            if is_absent:
                same = [rank for rank in self._stages if by_rank[rank][index] == [writes, is_new, 0]]
                if not same:
                    raise ConfigError(
                        name,
                        f"a buffer that rank {primary} writes with values that only other ranks have",
                        "A buffer's value is that of a rank which made all writes to it and had all that they need",
                        "Write it before the layers that are split over stages, in the module that computes the value, "
                        'or set `feeds="all"` on the modality whose features it is written from',
                    )
                found[name] = same[-1]
        return found

    def _figures(self, name: str, buffer: Tensor | None) -> list[int]:
        if buffer is None:
            return [0, 1, 1]
        first, writes = self._start[name]
        return [_writes(buffer) - (writes if buffer is first else 0), buffer is not first, is_remote(buffer)]


def settle(buffers: Iterable[Tensor]) -> None:
    """Make ordinary tensors of buffers that were written with values of other ranks, before they get new values."""
    for buffer in buffers:
        if isinstance(buffer, RemoteValue):
            make_plain(buffer)


def _writes(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
