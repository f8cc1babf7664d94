"""What cannot work raises on every rank, says why, and none hangs."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn

from features.toys import PAIR, PIPE, SHARED, TWINS, Layout, Run, Samples, Scenario, Toy, together
from lightning_mm5d.checkpoint.full_file import FullFileIO
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.trainer.launch import check_checkpoint


def errors(layout: Layout, scenario: Scenario, **options: Any) -> list[str]:
    """The error of every rank, as text."""

    def scene(run: Run) -> str:
        try:
            scenario(run)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if torch.distributed.is_initialized():  # as if the process had ended
                torch.distributed.destroy_process_group()
        return "no error"

    start = time.monotonic()
    found = together(layout, scene, **options)
    assert time.monotonic() - start < 50, "a rank waited for the group's timeout"
    return found


class UsesTheEncoderLate(Toy):
    """A penalty on weights that the last stage does not hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.encoder.patch.weight.norm()


class LastStageFails(Toy):
    """Only its rank comes to this error, in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            raise KeyError("the user's own mistake")
        return loss


class FirstLayerFails(Toy):
    """An error in a layer of the first language stage, which other ranks never come to."""

    def on_train_start(self) -> None:
        self.decoder.layers[0].register_module("norm", Breaking())


class Breaking(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ValueError("no kernel for this layer")


class FullDevice(Toy):
    """The device of the first language stage has no memory left between two passes through the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.loss(batch)
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return first + self.loss(batch)


class StopsIterating(Toy):
    """Lightning takes the error of a step for the end of the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if batch_idx == 0 else next(iter([]))


class NoLoss(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"cost": self.loss(batch)}


class OverAllParameters(Toy):
    """Its optimizer's update of a parameter depends on all others."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OwnReduction(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, reduce_fx=lambda values: values.sum())
        return loss


class HooksAroundLayers(Toy):
    """A hook that wants the gradients of what the first and the last stage have."""

    def on_fit_start(self) -> None:
        self.decoder.register_full_backward_hook(lambda _, inputs, outputs: None)


