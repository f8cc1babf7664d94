"""A loss that is no mean of its microbatches' losses is told of, and the comparison changes nothing."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from features.first_batch.lossy import LOSSES, TOLD
from features.toys import CLASSES, PAIR, WIDTH, Layout, Run, Toy, alone, outcomes
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.first_batch.feature import FirstBatchChecks
from ordinary.uses import Memory
from ranks import call_ranks

ALONE = Layout(None, 1)  # type: ignore[arg-type]
LAYOUTS = {1: ALONE, 2: PAIR}


class Lossy(Toy):
    """The toy with the loss of a name in `LOSSES`."""

    def __init__(self, name: str) -> None:
        super().__init__(dropout=0.3 if "dropout" in name else 0.0)
        self.name = name

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return LOSSES[self.name](self, batch)


def _told(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for name in LOSSES:
        if world > 1 and "writes" in name:  # microbatches in flight share the tensor that it writes to
            found[name] = []
            continue
        run = Run(LAYOUTS[world])
        samples = run.loader(16).dataset
        if "none" in name:
            samples.images[4:8, 0] = 9.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.trainer(max_steps=2, use_distributed_sampler=False).fit(Lossy(name), run.loader(samples))
        found[name] = [str(one.message) for one in caught if "the loss of the first two" in str(one.message)]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_no_mean_is_told_of_once_and_what_draws_or_fails_is_not(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    ranks = call_ranks(world, _told, world)
    for name in LOSSES:
        said = [text for rank in ranks for text in rank[name]]
        assert len(said) == (name in TOLD), (name, said)
        assert all(TOLD[name] in text for text in said)


class Logging(Toy):
    """Logs means, sums and others, each under the name of what it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        sizes = batch["images"].flatten(1).norm(dim=1)
        self.log("loss", loss)
        self.log("mean", sizes.mean())
        self.log("constant", 0.1)
        self.log("sum that is summed", sizes.sum(), reduce_fx="sum")
        self.log("largest", sizes.max(), reduce_fx="max")
        self.log("largest loss", loss, reduce_fx="max")
        self.log_dict({"sum": sizes.sum(), "count": len(sizes), "root": sizes.mean() ** 0.5})
        self.log("mean that is summed", sizes.mean(), reduce_fx="sum")
        self.log("object", self.accuracy(self(batch), batch["label"]))
        self.log("computed", self.accuracy.compute())
        return loss


