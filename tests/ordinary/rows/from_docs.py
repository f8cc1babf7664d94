"""What Lightning's pages tell to write, in forms that no other row has."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import ClasswiseWrapper, MeanMetric, MetricTracker, MinMaxMetric, MultitaskWrapper
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from features.toys import CLASSES, WIDTH, Encoder, Samples
from ordinary.uses import Ordinary, Run, fitted, flags, observed, row

SECTION = "From Lightning's pages"
OWN = {"replicas": "each replica keeps what its own samples give, as under DDP"}


class Tests(Ordinary):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


# --- callbacks that call the module ---


class OnlineEvaluator(Callback):
    """A head that is trained on features of the encoder, by an optimizer of the callback's own."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            pl_module.probe = nn.Linear(WIDTH, CLASSES, dtype=torch.float64).to(pl_module.device)
        self.optimizer = torch.optim.SGD(pl_module.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            features = pl_module.encoder(batch["images"])
        loss = F.cross_entropy(pl_module.probe(features.detach()), batch["label"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("online_loss", loss, sync_dist=True)
        self.seen.append(float(loss))


@row(
    SECTION,
    "an online evaluator: a callback trains a head of its own on features in `on_train_batch_end`",
    differs=OWN,
)
def online_evaluator(run: Run) -> dict[str, Any]:
    evaluator = OnlineEvaluator()
    return fitted(run, Ordinary(), callbacks=[evaluator]) | {"seen": evaluator.seen}


class Predicts(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        data = Samples(4, seed=9)
        pl_module.eval()
        with torch.no_grad():
            self.seen.append(pl_module({"images": data.images, "tokens": data.tokens}))
        pl_module.train()


@row(
    SECTION,
    "a callback predicts fixed samples after each epoch: `pl_module.eval()`, `pl_module(x)`, `pl_module.train()`",
)
def predicts(run: Run) -> dict[str, Any]:
    callback = Predicts()
    return fitted(run, Ordinary(), callbacks=[callback]) | {"seen": callback.seen}


# --- hooks in pairs, and profilers, which have such hooks ---


@row(SECTION, "hooks in pairs on all modules: the pre-hook notes when it begins, the forward hook takes that away")
class HooksInPairs(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[str, int] = {}
        self.done: set[str] = set()
        for name, module in self.named_modules():
            if name.startswith(("encoder.", "decoder.")):
                module.register_forward_pre_hook(partial(self._enter, name))
                module.register_forward_hook(partial(self._leave, name), with_kwargs=True)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.begun[name] = self.global_step

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        del self.begun[name]
        self.done.add(name)

    def on_train_end(self) -> None:
        self.seen += [sorted(self.done), len(self.begun)]


flags(SECTION, "`Trainer(profiler='pytorch')`", profiler="pytorch")


# --- schedulers and loaders ---


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        factor = 0.5 * (1 + math.cos(math.pi * self.last_epoch / self.steps)) * min(1, self.last_epoch / self.warmup)
        return [base * factor for base in self.base_lrs]


@row(SECTION, "a scheduler of one's own, stepped in `optimizer_step` after `super().optimizer_step(...)`")
class SteppedInOptimizerStep(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05, eps=1e-4)
        self.lr_scheduler = Warmup(optimizer, 2, 8)
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()
        self.seen.append(self.optimizers().param_groups[0]["lr"])


class ReadsLoaders(Ordinary):
    def on_train_start(self) -> None:
        loader = self.trainer.train_dataloader
        replicas = getattr(self.trainer.strategy, "num_replicas", 1)
        self.seen += [len(loader.dataset), isinstance(loader, DataLoader), isinstance(loader.dataset, Samples)]
        self.seen += [self.trainer.num_training_batches * loader.batch_size * replicas]

    def on_validation_end(self) -> None:
        self.seen += [len(self.trainer.val_dataloaders.dataset)]


@row(SECTION, "`self.trainer.train_dataloader` and `val_dataloaders` in hooks: their class, `dataset` and `batch_size`")
def reads_loaders(run: Run) -> dict[str, Any]:
    return fitted(run, ReadsLoaders())


@row(SECTION, "`Tuner(trainer).lr_find(module)`, then `fit` with the rate that it sets")
def tuned(run: Run) -> dict[str, Any]:
    module = Ordinary()
    module.lr = 0.1
    trainer = run.trainer()
    finder = Tuner(trainer).lr_find(module, run.training(), num_training=6, attr_name="lr")
    trainer.fit(module, run.training(), run.loader(16))
    losses = finder.results["loss"] if run.replicas == 1 else []  # a replica has those of its own samples
    return observed(trainer, module) | {"rates": finder.results["lr"], "by_rate": losses, "lr": module.lr}


# --- checkpoints ---


class OwnIO(TorchCheckpointIO):
    """Puts something into each file, and takes it out."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "own": 3}, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, **options: Any) -> Any:
        checkpoint = super().load_checkpoint(path, map_location, **options)
        assert checkpoint.pop("own") == 3
        return checkpoint


@row(
    SECTION,
    "`plugins=[...]` with a `CheckpointIO` of one's own: `test(ckpt_path='best')`, `validate(ckpt_path='last')`",
)
def own_checkpoint_io(run: Run) -> dict[str, Any]:
    return _with_plugin(run, OwnIO())


@row(SECTION, "`plugins=[AsyncCheckpointIO()]`: `test(ckpt_path='best')`, `validate(ckpt_path='last')`")
def async_checkpoint_io(run: Run) -> dict[str, Any]:
    return _with_plugin(run, AsyncCheckpointIO())


def _with_plugin(run: Run, plugin: Any) -> dict[str, Any]:
    module = Tests()
    saved = built_in.ModelCheckpoint(run.folder / "saved", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = run.trainer(callbacks=[saved], enable_checkpointing=True, plugins=[plugin], max_epochs=2)
    trainer.fit(module, run.training(), run.loader(16))
    tested = trainer.test(module, run.loader(16), ckpt_path="best", verbose=False)
    validated = trainer.validate(module, run.loader(16), ckpt_path="last", verbose=False)
    return observed(trainer, module) | {
        "tested": [dict(tested[0]), dict(validated[0])],
        "files": sorted(path.name for path in (run.folder / "saved").iterdir()),
    }


@row(SECTION, "`ModelCheckpoint(filename='e{epoch:02d}-l{val/loss:.3f}', auto_insert_metric_name=False, save_top_k=2)`")
def named_checkpoints(run: Run) -> dict[str, Any]:
    class Slashes(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)

    saved = built_in.ModelCheckpoint(
        run.folder / "saved",
        filename="e{epoch:02d}-l{val/loss:.3f}",
        monitor="val/loss",
        auto_insert_metric_name=False,
        save_top_k=2,
        every_n_train_steps=2,
        save_last=True,
    )
    result = fitted(run, Slashes(), callbacks=[saved], enable_checkpointing=True, max_epochs=2, val_check_interval=2)
    names = sorted((Path(path).name, float(value)) for path, value in saved.best_k_models.items())
    files = sorted(path.name for path in (run.folder / "saved").iterdir())
    return result | {"names": names, "files": files, "best": Path(saved.best_model_path).name}


@row(SECTION, "`fit` with `logger=True` and all that is on by default: files, `load_from_checkpoint`, `trainer.test()`")
def everything_on(run: Run) -> dict[str, Any]:
    module = Tests()
    trainer = run.trainer(logger=True, enable_checkpointing=True, enable_model_summary=True, max_epochs=2)
    trainer.fit(module, run.training(), run.loader(16))
    files = sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file())
    again = Tests.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).double()
    data = Samples(4)
    return observed(trainer, module) | {
        "files": [name for name in files if "events" not in name],
        "scores": again({"images": data.images, "tokens": data.tokens}),
        "tested": trainer.test(dataloaders=run.loader(16), verbose=False),
    }


class Pretrained(L.LightningModule):
    """An encoder with a step, hyperparameters and a metric of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.body = Encoder()
        self.metric = MeanMetric()

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images) * self.hparams["scale"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch["images"]).square().mean()
        self.log("pretraining", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NestedModule(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pretrained(scale=0.5).double()
        self.encoder.freeze()


@row(SECTION, "the encoder is a LightningModule with hyperparameters, frozen by its `freeze()`")
def nested_module(run: Run) -> dict[str, Any]:
    return fitted(run, NestedModule())


# --- evaluation ---


@row(SECTION, "`MetricTracker`, `ClasswiseWrapper`, `MinMaxMetric` and `MultitaskWrapper` over epochs")
class Wrapped(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MulticlassAccuracy(CLASSES, average="micro"))
        self.by_class = ClasswiseWrapper(MulticlassPrecision(CLASSES, average=None))
        self.min_max = MinMaxMetric(MulticlassAccuracy(CLASSES, average="micro"))
        self.tasks = MultitaskWrapper({"a": MulticlassAccuracy(CLASSES), "b": MeanMetric()})

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch)
        for metric in (self.tracker, self.by_class, self.min_max, self.tasks["a"]):
            metric.update(logits, batch["label"])
        self.tasks["b"].update(F.cross_entropy(logits, batch["label"], reduction="none"))
        self.log("val_loss", F.cross_entropy(logits, batch["label"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        best, step = self.tracker.best_metric(return_step=True)
        self.seen += [float(best), int(step), self.tracker.compute_all().tolist()]
        for prefix, metric in {"class": self.by_class, "range": self.min_max, "task": self.tasks}.items():
            self.log_dict({f"{prefix}/{name}": value for name, value in metric.compute().items()})
            metric.reset()


@row(
    SECTION,
    "`trainer.test` and `trainer.predict` with two loaders and a file's `ckpt_path`; `return_predictions=False`",
)
def two_loaders(run: Run) -> dict[str, Any]:
    class Both(Ordinary):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"which": dataloader_idx, "scores": self(batch).softmax(-1), "label": batch["label"]}

    trainer = run.trainer()
    trainer.fit(Both(), run.training())
    trainer.save_checkpoint(run.folder / "one.ckpt")
    loaders, path = [run.loader(16), run.loader(8)], run.folder / "one.ckpt"
    tested = run.trainer().test(Both(), loaders, ckpt_path=path, verbose=False)
    predicted = run.trainer().predict(Both(), loaders, ckpt_path=path)
    nothing = run.trainer().predict(Both(), loaders, ckpt_path=path, return_predictions=False)
    return {
        "tested": [dict(result) for result in tested],
        "predicted": predicted if run.replicas == 1 else None,
        "nothing": nothing,
    }
