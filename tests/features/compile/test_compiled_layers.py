"""`compile` on a modality: the numbers of uncompiled layers, code that equal layers share, and none compiled twice.

The backend is mostly "eager": dynamo traces and guards, and no compiler is needed. What takes long under autograd's
compiler is `exhaustive`, but for split backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch._dynamo import utils

from context_parallel.runs import steps, text
from features.toys import LANGUAGE, VISION, Layout, Run, Toy, assert_same, outcomes, together, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.config.errors import private
from lightning_mm5d.features.compile.feature import Compile
from lightning_mm5d.features.compile.fields import check
from lightning_mm5d.layout import Layout as Ranks
from lightning_mm5d.plan.plan import Plan
from zoo import CASES
from zoo.case import Batch, TinyModule

counters = private(utils, "counters")


@pytest.fixture(scope="module", autouse=True)
def backends() -> None:
    """Imports what compilers are made of once, before ranks are forked."""
    for backend in ("eager", "aot_eager"):
        torch.compile(torch.nn.Linear(1, 1), backend=backend)(torch.ones(1)).backward()
    torch._dynamo.reset()


class Graphs(Callback):
    """How many graphs were compiled up to the end of each step."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])


class Speaker(TinyModule):
    """The tiny Llama: trains, evaluates and generates; microbatches of unequal lengths."""

    lengths: Iterable[int] = ()

    def split_batch(self, batch: Batch, count: int) -> list[Batch]:
        parts = CASES["llama"].split(batch, count)
        return [
            {key: value[:, :length] for key, value in part.items()}
            for part, length in zip(parts, self.lengths or [99] * count, strict=True)
        ]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, **self.fixed).loss)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        model: Any = self.model
        return model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False)  # type: ignore[no-any-return]


def speaks(run: Run, module: Speaker | None = None) -> Any:
    module = module or Speaker(CASES["llama"].build().model, use_cache=False)
    graphs = Graphs()
    found = steps(run, module, text(3), callbacks=[graphs])
    data = torch.utils.data.DataLoader(text(1), batch_size=None)  # type: ignore[arg-type]
    trainer = run.trainer(use_distributed_sampler=False, limit_val_batches=1)
    found["val"] = [float(one["val_loss"]) for one in trainer.validate(module, data, verbose=False)]
    found["tokens"] = run.trainer(use_distributed_sampler=False).predict(module, data)
    return found | {"graphs": graphs.counts, "keys": sorted(module.state_dict())}


def adapts(run: Run) -> Any:
    model = CASES["llama"].build().model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    return steps(run, TinyModule(adapted, use_cache=False), text(2))


def language(world: int, backend: str = "eager", **fields: Any) -> Layout:
    return Layout({"language": Modality(compute={"compile": backend}, **fields)}, world)


LAYOUTS: dict[str, tuple[Layout, dict[str, Any], int]] = {
    # with the most graphs: for training, evaluation, and one more without gradients in the step
    "one process": (language(1), {}, 1),
    "pp 2": (language(2, pp_size=2), {}, 1),
    "pp 2 with split backwards": (language(2, "aot_eager", pp_size=2), {"schedule": "zero_bubble"}, 20),
    "tp 2": (language(2, tp_size=2), {}, 20),
    "cp 2": (language(2, cp_size=2), {}, 20),
    "pp 2, computed again": (language(2, pp_size=2, activation_checkpointing="full"), {}, 2),
}


LAYOUTS |= {
    f"{name} by autograd's compiler": (language(layout.world, "aot_eager", **fields), {}, most)
    for name, fields in {
        "tp 2": {"tp_size": 2},
        "cp 2": {"cp_size": 2},
        "computed again": {"activation_checkpointing": "full"},
    }.items()
    for layout, _, most in [LAYOUTS.get(name, LAYOUTS["one process"])]
}


