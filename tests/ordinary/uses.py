"""A use is a row of the table: a few lines on top of a two-part toy, and what of them can be observed.

A row is written as a class that derives from `Ordinary` or from `Callback`, as flags of the trainer, as a function
that makes the data, or as a function of a `Run` that does everything itself. Rows that are parts of one run can be
put together, which is how random modules are made of them (`ordinary.fuzz`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from features.toys import Layout, Samples, Toy, figures, weights
from parity.harness import strategy


class Ordinary(Toy):
    """The toy with a list of what a use observes; the list must be equal on all ranks, and on one process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []


@dataclass
class Run:
    """Makes trainers and loaders of one column; without a layout it is plain Lightning on one process."""

    layout: Layout | None
    replicas: int
    """of the column; the plain run that it is compared with takes the samples of all, in the order of DDP's sampler"""
    options: dict[str, Any]
    """of the strategy"""
    folder: Path

    @property
    def plain(self) -> bool:
        return self.layout is None

    def trainer(self, **flags: Any) -> L.Trainer:
        quiet = {
            "accelerator": "cpu",
            "devices": 1 if self.plain else self.layout.world,
            "strategy": "auto" if self.plain else strategy(self.layout.modalities, **self.options),
            "default_root_dir": self.folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "max_epochs": 1,
            "use_distributed_sampler": self.replicas > 1,
        }
        return L.Trainer(**(quiet | flags))

    def loader(self, dataset: Any = 16, batch_size: int = 8, **options: Any) -> DataLoader:
        """`batch_size` counts the samples of all replicas."""
        shares = 1 if self.plain else self.replicas
        samples = Samples(dataset) if isinstance(dataset, int) else dataset
        return DataLoader(samples, batch_size=batch_size // shares, **options)

    def training(self, dataset: Any = 32, batch_size: int = 8, **options: Any) -> DataLoader:
        """Like `loader`, in the order that Lightning's own sampler gives to replicas, where there are replicas."""
        samples = Samples(dataset) if isinstance(dataset, int) else dataset
        if self.plain and self.replicas > 1 and "sampler" not in options:
            options.pop("shuffle", None)
            options["sampler"] = DistributedSampler(samples, num_replicas=1, rank=0)
        return self.loader(samples, batch_size, **options)


@dataclass(frozen=True, kw_only=True)
class Use:
    """One row.

    Attributes:
        section: heading in the table.
        title: what the user writes, in Markdown.
        module: class of the LightningModule.
        callbacks: makes callbacks.
        flags: of the trainer, for a run.
        data: keyword arguments of `fit`, for a run.
        scenario: does everything itself and returns the observations by name.
        slots: things that it sets; two uses that set the same thing do not go together.
        over: how observations of replicas make the one of a process: "" where each equals it, else a name in `OVER`.
        differs: by column why what is observed is known to differ.
        tolerance: of differences between numbers.
        warns: whether the first batch tells that its loss is no mean of the microbatches' losses.
    """

    section: str
    title: str
    module: type[Ordinary] | None = None
    callbacks: Callable[[], list[Callback]] | None = None
    flags: Callable[[Run], dict[str, Any]] | None = None
    data: Callable[[Run], dict[str, Any]] | None = None
    scenario: Callable[[Run], dict[str, Any]] | None = None
    slots: frozenset[str] = frozenset()
    over: str = ""
    differs: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-9
    warns: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}: {self.title}"

    def __call__(self, run: Run) -> dict[str, Any]:
        torch.manual_seed(7)
        try:
            return self.scenario(run) if self.scenario is not None else together([self], run)
        finally:  # a seed of one use is not that of the samplers of the next
            for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
                os.environ.pop(name, None)


USES: dict[str, Use] = {}


def row(section: str, title: str, **options: Any) -> Callable[[Any], Any]:
    """Register what it decorates as a row: a module, a callback, or a function of a run that does everything."""

    def register(thing: Any) -> Any:
        options["slots"] = frozenset(options.get("slots", ()))
        if inspect.isclass(thing) and issubclass(thing, Callback):
            use = Use(section=section, title=title, callbacks=lambda: [thing()], **options)
        elif inspect.isclass(thing):
            written = {f"def {name}" for name in vars(thing) if not name.startswith("__")}
            use = Use(section=section, title=title, module=thing, **options)
            use = replace(use, slots=use.slots | written)
        else:
            use = Use(section=section, title=title, scenario=thing, **options)
        _add(use)
        return thing

    return register


