"""What goes over the wire, against what must: features to the language model, hidden states on, and their gradients.

What must is computed by hand from the shapes of the model. What goes is counted where torch.distributed is called, from
the first batch to the last: every message between stages with its headers, and every broadcast and all-reduce beside
them (losses, logs, Lightning's own).
"""

from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from model import LANGUAGE, PATCHES, TOKENS, VISION, WIDTH, VisionLanguage, loader
from torch import Tensor
from turns import Side, Turns, fit, row, run

from lightning_mm5d import Modality, MultimodalStrategy

STEPS, BATCH, MICROBATCHES, FLOAT_BYTES = 10, 8, 4, 4
PP_SIZE = 2


class Counter(Callback):
    """Counts what this rank sends."""

    def __init__(self) -> None:
        self.sent = 0.0

    def on_train_start(self, *_: Any) -> None:
        """From here on. A ring all-reduce sends 2 (n - 1) / n times the tensor from each of n ranks."""
        self._count("isend", lambda tensor, *_, **__: tensor.nbytes)
        self._count("broadcast", lambda tensor, src, group=None, *_, **__: _copies(tensor, src, group))
        self._count("all_reduce", lambda tensor, *_, group=None, **__: 2 * tensor.nbytes * (1 - 1 / _size(group)))

    def _count(self, name: str, cost: Any) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += cost(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(dist, name, counted)  # for good: the process ends with the training


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _copies(tensor: Tensor, src: int, group: Any) -> int:
    return tensor.nbytes * (_size(group) - 1) if dist.get_rank() == src else 0


def train(turns: Turns, rank: int) -> float:
    """Returns the bytes that this rank sent."""
    language = Modality(module=LANGUAGE.module, pp_size=PP_SIZE)
    strategy = MultimodalStrategy({"vision": VISION, "language": language}, batching={"num_microbatches": MICROBATCHES})
    counter = Counter()
    fit(VisionLanguage(2, 2), loader(STEPS, BATCH), strategy, 1 + PP_SIZE, counter)
    return counter.sent


def main() -> None:
    sent = sum(run(Side(1 + PP_SIZE, train)))
    forward = BATCH * PATCHES * WIDTH + (PP_SIZE - 1) * BATCH * TOKENS * WIDTH
    needed = STEPS * 2 * forward * FLOAT_BYTES  # gradients are as large as what they are the gradients of
    measured = f"{sent / 2**20:.3f} MiB / {needed / 2**20:.3f} MiB"
    row(f"vision, language pp {PP_SIZE}: bytes on the wire / bytes that must cross", sent / needed, "1.01", measured)


if __name__ == "__main__":
    main()
