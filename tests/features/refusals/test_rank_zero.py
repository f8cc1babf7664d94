"""A hook under ``rank_zero_only`` that writes a buffer is refused where there are other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from features.toys import PIPE, SHARED, Layout, Run, Toy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.refusals.feature import Refusals

REFUSALS = Refusals({"microbatch_size": None, "num_microbatches": 1})


class Scaled(Toy):
    """Scales latents by what the first batch is like, as latent diffusion does."""

    def __init__(self, scales: bool = True) -> None:
        super().__init__()
        self.scale: Any = 1.0
        if scales:
            del self.scale
            self.register_buffer("scale", torch.tensor(1.0))


class Registers(Scaled):
    @rank_zero_only
    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        del self.scale
        self.register_buffer("scale", 1.0 / batch["images"].std())


class Assigns(Scaled):
    @rank_zero_only
    def on_train_start(self) -> None:
        self.scale = torch.tensor(0.5)


class OnAllRanks(Scaled):
    def on_train_start(self) -> None:
        self.scale = torch.tensor(0.5)


class Prints(Scaled):
    @rank_zero_only
    def on_train_start(self) -> None:
        self.said = print(self.scale)  # type: ignore[func-returns-value]


def check(layout: Layout, module: Toy) -> None:
    REFUSALS.check(module, Run(layout).trainer().strategy.plan(Toy()), torch.device("cpu"))


@pytest.mark.parametrize("layout", [PIPE, SHARED])
@pytest.mark.parametrize(("kind", "hook"), [(Registers, "on_train_batch_start"), (Assigns, "on_train_start")])
def test_a_buffer_that_rank_0_alone_would_write_is_refused(kind: type[Scaled], hook: str, layout: Layout) -> None:
    with pytest.raises(ConfigError, match=rf"^{hook}: .*a write to the buffer 'scale' under rank_zero_only"):
        check(layout, kind())


@pytest.mark.parametrize("module", [Registers(scales=False), OnAllRanks(), Prints()])
def test_hooks_that_all_ranks_run_or_that_write_no_buffer_are_left_alone(module: Scaled) -> None:
    check(PIPE, module)
