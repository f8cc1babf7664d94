"""Hooks of a user's own callbacks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ordinary.rows.module_hooks import Tested, phases
from ordinary.uses import Ordinary, Run, fitted, observed, row

SECTION = "Hooks of callbacks"


def noted(hook: str) -> Any:
    """A scenario with a callback that notes each call of `hook`."""

    def scenario(run: Run) -> dict[str, Any]:
        seen: list[Any] = []

        def call(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            seen.append([trainer.global_step, trainer.state.fn, module.training, len(args), sorted(kwargs)])

        phases(run, Tested(), hook, callbacks=[type("Noting", (Callback,), {hook: call})()])
        return {"seen": seen}

    return scenario


for hook in (
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_train_start",
    "on_train_end",
    "on_validation_start",
    "on_validation_end",
    "on_test_start",
    "on_test_end",
    "on_predict_start",
    "on_predict_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
):
    row(SECTION, f"calls of `{hook}`")(noted(hook))


@row(SECTION, "`on_exception` gets the error of a step")
def on_exception(run: Run) -> dict[str, Any]:
    seen: list[str] = []

    class Failing(Ordinary):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise ArithmeticError("a batch that cannot be")

    class Keeps(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(type(exception).__name__)

    try:
        run.trainer(callbacks=[Keeps()]).fit(Failing(), run.training())
    except ArithmeticError:
        seen.append("raised")
    return {"seen": seen}


@row(SECTION, "`state_dict` and `load_state_dict` keep a count in the checkpoint")
def callback_state(run: Run) -> dict[str, Any]:
    class Counts(Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    first = run.trainer(callbacks=[Counts()])
    first.fit(Ordinary(), run.training())
    first.save_checkpoint(run.folder / "counted.ckpt")
    counts = Counts()
    module, second = Ordinary(), run.trainer(callbacks=[counts], max_epochs=2)
    second.fit(module, run.training(), ckpt_path=run.folder / "counted.ckpt")
    return observed(second, module) | {"seen": [counts.count]}


@row(SECTION, "`on_save_checkpoint` and `on_load_checkpoint` of a callback")
def callback_checkpoint(run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    class Keeps(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = [1, "two", torch.ones(2)]

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            seen.append(checkpoint["mine"])

    first = run.trainer(callbacks=[Keeps()])
    first.fit(Ordinary(), run.training())
    first.save_checkpoint(run.folder / "kept.ckpt")
    return fitted(run, Ordinary(), callbacks=[Keeps()], max_epochs=2, ckpt_path=run.folder / "kept.ckpt") | {
        "seen": seen
    }


@row(SECTION, "`self.trainer.should_stop = True` in `training_step`, in the midst of the second epoch")
def stops_in_training(run: Run) -> dict[str, Any]:
    class Stops(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop |= self.current_epoch == 1 and batch_idx == 2
            return super().training_step(batch, batch_idx)

    return fitted(run, Stops(), max_epochs=4)


@row(SECTION, "`self.trainer.should_stop = True` in `validation_step`")
def stops_in_validation(run: Run) -> dict[str, Any]:
    class Stops(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 1 and not self.trainer.sanity_checking:
                self.trainer.should_stop = True

    return fitted(run, Stops(), max_epochs=4)


@row(SECTION, "`trainer.should_stop = True` in `on_train_batch_end`")
class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


@row(SECTION, "sets the learning rate in `on_train_epoch_start`")
class SetsRate(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.03


# a logged float is one of float32, which rounds apart what differs in the last bit of float64
@row(SECTION, "calls `pl_module.log` in `on_train_batch_end`", over="mean", tolerance=1e-6)
class Logs(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("from_callback", float(outputs["loss"]), on_step=False, on_epoch=True, sync_dist=True)


@row(SECTION, "reads `trainer.callback_metrics` in `on_train_epoch_end`")
class ReadsMetrics(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [float(trainer.callback_metrics[name]) for name in ("val_loss", "train_loss")]


@row(SECTION, "adds a number to gradients in `on_after_backward`", slots=["accumulate_grad_batches"])
class AddsToGradients(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad.add_(0.001)
