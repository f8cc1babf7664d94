"""Hooks of the LightningModule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import CLASSES, WIDTH, Samples
from ordinary.uses import Ordinary, Run, fitted, observed, row

SECTION = "Hooks of the LightningModule"
STEPS = "training, validation, test and prediction"


def phases(run: Run, module: Ordinary, hook: str = "", **flags: Any) -> None:
    """Fit, validate, test and predict with one trainer; what cannot call `hook` is left out."""
    trainer = run.trainer(**flags)
    only = next((name for name in ("test", "predict", "fit", "train", "before", "after") if f"on_{name}_" in hook), "")
    if only not in ("test", "predict"):
        trainer.fit(module, run.training(16), run.loader(8))
    if not only:
        trainer.validate(module, run.loader(8), verbose=False)
    if only in ("test", ""):
        trainer.test(module, run.loader(16), verbose=False)
    if only in ("predict", ""):
        trainer.predict(module, run.loader(16))


def noted(hook: str) -> Any:
    """A scenario with a module that notes each call of `hook`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append([self.trainer.global_step, self.trainer.state.fn, self.training, len(args), sorted(kwargs)])

    def scenario(run: Run) -> dict[str, Any]:
        module = type("Noting", (Tested,), {hook: call})()
        phases(run, module, hook)
        return {"seen": module.seen}

    return scenario


class Tested(Ordinary):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


for hook in (
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_model_zero_grad",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "prepare_data",
):
    over = "first" if hook == "prepare_data" else ""
    row(SECTION, f"calls of `{hook}`", over=over)(noted(hook))


@row(SECTION, "`setup` notes its stage")
class SetUp(Ordinary):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.seen.append(stage)


@row(SECTION, "`teardown` counts its calls")
def teardown(run: Run) -> dict[str, Any]:
    class Ending(Tested):
        def teardown(self, stage: str) -> None:
            self.seen.append(stage)

    module = Ending()
    phases(run, module)
    return {"seen": module.seen}


@row(SECTION, "`configure_model` builds the head", slots=["build"])
class Configured(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.head = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.decoder.head is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.decoder.head = nn.Linear(WIDTH, CLASSES).double()


@row(SECTION, "`configure_callbacks` adds a callback", slots=["callbacks"])
class WithCallbacks(Ordinary):
    def configure_callbacks(self) -> list[Any]:
        from lightning.pytorch.callbacks import EarlyStopping

        return [EarlyStopping("val_loss", patience=1)]


@row(SECTION, "`on_train_batch_start` returns -1 to end the epoch")
class EndsEpoch(Ordinary):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


@row(SECTION, "`on_train_batch_start` reads the batch", over="mean")
class ReadsBatch(Ordinary):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["images"].mean()))


