"""Modules without a list of layers: what they compute, cut between their parts, equals one process.

All take images [B, 3, 8, 8] and return logits [B, CLASSES]. They are in float64.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3


def batches(count: int = 2, size: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, size, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (count, size), generator=generator)
    return [{"images": one, "labels": other} for one, other in zip(images, labels, strict=True)]


class Classifier(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["images"]), batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoLinears(nn.Module):
    """Registered in another order than called, with code between."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(7, CLASSES)
        self.scale = nn.Parameter(torch.full((7,), 1.5))
        self.a = nn.Linear(192, 7)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.a(images.flatten(1))
        return self.b(F.relu(hidden) * self.scale)


class Block(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != width:
            self.downsample = nn.Sequential(nn.Conv2d(inner, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8, 1))
        self.layer3 = nn.Sequential(Block(8, 12, 2), Block(12, 12, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(12, CLASSES)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.avgpool(x)
        return self.fc(torch.flatten(x, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class Pair(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inner, width), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.one(x).tanh(), {"two": self.two(x)}


class Join(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(inner, width)

    def forward(self, x: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return self.one(x[0] + 2 * x[1]["two"])


class Walked(nn.Module):
    """A ModuleDict walked in order, and a view of fixed sizes between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"x": nn.Conv2d(3, 4, 3, 2), "y": nn.BatchNorm2d(4), "z": nn.Conv2d(4, 5, 3)})
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for name, block in self.blocks.items():
            x = block(x)
            x = x if name == "y" else F.relu(x, inplace=True)
        return self.head(x.view(-1, 5))


def sequential() -> nn.Module:
    act = nn.ReLU()  # one module in two places
    layers = [nn.Flatten(), nn.Linear(192, 11), act, nn.Linear(11, 7), act, nn.Linear(7, 5), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(5, CLASSES))


def nested() -> nn.Module:
    body = [layer for width in range(5, 11) for layer in (nn.Linear(width, width + 1), nn.Tanh())]
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), nn.Sequential(*body, nn.Linear(11, CLASSES)))


def trees() -> nn.Module:
    return nn.Sequential(
        OrderedDict(flat=nn.Flatten(), pair=Pair(192, 6), join=Join(6, 5), more=Pair(5, 4), end=Join(4, CLASSES))
    )


MODELS = {
    "two_linears": TwoLinears,
    "sequential": sequential,
    "resnet": ResNet,
    "walked": Walked,
    "nested": nested,
    "trees": trees,
}


def build(name: str) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier(MODELS[name]())
