"""Modules without a list of layers: what they compute, cut between their parts, equals one process.

All take images [B, 3, 8, 8] and return logits [B, CLASSES]. They are in float64.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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


class Sized(Block):
    """Returns the size of its result beside it."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found, tuple(found.shape[2:])


class Pyramid(nn.Module):
    """A list of layers that change the shape, and return numbers that the model computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sized(3, 4, 2), Sized(4, 6, 2), Sized(6, 6, 1)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, (height, width) = layer(x)
        return self.head(x.sum(dim=(2, 3)) / (height * width))


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


class Encoded(Classifier):
    """An encoder that changes the shape of its hidden state, and a head that is a module of the step's own."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.encoder = ResNet()
        self.first, self.head = nn.Linear(CLASSES, 6), nn.Linear(6, CLASSES)
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = F.gelu(self.first(self.encoder(batch["images"])))
        return F.cross_entropy(self.head(hidden), batch["labels"])


class Steps(nn.Module):
    """Four parts; what a subclass does with them is its point."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(192, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.d = nn.Linear(5, CLASSES)
        self.calls = 0


class Skips(Steps):
    """The result of `a` is used again at the end."""

    def forward(self, images: Tensor) -> Tensor:
        first = self.a(images.flatten(1))
        return self.d(self.c(self.b(first).tanh()) + first)


class SkipsUnseen(Steps):
    """The same, in a way that no value shows, and from the third call on."""

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        first = self.a(images.flatten(1))
        logits = self.d(self.c(self.b(first).tanh()))
        return logits + (first > 0).double().mean() if self.calls > 2 else logits


class Decides(Steps):
    def forward(self, images: Tensor) -> Tensor:
        first = self.a(images.flatten(1))
        logits = self.d(self.c(self.b(first)))
        return logits if first.mean() > 100 else 2 * logits


class Repeats(Steps):
    def forward(self, images: Tensor) -> Tensor:
        hidden = self.a(images.flatten(1))
        for _ in range(2):
            hidden = self.b(hidden)
        return self.d(self.c(hidden))


class LeavesOut(Steps):
    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.b(self.a(images.flatten(1)))
        return self.d(self.c(hidden) if self.calls % 2 else hidden)


class Turns(Steps):
    """The code names the parts in another order than it calls them."""

    def forward(self, images: Tensor) -> Tensor:
        parts = [self.a, self.b, self.c, self.d]
        hidden = images.flatten(1)
        for index in (0, 2, 1, 3):
            hidden = parts[index](hidden)
        return hidden


class Hidden(Steps):
    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for name in "abcd":
            hidden = getattr(self, name)(hidden)
        return hidden


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(192, 8), nn.Linear(8, 6), nn.Linear(6, 5)])
        self.ups = nn.ModuleList([nn.Linear(5, 6), nn.Linear(12, 8), nn.Linear(16, CLASSES)])

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = images.flatten(1), []
        for down in self.downs:
            hidden = down(hidden).tanh()
            skips.append(hidden)
        hidden = self.ups[0](skips.pop())
        for up in self.ups[1:]:
            hidden = up(torch.cat([hidden, skips.pop()], dim=1))
        return hidden


class Transformer(nn.Module):
    """A list of layers with long skip connections between them, and nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(4)])

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = images.flatten(1), []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden if index < 2 else hidden + skips.pop(0))
            skips.append(hidden)
        return hidden[:, :CLASSES]


class Tapped(nn.Module):
    """A loss of all states: of a parameter, of what comes before the layers, of each layer and of a module in each.

    A hook keeps the results of the inner modules, and each layer's result is written to afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start, self.late = nn.Parameter(torch.linspace(0, 1, 6)), nn.Linear(6, CLASSES)
        self.before = nn.Sequential(nn.Linear(192, 6), nn.Tanh())
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)])
        self.head = nn.Linear(6, CLASSES)
        self.inner: list[Tensor] = []
        for layer in self.layers:
            layer[0].register_forward_hook(lambda module, args, result: self.inner.append(result))

    def forward(self, images: Tensor) -> Tensor:
        self.inner.clear()
        hidden = first = self.before(images.flatten(1))
        hidden = hidden + self.start
        states, early = [], []
        for layer in self.layers:
            hidden = layer(hidden)
            states.append(hidden * 1)
            early.append(self.late(hidden * 1))
            hidden += first
        kept = torch.cat([*states, *self.inner, first], dim=1).square().sum(dim=1, keepdim=True)
        return self.head(hidden + self.start.square()) + kept * torch.stack(early).mean(dim=0)


class Universal(nn.Module):
    """One module runs several times, in a loop over a range or as each member of a list."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.before, self.head = nn.Linear(192, 6), nn.Linear(6, CLASSES)
        self.layers = nn.ModuleList([block] * 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.before(images.flatten(1))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class Grouped(Universal):
    """Six calls of two modules, as the code of ALBERT has them, and hooks that keep the state of each."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 6
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.inner: list[Tensor] = []
        for layer in self.layers:
            layer[1].register_forward_hook(lambda module, args, result: self.inner.append(result))

    def forward(self, images: Tensor) -> Tensor:
        self.inner.clear()
        hidden = self.before(images.flatten(1))
        for i in range(self.depth):
            group = int(i / (self.depth / len(self.layers)))
            hidden = self.layers[group](hidden)
        return self.head(hidden) * (1 + torch.stack(self.inner).square().sum(dim=0).sum(dim=1, keepdim=True))


class LayerDrop(Transformer):
    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for index, layer in enumerate(self.layers):
            hidden = hidden if index == 2 else layer(hidden)
        return hidden[:, :CLASSES]


def build(model: Callable[[], nn.Module]) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Encoded() if model is Encoded else Classifier(model())
