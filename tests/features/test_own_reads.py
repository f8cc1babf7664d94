"""Tensors of a batch that a rank never reads stay where the loader left them, and no guess changes a number.

vision: rank 0; language: ranks 1-2 as stages, or 1. On a CPU a tensor would not move: so it is told apart by force.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from features.toys import PAIR, PIPE, TWINS, Layout, Run, Toy, alone, assert_same, together, weights
from lightning_mm5d.data.lazy import Waiting
from lightning_mm5d.features.own_reads import UnreadTensors
from lightning_mm5d.strategy import MultimodalStrategy


class Late(Toy):
    """Reads its images in every stage, but not in the first step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 else loss + batch["images"].mean()


class Early(Toy):
    """Reads them where a batch has moved, and moves them itself."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {name: value.to(device) for name, value in batch.items()}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "images": batch["images"] * 0.5}


def train(run: Run) -> Any:
    found: dict[str, Any] = {}
    for kind in (Toy, Late, Early):
        module, held = kind(), list[UnreadTensors]()
        trainer = run.trainer()
        if isinstance(trainer.strategy, MultimodalStrategy):
            attach = type(module).on_train_start
            vars(module)["on_train_start"] = lambda attach=attach, module=module, trainer=trainer, held=held: (
                held.extend(one for one in trainer.strategy._session._engine.around if isinstance(one, UnreadTensors)),
                attach(module),
            )[1]
        trainer.fit(module, run.training(24))
        figures = [(one._unread, one._read) for one in held]
        found[kind.__name__] = weights(module), {key: float(x) for key, x in trainer.callback_metrics.items()}, figures
    return found


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnreadTensors, "_must_move", lambda self, tensor: not isinstance(tensor, Waiting))


@pytest.mark.parametrize("layout", [PAIR, PIPE, TWINS], ids=["pair", "pipe", "twins"])
def test_ranks_without_an_encoder_leave_its_inputs_where_they_are(layout: Layout) -> None:
    one, ranks = alone(train), together(layout, train)
    for kind in one:
        assert_same(ranks[0][kind][0], one[kind][0])
        for rank, found in enumerate(ranks):
            assert_same(found[kind][1], one[kind][1])
            ((unread, read),) = found[kind][2]
            if rank == 0:
                assert not unread, "it computes the encoder"
                assert not read
            elif kind == "Toy":
                assert unread == {("images",)}
                assert not read
            elif kind == "Late" and rank < len(ranks) - 1 and layout is PIPE:
                assert unread == {("images",)}, "its step ends before it reads them"
            else:
                assert not unread, "a tensor that was read moves with its batch from then on"
                assert read == {("images",)}
