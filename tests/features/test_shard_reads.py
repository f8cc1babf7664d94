"""A step that keeps a sharded weight, or reduces it to what each rank would have of its own shard, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mm5d import ConfigError
from lightning_mm5d.features.shard_reads import Reads

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a norm": lambda weight: weight.norm(),
    "a norm of data": lambda weight: weight.data.norm(),
    "a norm by torch.linalg": lambda weight: torch.linalg.vector_norm(weight.detach()),
    "a sum of squares": lambda weight: (weight**2).sum(),
    "a mean size": lambda weight: weight.detach().abs().mean(),
    "a largest value": lambda weight: weight.flatten().max(),
    "norms of columns": lambda weight: weight.norm(dim=0),
    "means of columns": lambda weight: weight.mean(0, keepdim=True),
    "columns of norm 1": lambda weight: F.normalize(weight, dim=0),
}
LEFT: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda weight: F.linear(torch.ones(1, 2), weight).sum(),
    "norms of rows": lambda weight: weight.norm(dim=1),
    "sums of rows": lambda weight: weight.sum(-1),
    "rows of norm 1": lambda weight: F.normalize(weight),
    "a shape": lambda weight: weight.shape[0] + weight.numel(),
    "what another tensor is scaled by": lambda weight: (weight * torch.ones(3, 2)).sum(),
}


@pytest.mark.parametrize("name", [*REFUSED, *LEFT])
def test_a_reduction_over_the_sharded_dim_is_refused(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    watched = Reads("training_step", {"layer.weight": weight}, {"layer.weight": (0,)})
    if name in LEFT:
        with watched:
            LEFT[name](weight)
        return
    with pytest.raises(ConfigError, match=r"training_step: .* of 'layer.weight'"), watched:
        REFUSED[name](weight)


def test_a_copy_that_a_step_keeps_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    with Reads("training_step", {"layer.weight": weight}, {"layer.weight": (0,)}) as watched:
        copy = weight.detach().clone()
        product = F.linear(torch.ones(1, 2), weight)
        sizes = torch.histc(copy, 4)
        array = weight.detach().numpy()
        total, device = weight.new_zeros(()), weight.new_tensor([1.0])
    watched.check_kept({"weights": [weight], "product": product, "total": total, "device": device})
    for kept in (copy, sizes, array):
        with pytest.raises(ConfigError, match=r"what is made of 'layer.weight' in self.old"):
            watched.check_kept({"old": {"layer.weight": kept}})


def test_a_full_tensor_written_into_a_sharded_weight_is_refused_by_the_name_of_the_weight() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    with Reads("validation_step", {"layer.weight": weight}, {"layer.weight": (0,)}):
        with pytest.raises(ConfigError, match=r"validation_step: got .copy_\(\) of .*layer.weight.* of another size"):
            weight.data.copy_(torch.ones(6, 2))
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(3).copy_(torch.ones(4))
        weight.data.copy_(torch.zeros(3, 2))
