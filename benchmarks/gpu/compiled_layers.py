"""`compile=True` and `fused_linear_cross_entropy=True` on a GPU: the same losses, and what they are for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import one_process, towers
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import LackingError, Row
from lightning_mm5d import Modality, MultimodalStrategy

LARGE = towers.Size(width=1024, heads=16, vision=4, language=4, patches=256, tokens=768, vocabulary=4096)
STEPS = one_process.WARMUP + 8
NEEDED_BYTES = one_process.NEEDED_BYTES


def compiled(machine: Machine) -> Iterator[Row]:
    """Yield the difference of losses of compiled layers, and the time of a step."""
    size = machine.pick(LARGE, towers.SMALL)
    data = towers.batches(size, STEPS, 4)
    runs = {}
    for how in (False, machine.pick(True, "eager")):
        times = one_process.Times(machine)
        modalities = {
            "vision": Modality(
                module="encoder", boundary="encoder", colocate_with="language", compute={"compile": how}
            ),
            "language": Modality(compute={"compile": how}),
        }
        strategy = MultimodalStrategy(modalities, batching={"num_microbatches": 2}, launch={"timeout": towers.TIMEOUT})
        losses = towers.fit(towers.Towers(size), data, strategy, machine.accelerator, times, precision="bf16-mixed")
        runs[bool(how)] = losses, statistics.median(times.seconds())
    (plain, before), (losses, after) = runs[False], runs[True]
    off = max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, plain, strict=True))
    yield Row(name="compiled layers: losses, relative difference", value=off, at_most=0.02)
    note = f"{after * 1e3:.1f} / {before * 1e3:.1f} ms"
    yield Row(name="compiled layers: time of a step / uncompiled", value=after / before, at_most=1.0, note=note)


def fused_head(machine: Machine) -> Iterator[Row]:
    """Yield the difference of losses, and the peak memory, of a head that is fused with its loss."""
    if machine.gpu_bytes < NEEDED_BYTES and not machine.is_dry:
        raise LackingError(f"needs a GPU with {NEEDED_BYTES // 2**30} GiB")
    data = [one_process.batch(machine)] * 4
    runs: dict[bool, tuple[list[float], int]] = {}
    for is_fused in (False, True):
        modalities: dict[str, Any] = {
            "vision": Modality(colocate_with="language"),
            "language": Modality(compute={"fused_linear_cross_entropy": is_fused}),
        }
        one_process.free(machine)
        strategy = MultimodalStrategy(modalities, launch={"timeout": towers.TIMEOUT})
        losses = towers.fit(one_process.Qwen(machine), data, strategy, machine.accelerator, precision="bf16-true")
        runs[is_fused] = losses, machine.peak_bytes()
    (plain, whole), (losses, less) = runs[False], runs[True]
    off = max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, plain, strict=True))
    yield Row(name="fused_linear_cross_entropy: losses, relative difference", value=off, at_most=0.01)
    note = f"{less / 2**30:.2f} / {whole / 2**30:.2f} GiB"
    yield Row(name="fused_linear_cross_entropy: peak memory / without", value=less / whole, at_most=1.0, note=note)
