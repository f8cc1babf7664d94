"""A tiny two-part module, its data, and scenarios: functions that run once on one process and once on ranks.

A scenario makes its trainers and loaders through a `Run`, which knows the layout, and returns plain values. The
module is in float64, so that what ranks compute can be compared to 1e-9.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_mm5d import Modality
from parity.harness import strategy
from ranks import LIMIT_S, run_ranks

WIDTH, PIXELS, TOKENS, CLASSES = 8, 6, 5, 3
Scenario = Callable[..., Any]


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Encoder(nn.Module):
    """Images [B, PIXELS] -> features [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.projector = nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patch(images)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.projector(hidden)


class Decoder(nn.Module):
    """Tokens [B, S] and features [B, D] -> logits [B, CLASSES]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + features.unsqueeze(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden).mean(dim=1))


class Toy(L.LightningModule):
    """An ordinary classifier of (image, text) pairs."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.encoder = Encoder()
            self.decoder = Decoder(dropout)
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES, average="micro")
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.decoder(batch["tokens"], self.encoder(batch["images"]))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch), batch["label"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Samples(Dataset):
    """`count` samples, equal for equal seeds."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, PIXELS, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(16, (count, TOKENS), generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.images[index], "tokens": self.tokens[index], "label": self.labels[index]}


@dataclass(frozen=True)
class Layout:
    """A configuration of the toy, and what fills it."""

    modalities: dict[str, Modality]
    world: int
    replicas: int = 1


VISION, LANGUAGE = {"module": "encoder", "boundary": "encoder"}, {"module": "decoder"}
PAIR = Layout({"vision": Modality(**VISION), "language": Modality(**LANGUAGE)}, 2)
"""vision: rank 0; language: rank 1"""
PIPE = Layout({"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3)
"""vision: rank 0; language: ranks 1-2 as stages"""
TWINS = Layout({"vision": Modality(dp_size=1, **VISION), "language": Modality(dp_size=2, **LANGUAGE)}, 3, 2)
"""vision: rank 0, for both replicas of language: ranks 1-2"""
SHARED = Layout({"vision": Modality(colocate_with="language", **VISION), "language": Modality(**LANGUAGE)}, 2, 2)
"""two replicas of everything: ranks 0-1"""


@dataclass
class Run:
    """Makes trainers and loaders of one layout; None is one process without the strategy."""

    layout: Layout | None = None
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    """for files, the same on all ranks"""

    def trainer(self, **options: Any) -> L.Trainer:
        quiet = {
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 1,
        }
        chosen: Any = "auto"
        if self.layout is not None:
            chosen = strategy(self.layout.modalities, **{"num_microbatches": 2, **self.options})
        return L.Trainer(
            devices=1 if self.layout is None else self.layout.world,
            strategy=chosen,
            **{**quiet, **options},
        )

    def loader(self, dataset: Any = 16, batch_size: int = 8, **options: Any) -> DataLoader:
        """`batch_size` counts the samples of all replicas."""
        replicas = 1 if self.layout is None else self.layout.replicas
        samples = Samples(dataset) if isinstance(dataset, int) else dataset
        return DataLoader(samples, batch_size=batch_size // replicas, **options)

    def training(self, dataset: Any = 16, batch_size: int = 8, **options: Any) -> DataLoader:
        """Like `loader`, in the order that Lightning's own sampler gives to replicas, also where there is one."""
        samples = Samples(dataset) if isinstance(dataset, int) else dataset
        has_order = not options.keys().isdisjoint(("sampler", "batch_sampler", "shuffle"))
        if self.layout is None or (self.layout.replicas == 1 and not has_order):
            options["sampler"] = DistributedSampler(samples, num_replicas=1, rank=0)
        return self.loader(samples, batch_size, **options)


def alone(scenario: Scenario, folder: Path = Path()) -> Any:
    """The scenario's result on one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scenario(Run(folder=folder))


@lru_cache(maxsize=8)
def _kept_alone(scenarios: tuple[Scenario, ...], dtype: torch.dtype) -> list[Any]:
    return alone(lambda run: [scenario(run) for scenario in scenarios])


def together(
    layout: Layout, scenario: Scenario, folder: Path = Path(), *, limit: float = LIMIT_S, **options: Any
) -> list[Any]:
    """The scenario's result on every rank of `layout`, with `options` of the strategy."""
    return run_ranks(layout.world, _on_rank, scenario, Run(layout, options, folder), limit=limit)


def _on_rank(rank: int, scenario: Scenario, run: Run) -> Any:
    warnings.simplefilter("ignore")
    return scenario(run)


@dataclass
class Outcome:
    """What a scenario returned: on one process, and on each rank."""

    one: Any
    ranks: list[Any]


def outcomes(
    layout: Layout, *scenarios: Scenario, folder: Path = Path(), limit: float = LIMIT_S, **options: Any
) -> dict[str, Outcome]:
    """Run the scenarios one after the other, on one process and in the same processes on ranks; by name.

    Scenarios that write no files run on one process once, for all layouts that tests of a file compare with it.
    """

    def everything(run: Run) -> list[Any]:
        return [scenario(run) for scenario in scenarios]

    if folder == Path():
        expected = _kept_alone(scenarios, torch.get_default_dtype())
    else:
        expected = alone(everything, folder / "one")
    got = together(layout, everything, folder / "ranks", limit=limit, **options)
    return {
        scenario.__name__: Outcome(expected[index], [results[index] for results in got])
        for index, scenario in enumerate(scenarios)
    }


def figures(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all that `module` holds; whole on rank 0 after a trainer's end."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(got: Any, expected: Any, tolerance: float = 1e-9, where: str = "") -> None:
    """Compare nested results: tensors and floats to `tolerance`, everything else exactly."""
    if isinstance(expected, Mapping):
        assert sorted(got) == sorted(expected), where
        for key in expected:
            assert_same(got[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, tolerance, f"{where}[{index}]")
    elif isinstance(expected, float | Tensor):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")
    else:
        assert got == expected, where
