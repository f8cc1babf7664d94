"""What rows of parameters cannot do is refused by name, before processes start where the module tells.

Ranks 0 and 1 are replicas of everything and share one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning

from data_parallel.test_sharing import Trained, shared
from features.refusals.test_own_norms import REFUSALS, plan_of
from features.toys import SHARED, Run, together
from lightning_mm5d.config.errors import ConfigError, RemoteParameterError
from lightning_mm5d.features.shard_reads import check_shared


class Manual(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.head.weight.register_hook(lambda gradient: gradient / gradient.norm())


class Sparse(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.embedding.sparse = True


@pytest.mark.parametrize(
    ("module", "field"),
    [
        (Manual, "automatic_optimization"),
        (Hooked, "decoder.head.weight.register_hook"),
        (Sparse, "decoder.embedding.weight.sparse"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_modules_that_need_full_gradients_are_refused_before_processes_start(
    module: type[Trained], field: str, stage: int
) -> None:
    with pytest.raises(ConfigError) as error:
        check_shared(module(), plan_of(shared(stage)))
    assert error.value.field == field
    assert "zero_stage=0" in str(error.value)


def test_pruning_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage=0"):
        REFUSALS.check_callbacks([ModelPruning("l1_unstructured", amount=0.1)], plan_of(shared(1)))


def refused(run: Run, module: Any, **options: Any) -> str:
    """The error of a fit, of the same kind on all ranks."""
    try:
        run.trainer(**options).fit(module, run.training(), run.loader(8))
    except (ConfigError, RemoteParameterError) as error:
        return str(error)
    return ""


class Optimized(Trained):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class LateHook(Trained):
    def on_train_start(self) -> None:
        self.decoder.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def refusals(run: Run) -> dict[str, str]:
    found = {
        "LBFGS": Optimized(torch.optim.LBFGS),
        "Adafactor": Optimized(torch.optim.Adafactor),
        "hook": LateHook(),
    }
    return {name: refused(run, module) for name, module in found.items()}


def test_optimizers_and_hooks_that_need_full_parameters_are_refused() -> None:
    for found in together(shared(3), refusals):
        assert "full matrix" in found["LBFGS"]
        assert "full matrix" in found["Adafactor"]
        assert "decoder.head.weight.register_hook" in found["hook"]


class SparselyOptimized(Sparse):
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam([self.decoder.embedding.weight])


def refused_sparse(run: Run) -> str:
    return refused(run, SparselyOptimized())


def test_an_optimizer_of_sparse_gradients_is_refused_where_ranks_sum_them() -> None:
    """two replicas of everything, which share nothing: ranks 0-1"""
    for found in together(SHARED, refused_sparse):
        assert "SparseAdam" in found
        assert "decoder.embedding.weight" in found
