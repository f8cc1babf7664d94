"""Ranks that run unequal things are told so, all of them, by name and before they wait for each other.

The default run holds each kind of thing; more fields and options are `exhaustive`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from features.toys import LANGUAGE, PIPE, VISION, Layout, Run, Toy
from lightning_mm5d import Modality, PipelineTemplate
from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.trainer import statements
from ranks import run_ranks
from sweeps import swept

ODD = 2
"""the rank that differs"""
Case = tuple[Callable[[bool], tuple[L.LightningModule, L.Trainer, Any]], str]


class Wide(Toy):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        if odd:
            self.decoder.head = torch.nn.Linear(8, 4).double()


class Frozen(Toy):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.encoder.patch.requires_grad_(not odd)


class Dropped(Toy):
    def __init__(self, odd: bool) -> None:
        super().__init__(dropout=0.1 if odd else 0.2)


class Faster(Toy):
    def __init__(self, odd: bool) -> None:
        super().__init__(lr=0.2 if odd else 0.1)


class Elsewhere(Toy):
    """Another class of the same structure."""


def _field(name: str, odd: Any, usual: Any) -> Callable[[bool], Any]:
    return lambda is_odd: (Toy(), Run(PIPE, {name: odd if is_odd else usual}).trainer(), Run(PIPE).training())


def _option(name: str, odd: Any, usual: Any) -> Callable[[bool], Any]:
    return lambda is_odd: (Toy(), Run(PIPE).trainer(**{name: odd if is_odd else usual}), Run(PIPE).training())


def _module(cls: Callable[[bool], L.LightningModule]) -> Callable[[bool], Any]:
    return lambda odd: (cls(odd), Run(PIPE).trainer(), Run(PIPE).training())


def _layers(odd: bool) -> Any:
    stages = [1, 3] if odd else [2, 2]
    template = {"pipeline_template": PipelineTemplate(stages=stages)}
    modalities = {"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE, **template)}
    return Toy(), Run(Layout(modalities, 3)).trainer(), Run(PIPE).training()


def _seed(odd: bool) -> Any:
    L.seed_everything(8 if odd else 7, verbose=False)
    return Toy(), Run(PIPE).trainer(), Run(PIPE).training()


def _version(odd: bool) -> Any:
    statements.version = lambda package: "0.0.1" if odd else "0.0.2"  # type: ignore[assignment]
    return Toy(), Run(PIPE).trainer(), Run(PIPE).training()


def _devices(odd: bool) -> Any:
    os.environ["WORLD_SIZE"] = "4" if odd else "3"
    modalities = {**PIPE.modalities, "vision": Modality(dp_size=2 if odd else 1, **VISION)}
    return Toy(), Run(Layout(modalities, 4 if odd else 3)).trainer(), Run(PIPE).training()


def _batches(odd: bool) -> Any:
    return Toy(), Run(PIPE).trainer(), Run(PIPE).training(batch_size=4 if odd else 8)


def _samples(odd: bool) -> Any:
    return Toy(), Run(PIPE).trainer(), Run(PIPE).training(24 if odd else 16)


CASES: dict[str, Case] = {
    "a field": (_field("num_microbatches", 4, 2), "rank 2 has num_microbatches 4, ranks 0 and 1 have 2"),
    "a choice": (_field("loss_weight", "tokens", "samples"), "rank 2 has loss_weight tokens, ranks 0 and 1 have"),
    "a schedule": (_field("schedule", "gpipe", "1f1b"), "rank 2 has schedule gpipe, ranks 0 and 1 have 1f1b"),
    "a field of a modality": (
        _layers,
        "has modalities.language.pipeline.pipeline_template.stages [1, 3], ranks 0 and 1 have",
    ),
    "an option of the trainer": (_option("accumulate_grad_batches", 2, 1), "rank 2 has Trainer.accumulate_grad_batch"),
    "steps": (_option("max_steps", 3, -1), "rank 2 has Trainer.max_steps 3, ranks 0 and 1 have -1"),
    "a limit": (_option("limit_val_batches", 1, 1.0), "rank 2 has Trainer.limit_val_batches 1, ranks 0 and 1 have 1.0"),
    "clipping": (_option("gradient_clip_val", 1.0, None), "has Trainer.gradient_clip_val 1.0, ranks 0 and 1 have null"),
    "checkpoints": (_option("enable_checkpointing", True, False), 'rank 2 has Trainer.callbacks ["ModelCheckpoint'),
    "seeds": (_seed, "rank 2 has PL_GLOBAL_SEED 8, ranks 0 and 1 have 7"),
    "versions": (_version, "rank 2 has version of lightning_mm5d 0.0.1, ranks 0 and 1 have 0.0.2"),
    "the number of ranks": (_devices, "rank 2 has number of ranks 4, ranks 0 and 1 have 3"),
    "shapes": (_module(Wide), "rank 2 has decoder.head Linear(in_features=8, out_features=4"),
    "what is frozen": (_module(Frozen), "rank 2 has encoder.patch.weight float64[8, 6] frozen, ranks 0 and 1 have"),
    "settings of layers": (_module(Dropped), "has decoder.layers.0.dropout Dropout(p=0.1, inplace=False), ranks 0 and"),
    "classes": (
        _module(lambda odd: Elsewhere() if odd else Toy()),
        "rank 2 has LightningModule Elsewhere, ranks 0 and 1 have Toy",
    ),
    "a learning rate": (_module(Faster), "rank 2 has optimizer 0, group 0: lr 0.2, ranks 0 and 1 have 0.1"),
    "batch sizes": (_batches, "rank 2 has batch_size 4, ranks 0 and 1 have 8"),
    "data sets": (_samples, "rank 2 has number of samples 24, ranks 0 and 1 have 16"),
}


RESUMED = {
    "checkpoints of other steps": ("1.ckpt", "rank 2 has global_step 1, ranks 0 and 1 have 2"),
    "checkpoints of other weights": ("other.ckpt", "rank 2 has state_dict.encoder.patch.bias float64[8] with bits"),
    "checkpoints that are missing": ("no.ckpt", "rank 2 has checkpoint not read (FileNotFoundError: "),
}
"""what rank 2 resumes from, while the others resume from 2.ckpt"""


def _messages(rank: int, folder: Path, names: list[str]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found, alive = {}, []
    environment = dict(os.environ)
    for name in names:
        path = None
        if name in CASES:
            module, trainer, data = CASES[name][0](rank == ODD)
        else:
            module, trainer, data = Toy(), Run(PIPE).trainer(max_epochs=2), Run(PIPE).training()
            path = folder / (RESUMED[name][0] if rank == ODD else "2.ckpt")
        alive.append(trainer)  # rank 0's first store serves all cases
        try:
            trainer.fit(module, data, ckpt_path=path)
        except RankMismatchError as error:
            found[name] = str(error)
        except Exception as error:
            raise AssertionError(name) from error
        statements.version = metadata.version
        os.environ.clear()
        os.environ.update(environment)
    return found


@pytest.fixture(scope="module")
def messages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for steps in (1, 2):
            trainer = Run().trainer(max_steps=steps)
            trainer.fit(Toy(), Run().training())
            trainer.save_checkpoint(folder / f"{steps}.ckpt")
    saved = torch.load(folder / "2.ckpt", weights_only=False)
    saved["state_dict"]["encoder.patch.bias"][3] += 1e-9
    torch.save(saved, folder / "other.ckpt")
    asked = {item.name for item in request.session.items if item.path == request.path}
    names = [name for name in (*CASES, *RESUMED) if any(f"[{name}]" in test for test in asked)]
    return run_ranks(3, _messages, folder, names)


MORE = ("a choice", "a schedule", "steps", "a limit", "clipping", "classes", "checkpoints of other steps")


@pytest.mark.parametrize("name", swept([*CASES, *RESUMED], *MORE))
def test_ranks_that_disagree_are_all_told(name: str, messages: list[dict[str, str]]) -> None:
    """vision: rank 0; language: ranks 1-2 as stages; rank 2 differs"""
    for rank, found in enumerate(messages):
        assert {**CASES, **RESUMED}[name][1] in found.get(name, "no error"), f"rank {rank}"
