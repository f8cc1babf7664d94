"""Runs whose ranks talk in fewer bits: near the exact ones, equal on all ranks, in the share of bytes that was said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import Tensor

from features import toys
from features.toys import LANGUAGE, VISION, Layout, Run, Scenario, Toy, alone, together, weights
from lightning_mm5d import Modality, TensorParallelPlan, register_tensor_parallel_plan
from lightning_mm5d.sharded.remote_value import is_remote

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
RANDOM = {"gradients": E4M3, "stochastic_rounding": True}
_PLAN = TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})


class Single(Toy):
    """In float32; keeps losses, and what its layers compute with, which attributes may not: it is shards."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.noted = SimpleNamespace(seen=[])
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 0:
            held = {name: one.detach() for name, one in self.named_parameters() if not is_remote(one)}
            self.noted.seen.append({name: one.clone() for name, one in held.items()})
        return super().training_step({**batch, "images": batch["images"].float()}, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


def trained(run: Run, epochs: int = 5, **options: Any) -> dict[str, Any]:
    if run.layout is not None:
        register_tensor_parallel_plan("Layer", _PLAN)
    module = Single()
    trainer = run.trainer(max_epochs=epochs, gradient_clip_val=0.5, accumulate_grad_batches=2, **options)
    trainer.fit(module, run.training(32))
    return {"losses": module.losses, "seen": module.noted.seen, "weights": weights(module)}


def in_turn(layouts: Mapping[str, Layout], scenario: Scenario, folder: Path = Path()) -> dict[str, list[Any]]:
    """What `scenario` returns on each rank, for layouts of one number of ranks, in the same processes."""
    first = next(iter(layouts.values()))

    def every(run: Run) -> dict[str, Any]:
        return {name: scenario(replace(run, layout=one, folder=folder / name)) for name, one in layouts.items()}

    ranks = together(first, every)
    return {name: [rank[name] for rank in ranks] for name in layouts}


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


# layouts of 2 and 4 ranks; how far a loss may be off
RUNS: dict[str, tuple[Layout, float]] = {
    "replicas, all in bfloat16": (layout(BF16), 0.03),
    "replicas, random rounding": (layout(RANDOM), 0.15),
    "two stages, payloads in float8": (layout({"payloads": E4M3}, pp_size=2), 0.15),
    "stage 1, all in float8": (layout(E4M3, zero=1), 0.3),
    "stage 3, all in float8": (layout(E4M3, zero=3), 0.3),
}
LARGER: dict[str, tuple[Layout, float]] = {
    "stage 3 in blocks, all in float8": (layout(E4M3, 4, zero=3, size=2), 0.3),
    "stage 2, tensor parallel, all in float8": (layout(E5M2, 4, zero=2, tp_size=2), 0.5),
    "tensor parallel replicas, random rounding": (layout(RANDOM, 4, tp_size=2), 0.15),
}


SHARDED = "stage 2, tensor parallel, all in float8"


@pytest.mark.parametrize(
    "runs",
    [
        RUNS,
        {SHARDED: LARGER[SHARDED]},
        pytest.param({name: run for name, run in LARGER.items() if name != SHARDED}, marks=pytest.mark.exhaustive),
    ],
    ids=["2 ranks", "4 ranks", "more of 4 ranks"],
)
def test_ranks_stay_equal_to_the_bit_and_near_the_exact_run(runs: dict[str, tuple[Layout, float]]) -> None:
    exact = alone(trained)
    for name, ranks in in_turn({name: where for name, (where, _) in runs.items()}, trained).items():
        first, *others = ranks
        assert all(other["losses"] == first["losses"] for other in others), name
        pairs = zip(first["losses"], exact["losses"], strict=True)
        assert 1e-5 < max(abs(got - expected) for got, expected in pairs) <= runs[name][1], name
        assert_equal_on_ranks([rank["seen"] for rank in ranks], name)


def assert_equal_on_ranks(seen: list[list[dict[str, Tensor]]], name: str) -> None:
    """What layers compute with is equal on all ranks in each step, but for what tensor parallel ranks shard."""
    for step in zip(*seen, strict=True):
        held: dict[str, Tensor] = {}
        for rank in step:
            for key, value in rank.items():
                if "tensor parallel" not in name or not (".up." in key or "down.weight" in key):
                    assert torch.equal(value, held.setdefault(key, value)), (name, key)


def test_what_is_no_narrower_changes_nothing() -> None:
    ranks = in_turn({"plain": layout(None, zero=1), "same": layout("float32", zero=1)}, trained)
    plain, same = ranks["plain"][0], ranks["same"][0]
    assert plain["losses"] == same["losses"]
    assert all(torch.equal(plain["weights"][key], same["weights"][key]) for key in plain["weights"])


class Freezing(Single):
    """Trains its encoder for an epoch."""

    def on_train_epoch_start(self) -> None:
        self.encoder.requires_grad_(self.current_epoch == 0)


def frozen(run: Run) -> dict[str, Any]:
    module, trainer = Freezing(), run.trainer(max_epochs=2)
    trainer.fit(module, run.training(32))
    return weights(module)


def test_what_was_frozen_after_it_was_trained_is_exact_after_the_run() -> None:
    first = together(layout({"parameters": BF16}, zero=1), frozen)[0]
    rounded = [
        name for name, value in first.items() if value.dim() == 2 and torch.equal(value, value.bfloat16().float())
    ]
    assert not rounded


def hurt(run: Run) -> dict[str, Any]:
    """One sample of one replica is NaN."""
    samples, module = toys.Samples(32), Single()
    samples.images[5] = torch.nan
    run.trainer(max_epochs=1).fit(module, run.training(samples))
    return weights(module)


def test_a_gradient_that_is_nan_on_one_rank_is_seen_by_all() -> None:
    said = {"zero 2": layout(E4M3, zero=2), "replicas": layout({**RANDOM, "parameters": BF16})}
    for where in said.values():
        first = together(where, hurt, on_nonfinite="skip")[0]
        assert all(value.isfinite().all() for value in first.values())
        with pytest.raises(AssertionError, match="NonFiniteError"):
            together(where, hurt, on_nonfinite="raise")


def resumed(run: Run) -> dict[str, Any]:
    """A run, and one that goes on from a checkpoint in its midst."""
    run.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, epochs, start in (("whole", 4, None), ("first", 2, None), ("second", 4, run.folder / "half.ckpt")):
        torch.manual_seed(3)
        module = Single()
        trainer = run.trainer(max_epochs=epochs)
        trainer.fit(module, run.training(32), ckpt_path=start, weights_only=False)
        if name == "first":
            trainer.save_checkpoint(run.folder / "half.ckpt")
        found[name] = {"losses": module.losses, "weights": weights(module)}
    return found


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    said = {"gradients": E4M3, "parameters": E4M3, "payloads": BF16, "stochastic_rounding": True}
    for ranks in in_turn({str(zero): layout(said, zero=zero) for zero in (None, 1, 3)}, resumed, tmp_path).values():
        whole, second = ranks[0]["whole"], ranks[0]["second"]
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


def test_traffic_takes_the_share_of_bytes_that_its_dtype_has() -> None:
    cases = {f"{kind} {dtype}": layout({kind: dtype}, **TALK[kind]) for kind in TALK for dtype in DTYPES}
    bytes_of = {name: sum(ranks) for name, ranks in in_turn(cases, talks).items()}
    for kind in TALK:
        exact, half, quarter = (bytes_of[f"{kind} {dtype}"] for dtype in DTYPES)
        others = exact - (exact - half) * 2  # what travels beside it, for instance gradients of the encoder's replicas
        assert 0 <= others < exact
        assert others <= 0.01 * exact or kind != "gradients"
        assert (quarter - others) / (exact - others) == pytest.approx(0.25 + 1 / 128, rel=0.02), kind
