"""`ModalityThroughput` counts the flops that one process would count with torch's ``FlopCounterMode``, on any ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from features.shared_experts.families import FAMILIES
from features.throughput.counted_runs import Kept, by_sample, counted, one_process
from features.toys import PAIR, WIDTH, Layout, Run, Samples, Toy, alone, together
from lightning_mm5d import Modality, ModalityThroughput
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from parity.harness import strategy
from ranks import call_ranks
from sweeps import dealt
from zoo import CASES, apply_freeze

SAMPLES = 8


@dataclass(frozen=True)
class Counting:
    """A run: its model, the layout of its modalities, and what of the model trains."""

    name: str
    fields: dict[str, dict[str, Any]]
    world: int
    replicas: int = 1
    frozen: str = "none"
    is_adapted: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    images: tuple[tuple[int, ...] | None, ...] = (None, None, None)

    @property
    def case(self) -> Any:
        return CASES[self.name] if self.name in CASES else FAMILIES[self.name]

    def build(self) -> Any:
        module = self.case.build()
        apply_freeze(module, self.case, self.frozen)
        if self.is_adapted:
            inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), module.model)
            module.to(torch.get_default_dtype())
        return module

    def batches(self) -> list[Any]:
        return [self.case.batch(SAMPLES, seed=seed, images=images) for seed, images in enumerate(self.images)]

    def modalities(self) -> dict[str, Modality]:
        paths = self.case.modality_paths
        return {key: Modality(**{**paths.get(key, {}), **value}) for key, value in self.fields.items()}


RUNS = {
    "vision | language": Counting("llava", {"vision": {}, "language": {}}, 2),
    "pp 2": Counting("llama_tied", {"model": {"pp_size": 2}}, 2),
    "tp 2": Counting("llama_tied", {"model": {"tp_size": 2}}, 2),
    "heads of two ranks each": Counting("llama_tied", {"model": {"tp_size": 4}}, 4),
    "heads of two ranks each, sequences in shards": Counting(
        "llama_tied", {"model": {"tp_size": 4, "sequence_parallel": True}}, 4
    ),
    "adapters on heads of two ranks each": Counting("llama_tied", {"model": {"tp_size": 4}}, 4, is_adapted=True),
    "cp 2": Counting("llama_tied", {"model": {"cp_size": 2}}, 2),
    "ep 2": Counting("mixtral", {"model": {"dp_size": 2, "ep_size": 2}}, 2, 2),
    "two replicas of pp 2": Counting("llama_tied", {"model": {"dp_size": 2, "pp_size": 2}}, 4, 2),
    "zero 3": Counting("llama_tied", {"model": {"dp_size": 2, "zero_stage": 3}}, 2, 2),
    "colocated": Counting(
        "qwen2_audio", {"audio": {"colocate_with": "language"}, "language": {"pp_size": 2}}, 2, frozen="encoder"
    ),
    "images of any number, and none": Counting(
        "qwen2_vl",
        {"vision": {}, "language": {}},
        2,
        images=((1,) * 8, (2, 1) * 4, (0,) * 8, (0, 0, 0, 0, 2, 2, 1, 2), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)),
    ),
    "plain replicas": Counting("llava", {"model": {"dp_size": 2}}, 2, 2, options={"num_microbatches": 1}),
    "frozen language": Counting("llava", {"vision": {}, "language": {}}, 2, frozen="language"),
    "adapters": Counting("llama_tied", {"model": {"pp_size": 2}}, 2, is_adapted=True),
    "adapters on tp 2": Counting("llama_tied", {"model": {"tp_size": 2}}, 2, is_adapted=True),
    "checkpointed": Counting("llava", {"vision": {}, "language": {"activation_checkpointing": "full"}}, 2),
    "checkpointed on tp 2": Counting("llama_tied", {"model": {"tp_size": 2, "activation_checkpointing": "full"}}, 2),
    "fused head": Counting("llama_tied", {"model": {"pp_size": 2, "fused_linear_cross_entropy": True}}, 2),
    "2d grid": Counting("llama_tied", {"model": {"tp_size": 4, "tp_mode": "2d"}}, 4),
    "side by side": Counting("llama_tied", {"model": {"tp_size": 2, "interleaved_microbatches": 2}}, 2),
    "split backwards": Counting(
        "llava",
        {"vision": {"colocate_with": "language"}, "language": {"pp_size": 2}},
        2,
        options={"schedule": "zero_bubble"},
    ),
}

AGAIN = {
    "checkpointed": ("vision | language", "language/", 0.2, 1 / 3),  # a forward, without the head's
    "checkpointed on tp 2": ("tp 2", "", 0.2, 1 / 3),
    "fused head": ("pp 2", "", 0.01, 0.1),  # the logits
    "heads of two ranks each": ("tp 2", "", 0.05, 0.2),  # their keys and values
    "heads of two ranks each, sequences in shards": ("tp 2", "", 0.05, 0.2),
    "adapters on heads of two ranks each": ("adapters on tp 2", "", 0.05, 0.2),
}
"""by run: the run that it equals, what is counted, and the share of its flops that are computed again"""


def figures(rank: int, name: str) -> list[dict[str, float]]:
    run = RUNS[name]
    options = {"num_microbatches": 4 // run.replicas, **run.options}
    batches, more = run.batches(), {}
    if run.replicas > 1:
        batches = [part for batch in batches for part in run.case.split(batch, run.replicas)]
        more = {"use_distributed_sampler": True}
    return counted(run.build(), batches, strategy(run.modalities(), **options), run.world, **more)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", dealt(__file__, [name for name in RUNS if name not in AGAIN], 6))
def test_the_sum_over_ranks_is_that_of_one_process(name: str) -> None:
    """Ranks as the fields of `RUNS` say: modalities in their order, and replicas of everything beside each other."""
    run = RUNS[name]
    # the sum of the loss's own products over microbatches is that of the batch: all are linear in its rows
    expected = [one_process(run.build(), batch) for batch in run.batches()[1:]]
    for logged in call_ranks(run.world, figures, name):
        assert len(logged) == len(expected)
        for index, (got, (flops, hardware)) in enumerate(zip(logged, expected, strict=True)):
            if name.startswith("images") and index < 3:
                continue  # a first step of batches without some images is not counted by itself
            assert got["flops"] == pytest.approx(flops / SAMPLES, rel=1e-9), index
            assert got["hardware"] == pytest.approx(hardware / SAMPLES, rel=1e-9), index
            if len(run.fields) > 1:
                parts = [got.get(f"{modality}/flops", 0.0) for modality in run.fields]
                assert sum(parts) == pytest.approx(got["flops"], rel=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", AGAIN)
def test_recomputation_counts_in_hfu_alone(name: str) -> None:
    """vision: rank 0, language: rank 1; language on ranks 0-1 or 0-3, which share its layers, or as stages"""
    other, part, least, most = AGAIN[name]
    plain, again = (call_ranks(RUNS[which].world, figures, which)[0][-1] for which in (other, name))
    difference = again.pop("hardware") - plain.pop("hardware")
    if part:
        assert difference == pytest.approx(again.pop(f"{part}hardware") - plain.pop(f"{part}hardware"))
    assert least < difference / plain[f"{part}flops"] < most
    assert again == pytest.approx(plain, rel=1e-9)


class Gated(nn.Module):
    """A layer without a tensor parallel plan: what comes of its first product has two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.mixing(hidden).chunk(2, dim=-1)
        return hidden + self.out(gate.sigmoid() * value)


