"""Captured logs: what is recorded, what microbatches merge into, and what Lightning then stores."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.trainer.logs import (
    LogCapture,
    LogOptions,
    MergedLog,
    replay,
)


class Classifier(pl.LightningModule):
    """Logs in each way that a step can: numbers, tensors, reductions, metric objects, dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.accuracy = torch.nn.ModuleDict()
        self.collection = torch.nn.ModuleDict()
        for stage in ("train_", "val_"):
            metrics = [MulticlassAccuracy(3, average="micro"), MulticlassRecall(3, average="micro")]
            self.accuracy[stage] = MulticlassAccuracy(3, average="micro")
            self.collection[stage] = MetricCollection(metrics, prefix=stage)
        self.heard: list[dict[str, Any]] = []

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.log(f"{stage}loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log(f"{stage}samples", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log(f"{stage}largest", x.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log_dict({f"{stage}smallest": x.min()}, reduce_fx=min, on_epoch=True)
        self.accuracy[stage](logits, y)
        self.log(f"{stage}accuracy", self.accuracy[stage], on_step=True, on_epoch=True)
        self.collection[stage].update(logits, y)
        self.log_dict(self.collection[stage], on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("batch", float(batch_idx))
        return self.step(batch, "train_")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val_")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", float(batch_idx))
        self.heard.append({k: v.item() for k, v in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InMicrobatches(SingleDeviceStrategy):
    """Runs each step in microbatches of two and one samples, as a pipeline on one rank would."""

    strategy_name = "in_microbatches"

    def _run(self, step: str, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        module = self.lightning_module
        assert module is not None
        capture = LogCapture(module)
        losses = []
        x, y = batch
        with capture.capture():
            for index, start in enumerate(range(0, len(x), 2)):
                part = [x[start : start + 2], y[start : start + 2]]
                capture.begin_microbatch(index, len(part[0]))
                loss = getattr(module, step)(part, batch_idx)
                losses.append(None if loss is None else loss * len(part[0]) / len(x))
        replay(module, capture.merge())
        return None if losses[0] is None else torch.stack(losses).sum()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation_step", *args, **kwargs)


def fit(strategy: SingleDeviceStrategy) -> tuple[Classifier, pl.Trainer]:
    """Two epochs of batches of 5, 5 and 1 samples, that is microbatches of 2, 2, 1 | 2, 2, 1 | 1."""
    torch.manual_seed(0)
    module = Classifier()
    data = torch.utils.data.TensorDataset(torch.randn(11, 2), torch.randint(3, (11,)))
    loader = torch.utils.data.DataLoader(data, batch_size=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[EarlyStopping("val_accuracy", patience=5)],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # Lightning 2.6 under torch 2.13
        trainer.fit(module, loader, loader)
    return module, trainer


class Plain(pl.LightningModule):
    """Nothing but places to put metrics; notes what reaches the real `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.nested = torch.nn.ModuleDict({"sum": SumMetric()})
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, kwargs))


def merged_after(*microbatches: tuple[int, Any], **kwargs: Any) -> MergedLog:
    """The only merged log when each microbatch of so many samples logs that value, if it is not None."""
    module = Plain()
    capture = LogCapture(module)
    with capture.capture():
        for index, (samples, value) in enumerate(microbatches):
            capture.begin_microbatch(index, samples)
            if value is not None:
                module.log("x", value, **kwargs)
    (log,) = capture.merge()
    return log


# --- under a Trainer ---


def test_a_trainer_sees_the_same_metrics_as_without_microbatches() -> None:
    plain, plain_trainer = fit(SingleDeviceStrategy(device="cpu"))
    split, split_trainer = fit(InMicrobatches(device="cpu"))
    assert len(plain.heard) == 6
    for expected, got in zip(plain.heard, split.heard, strict=True):
        assert list(got) == list(expected)
        assert got == pytest.approx(expected, rel=1e-5)
    for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        expected, got = getattr(plain_trainer, kind), getattr(split_trainer, kind)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")
    assert {"train_loss_epoch", "val_accuracy", "train_MulticlassRecall", "batch", "hook"} <= set(
        split_trainer.callback_metrics
    )


# --- capture ---


def test_log_is_itself_again_after_the_capture_even_after_an_error() -> None:
    module = Plain()
    capture = LogCapture(module)

    def cut_off() -> None:
        with capture.capture():
            capture.begin_microbatch(0, 1)
            module.log("captured", 1.0)
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        cut_off()
    assert "log" not in vars(module)
    module.log("real", 2.0)
    assert [name for name, *_ in module.logged] == ["real"]


def test_a_step_reads_metrics_of_earlier_batches_beside_those_that_it_has_logged() -> None:
    module, trainer = Plain(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    held = trainer.callback_metrics
    held.update({"acc": torch.tensor(1.0), "acc_epoch": torch.tensor(2.0), "acc_steps_to_goal": torch.tensor(3.0)})
    capture = LogCapture(module)
    with capture.capture():
        capture.begin_microbatch(0, 1)
        assert trainer.callback_metrics["acc"] == 1
        module.log("acc", 1.0)
        shown = trainer.callback_metrics
        assert (shown["acc_epoch"], shown["acc_steps_to_goal"]) == (2, 3)
        for read in (lambda: shown["acc"], lambda: shown.get("acc_step"), lambda: [*shown.items()]):
            with pytest.raises(ConfigError, match="just logged it"):
                read()
        shown["own"] = torch.tensor(4.0)
    assert trainer.callback_metrics["own"] == 4


def test_a_log_patched_by_somebody_else_is_put_back() -> None:
    module = Plain()
    heard: list[str] = []
    module.__dict__["log"] = lambda name, value: heard.append(name)
    with LogCapture(module).capture():
        pass
    module.log("x", 1.0)
    assert heard == ["x"]


def test_a_later_change_in_place_does_not_reach_a_captured_tensor() -> None:
    module = Plain()
    capture = LogCapture(module)
    value = torch.tensor([2.0], requires_grad=True)
    with capture.capture():
        capture.begin_microbatch(0, 1)
        module.log("x", value)
        value.data.zero_()
    (log,) = capture.merge()
    assert log.value is not None
    assert log.value.item() == 2.0
    assert not log.value.requires_grad


def test_the_last_run_of_a_microbatch_replaces_earlier_ones() -> None:
    module = Plain()
    capture = LogCapture(module)
    with capture.capture():
        for stage in range(2):
            for index in range(2):
                capture.begin_microbatch(index, 1)
                module.log("before", 1.0, reduce_fx="sum")
                if stage == 1:
                    module.log("after", 1.0, reduce_fx="sum")
    assert {log.options.name: log.value.item() for log in capture.merge() if log.value is not None} == {
        "before": 2.0,
        "after": 2.0,
    }


@pytest.mark.parametrize(
    ("value", "kwargs", "message"),
    [
        (1.0, {"reduce_fx": torch.median}, r"self\.log\('x'\)\.reduce_fx: .*mean, sum, max and min"),
        (1.0, {"reduce_fx": "median"}, r"self\.log\('x'\)\.reduce_fx: got 'median'"),
        (1.0, {"sync_dist_group": object()}, r"self\.log\('x'\)\.sync_dist_group: .*sync_dist=True"),
        (torch.ones(3), {}, r"self\.log\('x'\): got \(3,\)\. A logged tensor has one element"),
        ({"a": 1.0}, {}, r"self\.log\('x'\): got \{'a': 1\.0\}\. .*Use self\.log_dict"),
        ("text", {}, r"self\.log\('x'\): got 'text'"),
        (MeanMetric(), {}, r"self\.log\('x'\): .*Make it an attribute of the LightningModule"),
    ],
)
def test_what_other_ranks_could_not_repeat_is_refused(value: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merged_after((1, value), **kwargs)


# --- merge ---


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 3.0), ("avg", 3.0), (torch.mean, 3.0), ("SUM", 7.0), (sum, 7.0), (torch.max, 5.0), ("min", 2.0)],
)
def test_values_merge_by_the_reduction_and_means_by_samples(reduce_fx: Any, expected: float) -> None:
    log = merged_after((4, torch.tensor(2.0)), (2, torch.tensor(5.0)), reduce_fx=reduce_fx)
    assert log.value is not None
    assert (log.value.item(), log.value.dtype, log.batch_size) == (expected, torch.float32, 6)


@pytest.mark.parametrize(
    ("microbatches", "kwargs", "value", "batch_size"),
    [
        pytest.param([(4, 1), (4, 3)], {"batch_size": 1}, 2.0, 2, id="own batch size"),
        pytest.param([(4, 1.0), (4, None), (2, 4.0)], {}, 2.0, 6, id="key in some microbatches"),
        pytest.param([(2, 1.0), (0, float("nan"))], {}, 1.0, 2, id="empty microbatch"),
        pytest.param([(0, 1.0), (0, 2.0)], {}, 1.5, 0, id="no samples at all"),
        pytest.param([(1, 7), (3, 7)], {}, 7.0, 4, id="integer"),
        pytest.param([(1, True), (1, False)], {}, 0.5, 2, id="bool"),
    ],
)
def test_weights_are_samples_or_the_given_batch_size(
    microbatches: list[tuple[int, Any]], kwargs: dict[str, Any], value: float, batch_size: int
) -> None:
    log = merged_after(*microbatches, **kwargs)
    assert log.value is not None
    assert (log.value.item(), log.batch_size) == (value, batch_size)


@pytest.mark.parametrize(("batch_size", "expected"), [(None, 4.0), (2, 4.0), (6, 3.0)])
def test_a_batch_size_of_all_samples_weighs_as_the_loss_does(batch_size: int | None, expected: float) -> None:
    """Two samples each, with one and with three label tokens."""
    module = Classifier()
    capture = LogCapture(module)
    with capture.capture():
        for index, (tokens, value) in enumerate([(1, 1.0), (3, 5.0)]):
            capture.begin_microbatch(index, tokens, 2)
            module.log("loss", torch.tensor(value), batch_size=batch_size)
    (log,) = capture.merge()
    assert log.value is not None
    assert log.value.item() == expected


@pytest.mark.parametrize(
    ("sizes", "given", "expected"),
    [
        ([(3, 3, 2), (2, 1)], [1, 1], [(4.0, 3), (7 / 3, 3)]),
        ([(4, 4), (4,)], [8, 8], [(3.0, 16), (1.0, 16)]),
        ([(4, 4), (2, 2)], [1, 1], [(3.0, 2), (3.0, 2)]),
        ([(3, 3, 2), (2, 1)], [(6, 9, 4), (5, 5)], [(79 / 19, 19), (3.0, 10)]),
    ],
    ids=["one", "of the data", "equal sizes", "counts"],
)
def test_a_constant_batch_size_is_that_of_each_batch(sizes: Any, given: Any, expected: Any) -> None:
    """Microbatches have the values 1, 5, 7 (or 1, 5); a batch weighs as often as the first has microbatches."""
    module = Classifier()
    capture = LogCapture(module)
    logs = []
    for of_batch, numbers in zip(sizes, given, strict=True):
        with capture.capture():
            for index, (samples, value) in enumerate(zip(of_batch, (1.0, 5.0, 7.0), strict=False)):
                capture.begin_microbatch(index, samples)
                number = numbers[index] if isinstance(numbers, tuple) else numbers
                module.log("loss", torch.tensor(value, dtype=torch.float64), batch_size=number)
        (log,) = capture.merge()
        assert log.value is not None
        logs.append((log.value.item(), log.batch_size))
    assert [value for pair in logs for value in pair] == pytest.approx([value for pair in expected for value in pair])


def test_calls_of_a_name_in_several_steps_or_turns_have_constants_of_their_own() -> None:
    module = Classifier()
    capture = LogCapture(module)
    for step, given in (("validation_step", 3), ("training_step", 8), ("training_step", 8)):
        with capture.capture():
            for index, samples in enumerate((6, 2)):
                capture.begin_microbatch(index, samples)
                module.log("loss", 1.0 + 4 * index, batch_size=given)
                module.log("loss", 1.0 + 4 * index, batch_size=given + index)
        constant, count = capture.merge(step)
        assert (float(constant.value or 0), constant.batch_size) == (2.0, 2 * given)
        assert count.batch_size == 2 * given + 1


def test_float64_stays_float64_and_low_precision_becomes_float32() -> None:
    for dtype, stored in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        log = merged_after((1, torch.tensor(1.0, dtype=dtype)), (1, 0.0))
        assert log.value is not None
        assert log.value.dtype == stored


def test_a_key_logged_twice_in_one_step_stays_two_calls() -> None:
    module = Plain()
    capture = LogCapture(module)
    with capture.capture():
        for index in range(2):
            capture.begin_microbatch(index, 1)
            module.log("x", 1.0 + index)
            module.log("x", 10.0 + index)
    assert [log.value.item() for log in capture.merge() if log.value is not None] == [1.5, 10.5]


def test_replay_gives_the_local_metric_object_the_merged_step_value() -> None:
    module = Plain()
    metric = MergedLog(
        options=LogOptions(name="metric", metric_attribute="nested.sum"),
        value=torch.tensor(3.0),
        batch_size=2,
    )
    replay(module, [metric])
    ((name, value, kwargs),) = module.logged
    assert (name, kwargs["batch_size"]) == ("metric", 2)
    assert value is module.nested["sum"]
    assert value._forward_cache == 3.0