def _told_of_logs(rank: int, world: int) -> list[str]:
    run = Run(LAYOUTS[world])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(max_steps=2, use_distributed_sampler=False).fit(Logging(), run.loader(16))
    return [str(one.message) for one in caught if "first two microbatches" in str(one.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_number_that_microbatches_log_otherwise_than_the_batch_is_told_of_once(world: int) -> None:
    said = [text for rank in call_ranks(world, _told_of_logs, world) for text in rank]
    names = ["largest loss", "sum", "count", "root", "mean that is summed", "computed"]
    assert [text.partition("'")[2].partition("'")[0] for text in said] == names
    assert all(
        ('say reduce_fx="sum"' in text) == (name in ("sum", "count")) for name, text in zip(names, said, strict=True)
    )
    assert all("torchmetrics.Metric" in text for text in (said[0], *said[3:]))


class Evaluating(Toy):
    """Logs and returns means, rows, sums and others in evaluation, each under the name of what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(4).double()
        self.average, self.moving, self.samples = 1.0, torch.ones(()).double(), 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        sizes = batch["images"].norm(dim=1)
        self.log("mean", sizes.mean())
        self.log("loss", self.loss(batch), sync_dist=True)
        self.log("sum that is summed", sizes.sum(), reduce_fx="sum")
        self.log_dict({"sum": sizes.sum(), "count": len(sizes)})
        self.last_rows, self.last_counts = sizes, batch["images"][:, :4].sum(0)
        self.average = 0.9 * self.average + 0.1 * float(sizes.mean())
        self.moving = 0.9 * self.moving + 0.1 * sizes.mean()
        self.samples += len(sizes)
        self.seen = self.seen + batch["images"][:, :4].sum(0)
        kept = {"names": ["a"] * len(sizes), "count": len(sizes), "mean": sizes.mean(), "batch": batch_idx}
        guessed = {"counts": batch["images"][:, :4].sum(0), "sizes": [1.0, 2.0, 3.0, 4.0], "sum": sizes.sum()}
        return {**kept, **guessed, "rows": (sizes, self(batch))}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch), batch["images"][:, :4].sum(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "rows": batch["label"], "counts": batch["images"][:, :4].sum(0)}


def _told_of_evaluation(rank: int, world: int) -> list[str]:
    run, module = Run(LAYOUTS[world]), Evaluating()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(use_distributed_sampler=False).fit(module, run.loader(16), run.loader(16))
        run.trainer().test(module, run.loader(16), verbose=False)
        run.trainer().predict(module, run.loader(16))
    texts = [str(one.message) for one in caught if "first two microbatches" in str(one.message)]
    return [text[: re.search(r" is (logged as )?(a |\d)", text).start()] for text in texts]


@pytest.mark.parametrize("world", [1, 2])
def test_what_evaluation_logs_or_any_step_returns_otherwise_than_for_the_batch_is_told_of_once(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    said = [text for rank in call_ranks(world, _told_of_evaluation, world) for text in rank]
    names = ["'sum'", "'count'", *(f"what it returns['{name}']" for name in ("counts", "sizes", "sum"))]
    evaluated = [
        [f"{step}: {name}" for name in (*names, "self.last_counts", "self.average", "self.moving")]
        for step in ("validation_step", "test_step")
    ]
    assert said == [
        *evaluated[0],
        "training_step: what it returns['counts']",
        *evaluated[1],
        "predict_step: what it returns[1]",
    ]


class Remembering(nn.Module):
    """Keeps means and counts of what passes in buffers, which change nothing."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("moving", "counted", "constant"):
            self.register_buffer(name, torch.zeros(WIDTH).double())
        self.norm = nn.BatchNorm1d(WIDTH, affine=False).double()

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.moving.lerp_(features.mean(0), 0.1)
                self.counted = self.counted + 1
                self.constant.fill_(3.0)
                self.norm(features)
        else:
            self.counted = self.counted + 1
        return features


def _told_of_buffers(rank: int, world: int) -> list[str]:
    run, module = Run(LAYOUTS[world]), Toy()
    module.encoder.projector = nn.Sequential(module.encoder.projector, Remembering())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(max_steps=2, use_distributed_sampler=False).fit(module, run.loader(16))
        run.trainer().validate(module, run.loader(16), verbose=False)
    return [str(one.message) for one in caught if "is written for each microbatch" in str(one.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_buffer_in_which_microbatches_leave_something_else_than_the_batch_is_told_of_once(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    said = [text for rank in call_ranks(world, _told_of_buffers, world) for text in rank]
    assert len(said) == 2
    assert "training_step: the buffer 'encoder.projector.1.counted' (and 1 more)" in said[0]
    assert re.search(r"^validation_step: the buffer .*1.counted' is .* Write to it in on_validation_batch_end", said[1])


class Averaging(Toy):
    """Writes to a buffer, or to a frozen copy of the head, as a function of the name in `WRITES` or `STEADY` does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.write = (WRITES | STEADY | TEACHERS)[name]
        self.register_buffer("average", self.decoder.head.weight.detach().clone())
        self.register_buffer("other", self.decoder.head.weight.detach().clone())
        self.teacher = copy.deepcopy(self.decoder.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.no_grad():
            self.write(self, self.decoder.head.weight.detach(), batch["images"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def _rebound(module: Averaging, weight: Tensor, images: Tensor) -> None:
    module.average = 0.9 * module.average + 0.1 * weight


def _delayed(module: Averaging, weight: Tensor, images: Tensor) -> None:
    module.other.copy_(module.average)
    module.average.copy_(weight)


def _once(module: Averaging, weight: Tensor, images: Tensor) -> None:
    if not module.average.any():
        module.average.copy_(weight)


WRITES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "multiplied and added": lambda m, weight, _: m.average.mul_(0.9).add_(weight, alpha=0.1),
    "slow": lambda m, weight, _: m.average.mul_(0.9999).add_(weight, alpha=1e-4),
    "lerp_": lambda m, weight, _: m.average.lerp_(weight, 0.01),
    "foreach": lambda m, weight, _: torch._foreach_lerp_([m.average], [weight], 0.01),
    "of data": lambda m, weight, _: m.average.data.lerp_(weight, 0.01),
    "data put anew": lambda m, weight, _: setattr(m.average, "data", 0.9 * m.average + 0.1 * weight),
    "rows": lambda m, weight, _: m.average[1:].lerp_(weight[1:], 0.01),
    "put anew": _rebound,
    "copied": lambda m, weight, _: m.average.copy_(0.9 * m.average + 0.1 * weight),
    "of another buffer": lambda m, weight, _: m.average.lerp_(m.other, 0.01),
    "one step late": _delayed,
    "of the batch": lambda m, weight, images: m.average.lerp_(weight * (1 + images.mean()), 0.01),
}
STEADY: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a copy": lambda m, weight, _: m.average.copy_(weight),
    "a copy put anew": lambda m, weight, _: setattr(m, "average", weight.clone()),
    "a constant": lambda m, *_: m.average.fill_(0.5),
    "normalised": lambda m, *_: m.average.copy_(F.normalize(m.average)),
    "a largest value": lambda m, weight, images: m.average.copy_(torch.maximum(m.average, images.max())),
    "a sum over samples": lambda m, weight, images: m.average.add_(images.sum()),
    "once": _once,
    "clamped": lambda m, *_: m.average.clamp_(-1, 1),
    "read": lambda m, weight, _: m.average + weight,
    "a frozen weight that is clamped": lambda m, *_: m.teacher.weight.clamp_(-9, 9),
}
TEACHERS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "lerp_ of a teacher": lambda m, weight, _: m.teacher.weight.lerp_(weight, 0.01),
    "data of a teacher": lambda m, weight, _: m.teacher.weight.data.mul_(0.75).add_(weight, alpha=0.25),
    "data of a teacher put anew": lambda m, weight, _: setattr(
        m.teacher.weight, "data", m.teacher.weight.lerp(weight, 0.5)
    ),
}


def _told_of_writes(rank: int, world: int, names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run, module = Run(LAYOUTS[world]), Averaging(name)
            try:
                run.trainer(max_steps=3, use_distributed_sampler=False).fit(module, run.loader(24))
            except ConfigError as error:
                found[name] = [str(error)]
                continue
        found[name] = [text for one in caught if "is written for each microbatch" in (text := str(one.message))]
    return found


def test_an_average_that_begins_as_what_it_averages_is_told_of() -> None:
    """all: rank 0; the weights change in no first step"""
    said = call_ranks(1, _told_of_writes, 1, [*WRITES])[0]
    for name, texts in said.items():
        assert len(texts) == 1, name
        assert re.search("the buffer '(average|other)'( \\(and 1 more\\))? is written for each microbatch", texts[0])


def test_what_is_written_as_often_as_one_likes_is_not_told_of() -> None:
    """all: rank 0"""
    assert call_ranks(1, _told_of_writes, 1, [*STEADY])[0] == {name: [] for name in STEADY}


def test_a_teacher_that_begins_as_a_copy_and_is_written_in_the_step_is_refused_before_it_differs() -> None:
    """all: rank 0"""
    for name, texts in call_ranks(1, _told_of_writes, 1, [*TEACHERS])[0].items():
        assert len(texts) == 1, name
        assert "a write to 'teacher.weight'" in texts[0]
        assert "The step runs for each microbatch and stage" in texts[0]


class Filing(Toy):
    """Writes a line for each microbatch of a test, into a file that it opens or has open, and logs a sum."""

    def __init__(self, folder: str, *, is_open: bool) -> None:
        super().__init__()
        self.path, self.is_open = Path(folder, "lines.txt"), is_open

    def on_test_start(self) -> None:
        self.file = self.path.open("a") if self.is_open else None

    def test_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch["label"][:, None] + self(batch).argmax(1, keepdim=True) * 0
        for label in labels.flatten().tolist():
            if self.file is not None:
                self.file.write(f"{label}\n")
            else:
                with self.path.open("a") as file:
                    file.write(f"{label}\n")
        self.log("count", float(len(labels)))

    def on_test_end(self) -> None:
        if self.file is not None:
            self.file.close()


def _lines(rank: int, folder: str, is_open: bool) -> tuple[list[str], list[str]]:
    with patch("lightning_mm5d.features.first_batch.feature._log.info") as info, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of sync_dist, which comes once in a process
        run = Run(ALONE)
        run.trainer().test(Filing(folder, is_open=is_open), run.loader(16), verbose=False)
    return Path(folder, "lines.txt").read_text().split(), [call.args[0] for call in info.call_args_list]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_step_that_writes_to_a_file_writes_each_line_once_and_is_said_not_to_be_compared(
    is_open: bool, tmp_path: Path
) -> None:
    """all: rank 0"""
    lines, said = call_ranks(1, _lines, str(tmp_path), is_open)[0]
    assert [int(line) for line in lines] == Run(ALONE).loader(16).dataset.labels.tolist()
    assert len(said) == 1
    assert ("because a module keeps an open file" if is_open else "because test_step opens a file") in said[0]


def _unchecked(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for name, count in (("a mean", 2), ("a sum with noise", 2), ("a sum with noise", 1), ("code for four samples", 2)):
        with patch("lightning_mm5d.features.first_batch.feature._log.info") as info, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(LAYOUTS[world], {"num_microbatches": count})
            run.trainer(max_steps=2, use_distributed_sampler=False).fit(Lossy(name), run.loader(16, 4 * count))
        found[f"{name} {count}"] = [call.args[0] for call in info.call_args_list]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_said_once_that_several_microbatches_are_not_compared_and_why(world: int) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    ranks = call_ranks(world, _unchecked, world)
    said = {name: [text for rank in ranks for text in rank[name]] for name in ranks[0]}
    assert not said["a mean 2"]
    assert not said["a sum with noise 1"]
    for name in ("a sum with noise 2", "code for four samples 2"):
        assert len(said[name]) == 1, name
        assert "because training_step draws random numbers, or fails on a batch of another size" in said[name][0]


class Writing(Toy):
    """Keeps what it can where a step can: buffers, attributes, generators, parameters, logs."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.encoder.projector = nn.Sequential(self.encoder.projector, nn.BatchNorm1d(WIDTH)).double()
        self.register_buffer("queue", torch.zeros(4, CLASSES).double())
        self.rows, self.seen, self.drawn = [], {"steps": 0}, np.random.default_rng(3)
        self.decoder.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        self.decoder.calls += 1
        self.queue = torch.cat([self.queue, logits.detach()])[-4:]
        self.rows.append(float(len(batch["label"])))
        self.seen["steps"] += 1
        self.drawn.random()
        if self.trainer.is_global_zero:
            with Path(self.trainer.default_root_dir, "steps.txt").open("a") as file:
                file.write(f"{batch_idx}\n")
        if self.logger is not None:
            self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
        loss = F.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", loss)
        return loss


def _after(world: int, folder: Path) -> Any:
    seed_everything(5, verbose=False)
    run, module, memory = Run(LAYOUTS[world]), Writing(), Memory()
    trainer = run.trainer(max_steps=1, logger=memory, default_root_dir=folder)
    trainer.fit(module, run.loader(16))
    draws = [random.random(), float(np.random.rand()), float(torch.rand(())), float(module.drawn.random())]
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    kept = [module.rows, module.seen, module.decoder.calls, module.accuracy._update_count]
    return dict(module.state_dict()), draws, figures, kept, memory.lines


def _both(rank: int, world: int, folder: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = []
        for name in ("with", "without"):
            path = Path(folder, name)
            path.mkdir(exist_ok=True)
            if name == "without":
                with patch.object(FirstBatchChecks, "attach", lambda *_: None):
                    found.append(_after(world, path))
            else:
                found.append(_after(world, path))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_comparison_changes_nothing(world: int, tmp_path: Path) -> None:
    """all: rank 0 | vision: rank 0, language: rank 1"""
    for checked, unchecked in call_ranks(world, _both, world, str(tmp_path)):
        weights, others = checked[0], unchecked[0]
        assert weights.keys() == others.keys()
        for name, value in weights.items():
            assert torch.equal(value.nan_to_num(), others[name].nan_to_num()), name
        assert checked[1:] == unchecked[1:]
    for name in ("with", "without"):
        assert (tmp_path / name / "steps.txt").read_text() == "0\n" * 2, "where the step ends, once a microbatch"


def _weights_of_pairs(run: Run) -> list[Tensor]:
    module = Lossy("a loss over pairs")
    run.trainer(max_epochs=2, use_distributed_sampler=False).fit(module, run.loader(16), run.loader(8))
    return [parameter.detach().clone() for parameter in module.parameters()]


def _of_whole_batches(rank: int) -> list[Tensor]:
    return _weights_of_pairs(Run(PAIR, {"num_microbatches": 1}))


def test_a_loss_over_pairs_is_that_of_one_process_with_one_microbatch() -> None:
    """vision: rank 0, language: rank 1"""
    found = call_ranks(2, _of_whole_batches)[0]
    torch.testing.assert_close(found, alone(_weights_of_pairs), rtol=1e-9, atol=1e-9)


class Sums(Callback):
    """Sums up in forward hooks what layers give, batch by batch."""

    def __init__(self) -> None:
        self.total, self.by_batch = {"encoder.patch": 0.0, "decoder.head": 0.0}, list[dict[str, float]]()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for path in self.total:
            pl_module.get_submodule(path).register_forward_hook(partial(self.add, path))

    def add(self, path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.total[path] += output.detach().sum().item()

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_batch.append(dict(self.total))


def sums(run: Run) -> list[dict[str, float]]:
    seen = Sums()
    run.trainer(callbacks=[seen]).fit(Toy(), run.loader(16))
    return seen.by_batch


def test_forward_hooks_that_write_to_a_callback_count_each_sample_once() -> None:
    """vision: rank 0, language: rank 1"""
    outcome = outcomes(PAIR, sums)["sums"]
    for rank, path in enumerate(outcome.one[0]):
        seen = [batch[path] for batch in outcome.ranks[rank]]
        assert seen == pytest.approx([batch[path] for batch in outcome.one], rel=1e-9)
