"""What published projects do around a model, in forms that no other row has."""

from __future__ import annotations

import copy
import csv
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import BLEUScore, WordErrorRate

from features.toys import CLASSES, WIDTH
from ordinary.uses import Ordinary, Run, callbacks, fitted, observed, row

SECTION = "From published projects"
OWN = {"replicas": "each replica keeps what its own samples give, as under DDP"}
WORDS = ["a", "cat", "dog", "bird", "on", "the", "mat"]


# --- metrics of text and of the epoch ---


@row(SECTION, "captions in `validation_step`: `BLEUScore` of strings, logged in `on_validation_epoch_end`")
class Captions(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.bleu, self.wer = BLEUScore(n_gram=1), WordErrorRate()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        chosen = self(batch).argmax(-1)
        said = [" ".join(WORDS[int(i)] for i in (c, c + 1, 2)) for c in chosen]
        meant = [" ".join(WORDS[int(i)] for i in (c, c + 1, 2)) for c in batch["label"]]
        self.bleu.update(said, [[text] for text in meant])
        self.wer.update(said, meant)

    def on_validation_epoch_end(self) -> None:
        self.log("bleu", self.bleu.compute())
        self.bleu.reset()
        self.log("wer", self.wer.compute())
        self.wer.reset()


@row(SECTION, "predictions of an epoch are gathered: `self.all_gather(torch.cat(self.outs))`", over="first")
class Gathered(Ordinary):
    def on_validation_epoch_start(self) -> None:
        self.outs: list[Tensor] = []
        self.labels: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outs.append(self(batch))
        self.labels.append(batch["label"])

    def on_validation_epoch_end(self) -> None:
        outs = self.all_gather(torch.cat(self.outs)).reshape(-1, CLASSES)
        labels = self.all_gather(torch.cat(self.labels)).reshape(-1)
        self.log("gathered_acc", (outs.argmax(-1) == labels).double().mean(), rank_zero_only=True)
        self.log("gathered_loss", F.cross_entropy(outs, labels), sync_dist=True)


@row(
    SECTION,
    "recall of images for texts over all samples of an epoch: `zip` of stored features",
    over="first",
    differs=OWN,
)
class Recall(Ordinary):
    def on_validation_epoch_start(self) -> None:
        self.store: dict[str, list[Tensor]] = {"image": [], "text": []}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        image = F.normalize(self.encoder(batch["images"]), dim=-1)
        text = F.normalize(self(batch), dim=-1)
        self.store["image"].append(image[:, :CLASSES])
        self.store["text"].append(text)
        return {"image": image, "text": text}

    def on_validation_epoch_end(self) -> None:
        image, text = torch.cat(self.store["image"]), torch.cat(self.store["text"])
        ranks = (image @ text.T).argsort(dim=1, descending=True)
        hits = (ranks[:, :5] == torch.arange(len(image)).unsqueeze(1)).any(1)
        self.seen.append([float(hits.double().mean()), len(image)])


@row(SECTION, "metrics by stage in a dict, made in `setup`, logged as objects by `log_dict` of a `MetricCollection`")
class ByStage(Ordinary):
    def setup(self, stage: str) -> None:
        made = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES, average="micro"), "f1": MulticlassF1Score(CLASSES, average="macro")}
        )
        self.val_metrics = made.clone(prefix="val/", postfix="_all")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metrics.update(self(batch), batch["label"])
        self.log_dict(self.val_metrics, on_step=False, on_epoch=True)


