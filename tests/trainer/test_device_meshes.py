"""torch's own tools work over a modality's ranks, by the mesh that the strategy gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from features.toys import LANGUAGE, VISION, Layout, Run, Toy, together
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError

GRID = Layout({"vision": Modality(dp_size=1, **VISION), "language": Modality(dp_size=2, tp_size=2, **LANGUAGE)}, 5, 2)
"""vision: rank 0; language: ranks 1-2 and 3-4, replicas of two shards"""


class Meshed(Toy):
    """Looks at its ranks with torch's own tools."""

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        mesh = strategy.device_mesh("language")
        self.found: dict[str, Any] = {"again": strategy.device_mesh("language") is mesh}
        if mesh is not None:
            total = torch.tensor([self.trainer.global_rank])
            dist.all_reduce(total, group=mesh["dp"].get_group())
            rows = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)])
            self.found |= {
                "names": mesh.mesh_dim_names,
                "ranks": mesh.mesh.tolist(),
                "over replicas": int(total),
                "rows": rows.to_local().tolist(),
                "sum": float(rows.sum().full_tensor()),
            }
        for name in ("vision", "langauge"):
            try:
                strategy.device_mesh(name)
            except ConfigError as error:
                self.found[name] = str(error)


def look(run: Run) -> Any:
    module = Meshed()
    run.trainer().fit(module, run.training())
    return module.found


def test_a_mesh_has_the_dims_of_its_modality_and_groups_of_its_own() -> None:
    """ranks as `GRID` says"""
    outside, *inside = together(GRID, look)
    for found in (outside, *inside):
        assert found["again"]
        assert found["vision"].startswith("device_mesh: got 'vision'. It is on rank 0 alone")
        assert "Did you mean 'language'?" in found["langauge"]
    assert "ranks" not in outside
    for rank, found in enumerate(inside, 1):
        assert found["names"] == ("dp", "tp")
        assert found["ranks"] == [[1, 2], [3, 4]]
        assert found["over replicas"] == (4 if rank in (1, 3) else 6)
        assert found["rows"] == ([0.0, 1.0, 2.0, 3.0] if rank in (1, 3) else [4.0, 5.0, 6.0, 7.0])
        assert found["sum"] == 28.0
