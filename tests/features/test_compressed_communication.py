"""Runs whose ranks talk in fewer bits: near the exact ones, equal on all ranks, in the share of bytes that was said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import Tensor

from features import toys
from features.toys import LANGUAGE, VISION, Layout, Run, Toy, alone, together, weights
from lightning_mm5d import Modality, TensorParallelPlan, register_tensor_parallel_plan
from lightning_mm5d.sharded.remote_value import is_remote

KINDS = ("gradients", "parameters", "payloads", "tensor_parallel")
E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
RANDOM = {"gradients": E4M3, "stochastic_rounding": True}
_PLAN = TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})


class Single(Toy):
    """In float32; it keeps what its layers compute with, and the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.seen: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 0:
            held = {name: one.detach() for name, one in self.named_parameters() if not is_remote(one)}
            self.seen.append({name: one.clone() for name, one in held.items()})
        return super().training_step({**batch, "images": batch["images"].float()}, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


def trained(run: Run, epochs: int = 5) -> dict[str, Any]:
    register_tensor_parallel_plan("Layer", _PLAN)
    module = Single()
    run.trainer(max_epochs=epochs, gradient_clip_val=0.5, accumulate_grad_batches=2).fit(module, run.training(32))
    return {"losses": module.losses, "seen": module.seen, "weights": weights(module)}


def layout(said: Any, world: int = 2, zero: int | None = None, size: int | None = None, **language: Any) -> Layout:
    """Both modalities on the same ranks."""
    common = {"communication_dtype": said, "zero_stage": zero, "dp_shard_size": size}
    per_replica = language.get("pp_size", 1) * language.get("tp_size", 1)
    return Layout(
        {
            "vision": Modality(colocate_with="language", **common, **VISION),
            "language": Modality(**common, **language, **LANGUAGE),
        },
        world,
        world // per_replica,
    )


# what is said; how far a loss may be off
RUNS: dict[str, tuple[Layout, float]] = {
    "replicas, all in bfloat16": (layout(BF16), 0.03),
    "replicas, random rounding": (layout(RANDOM), 0.15),
    "two stages, payloads in float8": (layout({"payloads": E4M3}, pp_size=2), 0.15),
    "stage 1, all in float8": (layout(E4M3, zero=1), 0.3),
    "stage 3 in blocks, all in float8": (layout(E4M3, 4, zero=3, size=2), 0.3),
    "stage 2, tensor parallel, all in float8": (layout(E5M2, 4, zero=2, tp_size=2), 0.5),
    "tensor parallel replicas, random rounding": (layout(RANDOM, 4, tp_size=2), 0.15),
}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_stay_equal_to_the_bit_and_near_the_exact_run(name: str) -> None:
    where, band = RUNS[name]
    exact = alone(trained)
    first, *others = ranks = together(where, trained)
    for other in others:
        assert other["losses"] == first["losses"]
    off = max(abs(got - expected) for got, expected in zip(first["losses"], exact["losses"], strict=True))
    assert 1e-5 < off <= band
    for step in range(len(first["seen"])):
        held: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        sharded = {key for rank in ranks for key in rank["seen"][step] if "up." in key or "down.weight" in key}
        for rank in ranks:
            for key, value in rank["seen"][step].items():
                if not (key in sharded and "tensor parallel" in name):
                    assert torch.equal(value, held.setdefault((key, value.shape), value)), (key, step)


def test_what_is_no_narrower_changes_nothing() -> None:
    plain = together(layout(None, zero=1, pp_size=1), trained)[0]
    same = together(layout("float32", zero=1, pp_size=1), trained)[0]
    assert plain["losses"] == same["losses"]
    assert all(torch.equal(plain["weights"][key], same["weights"][key]) for key in plain["weights"])


def resumed(run: Run) -> dict[str, Any]:
    """A run, and one that goes on from a checkpoint in its midst."""
    found = {}
    for name, epochs, start in (("whole", 4, None), ("first", 2, None), ("second", 4, run.folder / "half.ckpt")):
        module = Single()
        trainer = run.trainer(max_epochs=epochs)
        trainer.fit(module, run.training(32), ckpt_path=start, weights_only=False)
        if name == "first":
            trainer.save_checkpoint(run.folder / "half.ckpt")
        found[name] = {"losses": module.losses, "weights": weights(module)}
    return found


@pytest.mark.parametrize("zero", [None, 1, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(zero: int | None, tmp_path: Path) -> None:
    said = {"gradients": E4M3, "parameters": E4M3, "payloads": BF16, "stochastic_rounding": True}
    first = together(layout(said, zero=zero), resumed, tmp_path)[0]
    whole, second = first["whole"], first["second"]
    assert second["losses"] == whole["losses"][-len(second["losses"]) :]
    assert all(torch.equal(second["weights"][key], value) for key, value in whole["weights"].items())


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what this rank gives to other ranks: bytes by kind of call."""
    moved: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(name: str, size: Any) -> None:
            original = getattr(dist, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                moved[name] += size(*args, kwargs.get("group"))
                return original(*args, **kwargs)

            patch.setattr(dist, name, call)

        def ranks(group: Any) -> int:
            return dist.get_world_size(group)

        count("all_reduce", lambda x, *rest: 2 * x.nbytes * (ranks(rest[-1]) - 1) // ranks(rest[-1]))
        count("all_gather_single", lambda all, own, *rest: own.nbytes * (ranks(rest[-1]) - 1))
        count("reduce_scatter_single", lambda own, all, *rest: own.nbytes * (ranks(rest[-1]) - 1))
        count(
            "all_to_all_single",
            lambda came, sent, took, gave, group: (sum(gave) - gave[group.rank()]) * sent.element_size(),
        )
        count("isend", lambda x, *rest: x.nbytes)
        yield moved


class Talk(Callback):
    """Counts the bytes of all training steps but the first, in which ranks agree on more."""

    def __init__(self, moved: Counter[str]) -> None:
        self.moved, self.before, self.total = moved, 0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = self.moved.total()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += self.moved.total() - self.before if batch_idx else 0


def talks(run: Run) -> int:
    """Bytes of two training steps on this rank."""
    register_tensor_parallel_plan("Layer", _PLAN)
    with pytest.MonkeyPatch.context() as patch, counted() as moved:
        patch.setattr(toys, "WIDTH", 128)
        talk = Talk(moved)
        run.trainer(max_epochs=1, callbacks=[talk]).fit(Single(), run.training(48, 16))
        return talk.total


TALK: dict[str, dict[str, Any]] = {"gradients": {}, "parameters": {"zero": 3}, "payloads": {"pp_size": 2}}
TALK["tensor_parallel"] = {"tp_size": 2}


@pytest.mark.parametrize("kind", TALK)
def test_traffic_takes_the_share_of_bytes_that_its_dtype_has(kind: str) -> None:
    options = TALK[kind]
    exact, half, quarter = (sum(together(layout({kind: dtype}, **options), talks)) for dtype in ("float32", BF16, E4M3))
    others = exact - (exact - half) * 2  # what travels beside it, for instance gradients of the encoder's replicas
    assert 0 <= others < exact
    assert others <= 0.01 * exact or kind != "gradients"
    assert (quarter - others) / (exact - others) == pytest.approx(0.25 + 1 / 128, rel=0.02)
