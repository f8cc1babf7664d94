# Copyright The Lightning AI team.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Lightning's tests of gradients over ranks, of mixed precision and of `all_gather`, under their own names.

From tests_pytorch of Lightning 2.6.5: strategies, plugins, utilities. Changed: the strategy and its two layouts; CPU in
place of GPU; where a test expects a number for two DDP ranks it expects it for the number of replicas, and only the
gradients that a rank holds; annotations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_suite.support import BoringModel, in_both_layouts, trainer


class GradientModel(BoringModel):
    def __init__(self, automatic_optimization: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic_optimization

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(out["loss"])
            optimizer.step()  # type: ignore[union-attr]
        return out

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        held = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.stack([grad.sum() for grad in held]).sum()
        everywhere = self.all_gather(total)
        assert isinstance(everywhere, Tensor)
        assert len(everywhere) == self.trainer.strategy.layout.num_replicas  # type: ignore[attr-defined]
        assert torch.allclose(everywhere, everywhere[0].expand_as(everywhere))


@pytest.mark.parametrize(
    ("layout", "automatic_optimization"), [("replicas", True), ("replicas", False), ("stages", True)]
)
def test_ddp_gradients_synced(tmp_path: Path, layout: str, automatic_optimization: bool) -> None:
    run = trainer(layout, tmp_path, max_steps=2, limit_val_batches=0)
    run.fit(GradientModel(automatic_optimization))
    assert run.state.finished


class GatherCollection(BoringModel):
    def on_train_epoch_end(self) -> None:
        replicas = self.trainer.strategy.layout.num_replicas  # type: ignore[attr-defined]
        losses = torch.rand(2, 2).t()
        gathered: Any = self.all_gather(
            {
                "tensor_int": losses.int(),
                "tensor_float": losses,
                "tensor_list": [losses, losses],
                "np_ndarray": np.array([1, 2, 3]),
                "bool": [True, False],
                "float": [0.0, 1.0, 2.0],
                "int": [0, 1, 2],
            }
        )
        assert gathered["tensor_int"].dtype == torch.int32
        assert gathered["tensor_int"].numel() == replicas * losses.numel()
        assert gathered["tensor_float"].dtype == torch.float
        assert torch.stack(gathered["tensor_list"]).shape == (2, replicas, 2, 2)
        assert gathered["np_ndarray"].dtype == torch.int64
        assert gathered["np_ndarray"].numel() == replicas * 3
        assert gathered["bool"][0].dtype == torch.uint8  # torch.bool can't be all_gathered
        assert torch.stack(gathered["bool"]).shape == (2, replicas)
        assert torch.stack(gathered["float"]).shape == (3, replicas)
        assert torch.stack(gathered["int"]).shape == (3, replicas)


@in_both_layouts
def test_all_gather_collection(tmp_path: Path, layout: str) -> None:
    run = trainer(layout, tmp_path, limit_train_batches=4, limit_val_batches=0, max_epochs=1, accumulate_grad_batches=2)
    run.fit(GatherCollection())
    assert run.state.finished


class GatherWithGradients(BoringModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        tensor = self(batch)
        gathered = self.all_gather(tensor, sync_grads=True)
        assert isinstance(gathered, Tensor)
        replicas = self.trainer.strategy.layout.num_replicas  # type: ignore[attr-defined]
        assert gathered.shape == (replicas, *tensor.shape)
        return gathered.sum()


@in_both_layouts
def test_all_gather_sync_grads(tmp_path: Path, layout: str) -> None:
    run = trainer(layout, tmp_path, limit_train_batches=1, limit_val_batches=0, max_epochs=1)
    run.fit(GatherWithGradients())
    assert run.state.finished


class ScaledGradients(BoringModel):
    """Gradients are scaled after backward, unscaled before the step, and clipped by value then."""

    def on_after_backward(self) -> None:
        scale = self.trainer.precision_plugin.scaler.get_scale()  # type: ignore[attr-defined]
        assert scale != 1.0  # the return value if not enabled
        self.original = [p.grad / scale for p in self.parameters() if p.grad is not None]

    def on_before_optimizer_step(self, *_: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert len(grads) == len(self.original) > 0
        for actual, expected in zip(grads, self.original, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        expected = [g.clamp(-1e-3, 1e-3) for p in self.parameters() if (g := p.grad) is not None]
        super().configure_gradient_clipping(*args, **kwargs)
        for actual, clipped in zip([p.grad for p in self.parameters() if p.grad is not None], expected, strict=True):
            torch.testing.assert_close(actual, clipped, equal_nan=True)


@in_both_layouts
@pytest.mark.parametrize("accumulate", [1, 2])
def test_amp_gradient_unscale(tmp_path: Path, layout: str, accumulate: int) -> None:
    run = trainer(
        layout,
        tmp_path,
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=0,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0)),
        gradient_clip_val=1e-3,
        gradient_clip_algorithm="value",
        accumulate_grad_batches=accumulate,
    )
    run.fit(ScaledGradients())
    assert run.state.finished
