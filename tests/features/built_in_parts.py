"""Modules that are built in `configure_model`, and scenarios that train them; equal seeds give equal weights.

The classes are those of `toys`; nothing of them is built before a run.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from features.toys import Decoder, Encoder, Run, Toy


class Late(Toy):
    """The toy, built in `configure_model`, with a buffer of random numbers."""

    def __init__(self, lr: float = 0.1) -> None:
        L.LightningModule.__init__(self)
        self.save_hyperparameters({"lr": lr})
        self.decoder: Any = None

    def configure_model(self) -> None:
        if self.decoder is None:
            self.encoder, self.decoder = Encoder().double(), Decoder().double()
            self.register_buffer("offset", torch.randn(3).double())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + self.offset


class Mixed(Late):
    """Its encoder has memory from the start, with values of its own on each rank but the first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3 if os.environ.get("LOCAL_RANK", "0") == "0" else os.getpid())
            self.encoder = Encoder().double()

    def configure_model(self) -> None:
        if self.decoder is None:
            self.decoder = Decoder().double()
            self.decoder.embedding.requires_grad_(False)
            self.scale = nn.Parameter(torch.rand(3).double())
            self.register_buffer("offset", torch.zeros(3).double())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) * self.scale


class Copied(Late):
    """Values of a state dict, written while it is built."""

    def configure_model(self) -> None:
        if self.decoder is None:
            super().configure_model()
            self.encoder.load_state_dict({key: torch.full_like(x, 0.1) for key, x in Encoder().state_dict().items()})


class InSetup(Toy):
    """Its decoder is built in `setup`."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder: Any = None

    def setup(self, stage: str) -> None:
        if self.decoder is None:
            self.decoder = Decoder().double()


class Empty(Late):
    """Built on the meta device in its constructor, without a record."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.encoder, self.decoder = Encoder().double(), Decoder().double()
        self.register_buffer("offset", torch.zeros(3).double())


def made_empty(trainer: L.Trainer) -> Late:
    """A module of ``trainer.init_module(empty_init=True)``."""
    module = Late()
    with trainer.init_module(empty_init=True):
        module.configure_model()
    return module


class Seen(Callback):
    """What a rank holds when it begins to fit: copies of parameters and buffers, and the generator's state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.state = torch.empty(0)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.tensors = {name: tensor.detach().clone() for name, tensor in named}
        self.state = torch.get_rng_state()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def trained(run: Run, kind: type[Toy]) -> dict[str, Any]:
    """What a rank had at the start, and all weights at the end, of modules from the same seed."""
    torch.manual_seed(7)
    seen, module = Seen(), kind()
    run.trainer(callbacks=[seen]).fit(module, run.training())
    return {"start": seen.tensors, "state": seen.state, "end": weights(module)}


def goes_on(run: Run) -> dict[str, Any]:
    """Losses of runs that follow one another on one module, with trainers of their own."""
    torch.manual_seed(7)
    module, losses = Late(), []
    for _ in range(2):
        run.trainer().fit(module, run.training())
        losses += [run.trainer().validate(module, run.loader(), verbose=False)[0]["val_loss"]]
    return {"losses": losses}


def loaded_early(run: Run) -> dict[str, Any]:
    """A state dict goes into a module without memory, before the run."""
    torch.manual_seed(7)
    trainer = run.trainer()
    module = made_empty(trainer)
    values = {name: torch.full_like(x, 0.25, device="cpu") for name, x in module.state_dict().items()}
    module.load_state_dict(values)
    seen = Seen()
    trainer.callbacks.append(seen)
    trainer.fit(module, run.training())
    return {"start": seen.tensors, "end": weights(module)}


def resumed(run: Run) -> dict[str, Any]:
    """A checkpoint that one run saves goes into a module that the next one builds."""
    torch.manual_seed(7)
    trainer, seen = run.trainer(), Seen()
    trainer.fit(Late(), run.training())
    path = run.folder / "full.ckpt"
    trainer.save_checkpoint(path)
    run.trainer(max_epochs=2, callbacks=[seen]).fit(Late(), run.training(), ckpt_path=path)
    return {"start": seen.tensors}
