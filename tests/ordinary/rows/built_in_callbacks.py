"""Lightning's own callbacks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from ordinary.uses import Ordinary, Run, callbacks, fitted, row

SECTION = "Lightning's callbacks"

callbacks(SECTION, '`EarlyStopping("val_loss")`', lambda: [built_in.EarlyStopping("val_loss", patience=1)])
callbacks(
    SECTION, "`EarlyStopping` with a threshold", lambda: [built_in.EarlyStopping("val_loss", stopping_threshold=5.0)]
)
callbacks(
    SECTION,
    "`EarlyStopping(check_on_train_epoch_end=True)`",
    lambda: [built_in.EarlyStopping("train_loss", mode="max", check_on_train_epoch_end=True)],
)
callbacks(SECTION, "`EarlyStopping` of what is not logged", lambda: [built_in.EarlyStopping("nothing")])
callbacks(
    SECTION,
    "`EarlyStopping(strict=False)` of what is not logged",
    lambda: [built_in.EarlyStopping("nothing", strict=False)],
)
callbacks(SECTION, "`LearningRateMonitor`", lambda: [built_in.LearningRateMonitor("step")])
callbacks(SECTION, "`Timer(duration=...)`", lambda: [built_in.Timer(timedelta(hours=1))])
callbacks(
    SECTION,
    "`GradientAccumulationScheduler({0: 2})`",
    lambda: [built_in.GradientAccumulationScheduler({0: 2})],
    slots=["accumulate_grad_batches"],
)
callbacks(SECTION, "`LambdaCallback`", lambda: [built_in.LambdaCallback(on_train_start=lambda t, m: None)])
callbacks(SECTION, "`ModelSummary(max_depth=2)`", lambda: [built_in.ModelSummary(max_depth=2)])
callbacks(SECTION, "`RichModelSummary`", lambda: [built_in.RichModelSummary()])
callbacks(
    SECTION,
    "`DeviceStatsMonitor`",
    lambda: [built_in.DeviceStatsMonitor()],
    differs=dict.fromkeys(
        ("one", "replicas", "split", "pp", "tp", "zero"), "logs figures of the machine, and of each rank"
    ),
)


def progress(title: str, make: Any) -> None:
    @row(SECTION, title)
    def scenario(run: Run) -> dict[str, Any]:
        return fitted(run, Ordinary(), enable_progress_bar=True, callbacks=[make()])


progress("`TQDMProgressBar`", lambda: built_in.TQDMProgressBar(refresh_rate=1))
progress("`RichProgressBar`", lambda: built_in.RichProgressBar())


def saved(title: str, flags: Any = None, **options: Any) -> None:
    """A row with a ModelCheckpoint: its files, its best path and score, and what the best file holds."""

    @row(SECTION, title)
    def scenario(run: Run) -> dict[str, Any]:
        callback = ModelCheckpoint(run.folder / "saved", **options)
        found = fitted(run, Ordinary(), enable_checkpointing=True, callbacks=[callback], **(flags or {"max_epochs": 2}))
        names = sorted(path.name for path in (run.folder / "saved").glob("*"))
        best = callback.best_model_path
        state = torch.load(best, weights_only=False)["state_dict"] if best and run.replicas == 1 else {}
        score = None if callback.best_model_score is None else float(callback.best_model_score)
        found["seen"] = [best.rpartition("/")[2], score]
        return found | {"files": [names, {name: value.clone() for name, value in state.items()}]}


saved("`ModelCheckpoint()`")
saved('`ModelCheckpoint(monitor="val_loss")`', monitor="val_loss")
saved('`ModelCheckpoint(monitor="val_loss", save_top_k=2)`', {"max_epochs": 3}, monitor="val_loss", save_top_k=2)
saved("`ModelCheckpoint(save_top_k=-1)`", save_top_k=-1)
saved("`ModelCheckpoint(save_last=True)`", save_last=True)
saved('`ModelCheckpoint(save_last="link")`', save_last="link")
saved("`ModelCheckpoint(every_n_train_steps=3)`", every_n_train_steps=3, save_top_k=-1)
saved("`ModelCheckpoint(every_n_epochs=2)`", {"max_epochs": 4}, every_n_epochs=2)
saved("`ModelCheckpoint(train_time_interval=...)`", train_time_interval=timedelta(hours=1))
saved("`ModelCheckpoint(save_weights_only=True)`", save_weights_only=True)
saved('`ModelCheckpoint(filename="{epoch}-{val_loss:.2f}")`', monitor="val_loss", filename="{epoch}-{val_loss:.2f}")
saved("`ModelCheckpoint(save_on_train_epoch_end=True)`", monitor="train_loss", save_on_train_epoch_end=True)
saved('`ModelCheckpoint(mode="max")`', monitor="val_loss", mode="max")
saved("`ModelCheckpoint` with `val_check_interval=2`", {"val_check_interval": 2}, monitor="val_loss")


@row(SECTION, "two `ModelCheckpoint`s")
def two_checkpoints(run: Run) -> dict[str, Any]:
    made = [
        ModelCheckpoint(run.folder / "best", monitor="val_loss"),
        ModelCheckpoint(run.folder / "steps", every_n_train_steps=2, save_top_k=-1),
    ]
    found = fitted(run, Ordinary(), enable_checkpointing=True, callbacks=made)
    return found | {"files": sorted(path.name for path in run.folder.rglob("*.ckpt"))}


@row(SECTION, '`trainer.test(ckpt_path="best")` after fit')
def best(run: Run) -> dict[str, Any]:
    class Testing(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    callback = ModelCheckpoint(run.folder, monitor="val_loss")
    module, trainer = Testing(), run.trainer(enable_checkpointing=True, callbacks=[callback], max_epochs=3)
    trainer.fit(module, run.training(), run.loader(16))
    return {"seen": trainer.test(dataloaders=run.loader(16), ckpt_path="best", verbose=False)}


@row(SECTION, "`OnExceptionCheckpoint`")
def on_exception(run: Run) -> dict[str, Any]:
    class Failing(Ordinary):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ArithmeticError("a batch that cannot be")

    seen: list[str] = []
    trainer = run.trainer(callbacks=[built_in.OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)
    try:
        trainer.fit(Failing(), run.training())
    except ArithmeticError as error:
        seen.append(str(error))
    return {"seen": seen, "files": sorted(path.name for path in run.folder.glob("*.ckpt"))}


@row(SECTION, "`StochasticWeightAveraging`")
def averaging(run: Run) -> dict[str, Any]:
    swa = built_in.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    return fitted(run, Ordinary(), max_epochs=4, callbacks=[swa])


@row(SECTION, "`EMAWeightAveraging`")
def moving(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(), max_epochs=2, callbacks=[built_in.EMAWeightAveraging(decay=0.8)])


@row(SECTION, "`WeightAveraging` with a function of one's own")
def weight_averaging(run: Run) -> dict[str, Any]:
    def mean(averaged: Tensor, value: Tensor, count: Any) -> Tensor:
        return averaged + (value - averaged) / (count + 1)

    return fitted(run, Ordinary(), max_epochs=2, callbacks=[built_in.WeightAveraging(avg_fn=mean)])


@row(SECTION, "`BackboneFinetuning`")
def backbone(run: Run) -> dict[str, Any]:
    class Backbone(Ordinary):
        @property
        def backbone(self) -> nn.Module:
            return self.encoder

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    callback = built_in.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    return fitted(run, Backbone(), max_epochs=3, callbacks=[callback])


class Unfreezing(built_in.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.02)


@row(SECTION, "`BaseFinetuning` that unfreezes the encoder")
def finetuning(run: Run) -> dict[str, Any]:
    class Filtered(Ordinary):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    return fitted(run, Filtered(), max_epochs=3, callbacks=[Unfreezing()])


@row(SECTION, "`LearningRateFinder`")
def rate_finder(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(), callbacks=[built_in.LearningRateFinder(num_training_steps=5)])


@row(SECTION, "`BatchSizeFinder`")
def size_finder(run: Run) -> dict[str, Any]:
    class Sized(Ordinary):
        batch_size = 4

        def val_dataloader(self) -> Any:
            return run.loader(16)

        def train_dataloader(self) -> Any:
            return run.training(batch_size=self.batch_size * (run.replicas if not run.plain else 1))

    module = Sized()
    trainer = run.trainer(callbacks=[built_in.BatchSizeFinder(max_trials=2, steps_per_trial=1)])
    trainer.fit(module)
    return {"seen": [module.batch_size]}


@row(SECTION, "`ModelPruning`")
def pruning(run: Run) -> dict[str, Any]:
    module = Ordinary()
    parts = [(module.decoder.head, "weight")]
    callback = built_in.ModelPruning("l1_unstructured", parameters_to_prune=parts, amount=0.5)
    return fitted(run, module, callbacks=[callback])


class Writes(built_in.BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.seen.append([float(prediction.mean()), len(indices or [])])

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.seen.append([[float(p.mean()) for p in predictions], len(batch_indices[0])])


for interval in ("batch", "epoch", "batch_and_epoch"):

    def written(run: Run, interval: str = interval) -> dict[str, Any]:
        writer = Writes(interval)
        run.trainer(callbacks=[writer]).predict(Ordinary(), run.loader(16, 8), return_predictions=False)
        first = [] if writer.seen is None else writer.seen
        return {"seen": [] if run.replicas > 1 else first}

    row(SECTION, f'`BasePredictionWriter("{interval}")`')(written)


@row(
    SECTION,
    "`ThroughputMonitor`",
    differs=dict.fromkeys(("one", "replicas", "split", "pp", "tp", "zero"), "logs times of the machine"),
)
def throughput(run: Run) -> dict[str, Any]:
    monitor = built_in.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["label"]), window_size=2)
    return fitted(run, Ordinary(), callbacks=[monitor])


@row(SECTION, "several callbacks together")
def together(run: Run) -> dict[str, Any]:
    made: list[Callback] = [
        built_in.EarlyStopping("val_loss", patience=5),
        built_in.LearningRateMonitor(),
        ModelCheckpoint(run.folder, monitor="val_loss", save_last=True),
        built_in.Timer(timedelta(hours=1)),
    ]
    found = fitted(run, Ordinary(), enable_checkpointing=True, callbacks=made, max_epochs=3)
    return found | {"files": sorted(path.name for path in run.folder.rglob("*.ckpt"))}
