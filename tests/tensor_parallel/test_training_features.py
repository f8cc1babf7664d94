"""What a trainer and a LightningModule do around the model is what they do on one process, with divided layers too.

The default run holds all of it in a pipeline with sequence shards; without these it is `exhaustive`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from features.toys import Layout, Outcome, Run, assert_same, figures, outcomes, together, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from parity.harness import Batches
from sweeps import swept
from zoo import CASES
from zoo.case import VOCABULARY, TinyModule

LAYOUTS = {
    "tp 2": Layout({"language": Modality(tp_size=2)}, 2),
    "tp 2 x pp 2 with sequence shards": Layout(
        {"language": Modality(tp_size=2, pp_size=2, tensor={"sequence_parallel": True})}, 4
    ),
}


class Judge(TinyModule):
    """A loss of its own over all logits, and metrics of every kind."""

    def __init__(self) -> None:
        super().__init__(CASES["llama"].build().model, use_cache=False)
        self.accuracy = MulticlassAccuracy(num_classes=VOCABULARY, average="micro", ignore_index=-100)
        self.count, self.certainty = SumMetric(), MeanMetric()
        self.steps_seen: list[float] = []

    def judged(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, divergence from a teacher, logits and their labels."""
        output = self.model(**batch, **self.fixed)
        logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
        teacher = torch.linspace(0, 3, VOCABULARY).to(logits).softmax(-1).expand(logits.shape)
        divergence = F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")
        return output.loss + 0.1 * divergence, divergence, logits, labels

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, divergence, logits, labels = self.judged(batch)
        right = (logits.argmax(-1) == labels)[labels != -100]
        in_five = (logits.topk(5).indices == labels.unsqueeze(-1)).any(-1)[labels != -100]
        self.log_dict({"loss": loss, "divergence": divergence, "right": right.float().mean()})
        self.log("in_five", in_five.float().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "largest": logits.amax((1, 2))}

    def shared_step(self, batch: Any, stage: str) -> None:
        loss, _, logits, labels = self.judged(batch)
        self.accuracy(logits.flatten(0, 1), labels.flatten())
        self.count.update(len(labels))
        self.certainty.update(logits.softmax(-1).amax(-1))
        self.log_dict({f"{stage}_accuracy": self.accuracy, f"{stage}_count": self.count, f"{stage}_loss": loss})
        self.log(f"{stage}_certainty", self.certainty)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(**batch, **self.fixed).logits
        return {"token": logits[:, -1].argmax(-1), "logits": logits}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Descending(Judge):
    """In float32, and with an optimizer that does not amplify what rounding leaves of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(Judge):
    """Continues the text."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        prompt = batch["input_ids"][:, :8]  # without padding
        written = [
            self.model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=cached)  # type: ignore[operator]
            for cached in (True, False)
        ]
        sampled = self.model.generate(prompt, min_new_tokens=6, max_new_tokens=6, do_sample=True, top_k=8)  # type: ignore[operator]
        return {"greedy": written[0], "without cache": written[1], "sampled": sampled}


class Heard(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.largest: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.largest.append(outputs["largest"].clone())


def loader(count: int, seed: int = 0) -> DataLoader:
    return DataLoader(Batches([CASES["llama"].batch(4, seed=seed + i) for i in range(count)]), batch_size=None)


def trained(run: Run, module: Judge | None = None, **options: Any) -> Any:
    module, heard = module or Judge(), Heard()
    trainer = run.trainer(callbacks=[heard], use_distributed_sampler=False, **options)
    trainer.fit(module, loader(3), loader(2, seed=10))
    return {
        "losses": heard.losses,
        "largest": heard.largest,
        "metrics": figures(trainer),
        "weights": weights(module),
        "steps": trainer.global_step,
    }


def plain(run: Run) -> Any:
    return trained(run)


def clipped_by_norm(run: Run) -> Any:
    return trained(run, gradient_clip_val=0.05)


def clipped_by_value(run: Run) -> Any:
    return trained(run, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


def accumulated(run: Run) -> Any:
    return trained(run, accumulate_grad_batches=2)


def checkpointed(run: Run) -> Any:
    module: Any = Judge()
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trained(run, module)


def losses(result: dict[str, Any]) -> dict[str, Any]:
    """Without choices between nearly equal logits."""
    return {key: result[key] for key in ("losses", "weights", "steps")}


def single(run: Run) -> Any:
    return losses(trained(run, Descending()))


def brain_mixed(run: Run) -> Any:
    return losses(trained(run, Descending(), precision="bf16-mixed"))


def half_mixed(run: Run) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return losses(trained(run, Descending(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)]))


def evaluated(run: Run) -> Any:
    module = Judge()
    trainer = run.trainer(use_distributed_sampler=False)
    return {
        "validated": trainer.validate(module, loader(3), verbose=False),
        "tested": trainer.test(module, loader(2), verbose=False),
        "predicted": trainer.predict(module, loader(2)),
    }


TOLERANCES = {
    plain: 1e-6,
    clipped_by_norm: 1e-5,  # where gradients are small, Adam shows what the model rounds to float32
    clipped_by_value: 1e-6,
    accumulated: 1e-6,
    checkpointed: 1e-6,
    single: 1e-5,
    brain_mixed: 0.01,
    half_mixed: 2e-3,
    evaluated: 1e-6,
}


@pytest.fixture(scope="module", params=swept(LAYOUTS, "tp 2"))
def found(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """language: ranks 0-1, tensor parallel; or ranks 0-1 and 2-3 as stages of two tensor parallel ranks."""
    torch.set_default_dtype(torch.float64)
    try:
        return outcomes(LAYOUTS[request.param], *TOLERANCES)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "tolerance"), [(s.__name__, t) for s, t in TOLERANCES.items()])
