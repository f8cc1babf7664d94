"""The device's share of memory on each of two ranks, with and without offloading.

On a CPU the device and the host are one. So the bytes of tensors that are alive are counted, without the copies that
`HostMemory` holds: what a GPU would hold. A frozen encoder stands beside the first of two stages of the language model,
and each batch has eight microbatches. The peak is that of the second step, and the table has the worst rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from turns import Side, fit, row, run

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.features.offload import feature
from lightning_mm5d.features.offload.moves import HostMemory, Stored

WIDTH, TOKENS, MICROBATCHES = 256, 192, 8
KINDS = (["activations"], ["optimizer"], ["parameters"], ["activations", "optimizer", "parameters"])


class Device(TorchDispatchMode):
    """Counts the bytes of storages that are alive, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.is_host = False
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not self.is_host:
            self.count(tree_leaves(outputs))
        return outputs

    def count(self, tensors: list[Any]) -> None:
        """Count tensors that are on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata)
        self.most = max(self.most, self.now)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


DEVICE = Device()


class Host(HostMemory):
    """Its copies are not counted."""

    def store(self, tensor: Tensor) -> Stored:
        DEVICE.is_host = True
        try:
            return super().store(tensor)
        finally:
            DEVICE.is_host = False


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Model(L.LightningModule):
    """Images and tokens [B, S, D] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(8).requires_grad_(False), Stack(8)
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.decoder(batch + self.encoder(batch)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DEVICE.most = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.peaks.append(DEVICE.most)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.decoder.parameters(), lr=1e-3)


def peak(schedule: str, offload: list[str]) -> list[int]:
    """Peak of each rank."""
    stays = [kind for kind in offload if kind != "parameters"]
    modalities = {
        "vision": Modality(
            module="encoder",
            boundary="encoder",
            colocate_with="language.0",
            memory={"offload": ["parameters"] if "parameters" in offload else None},
        ),
        "language": Modality(module="decoder", pp_size=2, memory={"offload": stays or None}),
    }

    def train(turns: Any, rank: int) -> int:
        feature.HostMemory = Host  # type: ignore[misc]
        model = Model()
        DEVICE.count([*model.parameters()])
        strategy = MultimodalStrategy(
            modalities, schedule=schedule, batching={"num_microbatches": MICROBATCHES}, launch={"bucket_bytes": 2**20}
        )
        with DEVICE:
            fit(model, DataLoader([torch.randn(MICROBATCHES, TOKENS, WIDTH)] * 3, batch_size=None), strategy, 2)
        return model.peaks[1]

    return run(Side(2, train))


def main() -> None:
    for schedule in ("gpipe", "1f1b"):
        plain = peak(schedule, [])
        for offload in KINDS:
            ranks = peak(schedule, offload)
            values = ", ".join(
                f"{offloaded / 1e6:.1f} / {without / 1e6:.1f}" for offloaded, without in zip(ranks, plain, strict=True)
            )
            ratio = max(ranks) / max(plain)
            row(
                f"offload {' + '.join(offload)}, {schedule}, M = {MICROBATCHES}: peak / none", ratio, "", f"{values} MB"
            )


if __name__ == "__main__":
    main()
