"""What Lightning's guides show, in forms that no other row has: batches, samplers, hooks, metrics, schedules, loops."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, Sampler

from features.toys import CLASSES, WIDTH, Samples
from ordinary.uses import Ordinary, Run, callbacks, fitted, flags, observed, row

SECTION = "From Lightning's guides"
KEPT = {"replicas": "each replica keeps what its own samples give, as under DDP"}
ORDER = {"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"}

# --- batches ---


@dataclass
class Pair:
    images: Tensor
    tokens: Tensor
    label: Tensor


class Triple(NamedTuple):
    pair: Any
    label: Tensor


class Changed(Dataset):
    """`Samples`, each passed through a function."""

    def __init__(self, change: Any, count: int = 32) -> None:
        self.samples, self.change = Samples(count), change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.samples[index], index)


def together(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def shaped(title: str, collate: Any, read: Any, **options: Any) -> None:
    """A row with batches of a shape of its own; `read` makes the toy's batch of one."""

    @row(SECTION, title, **options)
    def scenario(run: Run) -> dict[str, Any]:
        class Shaped(Ordinary):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = self.loss(read(batch))
                self.log("train_loss", loss, sync_dist=True)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", self.loss(read(batch)), sync_dist=True)

        loaders = {"train_dataloaders": run.training(collate_fn=collate)}
        loaders["val_dataloaders"] = run.loader(16, collate_fn=collate)
        return fitted(run, Shaped(), data=loaders)


shaped("batches of a dataclass", lambda s: Pair(**together(s)), lambda b: vars(b))
shaped("batches with a dataclass in a dict", lambda s: {"pair": Pair(**together(s))}, lambda b: vars(b["pair"]))
shaped(
    "batches of a named tuple that holds a dict",
    lambda s: Triple({k: v for k, v in together(s).items() if k != "label"}, together(s)["label"]),
    lambda b: {**b.pair, "label": b.label},
)
shaped(
    "batches of three levels of dicts and lists",
    lambda s: {"x": {"views": [together(s)["images"], together(s)["images"] + 1]}, "t": together(s)},
    lambda b: {**b["t"], "images": (b["x"]["views"][0] + b["x"]["views"][1]) / 2},
)
shaped(
    "batches with a list of strings for each sample, and a count of them in the loss",
    lambda s: {**together(s), "texts": ["a" * (i + 1) for i in range(len(s))]},
    lambda b: {**b, "images": b["images"] * torch.tensor([len(t) for t in b["texts"]]).double().unsqueeze(1).sign()},
)
shaped(
    "a list of samples without a collation: `collate_fn=list`",
    list,
    lambda b: together(b),
)
shaped(
    "batches that are transposed: time first",
    lambda s: {**together(s), "tokens": together(s)["tokens"].T.contiguous()},
    lambda b: {**b, "tokens": b["tokens"].T},
)
shaped(
    "a mask of booleans beside the tokens",
    lambda s: {**together(s), "mask": together(s)["tokens"] > 3},
    lambda b: {**b, "tokens": b["tokens"] * b["mask"]},
)
shaped(
    "labels as a matrix of one hot rows",
    lambda s: {**together(s), "label": F.one_hot(together(s)["label"], CLASSES).double()},
    lambda b: b,
)
shaped(
    "half of the batch is a second view of the first half's samples",
    lambda s: {k: torch.cat([v, v]) for k, v in together(s).items()},
    lambda b: b,
)

# --- samplers ---


class EpochSampler(Sampler):
    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        yield from ((index * 5 + self.epoch) % self.count for index in range(self.count))

    def __len__(self) -> int:
        return self.count


@row(SECTION, "a sampler of one's own with `set_epoch`, over two epochs", differs=ORDER)
def with_epochs(run: Run) -> dict[str, Any]:
    loader = run.loader(32, sampler=EpochSampler(32))
    return fitted(run, Ordinary(), data={"train_dataloaders": loader}, max_epochs=2)


# --- hooks and layers ---


class BuildsInSetup(Ordinary):
    def setup(self, stage: str) -> None:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.full((CLASSES,), 1.5, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * self.scale


row(SECTION, "`setup` builds a parameter")(BuildsInSetup)


@row(SECTION, "`setup` replaces the head by a larger one", slots=["def training_step"])
class NewHead(Ordinary):
    def setup(self, stage: str) -> None:
        if self.decoder.head.out_features == CLASSES:
            torch.manual_seed(3)
            self.decoder.head = nn.Linear(WIDTH, CLASSES + 2).double()


@row(SECTION, "weight norm: `parametrizations.weight_norm` of the head")
class WeightNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.decoder.head)


