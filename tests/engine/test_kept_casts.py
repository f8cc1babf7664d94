"""Autocast casts each trained weight once in a step, whatever the number of microbatches."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from features.test_precision import Precise, Singles
from features.toys import LANGUAGE, PIPE, VISION, Layout, Run, weights
from lightning_mm5d import Modality
from lightning_mm5d.trainer import steps
from ranks import run_ranks

AGAIN = Layout(
    {
        "vision": Modality(activation_checkpointing="full", **VISION),
        "language": Modality(pp_size=2, activation_checkpointing="selective", **LANGUAGE),
    },
    3,
)
"""vision: rank 0; language: ranks 1-2 as stages; layers run again"""


class Casts(TorchDispatchMode):
    """Counts casts of tensors of the shape of an `up` layer's weight to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.found[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def trained(layout: Layout, count: int, schedule: str) -> Any:
    casts, module = Casts(), Precise()
    run = Run(layout, {"num_microbatches": count, "schedule": schedule})
    trainer = run.trainer(precision="bf16-mixed", limit_val_batches=0)
    with casts:
        trainer.fit(module, run.loader(Singles(8), shuffle=False), run.loader(Singles(8)))
    return casts.found[16, 8], weights(module)


def test_a_weight_is_cast_once_in_a_step() -> None:
    """vision: rank 0; language: ranks 1-2 as stages. Also where layers run again."""

    def counts(rank: int) -> Any:
        return [trained(layout, count, "1f1b")[0] for layout in (PIPE, AGAIN) for count in (1, 4)]

    for once, often, once_again, often_again in run_ranks(3, counts):
        assert once == often == once_again == often_again


def test_casts_that_are_kept_change_no_bit() -> None:
    """vision: rank 0; language: ranks 1-2 as stages. The others cast in each microbatch."""

    def both(rank: int) -> Any:
        cases = [(PIPE, "1f1b"), (PIPE, "zero_bubble"), (AGAIN, "1f1b")]
        kept = [trained(layout, 4, schedule)[1] for layout, schedule in cases]
        with patch.object(steps, "casting_once", lambda context, _: context()):
            return kept, [trained(layout, 4, schedule)[1] for layout, schedule in cases]

    kept, cast = run_ranks(3, both)[0]
    for one, other in zip(kept, cast, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
