"""Validation, test and prediction: signatures, outputs, and forms of calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from features.toys import Samples, figures
from ordinary.uses import Ordinary, Run, fitted, row

SECTION = "Validation, test and prediction"


def signature(title: str, step: Any, several: bool = False) -> None:
    """A row with this `validation_step`, used in validation and, under its name there, in the test."""

    def scenario(run: Run) -> dict[str, Any]:
        module = type("Signed", (Ordinary,), {"validation_step": step, "test_step": step})()
        loaders: Any = [run.loader(16), run.loader(Samples(8, seed=1))] if several else run.loader(16)
        trainer = run.trainer()
        found = trainer.validate(module, loaders, verbose=False)
        found += trainer.test(module, loaders, verbose=False)
        return {"seen": found}

    row(SECTION, title)(scenario)


def _only(self: Any, batch: Any) -> None:
    self.log("eval_loss", self.loss(batch), sync_dist=True)


def _index(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("eval_loss", self.loss(batch) * (1 + batch_idx), sync_dist=True)


def _loader(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    self.log("eval_loss", self.loss(batch) * (1 + dataloader_idx), sync_dist=True)


def _default(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
    self.log("eval_loss", self.loss(batch) * (1 + dataloader_idx), sync_dist=True)


def _anything(self: Any, *args: Any) -> None:
    self.log("eval_loss", self.loss(args[0]), sync_dist=True)


def _named(self: Any, batch: Any, batch_idx: int, **kwargs: Any) -> None:
    self.log("eval_loss", self.loss(batch), sync_dist=True)


def _without_loader(self: Any, batch: Any, dataloader_idx: int = 0) -> None:
    self.log("eval_loss", self.loss(batch), sync_dist=True)


signature("`validation_step(self, batch)`, `test_step(self, batch)`", _only)
signature("`(self, batch, batch_idx)`", _index)
signature("`(self, batch, batch_idx, dataloader_idx)` with several dataloaders", _loader, True)
signature("`(self, batch, batch_idx, dataloader_idx=0)` with several dataloaders", _default, True)
signature("`(self, batch, batch_idx, dataloader_idx=0)` with one dataloader", _default)
signature("`(self, *args)`", _anything)
signature("`(self, batch, batch_idx, **kwargs)`", _named)
signature("`(self, batch, dataloader_idx=0)`", _without_loader)


def predicting(title: str, step: Any, several: bool = False, count: int = 16, **options: Any) -> None:
    """A row with this `predict_step`; each replica predicts its samples."""

    def scenario(run: Run) -> dict[str, Any]:
        module = type("Signed", (Ordinary,), {"predict_step": step})()
        first = run.loader(count)
        loaders: Any = [first, run.loader(Samples(8, seed=1))] if several else first
        return {"seen": run.trainer().predict(module, loaders)}

    differs = {"replicas": "each replica returns the predictions of its own samples, as under DDP"}
    row(SECTION, title, differs=differs, **options)(scenario)


predicting("`predict_step(self, batch)`", lambda self, batch: self(batch))
predicting("`predict_step(self, batch, batch_idx)`", lambda self, batch, batch_idx: self(batch) + batch_idx)
predicting(
    "`predict_step(self, batch, batch_idx, dataloader_idx)`",
    lambda self, batch, batch_idx, dataloader_idx: self(batch) + dataloader_idx,
    True,
)
predicting("`predict_step(self, *args)`", lambda self, *args: self(args[0]))
predicting("`predict_step` returns classes", lambda self, batch, batch_idx: self(batch).argmax(1))
predicting("`predict_step` returns a dict", lambda self, batch, batch_idx: {"p": self(batch), "y": batch["label"]})
predicting("`predict_step` returns a tuple", lambda self, batch, batch_idx: (self(batch), batch["label"]))
predicting("`predict_step` returns a list of rows", lambda self, batch, batch_idx: list(self(batch)))
predicting("`predict_step` returns a list of numbers", lambda self, batch, batch_idx: self(batch).argmax(1).tolist())
predicting(
    "`predict_step` returns a list of strings",
    lambda self, batch, batch_idx: [f"class {i}" for i in self(batch).argmax(1).tolist()],
)
predicting("`predict_step` returns a number", lambda self, batch, batch_idx: float(self(batch).mean()))
predicting("`predict_step` returns a mean as a tensor", lambda self, batch, batch_idx: self(batch).mean())
predicting("`predict_step` returns an array of numpy", lambda self, batch, batch_idx: self(batch).numpy().tolist())
predicting("`predict_step` returns None", lambda self, batch, batch_idx: None)
predicting(
    "`predict_step` returns features of the encoder", lambda self, batch, batch_idx: self.encoder(batch["images"])
)
predicting("a smaller last batch is predicted", lambda self, batch, batch_idx: self(batch), count=20)


def evaluating(title: str, result: Any, **options: Any) -> None:
    """A row whose `validation_step` returns something that `on_validation_batch_end` reads."""

    class Returning(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return result(self(batch), batch)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append(outputs)

    def scenario(run: Run) -> dict[str, Any]:
        module = Returning()
        run.trainer().validate(module, run.loader(16), verbose=False)
        return {"seen": module.seen}

    row(SECTION, title, **options)(scenario)


OWN = {"replicas": "each replica has the outputs of its own samples, as under DDP"}
evaluating("`validation_step` returns the loss", lambda y, b: F.cross_entropy(y, b["label"]), over="mean")
evaluating("`validation_step` returns a number", lambda y, b: float(F.cross_entropy(y, b["label"])), over="mean")
evaluating("`validation_step` returns a count", lambda y, b: (y.argmax(1) == b["label"]).sum(), over="sum")
evaluating(
    "`validation_step` returns a count of Python", lambda y, b: int((y.argmax(1) == b["label"]).sum()), over="sum"
)
evaluating(
    "`validation_step` returns `len(batch)` in a dict, and a sum over samples",
    lambda y, b: {"n": len(y), "y": y.sum(0)},
    over="sum",
    differs=dict.fromkeys(
        ("split", "pp"), "what has no row for each sample is a list of microbatches', with a warning"
    ),
)
evaluating("`validation_step` returns logits and labels", lambda y, b: {"y": y, "label": b["label"]}, differs=OWN)
evaluating("`validation_step` returns None", lambda y, b: None)
evaluating("`validation_step` returns strings", lambda y, b: [f"{i}" for i in y.argmax(1).tolist()], differs=OWN)


@row(SECTION, "`trainer.validate` before fit")
def before(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer()
    found = trainer.validate(module, run.loader(16), verbose=False)
    trainer.fit(module, run.training(), run.loader(16))
    return {"seen": [found, figures(trainer)]}


@row(SECTION, "`trainer.test` after fit, with another trainer")
def another(run: Run) -> dict[str, Any]:
    class Testing(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    module = Testing()
    trainer = run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "after.ckpt")
    return {"seen": run.trainer().test(module, run.loader(16), ckpt_path=run.folder / "after.ckpt", verbose=False)}


@row(SECTION, "two fits with one module")
def twice(run: Run) -> dict[str, Any]:
    module = Ordinary()
    fitted(run, module)
    return fitted(run, module, max_epochs=2)


@row(SECTION, "`trainer.fit` twice with one trainer")
def again(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer()
    trainer.fit(module, run.training())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.training())
    return {"seen": [trainer.global_step, trainer.current_epoch], "metrics": figures(trainer)}


@row(SECTION, "a loss of validation by a metric of the epoch: `self.trainer.callback_metrics` after fit")
def after(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer()
    trainer.fit(module, run.training(), run.loader(16))
    return {"seen": [float(trainer.callback_metrics["val_loss"]), float(trainer.logged_metrics["train_loss"])]}


@row(SECTION, "the loss of a batch in a hook, after `self.eval()`")
def evaluated(run: Run) -> dict[str, Any]:
    class Evaluating(Ordinary):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            batch = next(iter(DataLoader(Samples(8), batch_size=8)))
            self.eval()
            with torch.no_grad():
                self.seen.append(float(self.loss(batch)))
            self.train()

    return fitted(run, Evaluating(), max_epochs=2)


@row(SECTION, "gradients in validation: `torch.enable_grad` with `inference_mode=False`")
def gradients(run: Run) -> dict[str, Any]:
    class Saliency(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                images = batch["images"].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss({**batch, "images": images}), images)
            self.log("saliency", gradient.abs().sum(), sync_dist=True)

    return fitted(run, Saliency(), inference_mode=False)


@row(SECTION, "gradients in validation of what the encoder gives: Grad-CAM")
def of_features(run: Run) -> dict[str, Any]:
    class Cam(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                features = self.encoder(batch["images"])
                loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
                (gradient,) = torch.autograd.grad(loss, features)
            self.log("cam", gradient.abs().sum(), sync_dist=True)

    return fitted(run, Cam(), inference_mode=False)


@row(
    SECTION,
    "gradients in validation: `loss.backward()`, and the norm of all `p.grad`",
    differs={"replicas": "each replica has the gradients of its own samples, as under DDP"},
)
def of_parameters(run: Run) -> dict[str, Any]:
    class Norms(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                self.loss(batch).backward()
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.log("norm", torch.stack(norms).norm(), sync_dist=True)
            self.zero_grad()

    return fitted(run, Norms(), inference_mode=False)


@row(SECTION, "gradients of images in a hook: `torch.enable_grad` in `on_validation_epoch_end`")
def in_hook(run: Run) -> dict[str, Any]:
    class Saliency(Ordinary):
        def on_validation_epoch_end(self) -> None:
            batch = next(iter(DataLoader(Samples(8), batch_size=8)))
            with torch.enable_grad():
                images = batch["images"].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss({**batch, "images": images}), images)
            self.seen.append(float(gradient.abs().sum()))

    return fitted(run, Saliency(), inference_mode=False)


@row(SECTION, "`validation_step` calls `training_step`'s helper and logs by stage")
def shared(run: Run) -> dict[str, Any]:
    class Shared(Ordinary):
        def step(self, batch: Any, stage: str) -> Tensor:
            loss = self.loss(batch)
            self.log(f"{stage}_loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch, "val")

    return fitted(run, Shared())