class Unshared(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers = nn.ModuleList([Gated() for _ in range(4)]).double()


def unshared(run: Run) -> Any:
    kept = Kept()
    run.trainer(callbacks=[kept], log_every_n_steps=1, max_epochs=1).fit(Unshared(), run.training(24, 8))
    return [by_sample(one) for one in kept.logged if "samples_per_sec" in one]


def test_layers_that_tensor_parallel_ranks_compute_in_full_count_once(tmp_path: Any) -> None:
    """vision: rank 0; language, whose layers have no plan: ranks 1-2 with all of them"""
    language = with_fields(PAIR.modalities["language"], tp_size=2)
    flops, _ = one_process(Unshared(), next(iter(DataLoader(Samples(8), batch_size=8))))
    layout = Layout({**PAIR.modalities, "language": language}, 3)
    for got in together(layout, unshared, tmp_path)[0]:
        assert got["flops"] == pytest.approx(flops / 8, rel=1e-6)
        assert got["hardware"] == pytest.approx((got["vision/flops"] + 2 * got["language/flops"]), rel=1e-6)


def batches_of_any_size(run: Run) -> Any:
    """Accumulation over two batches, a last batch that is smaller, validation in between, and two fits."""
    kept, module = Kept(prog_bar=True), Toy()
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "max_epochs": 2, "val_check_interval": 2}
    trainer = run.trainer(callbacks=[kept], num_sanity_val_steps=1, **options)
    trainer.fit(module, run.training(44, 8), run.loader(8))
    path = run.folder / "end.ckpt"
    trainer.save_checkpoint(path)
    first = len(kept.logged)
    trainer = run.trainer(callbacks=[kept], log_every_n_steps=2, max_epochs=4)
    trainer.fit(module, run.training(44, 8), ckpt_path=path)
    assert kept.figures is None
    shown = {name for name in ("tokens_per_sec", "device/mfu", "device/hfu") if name in trainer.progress_bar_metrics}
    return [by_sample(one) for one in kept.logged if "samples_per_sec" in one], first, len(kept.logged), shown