@row(SECTION, "`MeanMetric` weighted by tokens: `update(loss, weight=mask.sum())`", tolerance=1e-6)
class Weighted(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()
        self.double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = F.cross_entropy(self(batch), batch["label"], reduction="none")
        weight = (batch["tokens"] > 3).sum(1).double()
        self.mean.update(losses, weight=weight)
        self.total.update(weight)
        self.log("weighted", self.mean, on_epoch=True)
        self.log("tokens", self.total, on_epoch=True)


# --- teachers, prototypes and memories ---


@row(SECTION, "distillation: a frozen teacher in a list, not a submodule, under `torch.no_grad`")
class Distilled(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.encoder).requires_grad_(False).eval()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher[0](batch["images"] * 1.1)
        loss = self.loss(batch) + F.mse_loss(self.encoder(batch["images"]), wanted)
        self.log("train_loss", loss, sync_dist=True)
        return loss


@row(SECTION, "distillation of a whole frozen copy of the model, a submodule, with a temperature")
class WholeTeacher(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleDict({"encoder": self.encoder, "decoder": self.decoder}))
        self.teacher.requires_grad_(False)
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(1.05)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher["decoder"](batch["tokens"], self.teacher["encoder"](batch["images"]))
        logits = self(batch)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        hard = F.cross_entropy(logits, batch["label"])
        self.log_dict({"soft": soft, "hard": hard}, sync_dist=True)
        return 0.5 * soft + 0.5 * hard


class Prototypes(nn.Module):
    """Class means in a buffer, moved once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(CLASSES, WIDTH, dtype=torch.float64))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - self.means[labels]).pow(2).sum(1).mean()


@row(SECTION, "a loss module with class means in a buffer, moved in `on_train_batch_end`", differs=OWN)
class Centers(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.center = Prototypes()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        features = self.encoder(batch["images"])
        loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        return {"loss": loss + 0.1 * self.center(features, batch["label"]), "features": features.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for label in range(CLASSES):
            chosen = outputs["features"][batch["label"] == label]
            if len(chosen):
                self.center.means[label].lerp_(chosen.mean(0), 0.5)


@row(
    SECTION,
    "a queue of features (MoCo): `self.queue[i:i+n] = k` and `self.ptr[0] = ...` in `on_train_batch_end`",
    differs=OWN,
)
class Queue(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.register_buffer("queue", torch.randn(16, WIDTH, generator=generator, dtype=torch.float64))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        keys = F.normalize(self.encoder(batch["images"]), dim=1)
        scores = keys @ self.queue.clone().T
        loss = self.loss(batch) + F.cross_entropy(scores, torch.zeros(len(keys), dtype=torch.long))
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "keys": keys.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        start = int(self.ptr)
        keys = outputs["keys"]
        self.queue[start : start + len(keys)] = keys
        self.ptr[0] = (start + len(keys)) % 16


@row(SECTION, "learned weights of losses: `exp(-s) * loss + s` with `nn.Parameter(torch.zeros(2))`")
class Uncertainty(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        first = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        second = features.pow(2).mean()
        total = sum(torch.exp(-s) * part + s for s, part in zip(self.log_vars, (first, second), strict=True))
        self.log("w0", self.log_vars[0].exp(), sync_dist=True)
        self.log_dict({f"var/{i}": v for i, v in enumerate(self.log_vars.detach())}, sync_dist=True)
        return total


# --- attributes of the trainer in steps ---


@row(SECTION, "`self.trainer.is_last_batch`, `num_val_batches`, `max_epochs` and `training` in the step")
class Attributes(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        share = (self.global_step + 1) / (trainer.max_epochs * trainer.num_training_batches)
        loss = self.loss(batch) * (2.0 if trainer.is_last_batch else 1.0) * share
        self.log("share", share)
        self.log("last", float(trainer.is_last_batch))
        self.log("vals", float(sum(trainer.num_val_batches)))
        self.log("kind", float(trainer.training) + 2 * float(trainer.sanity_checking) + 4 * float(self.training))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        name = "sanity" if self.trainer.sanity_checking else "val_loss"
        self.log(name, self.loss(batch) + self.trainer.current_epoch, sync_dist=True)


@row(SECTION, "`self.log` of the ramp of a schedule by `self.trainer.estimated_stepping_batches` under accumulation")
def ramp(run: Run) -> dict[str, Any]:
    class Ramp(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ramp = min(1.0, self.global_step / self.trainer.estimated_stepping_batches)
            self.log("ramp", ramp, prog_bar=True)
            stepping = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
            self.log("stepping", float(stepping))
            return self.loss(batch) * (0.5 + ramp)

    return fitted(run, Ramp(), max_epochs=2, accumulate_grad_batches=2)


@row(
    SECTION,
    "`self.log` with f-strings of the batch's own names: one metric for each class that the batch has",
    over="mean",
)
class PerClass(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = F.cross_entropy(self(batch), batch["label"], reduction="none")
        for label in range(CLASSES):
            chosen = losses[batch["label"] == label]
            self.log(f"val/class_{label}", chosen.sum() / len(losses), batch_size=len(losses), sync_dist=True)


@row(
    SECTION,
    "`self.print` and a table of the first samples once an epoch: `if batch_idx == 0`",
    over="first",
    differs=OWN,
)
class Table(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch)
        if batch_idx == 0:
            self.table = [(int(a), int(b)) for a, b in zip(logits.argmax(-1), batch["label"], strict=True)]

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.table[:4])


# --- resuming and checkpoints ---


@row(SECTION, "`on_save_checkpoint` drops the encoder's weights, `on_load_checkpoint` puts them back")
def dropped(run: Run) -> dict[str, Any]:
    class Dropping(Ordinary):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            for name in [name for name in state if name.startswith("encoder.patch")]:
                del state[name]
            checkpoint["note"] = {"epoch": self.current_epoch, "names": len(state)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["note"])
            for name, value in self.state_dict().items():
                checkpoint["state_dict"].setdefault(name, value)

    module, trainer = Dropping(), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "some.ckpt")
    other = Dropping()
    again = run.trainer(max_epochs=2)
    again.fit(other, run.training(), ckpt_path=run.folder / "some.ckpt")
    return observed(again, other) | {"seen": other.seen}


@row(SECTION, "hyperparameters nested in a dict and a namespace, read after `load_from_checkpoint`")
def nested(run: Run) -> dict[str, Any]:
    class Nested(Ordinary):
        def __init__(self, model: Any = None, optim: Any = None, name: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters({"model": model, "optim": optim, "lr": optim["lr"]})
            self.save_hyperparameters("name")

    module = Nested({"width": [1, 2], "act": "gelu"}, {"lr": 0.05, "betas": (0.9, 0.95)})
    trainer = run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "nested.ckpt")
    trainer.strategy.barrier()
    loaded = torch.load(run.folder / "nested.ckpt", weights_only=False)
    return observed(trainer, module) | {"seen": [loaded["hyper_parameters"], dict(module.hparams)]}


@row(SECTION, "`CSVLogger` with step and epoch columns read back after fit: the rows of `metrics.csv`")
def table_of_csv(run: Run) -> dict[str, Any]:
    class Logging(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("epoch_only", loss * 2, on_step=False, on_epoch=True, sync_dist=True)
            return loss

    module = Logging()
    logger = CSVLogger(run.folder, name="", version="", flush_logs_every_n_steps=3)
    trainer = run.trainer(logger=logger, max_epochs=2, log_every_n_steps=2)
    trainer.fit(module, run.training(), run.loader(16))
    trainer.strategy.barrier()
    with open(run.folder / "metrics.csv") as file:
        rows = [{k: float(v) for k, v in line.items() if v} for line in csv.DictReader(file)]
    return observed(trainer, module) | {"seen": rows}


class Extras(Callback):
    """Saves a copy of the weights with each checkpoint, and compares the next epoch with it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        moved = {name: (value.detach() - self.before[name]).norm() for name, value in pl_module.named_parameters()}
        self.seen.append({name: float(value) for name, value in moved.items()})
        pl_module.log("moved", sum(moved.values()), sync_dist=False)


callbacks(SECTION, "a callback logs how far each parameter moved in an epoch", lambda: [Extras()])


class Ratio(Callback):
    """Logs the ratio of update to weight by the logger, in the step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            ratios = [
                (group["lr"] * p.grad.std() / p.detach().std()).log10().item() for p in group["params"] if p.ndim == 2
            ]
            self.seen.append(ratios)
        trainer.logger.log_metrics({"ratio": sum(ratios) / len(ratios)}, step=trainer.global_step)


callbacks(SECTION, "a callback logs `lr * grad.std() / weight.std()` of each matrix", lambda: [Ratio()])


class Pace(Callback):
    """Lengthens accumulation and limits during the run."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch
        trainer.gradient_clip_val = 0.1 / (1 + trainer.current_epoch)


@row(SECTION, "a callback sets `trainer.accumulate_grad_batches` and `trainer.gradient_clip_val` by epoch")
def pace(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(), max_epochs=3, gradient_clip_val=0.2, callbacks=[Pace()])


@row(SECTION, "`self.hparams` changed by a callback is in the next checkpoint")
def changed_hparams(run: Run) -> dict[str, Any]:
    class Change(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.hparams.lr = pl_module.hparams.lr / 2
            pl_module.hparams["tag"] = "half"

    module, trainer = Ordinary(), run.trainer(callbacks=[Change()])
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "c.ckpt")
    trainer.strategy.barrier()
    loaded = torch.load(run.folder / "c.ckpt", weights_only=False)
    return observed(trainer, module) | {"seen": [dict(loaded["hyper_parameters"])]}


class Probe(Ordinary):
    """A linear probe: features are kept in validation and a classifier is fitted in closed form."""

    def on_validation_epoch_start(self) -> None:
        self.features: list[Tensor] = []
        self.targets: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.features += [self.encoder(batch["images"]).cpu()]
        self.targets += [batch["label"].cpu()]

    def on_validation_epoch_end(self) -> None:
        x, y = torch.cat(self.features), F.one_hot(torch.cat(self.targets), CLASSES).double()
        solved = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
        self.seen.append(float(((x @ solved).argmax(1) == y.argmax(1)).double().mean()))
        self.log("probe", self.seen[-1], sync_dist=True)
        self.features, self.targets = [], []


row(
    SECTION, "a linear probe of the features of a validation epoch: `self.features += [...]`", over="first", differs=OWN
)(Probe)