class WritesHead(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.decoder.head.weight.data.mul_(0.9)
        return loss


class Perturbed(Toy):
    """Computes the loss while a weight is twice as large, which the first stage does not see the end of."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.encoder.patch.weight
        before = weight.detach().clone()
        weight.data.mul_(2)
        loss = self.loss(batch)
        weight.data.copy_(before)
        return loss


class NotANumber(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * float("nan")
        self.log("train_loss_nan", loss)
        return loss


class Uncut(Toy):
    """A batch with a tensor that has no row per sample."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {**batch, "table": torch.zeros(3, 2)}


def fit(module: type[Toy], **options: Any) -> Scenario:
    def scene(run: Run) -> None:
        run.trainer(**options).fit(module(), run.training(16), run.loader(8))

    return scene


CASES = {
    "a remote weight in the loss": (UsesTheEncoderLate, PAIR, "RemoteParameterError", "encoder.patch.weight"),
    "an optimizer over all parameters": (OverAllParameters, PAIR, "ConfigError", "AdamW"),
    "a backward hook around split layers": (HooksAroundLayers, PIPE, "ConfigError", "decoder.register_full_backward"),
    "no loss": (NoLoss, TWINS, "ConfigError", "training_step"),
    "a reduction of one's own": (OwnReduction, PIPE, "ConfigError", "reduce_fx"),
    "a batch that cannot be cut": (Uncut, PAIR, "ConfigError", "table"),
    "an iterator that is empty": (StopsIterating, PAIR, "RuntimeError", "training_step raised StopIteration"),
    "an error in a layer of the first stage": (FirstLayerFails, PIPE, "ValueError", "no kernel for this layer"),
    "a device that is full between two passes": (FullDevice, PIPE, "OutOfMemoryError", "CUDA out of memory"),
    "an error of one rank": (LastStageFails, TWINS, "KeyError", "own mistake"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failure_reaches_every_rank(name: str) -> None:
    """vision: rank 0; language: rank 1, or ranks 1-2 as stages or as replicas."""
    module, layout, kind, words = CASES[name]
    found = errors(layout, fit(module, num_sanity_val_steps=0))
    assert "no error" not in found
    named = [error for error in found if error.startswith(kind)]
    assert named, found
    assert all(words in error for error in named), named
    others = [error for error in found if not error.startswith(kind)]
    repeats = "RefusedElsewhereError" if kind == "ConfigError" else "RankLostError"
    assert all(error.startswith(repeats) and named[0] in error for error in others), others


def test_a_refusal_of_one_rank_is_a_config_error_on_all() -> None:
    """vision: rank 0; language: ranks 1-2 as stages, of which the last one writes"""

    def scene(run: Run) -> None:
        with pytest.raises(ConfigError, match=r"training_step: got \"a write to 'decoder.head.weight'\""):
            run.trainer(num_sanity_val_steps=0).fit(WritesHead(), run.training(16))
        if torch.distributed.is_initialized():  # as if the process had ended
            torch.distributed.destroy_process_group()

    together(PIPE, scene)


def test_a_rank_that_ends_between_two_writes_to_a_weight_refuses_them() -> None:
    """vision: rank 0; language: rank 1"""
    found = errors(PAIR, fit(Perturbed, num_sanity_val_steps=0), num_microbatches=1)
    assert all("a write to 'encoder.patch.weight'" in error for error in found), found


def nan_losses(run: Run) -> tuple[float, int]:
    """The loss that is seen, and how many warnings told of it."""
    trainer = run.trainer(num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(NotANumber(), run.training(16))
    return float(trainer.callback_metrics["train_loss_nan"]), sum("NaN in stage" in str(one.message) for one in told)


def test_a_loss_that_is_nan_goes_on_as_on_one_process_and_the_last_stage_warns() -> None:
    """vision: rank 0; language: ranks 1-2 as stages"""
    found = together(PIPE, nan_losses)
    assert all(value != value for value, _ in found)
    assert [count for _, count in found] == [0, 0, 1]


def test_a_checkpoint_that_is_missing_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(ConfigError, match=r"ckpt_path: got .*lost.ckpt'. There is no such .*Use 'last.ckpt'"):
        Run(PIPE).trainer().fit(Toy(), ckpt_path=tmp_path / "lost.ckpt")
    with pytest.raises(ConfigError, match=r"no such checkpoint. Name one that exists; '.*nowhere' has none"):
        Run(PIPE).trainer().validate(Toy(), ckpt_path=tmp_path / "nowhere" / "lost.ckpt")


class Fetching(Toy):
    def prepare_data(self) -> None:
        """May fetch a checkpoint."""


class OwnStore(TorchCheckpointIO):
    """Knows checkpoints by other names than paths."""


def test_a_checkpoint_that_may_be_elsewhere_is_looked_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ranks: none"""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.ckpt").touch()
    usual = {"num_nodes": 1, "checkpoint_io": FullFileIO(), "lightning_module": Toy()}
    for path, differs in (
        ("~/run.ckpt", {}),
        ("last", {}),
        ("s3://bucket/run.ckpt", {}),
        ("run-42", {"checkpoint_io": OwnStore()}),
        ("lost.ckpt", {"lightning_module": Fetching()}),
        ("lost.ckpt", {"num_nodes": 2}),
    ):
        check_checkpoint(SimpleNamespace(**usual | differs), None, lambda ckpt_path: None, path)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        check_checkpoint(SimpleNamespace(**usual), None, lambda ckpt_path: None, "lost.ckpt")


def test_too_many_microbatches_are_refused_before_any_process_starts() -> None:
    trainer = Run(PIPE, {"num_microbatches": 9}).trainer()
    with pytest.raises(ConfigError, match="num_microbatches") as caught:
        trainer.fit(Toy(), Run().loader(16, batch_size=8))
    assert "8" in str(caught.value)
    assert not torch.distributed.is_initialized()


class OneAtATime(torch.utils.data.IterableDataset):
    """Batches whose size only shows when they come."""

    def __iter__(self) -> Any:
        samples = Samples(4)
        for start in (0, 2):
            yield torch.utils.data.default_collate([samples[start], samples[start + 1]])


def unknown_batch_size(run: Run) -> None:
    run.trainer().fit(Toy(), torch.utils.data.DataLoader(OneAtATime(), batch_size=None))


def test_too_many_microbatches_are_refused_in_the_first_step_where_sizes_are_unknown() -> None:
    """vision: rank 0; language: rank 1"""
    found = errors(PAIR, unknown_batch_size, num_microbatches=4)
    assert all(error.startswith("ConfigError") and "num_microbatches" in error for error in found), found


class Smooth(Toy):
    """A loss without labels; those of `cross_entropy` would be counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


def test_tokens_cannot_weigh_where_there_are_no_labels() -> None:
    """two replicas of everything: ranks 0-1"""
    found = errors(SHARED, fit(Smooth), loss_weight="tokens")
    assert all(error.startswith("ConfigError") and "loss_weight" in error for error in found), found