@row(SECTION, '`on_train_batch_end` reads `outputs["loss"]`', over="mean")
class ReadsLoss(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


@row(SECTION, "`on_train_batch_end` reads a tensor that the step returns beside the loss", over="mean", slots=["step"])
class ReadsLogits(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        return {"loss": F.cross_entropy(logits, batch["label"]), "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(outputs["logits"].mean()), outputs["logits"].dim()]


@row(SECTION, "`on_validation_batch_end` reads what `validation_step` returns", over="mean", slots=["validation"])
class ReadsValidation(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        return {"logits": logits, "loss": F.cross_entropy(logits, batch["label"])}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen += [float(outputs["loss"]), float(outputs["logits"].sum() / len(outputs["logits"]))]


@row(SECTION, "`on_test_batch_end` reads what `test_step` returns", over="joined")
def test_outputs(run: Run) -> dict[str, Any]:
    class Testing(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch).argmax(dim=1)

        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append(int(outputs.sum() + (16 if len(outputs) else 0)))

    module = Testing()
    run.trainer().test(module, run.loader(16, 16), verbose=False)
    return {"seen": [] if run.replicas > 1 else module.seen}


@row(SECTION, "`on_predict_batch_end` reads the predictions", over="mean")
def predict_outputs(run: Run) -> dict[str, Any]:
    class Predicting(Ordinary):
        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append(float(outputs.mean()))

    module = Predicting()
    run.trainer().predict(module, run.loader(16))
    return {"seen": module.seen}


@row(SECTION, "`on_before_backward` reads the loss", over="mean")
class ReadsBackward(Ordinary):
    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(float(loss))


@row(SECTION, "`on_after_backward` zeroes the gradients of a layer")
class ZeroesGradients(Ordinary):
    def on_after_backward(self) -> None:
        for p in self.decoder.layers[1].parameters():
            if p.grad is not None:
                p.grad.zero_()


@row(SECTION, "`on_before_optimizer_step` scales all gradients in place")
class ScalesGradients(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


@row(SECTION, "`on_before_optimizer_step` clamps gradients in place")
class ClampsGradients(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


@row(SECTION, "`configure_gradient_clipping` calls `self.clip_gradients`")
class ClipsByHook(Ordinary):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


@row(SECTION, "`optimizer_step` warms the learning rate up", slots=["optimizer_step"])
class WarmsUp(Ordinary):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 3)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@row(SECTION, "`optimizer_step` steps every second batch", slots=["optimizer_step"])
class StepsRarely(Ordinary):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@row(SECTION, "`optimizer_zero_grad` with `set_to_none=False`")
class ZeroesInPlace(Ordinary):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@row(SECTION, "`lr_scheduler_step` of one's own", slots=["optimizer"])
class StepsScheduler(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.seen.append(scheduler.get_last_lr()[0])


@row(SECTION, "`backward` of one's own", slots=["backward"])
class OwnBackward(Ordinary):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


@row(SECTION, "`on_before_batch_transfer` changes the batch", slots=["batch"])
class BeforeTransfer(Ordinary):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "images": batch["images"] * 0.5}


@row(SECTION, "`on_after_batch_transfer` changes the batch", slots=["batch"])
class AfterTransfer(Ordinary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "images": batch["images"] + 1} if self.trainer.training else batch


@row(SECTION, "`transfer_batch_to_device` of one's own", slots=["batch"])
class OwnTransfer(Ordinary):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {name: value.to(device) for name, value in batch.items()}


@row(SECTION, "`on_save_checkpoint` and `on_load_checkpoint` keep a number")
def checkpoint_hooks(run: Run) -> dict[str, Any]:
    class Kept(Ordinary):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["number"] = self.global_step

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["number"])

    first = Kept()
    trainer = run.trainer()
    trainer.fit(first, run.training())
    trainer.save_checkpoint(run.folder / "kept.ckpt")
    return fitted(run, Kept(), max_epochs=2, ckpt_path=run.folder / "kept.ckpt")


@row(SECTION, "`train_dataloader` and `val_dataloader` of the module")
def own_loaders(run: Run) -> dict[str, Any]:
    class Loading(Ordinary):
        def train_dataloader(self) -> Any:
            return run.training()

        def val_dataloader(self) -> Any:
            return [run.loader(16), run.loader(Samples(8, seed=1))]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

    module = Loading()
    trainer = run.trainer()
    trainer.fit(module)
    return observed(trainer, module)


@row(SECTION, "`test_dataloader` and `predict_dataloader` of the module", over="mean")
def own_test_loaders(run: Run) -> dict[str, Any]:
    class Loading(Tested):
        def test_dataloader(self) -> Any:
            return run.loader(16)

        def predict_dataloader(self) -> Any:
            return run.loader(16)

    module, trainer = Loading(), run.trainer()
    trainer.test(module, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "seen": [float(out.mean()) for out in trainer.predict(module)]}


@row(SECTION, "`forward` is called by the step", slots=["step"])
class CallsForward(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.forward(batch), batch["label"])


@row(
    SECTION,
    "`on_train_epoch_end` keeps the mean of the losses that the steps appended",
    over="mean",
    slots=["step"],
)
class AppendsLosses(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(torch.stack(self.outs).mean()))
        self.outs.clear()


@row(
    SECTION,
    "`on_validation_epoch_end` logs the mean of the losses that the steps appended",
    slots=["validation"],
)
class AppendsValidation(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("mean_val", torch.stack(self.outs).mean(), sync_dist=True)
        self.outs.clear()
