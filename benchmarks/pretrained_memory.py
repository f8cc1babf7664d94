"""A LLaVA of random weights, at least 2 GB in files, that four ranks load from its files: memory and bytes read.

The weights are written first, file by file, into a temporary folder. `configure_model` calls `from_pretrained`. From
its start to the end of setup each rank's highest resident memory is taken, less what it was before, and the bytes that
the process has read from all files. Both are divided by the rank's own share: the bytes of the parameters and buffers
that it holds. One tensor is taken off the memory, because a rank reads one tensor at a time beside its share.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from turns import Side, row, run

from lightning_mm5d import Modality, MultimodalStrategy, from_pretrained
from lightning_mm5d.sharded.remote_value import is_remote

WORLD, IMAGE_ID, FEATURES = 4, 31_999, 16
LAYOUTS: dict[str, dict[str, Modality]] = {
    "vision | language in 3 stages": {"vision": Modality(), "language": Modality(pp_size=3)},
    "vision tp 2 | language tp 2": {"vision": Modality(tp_size=2), "language": Modality(tp_size=2)},
}


def config(layers: int) -> LlavaConfig:
    """About 67 MB a layer, and 0.4 GB beside them."""
    vision = CLIPVisionConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, image_size=56
    )
    vision.patch_size = 14
    text = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=IMAGE_ID + 1,
    )  # fmt: skip
    return LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_ID, image_seq_length=FEATURES)


def write(folder: Path, layers: int) -> list[int]:
    """Write a model's random weights; return the sizes of its tensors in bytes.

    Another process does it, so that ranks which are forked from this one begin without memory that it has freed.
    """
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_write, (folder, layers))


def _write(folder: Path, layers: int, file_bytes: int = 200 * 10**6) -> list[int]:
    """Write files of about `file_bytes`."""
    model_config = config(layers)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(model_config)
    model_config.architectures, model_config.dtype = [type(model).__name__], torch.float32
    model_config.save_pretrained(folder)
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        if sum(other.nbytes for other in files[-1].values()) + tensor.nbytes > file_bytes:
            files.append({})
        files[-1][name] = tensor
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        values = {name: torch.randn(tensor.shape) / 50 for name, tensor in tensors.items()}
        save_file(values, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    sizes = [tensor.nbytes for tensors in files for tensor in tensors.values()]
    whole = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return sizes


class Measured(L.LightningModule):
    """Measures from `begin` to the end of setup."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.figures: dict[str, float] = {}

    def begin(self) -> None:
        """Count from here on."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory counts from here
        self.figures = {"memory": _status("VmRSS"), "read": _read()}

    def on_validation_start(self) -> None:
        memory, read = _status("VmHWM") - self.figures["memory"], _read() - self.figures["read"]
        self.figures = {"memory": memory, "read": read, "share": share(self)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(**batch, use_cache=False).loss, sync_dist=True)


class Loaded(Measured):
    """A model that `configure_model` takes from files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            self.begin()
            self.model = from_pretrained(LlavaForConditionalGeneration, self.folder)


def share(module: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers that this process holds."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()) if not is_remote(tensor))


def validate(module: Measured, modalities: dict[str, Modality]) -> dict[str, float]:
    """Set the module up on this rank, and let it see one batch; return what was measured."""
    tokens = torch.randint(0, IMAGE_ID, (2, 8 + FEATURES))
    tokens[:, 1 : 1 + FEATURES] = IMAGE_ID
    batch = {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 56, 56)}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = MultimodalStrategy(modalities=modalities, batching={"num_microbatches": 2}, checkpoint="sharded")
    trainer = L.Trainer(
        accelerator="cpu", devices=WORLD, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.validate(module, DataLoader([batch], batch_size=None), verbose=False)
    assert torch.isfinite(trainer.callback_metrics["loss"])
    return module.figures


def measured(folder: Path, modalities: dict[str, Modality]) -> list[dict[str, float]]:
    """What each rank measured."""
    return run(Side(WORLD, lambda turns, rank: validate(Loaded(folder), modalities)))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


def main(layers: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = write(folder, layers)
        for layout, modalities in LAYOUTS.items():
            ranks = measured(folder, modalities)
            for figure, less, aim in (("memory", max(sizes), "1.15"), ("read", 0, "1.05")):
                what = f"{figure} less one tensor of {less / 1e6:.0f} MB" if less else figure
                ratio = max((rank[figure] - less) / rank["share"] for rank in ranks)
                values = ", ".join(f"{rank[figure] / 1e6:.0f} / {rank['share'] / 1e6:.0f}" for rank in ranks)
                row(f"{sum(sizes) / 1e9:.1f} GB, {layout}: {what} / own share, worst rank", ratio, aim, f"{values} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 36)
