"""What gradients and the messages that carry them take together: one copy of all gradients, in every way of training.

All bytes that torch allocates during a `fit` count, with activations, which are small here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from features.toys import Layout, Run, together
from lightning_mm5d import Modality

WIDTH, LAYERS = 96, 48
ONE = WIDTH * WIDTH * 8
"""bytes of the gradient of one weight, which exists beside all others when autograd adds it to them"""


class Wide(L.LightningModule):
    """Wide layers and few samples, so that gradients are far larger than activations."""

    def __init__(self, change: Callable[[Wide], None] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.encoder = nn.Linear(6, WIDTH, bias=False)
            self.decoder = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        if change is not None:
            change(self)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.decoder(self.encoder(batch["images"])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * 8 for p in self.parameters() if p.requires_grad)


def tied(module: Wide) -> None:
    for index in range(0, LAYERS, 4):
        module.decoder[index].weight = module.decoder[index + 1].weight


def frozen(module: Wide) -> None:
    for index in range(0, LAYERS, 2):
        module.decoder[index].requires_grad_(False)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations return, until their memory is freed on whatever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._lock = threading.RLock()
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if size and key not in self._seen:
                self._seen[key] = weakref.finalize(storage, self._free, key, size)
                self.now += size
                self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        with self._lock:
            del self._seen[key]
            self.now -= size


class Count(L.Callback):
    """Counts bytes from the start of training, when everything but gradients is there, to its end."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        step = trainer.strategy.training_step

        def first_step(*args: Any, **kwargs: Any) -> Any:  # a hook would be shown full parameters
            trainer.strategy.training_step = step
            self.live = Live()
            self.live._seen = {one.untyped_storage()._cdata: None for one in module.parameters()}
            self.live.__enter__()
            return step(*args, **kwargs)

        trainer.strategy.training_step = first_step

    def on_train_end(self, *_: Any) -> None:
        self.live.__exit__(None, None, None)
        self.peak = self.live.peak


def peak(run: Run, module: Wide, **options: Any) -> tuple[int, int]:
    """The largest number of bytes that were alive at a time during a fit, and those of gradients."""
    size, count = module.gradient_bytes, Count()
    samples = 2 * run.layout.world if run.layout is not None else 2
    run.trainer(callbacks=[count], **options).fit(module, run.training(3 * samples, batch_size=samples))
    return count.peak, size


def peaks(run: Run) -> dict[str, tuple[int, int]]:
    cases: dict[str, Callable[[], tuple[int, int]]] = {
        "all": lambda: peak(run, Wide()),
        "accumulated": lambda: peak(run, Wide(), accumulate_grad_batches=3),
        "tied": lambda: peak(run, Wide(tied)),
        "frozen": lambda: peak(run, Wide(frozen)),
        "clipped": lambda: peak(run, Wide(), gradient_clip_val=0.1),
    }
    # on a busy machine gloo's threads may free what they sent a step later: the least of two is what the code keeps
    return {name: min(measured(), measured()) for name, measured in cases.items()}


def layout(world: int = 2, **sharing: Any) -> Layout:
    sizes = {"module": "encoder", "boundary": "encoder"}, {"module": "decoder"}
    encoder, decoder = Modality(colocate_with="language", **sharing, **sizes[0]), Modality(**sharing, **sizes[1])
    return Layout({"vision": encoder, "language": decoder}, world, world)


# most bytes over those of gradients, beside the gradient of one weight, and activations of up to 3 %
WHOLE = {"all": 1.0, "accumulated": 1.0, "tied": 1.0, "frozen": 1.0, "clipped": 1.0}
# and two messages of a weight each on their way, with what arrives; accumulated rows are a half more
ROWS = {"all": 1.0, "accumulated": 1.5, "tied": 1.0, "frozen": 1.0, "clipped": 1.0}


@pytest.mark.parametrize(
    ("where", "microbatches", "most"),
    [
        pytest.param(layout(), 1, WHOLE, id="plain replicas"),
        pytest.param(layout(), 2, WHOLE, id="microbatches"),
        pytest.param(layout(zero_stage=2), 2, ROWS, id="rows"),
        pytest.param(layout(zero_stage=1), 2, ROWS, id="states", marks=pytest.mark.exhaustive),
        pytest.param(layout(zero_stage=2), 1, ROWS, id="rows of one backward", marks=pytest.mark.exhaustive),
        pytest.param(layout(4, zero_stage=2, dp_shard_size=2), 1, ROWS, id="blocks", marks=pytest.mark.exhaustive),
    ],
)
def test_there_is_one_copy_of_all_gradients(where: Layout, microbatches: int, most: dict[str, float]) -> None:
    carried = 4 if most is ROWS else 0

    def exceeded() -> list[str]:
        return [
            f"{case}: {peak_bytes / gradient_bytes:.3f}"
            for found in together(where, peaks, num_microbatches=microbatches, bucket_bytes=ONE)
            for case, (peak_bytes, gradient_bytes) in found.items()
            if peak_bytes > most[case] * gradient_bytes + (1 + carried) * ONE + 0.08 * LAYERS * ONE
        ]

    # a rank that gets no processor time keeps the others' messages waiting, with their memory: not three times in a row
    assert not exceeded() or not exceeded() or not exceeded()