@row(SECTION, "an orthogonal parametrization of the encoder's projector")
class Orthogonal(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        parametrizations.orthogonal(self.encoder.projector)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@row(SECTION, "`register_parametrization` of one's own: a symmetric weight")
class Parametrized(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.encoder.projector, "weight", Symmetric())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


@row(SECTION, "an autograd function of one's own: gradients are reversed")
class Reverses(Ordinary):
    def forward(self, batch: Any) -> Tensor:
        return self.decoder(batch["tokens"], Reversed.apply(self.encoder(batch["images"])))


@row(SECTION, "a straight-through estimator: `x + (x.round() - x).detach()`")
class StraightThrough(Ordinary):
    def forward(self, batch: Any) -> Tensor:
        features = self.encoder(batch["images"])
        return self.decoder(batch["tokens"], features + (features.round() - features).detach())


@row(SECTION, "tied weights: the head is another embedding's weight")
class Tied(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(CLASSES, WIDTH).double()
        torch.manual_seed(4)
        nn.init.normal_(self.classes.weight)
        self.decoder.head.weight = self.classes.weight


@row(SECTION, "a buffer holds a moving mean of the loss", differs=KEPT)
class MovingMean(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.mul_(0.9).add_(outputs["loss"].detach(), alpha=0.1)
        self.seen.append(float(self.mean))


@row(SECTION, "a forward pre-hook on a layer doubles its input")
class PreHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.norm.register_forward_pre_hook(_doubles)


def _doubles(module: nn.Module, args: tuple) -> tuple:
    return (2 * args[0],)


@row(SECTION, "a forward hook on a layer halves its output")
class PostHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[0].register_forward_hook(_halves)
        self.decoder.layers[1].register_forward_hook(_halves)


def _halves(module: nn.Module, args: tuple, result: Tensor) -> Tensor:
    return result / 2


@row(SECTION, "a full backward hook on a layer doubles gradients of its input")
class BackwardHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers[2].register_full_backward_hook(_more)


def _more(module: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
    return tuple(None if one is None else 2 * one for one in inputs)


@row(SECTION, "layers are left out by the step's number (stochastic depth without chance)")
class SkipsLayers(Ordinary):
    def forward(self, batch: Any) -> Tensor:
        hidden = self.encoder(batch["images"])
        if self.global_step % 2:
            hidden = hidden * 0.5
        return self.decoder(batch["tokens"], hidden)


@row(SECTION, "`torch.compile` of the head")
class CompiledHead(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.norm = torch.compile(self.decoder.norm, backend="eager")


@row(SECTION, "`torch.compile` of the whole encoder")
class CompiledEncoder(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.compile(self.encoder, backend="eager")


@row(SECTION, "gradients of a layer are frozen by `requires_grad_` in `on_train_batch_start`")
class Freezes(Ordinary):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.patch.requires_grad_(batch_idx % 2 == 0)


# --- losses ---


@row(
    SECTION,
    "the exponential of the loss: `loss.exp()`",
    warns=True,
    differs={
        "replicas": "replicas are averaged, as under DDP",
        "split": "microbatches are averaged",
        "pp": "microbatches are averaged",
    },
)
class Exponential(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).exp()


@row(
    SECTION,
    "perplexity is logged: `loss.exp()`",
    differs={
        "replicas": "replicas are averaged, as under DDP",
        "split": "microbatches are averaged",
        "pp": "microbatches are averaged",
    },
)
class Perplexity(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("perplexity", loss.detach().exp(), sync_dist=True)
        return loss


@row(
    SECTION,
    "`if loss > x: loss = loss * 0.5` in the step",
    differs={
        "replicas": "each replica decides by its own samples, as under DDP",
        **dict.fromkeys(("split", "pp"), "each microbatch decides by its own samples"),
    },
    warns=True,
)
class Decides(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * 0.5 if loss > 1.2 else loss


@row(
    SECTION,
    "the square root of a mean squared error (RMSE)",
    warns=True,
    differs={
        "replicas": "replicas are averaged, as under DDP",
        "split": "microbatches are averaged",
        "pp": "microbatches are averaged",
    },
)
class RootMeanSquare(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch), F.one_hot(batch["label"], CLASSES).double()).sqrt()


# --- schedules, loops, flags ---

callbacks(
    SECTION,
    "`GradientAccumulationScheduler({0: 1, 1: 2})`, from the second epoch",
    lambda: [built_in.GradientAccumulationScheduler({0: 1, 1: 2})],
)
callbacks(
    SECTION,
    "`EarlyStopping` of a metric of the step, checked after the epoch",
    lambda: [built_in.EarlyStopping("train_loss", patience=1, check_on_train_epoch_end=True)],
)
flags(SECTION, max_epochs=2, limit_train_batches=0.75, limit_val_batches=0.5, val_check_interval=0.34)
flags(SECTION, max_epochs=2, accumulate_grad_batches=3, val_check_interval=2)
flags(SECTION, max_epochs=3, gradient_clip_val=0.1, gradient_clip_algorithm="norm", accumulate_grad_batches=2)
flags(SECTION, max_steps=5, max_epochs=-1)
flags(SECTION, max_epochs=2, limit_train_batches=3, log_every_n_steps=2, num_sanity_val_steps=1)


@row(SECTION, "two param groups, two schedulers: `interval` step and epoch")
def two_schedules(run: Run) -> dict[str, Any]:
    class Scheduled(Ordinary):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.encoder.parameters(), "lr": 0.05}, {"params": self.decoder.parameters()}]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            step = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.9**s, lambda s: 1 / (1 + s)])
            epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "interval": "epoch"}]

    return fitted(run, Scheduled(), max_epochs=2, callbacks=[built_in.LearningRateMonitor()])


@row(
    SECTION,
    "`validate`, `test` and `predict` after `fit` with one trainer",
    differs={"replicas": "each replica returns the predictions of its own samples, as under DDP"},
)
def all_loops(run: Run) -> dict[str, Any]:
    class Tested(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    module, trainer = Tested(), run.trainer()
    trainer.fit(module, run.training(), run.loader(16))
    kept = {"validated": trainer.validate(module, run.loader(16), verbose=False)}
    kept["tested"] = trainer.test(module, run.loader(16), verbose=False)
    kept["predicted"] = trainer.predict(module, run.loader(16))
    return observed(trainer, module) | kept


@row(SECTION, "training goes on with another trainer and more epochs: `ckpt_path` of the first")
def goes_on(run: Run) -> dict[str, Any]:
    path = run.folder / "first.ckpt"
    trainer = run.trainer(max_epochs=1)
    trainer.fit(Ordinary(), run.training())
    trainer.save_checkpoint(path)
    return fitted(run, Ordinary(), ckpt_path=path, max_epochs=3)


@row(SECTION, "`save_checkpoint` after fit, with an `on_save_checkpoint` that reads weights")
def saves_after(run: Run) -> dict[str, Any]:
    class Reads(Ordinary):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["norm"] = float(sum(p.detach().norm() for p in self.parameters()))
            checkpoint["copy"] = copy.deepcopy(self.decoder.head.weight.detach())

    module, trainer = Reads(), run.trainer()
    trainer.fit(module, run.training(), run.loader(16))
    trainer.save_checkpoint(run.folder / "after.ckpt")
    saved = torch.load(run.folder / "after.ckpt", weights_only=False)
    return observed(trainer, module) | {"saved": [saved["norm"], saved["copy"]]}


class SkipsSome(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else {"loss": self.loss(batch), "extra": 2.0}


@row(SECTION, "a skipped batch: what `on_train_batch_end` of a callback gets")
def skipped(run: Run) -> dict[str, Any]:
    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            pl_module.seen.append(outputs if outputs is None else sorted(outputs))

    return fitted(run, SkipsSome(), callbacks=[Looks()])


class AveragesWeights(Callback):
    """A moving average of all weights, that validation uses."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.average[name].mul_(0.5).add_(value, alpha=0.5)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "average"):
            self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "kept"):
            pl_module.load_state_dict(self.kept)


callbacks(SECTION, "an EMA callback by `state_dict()` and `load_state_dict`", lambda: [AveragesWeights()])


class Warms(Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * min(1.0, (trainer.global_step + 1) / 4)


callbacks(SECTION, "a callback warms the learning rate up in `on_train_batch_start`", lambda: [Warms()])


@row(
    SECTION, "`on_exception` of a callback, and training goes on after `KeyboardInterrupt`'s kin: `trainer.should_stop`"
)
def stops(run: Run) -> dict[str, Any]:
    class Stops(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    return fitted(run, Ordinary(), callbacks=[Stops()], max_epochs=4)


@row(SECTION, "manual optimization with two schedulers and clipping each step")
def by_hand(run: Run) -> dict[str, Any]:
    class Manual(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            one, two = self.optimizers()
            loss = self.loss(batch)
            one.zero_grad()
            two.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(one, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            one.step()
            if (batch_idx + 1) % 2 == 0:
                two.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.log("train_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            one = torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9)
            two = torch.optim.Adam(self.decoder.parameters(), lr=0.01)
            return [one, two], [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (one, two)]

    return fitted(run, Manual())


@row(SECTION, "the same trainer fits a second module")
def second_module(run: Run) -> dict[str, Any]:
    trainer = run.trainer()
    trainer.fit(Ordinary(), run.training())
    trainer = run.trainer(max_epochs=2)
    module = Ordinary(lr=0.05)
    trainer.fit(module, run.training(), run.loader(16))
    return observed(trainer, module)


@row(SECTION, "`self.log` of a dict's values with `on_step` and `on_epoch`, and slashes in names")
class Slashes(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss/total": loss, "loss/half": loss / 2}, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@row(SECTION, "a learning rate by hparams: `self.hparams.lr` is changed in `on_train_start`")
class ByHparams(Ordinary):
    def on_train_start(self) -> None:
        self.hparams.lr = 0.02
        for group in self.optimizers().param_groups:
            group["lr"] = self.hparams.lr
