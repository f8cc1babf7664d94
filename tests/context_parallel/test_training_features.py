"""What a LightningModule and a trainer do around shared sequences is what they do on one process.

Optimization, metrics, precision, generation and checkpoints. Unless a test says otherwise, its ranks 0-1 share each
sequence. What a trainer does in a pipeline of such ranks is `exhaustive`; tensor parallel pipelines have it in the
default run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from context_parallel.runs import PAIR, PIPE, shared, steps, text
from features.toys import Layout, Outcome, Run, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import Modality
from parity.harness import Batches
from tensor_parallel import test_training_features as usual
from tensor_parallel.layouts import Compared, check_all
from zoo import CASES
from zoo.case import Batch, TinyModule
from zoo.text import PAD

# --- what a trainer does ---

USUAL = {
    usual.plain: 1e-6,
    usual.clipped_by_norm: 1e-6,
    usual.clipped_by_value: 1e-6,
    usual.accumulated: 1e-6,
    usual.checkpointed: 1e-6,
    usual.single: 1e-5,
    usual.brain_mixed: 0.01,
    usual.half_mixed: 2e-3,
    usual.evaluated: 1e-6,
}


@pytest.fixture(scope="module", params=["one stage", pytest.param("two stages", marks=pytest.mark.exhaustive)])
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """Ranks 0-1; or ranks 0-1 and 2-3 as stages. Two microbatches, AdamW, a loss over all logits, metrics."""
    torch.set_default_dtype(torch.float64)
    try:
        yield outcomes({"one stage": PAIR, "two stages": PIPE}[request.param], *USUAL)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "tolerance"), [(scenario.__name__, off) for scenario, off in USUAL.items()])
def test_a_feature_gives_what_it_gives_on_one_process(found: dict[str, Outcome], name: str, tolerance: float) -> None:
    one = {key: value for key, value in found[name].one.items() if key != "weights"}
    for rank in found[name].ranks:
        assert_same({key: value for key, value in rank.items() if key != "weights"}, one, tolerance)
    if "weights" in found[name].one:
        assert_same(found[name].ranks[0]["weights"], found[name].one["weights"], tolerance)


def test_clipping_and_mixed_precision_make_a_difference(found: dict[str, Outcome]) -> None:
    for name, plain in (("clipped_by_norm", "plain"), ("clipped_by_value", "plain"), ("brain_mixed", "single")):
        with pytest.raises(AssertionError):
            assert_same(found[name].ranks[0]["weights"], found[plain].one["weights"], 1e-6)


def test_metrics_count_every_sample_once(found: dict[str, Outcome]) -> None:
    for rank in found["evaluated"].ranks:
        assert rank["validated"][0]["val_count"] == 12
        assert rank["tested"][0]["test_count"] == 8


class Grouped(TinyModule):
    """Half of it frozen, two groups of parameters, and a scheduler."""

    def __init__(self) -> None:
        super().__init__(CASES["llama_tied"].build().model, use_cache=False)
        for layer in self.model.model.layers[:2]:  # type: ignore[index, union-attr]
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() == 1], "lr": 0.2},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def in_groups(run: Run) -> Any:
    return steps(run, Grouped(), text(4), accumulate_grad_batches=2, gradient_clip_val=0.3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(shared(cp_mode="ulysses"), marks=pytest.mark.exhaustive),
        shared(4, tp_size=2, sequence_parallel=True),
    ],
    ids=["ulysses", "tensor parallel"],
)
def test_groups_of_parameters_beside_frozen_layers_train_as_on_one_process(layout: Layout) -> None:
    """Ranks 0-1; or ranks 0-1 and 2-3 are tensor parallel."""
    outcome = outcomes(layout, in_groups)["in_groups"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)
    for rank in outcome.ranks:
        assert_same(rank["losses"], outcome.one["losses"], 1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        pytest.param("bert", "adapt", marks=pytest.mark.exhaustive),
        ("gpt2", "at_both_ends"),
        pytest.param("llama", "beside_a_trained_norm", marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_train_as_on_one_process(name: str, ends: str) -> None:
    pytest.importorskip("peft")
    from tensor_parallel import test_adapters

    prepare = getattr(test_adapters, ends)
    check_all(2, Compared(name=name, fields={"language": {"cp_size": 2}}, prepare=prepare, exact=name == "bert"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "schedule"), [("gpt2", "zero_bubble"), pytest.param("bert", "1f1b", marks=pytest.mark.exhaustive)]
)
def test_frozen_halves_train_as_on_one_process(name: str, schedule: str) -> None:
    """Ranks 0-1 and 2-3 as stages."""
    fields: dict[str, dict[str, Any]] = {"language": {"cp_size": 2, "pp_size": 2}}
    options = {"schedule": schedule}
    check_all(4, Compared(name=name, fields=fields, variant="lower", options=options, exact=name == "bert"))


# --- generation ---


class Writer(TinyModule):
    """Writes text while it is validated, between steps of training."""

    def __init__(self) -> None:
        super().__init__(CASES["llama"].build().model)
        self.written: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        prompt = batch["input_ids"][:, :7]
        left = F.pad(prompt[:2], (2, 0), value=PAD)  # prompts of unlike lengths
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        written = [
            self.model.generate(prompt, **options, use_cache=cached)  # type: ignore[operator]
            for cached in (True, False)
        ]
        written += [self.model.generate(left, attention_mask=(left != PAD).long(), **options)]  # type: ignore[operator]
        written += [self.model.generate(prompt[:1], **options, num_beams=2)]  # type: ignore[operator]
        self.written += written
        self.log("val_loss", self.model(**batch, use_cache=False).loss)


def written_between_steps(run: Run) -> Any:
    module = Writer()
    trainer = run.trainer(use_distributed_sampler=False, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(module, DataLoader(Batches(text(2)), batch_size=None), DataLoader(Batches(text(1)), batch_size=None))
    return {"weights": weights(module), "metrics": figures(trainer), "written": module.written}


@pytest.mark.usefixtures("float64")
def test_text_that_is_written_in_a_validation_step_is_that_of_one_process() -> None:
    outcome = outcomes(PAIR, written_between_steps, num_microbatches=1)["written_between_steps"]
    assert len(outcome.one["written"]) == 12
    for rank in outcome.ranks:
        for got, expected in zip(rank["written"], outcome.one["written"], strict=True):
            assert torch.equal(got, expected)
        assert_same(rank["metrics"], outcome.one["metrics"], 1e-6)
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)


# --- checkpoints ---


class Continued(usual.Descending):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def half(run: Run) -> Any:
    module = Continued()
    trainer = run.trainer(use_distributed_sampler=False, max_steps=2, max_epochs=-1)
    trainer.fit(module, usual.loader(4))
    trainer.save_checkpoint(run.folder / "half.ckpt")
    return weights(module)


def rest(run: Run) -> Any:
    module = Continued()
    trainer = run.trainer(use_distributed_sampler=False, max_steps=4, max_epochs=-1)
    trainer.fit(module, usual.loader(4), ckpt_path=run.folder / "half.ckpt")
    return weights(module)


def test_any_layout_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Written with ranks 0-1 of one sequence; read by one process, by tensor parallel ranks 0-1 and by ranks 0-2."""
    together(PAIR, half, tmp_path)
    (tmp_path / "one").mkdir()
    alone(half, tmp_path / "one")
    written = [torch.load(folder / "half.ckpt", weights_only=True) for folder in (tmp_path, tmp_path / "one")]
    assert list(written[0]["state_dict"]) == list(written[1]["state_dict"])
    assert_same(written[0]["state_dict"], written[1]["state_dict"], 1e-5)
    expected = alone(rest, tmp_path / "one")
    assert_same(alone(rest, tmp_path), expected, 1e-5)
    for layout in (Layout({"language": Modality(tp_size=2)}, 2), shared(3, cp_size=3), PAIR):
        assert_same(together(layout, rest, tmp_path)[0], expected, 1e-5)
