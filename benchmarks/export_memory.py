"""Exports of a sharded checkpoint of 1.4 GB that two ranks wrote: memory over the largest tensor.

The memory of an export is the highest that is resident in a process that does nothing else, less what was resident
before. Mixtral's fused experts are converted: such a tensor is in memory together with what it is divided into.
"""

from __future__ import annotations

import gc
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from turns import Side, row, run

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.export.exported import export
from lightning_mm5d.features.sharded_checkpoints.sharded_load import ShardedCheckpoint


def llama() -> Any:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, vocab_size=32_000
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> Any:
    config = MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=32_000, num_local_experts=8,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Saved(L.LightningModule):
    """Saves itself in validation."""

    def __init__(self, build: Callable[[], Any], path: Path) -> None:
        super().__init__()
        self.build, self.path = build, path
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch, use_cache=False).loss)

    def on_validation_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def save(build: Callable[[], Any], path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = MultimodalStrategy(
        {"language": Modality(pp_size=2)}, batching={"num_microbatches": 2}, checkpoint="sharded"
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.validate(Saved(build, path), DataLoader([torch.randint(0, 99, (2, 8))], batch_size=None), verbose=False)


def measured(path: Path, out: Path, **options: Any) -> int:
    """Bytes that an export adds to what is resident; code that the first one loads counts before."""
    export(path, out.with_suffix(".first"), **options)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory counts from here
    before = _status("VmRSS")
    export(path, out, **options)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    forms: dict[str, dict[str, Any]] = {
        "Hugging Face": {"max_shard_size": "500MB"},
        "Hugging Face in bfloat16": {"dtype": "bfloat16"},
        "plain Lightning": {"format": "lightning"},
    }
    for build, converted in ((llama, 1), (mixtral, 2)):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "saved.ckpt"
            run(Side(2, lambda turns, rank, build=build, path=path: save(build, path)))
            source = ShardedCheckpoint(path)
            sizes = [math.prod(source.shape(each)) * source.dtype(each).itemsize for each in source.names()]
            for number, (form, options) in enumerate(forms.items()):
                out = Path(name) / str(number)
                side = Side(1, lambda turns, rank, path=path, out=out, options=options: measured(path, out, **options))
                (memory,) = run(side)
                what = (
                    f"{sum(sizes) / 1e9:.1f} GB, {build.__name__}, to {form}: memory of the export / the largest tensor"
                )
                least = 1 if form == "plain Lightning" else converted + 0.5 * ("dtype" in options) / converted
                row(what, memory / max(sizes), f"{least + 0.15:.2f}", f"{memory / 1e6:.0f} / {max(sizes) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
