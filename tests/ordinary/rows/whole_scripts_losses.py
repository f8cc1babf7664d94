"""Whole scripts, as in `whole_scripts`: losses, batches, teachers, and several fits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from features.toys import WIDTH, Samples
from ordinary.rows.whole_scripts import DDP_ORDER, MEANS, SECTION, Tested
from ordinary.uses import Memory, Ordinary, Run, fitted, observed, row


@row(
    SECTION,
    "`on_save_checkpoint` and `on_load_checkpoint` keep tensors, a generator's state and a list, then training goes on",
)
def tensors_in_checkpoint(run: Run) -> dict[str, Any]:
    class Keeps(Tested):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(5)
            self.mean = torch.zeros(WIDTH, dtype=torch.float64)
            self.history: list[float] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch["images"] += 0.1 * torch.randn(batch["images"].shape[-1], generator=self.noise, dtype=torch.float64)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.mean = 0.9 * self.mean + 0.1 * self.decoder.norm.weight.detach()
            self.history.append(float(outputs["loss"]))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"mean": self.mean, "noise": self.noise.get_state(), "history": self.history}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            own = checkpoint["own"]
            self.mean, self.history = own["mean"].clone(), [*own["history"]]
            self.noise.set_state(own["noise"])

        def on_train_end(self) -> None:
            self.seen += [self.mean, len(self.history)]

    trainer = run.trainer()
    trainer.fit(Keeps(), run.training(), run.loader(16))
    trainer.save_checkpoint(run.folder / "kept.ckpt")
    return fitted(run, Keeps(), max_epochs=3, ckpt_path=str(run.folder / "kept.ckpt"))


@row(
    SECTION,
    "terms of the loss by epoch: focal with label smoothing, a term for features that starts in the second epoch",
)
class ByEpoch(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        logits = self.decoder(batch["tokens"], features)
        losses = F.cross_entropy(logits, batch["label"], label_smoothing=0.1, reduction="none")
        focal = ((1 - torch.exp(-losses)) ** 2 * losses).mean()
        extra = features.pow(2).mean() if self.current_epoch > 0 else logits.new_zeros(())
        self.log_dict({"focal": focal, "extra": extra}, on_step=True, on_epoch=True, sync_dist=True)
        return focal * (1 + 0.5 * self.current_epoch) + 0.1 * extra


@row(
    SECTION,
    "an epoch counts: terms of the loss by `self.trainer.current_epoch / self.trainer.max_epochs`, three epochs",
)
def by_epochs(run: Run) -> dict[str, Any]:
    return fitted(run, ByEpoch(), max_epochs=3, check_val_every_n_epoch=3)


@row(
    SECTION, "a contrastive loss within the batch with a learned temperature that is clamped", warns=True, differs=MEANS
)
class Contrastive(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        images = F.normalize(self.encoder(batch["images"]), dim=-1)
        texts = F.normalize(self.decoder.embedding(batch["tokens"]).mean(1), dim=-1)
        logits = self.scale.exp() * images @ texts.T
        labels = torch.arange(len(logits))
        sides = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
        return sides / 2 + F.cross_entropy(self(batch), batch["label"])

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.scale.clamp_(0, 1.55)


@row(
    SECTION,
    "a penalty on gradients of images, `create_graph=True`, logged beside the loss",
    tolerance=1e-8,
    differs={"replicas": "the penalty is of the mean loss of a replica's own batch, as under DDP"},
)
class Penalised(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch["images"].clone().requires_grad_()
        loss = F.cross_entropy(self({**batch, "images": images}), batch["label"])
        (slope,) = torch.autograd.grad(loss, images, create_graph=True)
        penalty = slope.pow(2).sum()
        self.log_dict({"loss": loss, "penalty": penalty}, sync_dist=True)
        return loss + 0.1 * penalty


class Pair(NamedTuple):
    """A batch as a named tuple."""

    pixels: Tensor
    words: Tensor
    label: Tensor | None
    names: list[str]


class Unlabelled(Dataset):
    """Samples as named tuples; text that is as long as it is."""

    def __init__(self, count: int, ragged: bool = False) -> None:
        self.samples, self.ragged = Samples(count), ragged

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        one = self.samples[index]
        words = one["tokens"][: 2 + index % 3] if self.ragged else one["tokens"]
        return one["images"], words, one["label"], f"sample {index}"


def tupled(samples: list[Any]) -> Pair:
    """A named tuple of stacked columns."""
    pixels, words, labels, names = zip(*samples, strict=True)
    return Pair(torch.stack(pixels), torch.stack(words), torch.stack(labels), [*names])


@row(SECTION, "batches that are named tuples with names of samples; validation batches have `None` for a label")
def named_tuples(run: Run) -> dict[str, Any]:
    def without(samples: list[Any]) -> Pair:
        return tupled(samples)._replace(label=None)

    class Reads(Ordinary):
        def forward(self, batch: Any) -> Tensor:
            return self.decoder(batch.words, self.encoder(batch.pixels))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch), batch.label)
            return {"loss": loss, "names": batch.names}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append([outputs["names"], batch.names])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch.label is None
            self.log("sure", self(batch).softmax(-1).amax(-1).mean(), sync_dist=True)

    train = run.training(Unlabelled(32), collate_fn=tupled)
    loaders = {"train_dataloaders": train, "val_dataloaders": run.loader(Unlabelled(16), collate_fn=without)}
    kept = fitted(run, Reads(), data=loaders)
    return kept if run.replicas == 1 else kept | {"seen": []}


def padded(samples: list[Any]) -> dict[str, Any]:
    """Words padded with zeros to the longest of the batch, and a mask."""
    pixels, words, labels, names = zip(*samples, strict=True)
    tokens = nn.utils.rnn.pad_sequence(list(words), batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(one), dtype=torch.bool) for one in words], batch_first=True)
    return {
        "images": torch.stack(pixels),
        "tokens": tokens,
        "mask": mask,
        "label": torch.stack(labels),
        "names": [*names],
        "extra": None,
    }


@row(SECTION, "a `collate_fn` that pads words to the longest of a batch; the mask weighs the embeddings", over="joined")
def pads(run: Run) -> dict[str, Any]:
    class Masked(Ordinary):
        def forward(self, batch: Any) -> Tensor:
            features = self.encoder(batch["images"])
            lengths = batch["mask"].sum(-1, keepdim=True)
            words = self.decoder.embedding(batch["tokens"]) * batch["mask"].unsqueeze(-1)
            features = features + words.sum(1) / lengths
            return self.decoder(batch["tokens"][:, :2], features)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self(batch), batch["label"])
            self.log(
                "tokens", batch["mask"].sum().double(), reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True
            )
            return loss

    train = run.training(Unlabelled(32, ragged=True), collate_fn=padded)
    loaders = {
        "train_dataloaders": train,
        "val_dataloaders": run.loader(Unlabelled(16, ragged=True), collate_fn=padded),
    }
    return fitted(run, Masked(), data=loaders, max_epochs=2)


@dataclass
class Sheet:
    """A batch as a dataclass."""

    images: Tensor
    tokens: Tensor
    label: Tensor
    source: str = "made"
    weight: Tensor | None = None

    def to(self, *args: Any, **kwargs: Any) -> Sheet:
        return Sheet(
            self.images.to(*args, **kwargs),
            self.tokens.to(*args, **kwargs),
            self.label.to(*args, **kwargs),
            self.source,
        )


@row(SECTION, "batches of a dataclass with `to`, a string and `None`, `on_after_batch_transfer` fills a weight")
def dataclasses_as_batches(run: Run) -> dict[str, Any]:
    def collate(samples: list[Any]) -> Sheet:
        pixels, words, labels, _ = zip(*samples, strict=True)
        return Sheet(torch.stack(pixels), torch.stack(words), torch.stack(labels))

    class Sheets(Ordinary):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch.weight = 1 + batch.label.double() / 10
            return batch

        def forward(self, batch: Any) -> Tensor:
            return self.decoder(batch.tokens, self.encoder(batch.images))

        def loss(self, batch: Any) -> Tensor:
            return (F.cross_entropy(self(batch), batch.label, reduction="none") * batch.weight).mean()

    train = run.training(Unlabelled(32), collate_fn=collate)
    loaders = {"train_dataloaders": train, "val_dataloaders": run.loader(Unlabelled(16), collate_fn=collate)}
    return fitted(run, Sheets(), data=loaders)


@row(
    SECTION,
    "a teacher that is a deep copy, momentum by a cosine of `global_step`, a loss between both, saved and resumed",
)
def teacher(run: Run) -> dict[str, Any]:
    class Student(Tested):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            features = self.encoder(batch["images"])
            with torch.no_grad():
                aim = self.teacher(batch["images"] + 0.1)
            logits = self.decoder(batch["tokens"], features)
            loss = F.cross_entropy(logits, batch["label"]) + 0.1 * F.mse_loss(features, aim)
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            beta = 1 - 0.1 * (1 + torch.cos(torch.tensor(self.global_step / 8 * torch.pi))).item() / 2
            with torch.no_grad():
                for ours, theirs in zip(self.encoder.parameters(), self.teacher.parameters(), strict=True):
                    theirs.mul_(beta).add_(ours, alpha=1 - beta)

    trainer = run.trainer()
    trainer.fit(Student(), run.training(), run.loader(16))
    trainer.save_checkpoint(run.folder / "student.ckpt")
    return fitted(run, Student(), max_epochs=2, ckpt_path=str(run.folder / "student.ckpt"))


@row(
    SECTION,
    "gradients of parts are logged by `log_dict(grad_norm(self.encoder, 2))`, clipping, skipped steps by a limit",
)
def norms(run: Run) -> dict[str, Any]:
    from lightning.pytorch.utilities import grad_norm

    class Norms(Tested):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            parts = {"encoder": self.encoder, "decoder": self.decoder}
            totals = {f"norm/{name}": grad_norm(part, 2)["grad_2.0_norm_total"] for name, part in parts.items()}
            self.log_dict(totals)
            if max(float(total) for total in totals.values()) > 0.6:
                optimizer.zero_grad()

    return fitted(run, Norms(), max_epochs=2, gradient_clip_val=0.7)


@row(
    SECTION,
    "generator and discriminator take turns: `toggle_optimizer`, `detach`, two schedulers, `log_dict(prog_bar=True)`",
)
def adversarial(run: Run) -> dict[str, Any]:
    class Adversarial(Ordinary):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            made, judge = self.optimizers()
            self.toggle_optimizer(made)
            features = self.encoder(batch["images"])
            loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
            self.manual_backward(loss)
            made.step()
            made.zero_grad()
            self.untoggle_optimizer(made)
            self.toggle_optimizer(judge)
            features = self.encoder(batch["images"]).detach()
            other = -F.log_softmax(self.decoder(batch["tokens"], features), -1)[:, 0].mean()
            self.manual_backward(other)
            judge.step()
            judge.zero_grad()
            self.untoggle_optimizer(judge)
            self.log_dict({"made": loss, "judged": other}, prog_bar=True, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            for schedule in self.lr_schedulers():
                schedule.step()

        def configure_optimizers(self) -> Any:
            made = torch.optim.Adam(self.encoder.parameters(), lr=0.01, betas=(0.5, 0.9))
            judge = torch.optim.Adam(self.decoder.parameters(), lr=0.01, betas=(0.5, 0.9))
            return [made, judge], [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (made, judge)]

    return fitted(run, Adversarial(), max_epochs=2)


@row(
    SECTION,
    "k folds: a new trainer and `load_state_dict` of the first weights for each fold, means of `validate`",
)
def folds(run: Run) -> dict[str, Any]:
    samples, module, scores = Samples(24), Tested(), []
    start = copy.deepcopy(module.state_dict())
    for fold in range(3):
        inner = [index for index in range(24) if index % 3 != fold]
        outer = [index for index in range(24) if index % 3 == fold]
        module.load_state_dict(start)
        trainer = run.trainer(max_epochs=2)
        trainer.fit(module, run.training(torch.utils.data.Subset(samples, inner)))
        subset = torch.utils.data.Subset(samples, outer)
        scores.append(trainer.validate(module, run.loader(subset), verbose=False)[0])
    return {"scores": scores, "mean": sum(score["val_loss"] for score in scores) / 3}


@row(
    SECTION,
    "weights of a first stage go to a second module: `load_state_dict(strict=False)`, the encoder frozen, then thawed",
)
def stages(run: Run) -> dict[str, Any]:
    first = Tested()
    run.trainer().fit(first, run.training())
    second = Tested(lr=0.05)
    if run.plain or torch.distributed.get_rank() == 0:
        torch.save(first.state_dict(), run.folder / "first.pt")
    if not run.plain:
        torch.distributed.barrier()
    kept = torch.load(run.folder / "first.pt")
    second.load_state_dict({k: v for k, v in kept.items() if k.startswith("encoder")}, strict=False)
    second.encoder.requires_grad_(False)
    run.trainer().fit(second, run.training())
    second.encoder.requires_grad_(True)
    return fitted(run, second, max_epochs=2)


@row(
    SECTION, "curriculum: a batch sampler by epoch, harder samples by losses that the step returned", differs=DDP_ORDER
)
def curriculum(run: Run) -> dict[str, Any]:
    class Losses(Tested):
        def __init__(self) -> None:
            super().__init__()
            self.hardness = torch.zeros(32, dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = F.cross_entropy(self(batch), batch["label"], reduction="none")
            return {"loss": losses.mean(), "losses": losses.detach(), "index": batch["index"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hardness[outputs["index"]] = outputs["losses"]

        def train_dataloader(self) -> Any:
            order = self.hardness.argsort(descending=True, stable=True).tolist()
            return DataLoader(Indexed(32), 8 if run.plain else 8 // run.replicas, sampler=order)

        def on_train_end(self) -> None:
            self.seen.append(self.hardness)

    module, memory = Losses(), Memory()
    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, logger=memory)
    trainer.fit(module)
    return observed(trainer, module) | {"seen": module.seen, "logged": memory.lines}


class Indexed(Samples):
    """Samples that say which they are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"index": index}


@row(
    SECTION,
    "two iterators in a `dict` of loaders by `CombinedLoader('max_size_cycle')`, weights of tasks by their last losses",
    differs={"replicas": "each replica weighs tasks by its own losses, as under DDP"},
)
def tasks(run: Run) -> dict[str, Any]:
    class Tasks(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.last = {"a": 1.0, "b": 1.0}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = {name: F.cross_entropy(self(part), part["label"]) for name, part in batch.items()}
            total = sum(self.last.values())
            loss = sum(self.last[name] / total * losses[name] for name in losses)
            return {"loss": loss, **{name: one.detach() for name, one in losses.items()}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = {name: float(outputs[name]) for name in self.last}
            self.log_dict({f"last/{name}": value for name, value in self.last.items()}, sync_dist=True)

    loaders = {"a": run.training(32), "b": run.training(Samples(16, seed=4))}
    kept = fitted(run, Tasks(), data={"train_dataloaders": loaders}, max_epochs=2)
    return kept
