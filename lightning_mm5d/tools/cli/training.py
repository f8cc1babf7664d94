"""``mm5d fit`` and its siblings: a LightningCLI from YAML alone.

Where the configuration names no class, the model is a `MultimodalModule` and the data a `MultimodalDataModule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI

from lightning_mm5d import ModalityThroughput, MultimodalStrategy
from lightning_mm5d.recipes.data import MultimodalDataModule
from lightning_mm5d.recipes.module import MultimodalModule
from lightning_mm5d.tools.cli.configuration import check_early, read_configuration


class RecipeCLI(LightningCLI):
    """A LightningCLI that shows throughput and MFU, and ends with the figures of the last validation."""

    def before_fit(self) -> None:
        """Show tokens per second and MFU in the progress bar, unless the configuration says how."""
        callbacks = vars(self.trainer)["callbacks"]
        is_ours = isinstance(self.trainer.strategy, MultimodalStrategy)
        if is_ours and not any(isinstance(one, ModalityThroughput) for one in callbacks):
            callbacks.insert(0, ModalityThroughput(prog_bar=True))

    def after_fit(self) -> None:
        """Print what the last validation measured, on the first rank."""
        found = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name.startswith("val_")}
        if found and self.trainer.is_global_zero:
            print("last validation: " + ", ".join(f"{name[4:]} {value:.4g}" for name, value in sorted(found.items())))


def command_line(contents: Sequence[Mapping[str, Any]], options: Sequence[str] = ()) -> Any:
    """Return what makes the LightningCLI of a configuration, when it is called.

    Args:
        contents: of its files.
        options: that lie on top of them.
    """
    named = {
        key: any(isinstance(one.get(key), str) or "class_path" in (one.get(key) or {}) for one in contents)
        or any(option.split("=")[0] in (f"--{key}", f"--{key}.class_path") for option in options)
        for key in ("model", "data")
    }
    has_data = any("data" in one for one in contents) or any(option.startswith("--data.") for option in options)
    module = None if named["model"] else MultimodalModule
    data = None if named["data"] or (named["model"] and not has_data) else MultimodalDataModule
    return partial(RecipeCLI, module, data, save_config_kwargs={"overwrite": True})


def train(arguments: Sequence[str]) -> None:
    """Run ``mm5d fit ...``; `arguments` are those of a LightningCLI."""
    contents = [_content(path) for path in _configs(arguments)]
    with suppress(ArgumentError):  # which the parser tells itself
        check_early(contents, arguments[1:])
    command_line(contents, arguments)(args=list(arguments))


def _configs(arguments: Sequence[str]) -> list[Path]:
    found = []
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name in ("--config", "-c"):
            found.append(Path(value if given else next(iter(arguments[at + 1 : at + 2]), "")))
    return found


def _content(path: Path) -> dict[str, Any]:
    if ":" in str(path) and not path.is_file():  # an address, or the text itself, which the parser reads
        return {}
    return read_configuration(path)
