"""What the strategy costs one GPU: a model of the shape of Qwen2-VL 2B with random weights, and plain Lightning.

bf16, AdamW, batches of text with an image for each sample. Both sides train in turns in one process. FLOP of a step
are counted by torch's `FlopCounterMode`, nothing is recomputed; MFU is their rate over the GPU's peak of dense bf16.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import LackingError, Row
from benchmarks.gpu.towers import TIMEOUT, fit
from lightning_mm5d import MultimodalStrategy

IMAGE, START, END, FIRST_TEXT = 4, 5, 6, 16  # token ids
WARMUP = 4
NEEDED_BYTES = 36 * 2**30
PEAKS = {
    "H100 PCIe": 756,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
    "RTX 4090": 165,
}
"""TFLOP/s of dense bf16 by a part of the GPU's name, from its data sheet; the first that fits counts."""

TEXT: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536, "mlp_ratio": 4}
SMALL_TEXT = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
}
SMALL_VISION = VISION | {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64}


class Qwen(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights each time."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen2VLConfig(
            text_config=machine.pick(TEXT, SMALL_TEXT),
            vision_config=machine.pick(VISION, SMALL_VISION),
            image_token_id=IMAGE,
            vision_start_token_id=START,
            vision_end_token_id=END,
            video_token_id=END + 1,
            tie_word_embeddings=True,
        )
        with torch.device(machine.device):  # drawn where they stay: a CPU would take minutes
            self.model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Times(Callback):
    """Marks the start of every step on the device; nothing waits for it before the end."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._marks.append(self._machine.mark())

    def on_train_end(self, *_: Any) -> None:
        self._marks.append(self._machine.mark())

    def seconds(self) -> list[float]:
        """Return the time of each step after the warm-up."""
        self._machine.synchronize()
        return [self._machine.between(*pair) for pair in pairwise(self._marks)][WARMUP:]


def batch(machine: Machine) -> dict[str, Tensor]:
    """Return samples that are an image and text: `input_ids` and `labels` [B, S], patches, and grids [B, 3]."""
    samples, length, side = machine.pick((2, 2048, 32), (2, 32, 4))
    features = side * side // 4
    generator = torch.Generator().manual_seed(0)
    vocabulary = machine.pick(TEXT, SMALL_TEXT)["vocab_size"]
    tokens = torch.randint(FIRST_TEXT, vocabulary, (samples, length), generator=generator)
    tokens[:, 1], tokens[:, 2 : 2 + features], tokens[:, 2 + features] = START, IMAGE, END
    labels = tokens.clone()
    labels[:, : 3 + features] = -100
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "labels": labels,
        "pixel_values": torch.randn(samples * side * side, 3 * 2 * 14 * 14, generator=generator).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, side, side]] * samples),
    }


def run(machine: Machine) -> Iterator[Row]:
    """Yield tokens per second and MFU of both sides, and their ratio."""
    if machine.gpu_bytes < NEEDED_BYTES and not machine.is_dry:
        raise LackingError(f"needs a GPU with {NEEDED_BYTES // 2**30} GiB")
    data = [batch(machine)] * (WARMUP + machine.pick(16, 2))
    tokens = data[0]["input_ids"].numel()
    flop = flop_of(machine, lambda: Qwen(machine), data[0])
    sides = in_turns(
        machine,
        data,
        {
            "strategy": lambda: (Qwen(machine), MultimodalStrategy(launch={"timeout": TIMEOUT})),
            "plain Lightning": lambda: (Qwen(machine), "auto"),
        },
    )
    ours, plain = sides.values()
    yield from rates(machine, sides, tokens, flop)
    yield Row(name="tokens per second, strategy / plain Lightning", value=plain.seconds / ours.seconds, at_least=0.99)
    note = f"{ours.peak_bytes / 2**30:.2f} / {plain.peak_bytes / 2**30:.2f} GiB"
    ratio = ours.peak_bytes / plain.peak_bytes
    yield Row(name="peak memory, strategy / plain Lightning", value=ratio, at_most=1.02, note=note)


def rates(
    machine: Machine, sides: Mapping[str, Side], tokens: int, flop: float, aim: float | None = None
) -> Iterator[Row]:
    """Yield tokens per second and MFU of each side, and how far the strategy's last loss is from plain Lightning's.

    Args:
        machine: to which the MFU refers.
        sides: sides by name, "strategy" and "plain Lightning" among them.
        tokens: of a step.
        flop: of a step.
        aim: for the MFU of the strategy.
    """
    peak = peak_of(machine)
    for name, side in sides.items():
        note = f"{side.seconds * 1e3:.1f} ms a step of {tokens}"
        yield Row(name=f"{name}: tokens", value=tokens / side.seconds, unit="/s", note=note)
        if peak:
            mfu, note = flop / side.seconds / peak, f"of {peak / 1e12:.0f} TFLOP/s"
            yield Row(name=f"{name}: MFU", value=mfu, at_least=aim if name == "strategy" else None, note=note)
    ours, plain = sides["strategy"].losses[-1], sides["plain Lightning"].losses[-1]
    yield Row(name="last loss: relative difference", value=abs(ours - plain) / abs(plain), at_most=0.01)


class Side(NamedTuple):
    """What a way of training took.

    Attributes:
        seconds: median of a step.
        losses: of the last run.
        peak_bytes: on the GPU, of the last run.
    """

    seconds: float
    losses: list[float]
    peak_bytes: int


def in_turns(
    machine: Machine, data: list[Any], sides: Mapping[str, Callable[[], tuple[L.LightningModule, Any]]]
) -> dict[str, Side]:
    """Train each side twice in bf16, in turns of which the second goes backwards.

    Args:
        machine: to train on.
        data: a batch for each step.
        sides: by name what makes a module and its strategy.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    measured = {}
    for name in (*sides, *reversed(sides)):
        times = Times(machine)
        free(machine)
        module, strategy = sides[name]()
        losses = fit(module, data, strategy, machine.accelerator, times, precision="bf16-true")
        seconds[name] += times.seconds()
        measured[name] = Side(statistics.median(seconds[name]), losses, machine.peak_bytes())
        del module, strategy
    return {name: measured[name] for name in sides}


def flop_of(machine: Machine, build: Callable[[], L.LightningModule], first: Any) -> float:
    """Return the FLOP of a forward and backward of one batch."""
    on_device = apply_to_collection(first, Tensor, lambda tensor: tensor.to(machine.device))
    with FlopCounterMode(display=False) as counter:
        build().training_step(on_device, 0).backward()
    return float(counter.get_total_flops())


def free(machine: Machine) -> None:
    """Return cached memory to the GPU, and begin a new peak."""
    gc.collect()
    if not machine.is_dry:
        torch.cuda.empty_cache()
    machine.reset_peak()


def peak_of(machine: Machine) -> float | None:
    """Return the FLOP/s that the first GPU can reach; None where its name is not known."""
    if machine.is_dry:
        return 1e12
    name = machine.probed["gpus"][0]["name"]
    return next((peak * 1e12 for part, peak in PEAKS.items() if all(word in name for word in part.split())), None)