def test_accumulated_and_smaller_batches_validation_and_resumed_runs_count(tmp_path: Any) -> None:
    """vision: rank 0; language: rank 1"""
    batch = next(iter(DataLoader(Samples(8), batch_size=8)))
    flops, hardware = one_process(Toy(), batch)
    for logged, first, every, shown in together(PAIR, batches_of_any_size, tmp_path):
        assert first > 0
        assert every > first
        assert shown == {"tokens_per_sec", "device/mfu"}
        assert logged
        for got in logged:
            assert got["flops"] == pytest.approx(flops / 8, rel=1e-6)
            assert got["hardware"] == pytest.approx(hardware / 8, rel=1e-6)
            assert got["language/tokens"] == pytest.approx(5)


def features_from_files(run: Run) -> Any:
    kept, module = Kept(), Toy()
    module.encoder.requires_grad_(False)
    run.trainer(callbacks=[kept], log_every_n_steps=1, max_epochs=4).fit(module, run.training(24, 8))
    return [by_sample(one) for one in kept.logged if "samples_per_sec" in one]


def test_features_that_are_read_take_no_flops(tmp_path: Any) -> None:
    """vision, frozen: rank 0; language: rank 1"""
    batch, module = next(iter(DataLoader(Samples(8), batch_size=8))), Toy()
    module.encoder.requires_grad_(False)
    flops, _ = one_process(module, batch)
    encoding = 2 * sum(p.numel() for p in module.encoder.parameters() if p.ndim == 2) * 8
    vision = with_fields(PAIR.modalities["vision"], cache_features=str(tmp_path / "features"))
    cached = replace(PAIR, modalities={**PAIR.modalities, "vision": vision})
    logged = together(cached, features_from_files, tmp_path)[0]
    assert logged[0]["flops"] == pytest.approx(flops / 8, rel=1e-6)
    assert logged[-1]["flops"] == pytest.approx((flops - encoding) / 8, rel=1e-6)
    assert logged[-1].get("vision/flops", 0.0) == 0.0


def test_a_peak_that_is_none_is_refused() -> None:
    for peak in (0, -1.0, float("nan"), float("inf"), "fast", True):
        with pytest.raises(ConfigError, match=r"available_flops: got .* above 0"):
            ModalityThroughput(available_flops=peak)  # type: ignore[arg-type]


def test_another_strategy_is_refused_when_training_starts() -> None:
    def fits(run: Run) -> None:
        run.trainer(callbacks=[ModalityThroughput()]).fit(Toy(), run.loader())

    with pytest.raises(ConfigError, match=r"callbacks: got 'ModalityThroughput'. .* strategy='mm5d'"):
        alone(fits)