def flags(section: str, title: str | None = None, /, *, over: str = "", differs: Any = None, **flags: Any) -> None:
    """Register flags of the trainer as a row."""
    said = title or "`Trainer(" + ", ".join(f"{name}={value!r}" for name, value in flags.items()) + ")`"
    _add(
        Use(
            section=section,
            title=said,
            flags=lambda run: dict(flags),
            slots=frozenset(flags),
            over=over,
            differs=differs or {},
        )
    )


def callbacks(section: str, title: str, make: Callable[[], list[Callback]], **options: Any) -> None:
    """Register callbacks as a row."""
    options["slots"] = frozenset(options.get("slots", ()))
    _add(Use(section=section, title=title, callbacks=make, **options))


def data(section: str, title: str, **options: Any) -> Callable[[Any], Any]:
    """Register a function of a run that makes the arguments of `fit` as a row."""

    def register(make: Callable[[Run], dict[str, Any]]) -> Any:
        options["slots"] = frozenset({"data", *options.get("slots", ())})
        _add(Use(section=section, title=title, data=make, **options))
        return make

    return register


def _add(use: Use) -> None:
    assert use.name not in USES, f"two rows are called {use.name}"
    USES[use.name] = use


class Memory(Logger):
    """Keeps in memory what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append([step, {name: float(value) for name, value in metrics.items()}])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.lines.append(["parameters", {name: value for name, value in dict(params).items()}])


class Losses(Callback):
    """Keeps what training steps return as their loss, and a digest of the batches."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.batches: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self.batches.append(sum(float(leaf.detach().double().mean()) for leaf in leaves if leaf.numel()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses.append(None if loss is None else float(loss))


def module_of(uses: Sequence[Use]) -> type[Ordinary]:
    """The class that has the methods of all `uses`."""
    bases = list(dict.fromkeys(use.module for use in uses if use.module is not None))
    if len(bases) == 1:
        return bases[0]
    return type("Composed", tuple(bases) or (Ordinary,), {})


def together(uses: Sequence[Use], run: Run) -> dict[str, Any]:
    """Fit the module that `uses` make, with their data, callbacks and flags, and return what is observed."""
    module = module_of(uses)()
    losses, memory = Losses(), Memory()
    made = [callback for use in uses if use.callbacks is not None for callback in use.callbacks()]
    chosen: dict[str, Any] = {"logger": memory}
    for use in uses:
        chosen |= use.flags(run) if use.flags is not None else {}
    given = [callback for use in uses if use.flags is not None for callback in chosen.pop("callbacks", [])]
    trainer = run.trainer(callbacks=[losses, *made, *given], **chosen)
    batches: dict[str, Any] = {}
    for use in uses:
        batches |= use.data(run) if use.data is not None else {}
    if not batches:
        batches = {"train_dataloaders": run.training(), "val_dataloaders": run.loader(16)}
    trainer.fit(module, **batches)
    return observed(trainer, module) | {
        "losses": losses.losses,
        "batches": losses.batches,
        "logged": memory.lines,
        "seen": [*module.seen, *(seen for callback in made for seen in getattr(callback, "seen", []))],
    }


def observed(trainer: L.Trainer, module: nn.Module) -> dict[str, Any]:
    """What is compared after every run: logged values, progress and weights."""
    return {
        "metrics": figures(trainer),
        "progress": [trainer.global_step, trainer.current_epoch],
        "weights": weights(module),
    }


def fitted(run: Run, module: Ordinary, **flags: Any) -> dict[str, Any]:
    """Fit `module` with `flags` and the usual data, for rows that do more than that."""
    losses, memory = Losses(), Memory()
    made = [losses, *flags.pop("callbacks", [])]
    given = {"train_dataloaders": run.training(), "val_dataloaders": run.loader(16)}
    given |= flags.pop("data", {})
    path = flags.pop("ckpt_path", None)
    trainer = run.trainer(callbacks=made, **({"logger": memory} | flags))
    trainer.fit(module, **given, **({} if path is None else {"ckpt_path": path}))
    kept = {"losses": losses.losses, "batches": losses.batches, "logged": memory.lines, "seen": module.seen}
    return observed(trainer, module) | kept