def test_a_feature_gives_what_it_gives_on_one_process(found: dict[str, Outcome], name: str, tolerance: float) -> None:
    one, ranks = found[name].one, found[name].ranks
    for rank in ranks:
        whole = {key: value for key, value in one.items() if key != "weights"}
        assert_same({key: value for key, value in rank.items() if key != "weights"}, whole, tolerance)
    if "weights" in one:
        assert_same(ranks[0]["weights"], one["weights"], tolerance)


def test_clipping_had_something_to_clip(found: dict[str, Outcome]) -> None:
    for name in ("clipped_by_norm", "clipped_by_value"):
        with pytest.raises(AssertionError):
            assert_same(found[name].one["weights"], found["plain"].one["weights"], 1e-6)


def test_mixed_precision_is_mixed(found: dict[str, Outcome]) -> None:
    for name in ("brain_mixed", "half_mixed"):
        for outcome in (found[name].one, found[name].ranks[0]):
            with pytest.raises(AssertionError):
                assert_same(outcome["weights"], found["single"].one["weights"], 1e-5)


def test_metrics_count_every_sample_once(found: dict[str, Outcome]) -> None:
    for rank in found["evaluated"].ranks:
        assert rank["validated"][0]["val_count"] == 12
        assert rank["tested"][0]["test_count"] == 8


# --- text ---


def written(run: Run) -> Any:
    module = Writer()
    return run.trainer(use_distributed_sampler=False).predict(module, loader(2))


def written_with_shards(run: Run) -> Any:
    if run.layout is not None:
        run = Run(Layout({"language": Modality(tp_size=2, tensor={"sequence_parallel": True})}, 2), run.options)
    return written(run)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_generated_text_is_that_of_one_process() -> None:
    """language: ranks 0-1, tensor parallel."""
    for outcome in outcomes(LAYOUTS["tp 2"], written, written_with_shards).values():
        assert len(outcome.one) == 2
        for rank in outcome.ranks:
            for got, expected, first in zip(rank, outcome.one, outcome.ranks[0], strict=True):
                assert got["greedy"].shape == (4, 14)
                assert torch.equal(got["greedy"], expected["greedy"])
                assert torch.equal(got["without cache"], expected["greedy"])
                assert torch.equal(got["sampled"], first["sampled"]), "ranks of a group draw equal samples"
                assert not torch.equal(got["sampled"], got["greedy"])


# --- what is refused, and what does nothing ---


class Whole(Judge):
    """Updates an element by others of its matrix."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.optimizer = name

    def configure_optimizers(self) -> Any:
        if self.optimizer == "Muon":
            matrices = [p for name, p in self.named_parameters() if p.dim() == 2 and ".layers." in name]
            return torch.optim.Muon(matrices, lr=0.01)
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)


def refusals(run: Run) -> list[str]:
    found = []
    for name in ("Adafactor", "Muon"):
        try:
            run.trainer(use_distributed_sampler=False).fit(Whole(name), loader(1))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_optimizers_of_whole_matrices_are_refused_on_every_rank() -> None:
    """language: ranks 0-1, tensor parallel."""
    for errors in together(LAYOUTS["tp 2"], refusals):
        assert [error.split("'")[1] for error in errors] == ["Adafactor", "Muon"]
        assert all("tp_size=1" in error for error in errors)


def of_one_rank(run: Run) -> Any:
    module = Judge()
    trainer = run.trainer(use_distributed_sampler=False)
    with patch.object(TensorParallel, "__init__", side_effect=AssertionError):
        trainer.fit(module, loader(1))
    return weights(module)


def test_sequence_shards_of_one_rank_are_the_whole_sequence() -> None:
    """language: rank 0."""
    results = [
        together(Layout({"language": Modality(tensor={"sequence_parallel": flag})}, 1), of_one_rank)[0]
        for flag in (True, False)
    ]
    assert_same(*results, 0.0)
