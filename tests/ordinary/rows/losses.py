"""Losses, and what `training_step` does and returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import CLASSES, WIDTH, Samples
from ordinary.uses import Ordinary, Run, fitted, row

SECTION = "Losses and steps"
WITHIN = {
    "replicas": "samples are compared within a replica, as under DDP",
    "split": "samples are compared within a microbatch",
    "pp": "samples are compared within a microbatch",
}


def loss(title: str, compute: Any, **options: Any) -> None:
    """A row with a loss of (logits [B, C], batch)."""

    class Lossy(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            value = compute(self(batch), batch)
            self.log("train_loss", value, sync_dist=True)
            return value

    row(SECTION, title, slots=["step"], **options)(Lossy)


loss("`F.cross_entropy`", lambda y, b: F.cross_entropy(y, b["label"]))
loss("`F.cross_entropy(label_smoothing=0.1)`", lambda y, b: F.cross_entropy(y, b["label"], label_smoothing=0.1))
loss("`F.mse_loss`", lambda y, b: F.mse_loss(y[:, 0], b["label"].double()))
loss("`F.l1_loss`", lambda y, b: F.l1_loss(y, torch.ones_like(y)))
loss("`F.smooth_l1_loss`", lambda y, b: F.smooth_l1_loss(y, torch.ones_like(y)))
loss(
    "`F.binary_cross_entropy_with_logits`",
    lambda y, b: F.binary_cross_entropy_with_logits(y, F.one_hot(b["label"], CLASSES).double()),
)
loss(
    '`F.kl_div(reduction="batchmean")`',
    lambda y, b: F.kl_div(y.log_softmax(1), torch.full_like(y, 1 / CLASSES), reduction="batchmean"),
)
loss("`F.nll_loss` of `log_softmax`", lambda y, b: F.nll_loss(y.log_softmax(1), b["label"]))
loss(
    "a mean by hand: `losses.sum() / len(losses)`",
    lambda y, b: F.cross_entropy(y, b["label"], reduction="none").sum() / len(y),
)
loss(
    "focal loss",
    lambda y, b: (
        (1 - y.softmax(1).gather(1, b["label"][:, None])) ** 2
        * F.cross_entropy(y, b["label"], reduction="none")[:, None]
    ).mean(),
)
loss("a penalty on logits is added", lambda y, b: F.cross_entropy(y, b["label"]) + 0.01 * y.pow(2).mean())
loss("the loss is doubled in place: `loss *= 2`", lambda y, b: F.cross_entropy(y, b["label"]).mul_(2))
MICRO = {"split": "a sum over the samples of a microbatch; microbatches are averaged", "pp": ""}
MICRO["pp"] = MICRO["split"]
SUMS = MICRO | {"replicas": "replicas are averaged, as under DDP"}
loss(
    '`F.cross_entropy(reduction="sum")`',
    lambda y, b: F.cross_entropy(y, b["label"], reduction="sum"),
    differs=SUMS,
    warns=True,
)
UNEVEN = {
    "replicas": "replicas with unlike counts weigh the same, as under DDP",
    "split": "microbatches weigh by samples, not by what is counted: say `loss_weight`",
    "pp": "microbatches weigh by samples, not by what is counted: say `loss_weight`",
}
loss(
    "`F.cross_entropy(weight=...)`, weights of classes",
    lambda y, b: F.cross_entropy(y, b["label"], weight=torch.tensor([1.0, 2.0, 3.0], dtype=y.dtype)),
    differs=UNEVEN,
    warns=True,
)
loss(
    "`ignore_index`: samples without a label",
    lambda y, b: F.cross_entropy(y, torch.where(b["label"] == 0, -100, b["label"])),
    differs=UNEVEN,
    warns=True,
)
loss(
    "a masked mean: `(losses * mask).sum() / mask.sum()`",
    lambda y, b: (F.cross_entropy(y, b["label"], reduction="none") * (b["label"] > 0)).sum() / (b["label"] > 0).sum(),
    differs=UNEVEN,
    warns=True,
)


@row(SECTION, "contrastive loss within the batch (CLIP)", slots=["step"], differs=WITHIN, warns=True)
class Contrastive(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        texts = self.decoder.embedding(batch["tokens"]).mean(1)
        logits = self.encoder(batch["images"]) @ texts.T
        return F.cross_entropy(logits, torch.arange(len(logits)))


@row(SECTION, "a triplet margin loss with a rolled batch", slots=["step"], differs=WITHIN, warns=True)
class Triplet(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        return F.triplet_margin_loss(logits, logits + 0.1, logits.roll(1, 0)) + F.cross_entropy(logits, batch["label"])


@row(SECTION, "mixup with a permutation of the batch", slots=["step", "random"], differs=WITHIN, warns=True)
class Mixup(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = 0.7 * batch["images"] + 0.3 * batch["images"].flip(0)
        logits = self({**batch, "images": images})
        return 0.7 * F.cross_entropy(logits, batch["label"]) + 0.3 * F.cross_entropy(logits, batch["label"].flip(0))


def returns(title: str, result: Any, **options: Any) -> None:
    """A row whose step returns what `result` makes of the loss."""

    class Returning(Ordinary):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return result(self.loss(batch), batch)

    row(SECTION, title, slots=["step"], **options)(Returning)


returns("returns the loss", lambda loss, b: loss)
returns('returns `{"loss": loss}`', lambda loss, b: {"loss": loss})
returns(
    "returns a dict with tensors beside the loss",
    lambda loss, b: {"loss": loss, "images": b["images"], "twice": 2 * loss},
)
returns("returns a dict with a string beside the loss", lambda loss, b: {"loss": loss, "name": "text"})
returns("returns a dict with None beside the loss", lambda loss, b: {"loss": loss, "hidden": None})


@row(SECTION, "`training_step` returns None for some batches", slots=["step"])
class Skips(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else self.loss(batch)


@row(SECTION, "hooks around the backward, and batches for which `training_step` returns None", over="first")
def skips_beside_hooks(run: Run) -> dict[str, Any]:
    class Hooked(Skips):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx in (1, 2) else self.loss(batch)

        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append(["before", self.trainer.fit_loop.batch_idx])

        def on_after_backward(self) -> None:
            self.seen.append(["after", self.trainer.fit_loop.batch_idx])
            for parameter in self.parameters():
                parameter.grad.add_(parameter.detach(), alpha=0.01)

    alone, twice = fitted(run, Hooked()), fitted(run, Hooked(), accumulate_grad_batches=2)
    return alone | {"weights": [alone["weights"], twice["weights"]], "seen": [alone["seen"], twice["seen"]]}


@row(SECTION, "`training_step` returns None for all batches", slots=["step"])
class SkipsAll(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


@row(SECTION, 'a count beside the loss, read by a hook: `outputs["correct"]`', slots=["step"], over="sum")
class Counts(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        correct = (logits.argmax(1) == batch["label"]).sum()
        return {"loss": F.cross_entropy(logits, batch["label"]), "correct": correct}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(int(outputs["correct"]))


@row(SECTION, "a number of Python beside the loss, read by a hook", slots=["step"], over="sum")
class CountsNumbers(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "size": len(batch["label"])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(int(outputs["size"]))


@row(SECTION, "`training_step(self, batch)`", slots=["step"])
class NoIndex(Ordinary):
    def training_step(self, batch: Any) -> Tensor:
        return self.loss(batch)


@row(SECTION, "`training_step(self, batch, batch_idx, *args)`", slots=["step"])
class MoreArguments(Ordinary):
    def training_step(self, batch: Any, batch_idx: int, *args: Any) -> Tensor:
        self.log("index", float(batch_idx))
        return self.loss(batch)


@row(SECTION, "`batch_idx` steers the loss", slots=["step"])
class ByIndex(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (0.5 if batch_idx % 2 else 1.0)


@row(SECTION, "`self.global_step` and `self.current_epoch` steer the loss", slots=["step"])
class ByStep(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + 0.1 * self.global_step + self.current_epoch)


@row(SECTION, "`self.trainer.num_training_batches` and `estimated_stepping_batches` in the step", slots=["step"])
class ByLength(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + batch_idx / self.trainer.num_training_batches)


@row(SECTION, "an auxiliary loss of the encoder's features", slots=["step"])
class Auxiliary(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        logits = self.decoder(batch["tokens"], features)
        return F.cross_entropy(logits, batch["label"]) + 0.1 * features.pow(2).mean()


@row(SECTION, "an auxiliary head on the encoder", slots=["step", "build"])
class AuxiliaryHead(Ordinary):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.extra = nn.Linear(WIDTH, CLASSES).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        logits = self.decoder(batch["tokens"], features)
        return F.cross_entropy(logits, batch["label"]) + F.cross_entropy(self.extra(features), batch["label"])


@row(SECTION, "two forwards in one step (R-Drop without dropout)", slots=["step"])
class Twice(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self(batch), self({**batch, "images": batch["images"] * 0.9})
        return F.cross_entropy(first, batch["label"]) + F.mse_loss(first, second)


@row(SECTION, "the step calls the layers in a loop of its own", slots=["step"])
class Loops(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        decoder = self.decoder
        hidden = decoder.embedding(batch["tokens"]) + self.encoder(batch["images"]).unsqueeze(1)
        for layer in decoder.layers:
            hidden = layer(hidden)
        return F.cross_entropy(decoder.head(decoder.norm(hidden).mean(dim=1)), batch["label"])


@row(SECTION, "a loss of the states of all layers", slots=["step"])
class States(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        decoder = self.decoder
        states = [decoder.embedding(batch["tokens"]) + self.encoder(batch["images"]).unsqueeze(1)]
        for layer in decoder.layers:
            states.append(layer(states[-1]))
        loss = F.cross_entropy(decoder.head(decoder.norm(states[-1]).mean(dim=1)), batch["label"])
        return loss + 0.01 * torch.stack([state.pow(2).mean() for state in states]).sum()


@row(SECTION, "the encoder is called twice in a step, with two views", slots=["step"])
class Views(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, others = self.encoder(batch["images"]), self.encoder(batch["images"].flip(1))
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"]) + F.mse_loss(features, others)


@row(SECTION, "L2 over all parameters in the step", slots=["step"])
class Penalised(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


@row(SECTION, "L1 over the parameters of the head in the step", slots=["step"])
class PenalisedHead(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 1e-3 * self.decoder.head.weight.abs().sum()


@row(SECTION, "adversarial images: `torch.autograd.grad` in the step", slots=["step"])
class Attacked(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch["images"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss({**batch, "images": images}), images)
        return self.loss({**batch, "images": (images + 0.01 * gradient.sign()).detach()})


@row(
    SECTION,
    "adversarial images against a frozen encoder under `torch.compile`: `torch.autograd.grad` in the step",
    slots=["step", "build", "def training_step"],
)
class AttackedCompiled(Attacked):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        self.encoder = torch.compile(self.encoder, backend="eager")


@row(SECTION, "`with torch.no_grad():` for the encoder", slots=["step"])
class FrozenByContext(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.encoder(batch["images"])
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


@row(SECTION, "features are detached: `self.encoder(x).detach()`", slots=["step"])
class Detached(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.decoder(batch["tokens"], self.encoder(batch["images"]).detach()), batch["label"])


@row(SECTION, "an encoder that is not used in some steps", slots=["step"])
class SometimesUsed(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            features = torch.zeros(len(batch["label"]), WIDTH, dtype=torch.float64)
        else:
            features = self.encoder(batch["images"])
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


@row(SECTION, "a parameter of the module itself: a learned temperature", slots=["step", "build"])
class Temperature(Ordinary):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch) * self.scale, batch["label"])


@row(SECTION, "a buffer counts steps: `self.count += 1`", slots=["step", "build"])
class Buffered(Ordinary):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


@row(
    SECTION,
    "an attribute counts steps: `self.steps += 1` in the step",
    slots=["step"],
    differs={"split": "the step runs once for each microbatch", "pp": "the step runs once for each microbatch"},
)
class CountsSteps(Ordinary):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.steps)


@row(SECTION, "`if not torch.isfinite(loss): raise` in the step", slots=["step"])
class ChecksFinite(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        return loss


@row(SECTION, "`requires_grad_(False)` of all but the head", slots=["step"])
class NothingTrains(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.decoder.head.requires_grad_(True)


@row(
    SECTION,
    "dropout",
    slots=["random"],
    differs={
        column: "dropout draws other numbers than one process" for column in ("one", "replicas", "split", "pp", "tp")
    },
)
def dropout(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(dropout=0.2))


@row(
    SECTION,
    "a batch norm in the encoder",
    differs={
        "replicas": "each replica normalises by its own samples, as under DDP",
        "split": "each microbatch is normalised by its own samples",
        "pp": "each microbatch is normalised by its own samples",
    },
    warns=True,
)
def batch_norm(run: Run) -> dict[str, Any]:
    class Normalised(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.projector = nn.Sequential(self.encoder.projector, nn.BatchNorm1d(WIDTH)).double()

    return fitted(run, Normalised())


@row(SECTION, "tied weights of embedding and another layer")
def tied(run: Run) -> dict[str, Any]:
    class Tied(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.decoder.layers[3].up.weight = self.decoder.layers[0].up.weight

    return fitted(run, Tied())


@row(SECTION, "the step writes to its batch in place: `batch[...].mul_(2)`", slots=["step"])
class WritesToBatch(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["images"].mul_(2.0)
        value = F.cross_entropy(self(batch), batch["label"])
        self.log("train_loss", value, sync_dist=True)
        return value

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch["images"].sub_(0.5)
        self.log("val_loss", F.cross_entropy(self(batch), batch["label"]), sync_dist=True)


WRITTEN = "microbatches are copies where the step writes to them, and the batch stays as it was"


@row(
    SECTION,
    "`on_train_batch_end` reads a batch to which the step wrote",
    slots=["step", "def training_step", "def validation_step"],
    over="mean",
    differs={"split": WRITTEN, "pp": WRITTEN},
)
class ReadsWritten(WritesToBatch):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["images"].square().mean()))


class PartlyLabelled(Samples):
    """Tuples of images, tokens and labels, of which every third does not count."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.labels[::3] = -100

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.tokens[index], self.labels[index]


@row(
    SECTION,
    "batches of several dataloaders are joined in the step, labels of -100 among them (Donut)",
    slots=["step", "batches"],
    data=lambda run: {"train_dataloaders": [run.training(PartlyLabelled(32))]},
    differs={"replicas": "the mean of replicas' means over labels, as under DDP"},
)
class JoinsLoaders(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, tokens, labels = [], [], []
        for part in batch:
            images.append(part[0])
            tokens.append(part[1])
            labels.append(part[2])
        logits = self({"images": torch.cat(images), "tokens": torch.cat(tokens)})
        loss = F.cross_entropy(logits, torch.cat(labels))
        self.log("train_loss", loss, sync_dist=True)
        return loss