LONG = {"cp 2", "pp 2, computed again", *(one for one in LAYOUTS if "autograd" in one)}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.exhaustive if one in LONG else ()) for one in LAYOUTS]
)
def test_compiled_layers_equal_one_process_and_compile_in_the_first_step_alone(name: str) -> None:
    layout, options, most = LAYOUTS[name]
    torch.set_default_dtype(torch.float64)
    try:
        every = outcomes(layout, speaks, *((adapts,) if name == "pp 2" else ()), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    for which, found in every.items():
        assert_same(found.ranks[0]["weights"], found.one["weights"], 1e-6, which)
        for rank in found.ranks:
            assert_same(rank["losses"], found.one["losses"], 1e-6, which)
    found = every["speaks"]
    for rank in found.ranks:
        assert_same(rank["val"], found.one["val"], 1e-6)
        assert_same(rank["tokens"], found.one["tokens"])
        assert rank["keys"] == found.one["keys"]
        assert 0 < rank["graphs"][0] <= most
        assert len(set(rank["graphs"])) == 1, "nothing is compiled after the first step"


def two_lengths(run: Run) -> Any:
    module = Speaker(CASES["llama"].build().model, use_cache=False)
    module.lengths = (16, 11)
    graphs = Graphs()
    return steps(run, module, text(3), callbacks=[graphs]) | {"graphs": graphs.counts}


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("eager", {}),
        pytest.param("aot_eager", {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_lengths_of_microbatches_compile_twice_at_most(backend: str, fields: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        plain = together(Layout({"language": Modality()}, 1), two_lengths)
        (found,) = together(language(1, backend, **fields), two_lengths, schedule="gpipe")
        assert_same(found["weights"], plain[0]["weights"])
        assert found["graphs"][-1] <= 2
        assert found["graphs"][-1] == found["graphs"][-2]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_backend_that_does_not_exist_and_a_missing_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_: None)
    for said, rule in (("inductr", "no such backend"), (True, "C\\+\\+ compiler")):
        modalities = {"vision": Modality(**VISION), "language": Modality(compute={"compile": said}, **LANGUAGE)}
        ranks = Ranks.build(modalities, world_size=2, loss_modality="language")
        with pytest.raises(ConfigError, match=rule):
            Compile({}).check(Toy(), Plan.of(Toy(), ranks, modalities), torch.device("cpu"))


def drops(run: Run) -> Any:
    module = Toy(dropout=0.5)
    module.encoder.requires_grad_(False)
    trainer = run.trainer()
    trainer.fit(module, run.training(16))
    return weights(module)


SHARES: dict[str, Any] = {"zero_stage": 3, "reshard_after_forward": True}


@pytest.mark.parametrize(
    ("world", "replicas", "vision", "language"),
    [
        pytest.param(3, 1, {}, {"pp_size": 2}, marks=pytest.mark.exhaustive),
        (2, 2, {"colocate_with": "language"}, SHARES),
    ],
    ids=["stages", "shared parameters"],
)
def test_frozen_encoders_and_dropout_give_what_uncompiled_layers_give(
    world: int, replicas: int, vision: dict[str, Any], language: dict[str, Any]
) -> None:
    """vision: rank 0; language: ranks 1-2 as stages; then both on ranks 0-1, which share their parameters"""
    found = []
    for backend in (False, "eager" if replicas > 1 else "aot_eager"):
        modalities = {
            "vision": Modality(compute={"compile": backend}, **VISION, **vision),
            "language": Modality(compute={"compile": backend}, **LANGUAGE, **language),
        }
        found.append(together(Layout(modalities, world, replicas), drops)[0])
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("modality", "rule"),
    [
        (Modality(compute={"compile": 2}), "backend of torch.compile"),  # type: ignore[arg-type]
        (Modality(compute={"compile": ""}), "backend of torch.compile"),
        (Modality(compute={"compile": True}, tp_size=2, tensor={"sequence_parallel": True}), "sequence_parallel"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_field(modality: Modality, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        check({"modalities": {"language": modality}})
    assert caught.value.field == "modalities.language.compute.compile"
