"""What steps do with gradients and functions themselves: `torch.func`, gradients of tasks, values beside a layer's."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from features.toys import WIDTH, Decoder, Layer
from ordinary.uses import Ordinary, row

SECTION = "Gradients and functions in steps"
OWN_SAMPLES = {"replicas": "each replica steps by the gradients of its own samples, as under DDP"}


class OfFeatures(Ordinary):
    """Trains on features that a subclass makes."""

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.decoder(batch["tokens"], self.features(batch["images"])), batch["label"])
        self.log("train_loss", loss, sync_dist=True)
        return loss


@row(SECTION, "`torch.vmap` of the encoder")
class Vmap(OfFeatures):
    def features(self, images: Tensor) -> Tensor:
        return torch.vmap(self.encoder)(images)


@row(SECTION, "`torch.vmap` of a loss for each sample")
class VmapOfLoss(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        return torch.vmap(F.cross_entropy)(self(batch), batch["label"]).mean()


@row(SECTION, "a penalty on the Jacobian of the encoder: `torch.func.jacrev` under `torch.vmap`")
class Jacobian(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        slopes = torch.vmap(torch.func.jacrev(self.encoder))(batch["images"])
        return super().loss(batch) + 0.1 * slopes.square().mean()


@row(SECTION, "saliency in `validation_step`: `torch.func.grad` of the encoder")
class Saliency(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        slope = torch.func.grad(lambda images: self.encoder(images).sum())(batch["images"])
        self.log("saliency", slope.abs().mean(), sync_dist=True)


@row(SECTION, "a teacher by `torch.func.functional_call` with averaged weights in a dict")
class AveragedCall(Ordinary):
    def on_train_start(self) -> None:
        self.average = {name: p.detach().clone() for name, p in self.decoder.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.decoder.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch["tokens"], self.encoder(batch["images"])
        with torch.no_grad():
            taught = torch.func.functional_call(self.decoder, self.average, inputs)
        logits = self.decoder(*inputs)
        loss = F.cross_entropy(logits, batch["label"]) + F.mse_loss(logits, taught)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Tasks(Ordinary):
    """Two losses, whose gradients are projected where they conflict (PCGrad)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def losses(self, batch: Any) -> list[Tensor]:
        logits = self(batch)
        return [F.cross_entropy(logits, batch["label"]), logits.square().mean()]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if one is None else one for p, one in zip(self.parameters(), found, strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = [self.gradients(loss) for loss in self.losses(batch)]
        product = sum((one * other).sum() for one, other in zip(first, second, strict=True))
        square = sum(one.square().sum() for one in second)
        share = (product / square).clamp(max=0)
        for p, one, other in zip(self.parameters(), first, second, strict=True):
            p.grad = one + (1 - share) * other
        self.optimizers().step()


row(SECTION, "conflicting gradients of two losses (PCGrad), by `torch.autograd.grad`", differs=OWN_SAMPLES)(Tasks)


@row(SECTION, "conflicting gradients of two losses (PCGrad), by `p.grad` after `manual_backward`")
class TasksByBackward(Tasks):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, kept = self.optimizers(), []
        for loss in self.losses(batch):
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            kept.append([p.grad.clone() for p in self.parameters()])
        first, second = kept
        product = sum((one * other).sum() for one, other in zip(first, second, strict=True))
        square = sum(one.square().sum() for one in second)
        share = (product / square).clamp(max=0)
        for p, one, other in zip(self.parameters(), first, second, strict=True):
            p.grad = one + (1 - share) * other
        optimizer.step()


class Routed(Layer):
    """Returns a penalty beside the hidden state."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(hidden), self.norm(hidden).tanh().square().mean()


class Penalised(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(4)])

    def forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.embedding(tokens) + features.unsqueeze(1)
        total = 0.0
        for layer in self.layers:
            hidden, penalty = layer(hidden)
            total = total + penalty
        return self.head(self.norm(hidden).mean(dim=1)), total


class Sequence(Decoder):
    """Its layers are one module, which a function is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = checkpoint_sequential(
            self.layers, 2, self.embedding(tokens) + features.unsqueeze(1), use_reentrant=False
        )
        return self.head(self.norm(hidden).mean(dim=1))


class Reduced(Decoder):
    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = reduce(
            lambda hidden, layer: layer(hidden), self.layers, self.embedding(tokens) + features.unsqueeze(1)
        )
        return self.head(self.norm(hidden).mean(dim=1))


class WithDecoder(Ordinary):
    def __init__(self, decoder: type[Decoder]) -> None:
        super().__init__()
        torch.manual_seed(WIDTH)
        self.decoder = decoder().double()


@row(
    SECTION,
    "layers return a penalty beside the hidden state, and the loss adds them: `hidden, penalty = layer(hidden)`",
)
class AddsPenalties(WithDecoder):
    def __init__(self) -> None:
        super().__init__(Penalised)

    def loss(self, batch: Any) -> Tensor:
        logits, penalty = self(batch)
        self.log("penalty", penalty, sync_dist=True)
        return F.cross_entropy(logits, batch["label"]) + 0.1 * penalty


@row(SECTION, "`checkpoint_sequential(self.layers, 2, self.embedding(tokens))`")
class Checkpointed(WithDecoder):
    def __init__(self) -> None:
        super().__init__(Sequence)


@row(SECTION, "`functools.reduce` over the layers, from `self.embedding(tokens)`")
class ReducesLayers(WithDecoder):
    def __init__(self) -> None:
        super().__init__(Reduced)


@row(
    SECTION,
    "meta learning (MAML): weights of the head adapted by `torch.autograd.grad(create_graph=True)`, `functional_call`",
    differs={
        "replicas": "each replica adapts weights to its own samples, as under DDP",
        "split": "each microbatch adapts weights to its own samples; a warning tells of it",
    },
    warns=True,
)
class Adapts(Ordinary):
    def loss(self, batch: Any) -> Tensor:
        half, weights = len(batch["label"]) // 2, dict(self.decoder.named_parameters())
        features, label = self.encoder(batch["images"]), batch["label"]
        support = self.decoder(batch["tokens"][:half], features[:half])
        if self.training:
            loss = F.cross_entropy(support, label[:half])
            (slope,) = torch.autograd.grad(loss, weights["head.weight"], create_graph=True)
            weights["head.weight"] = weights["head.weight"] - 2.0 * slope
        query = torch.func.functional_call(self.decoder, weights, (batch["tokens"][half:], features[half:]))
        return F.cross_entropy(query, label[half:])
