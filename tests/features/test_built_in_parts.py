"""Modules built in `configure_model` are those of one process, on all layouts, from the first weight on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from features.built_in_parts import (
    Copied,
    Empty,
    InSetup,
    Late,
    Mixed,
    goes_on,
    loaded_early,
    made_empty,
    resumed,
    trained,
)
from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    SHARED,
    TWINS,
    VISION,
    Layout,
    Outcome,
    Run,
    Toy,
    alone,
    assert_same,
    outcomes,
    together,
)
from lightning_mm5d import ConfigError, Modality, RemoteParameterError
from sweeps import dealt

LAYOUTS = {"pair": PAIR, "pipe": PIPE, "twins": TWINS, "shared": SHARED}
KINDS = (Late, Mixed, Copied)
OTHERS = (loaded_early, resumed)


@pytest.fixture(scope="module", params=dealt(__file__, LAYOUTS))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    scenarios: list[Any] = [partial(trained, kind=kind) for kind in KINDS]
    for kind, scenario in zip(KINDS, scenarios, strict=True):
        scenario.__name__ = kind.__name__
    folder = tmp_path_factory.mktemp("found")
    return outcomes(LAYOUTS[request.param], *scenarios, *OTHERS, folder=folder)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in (*KINDS, loaded_early)])
def test_each_rank_begins_with_its_part_of_the_weights_of_one_process_bit_by_bit(
    found: dict[str, Outcome], kind: str
) -> None:
    one, held = found[kind].one["start"], set[str]()
    for rank in found[kind].ranks:
        for name, value in rank["start"].items():
            if not bool(value.isnan().all()):
                assert torch.equal(value, one[name]), name
                held.add(name)
    assert held == one.keys()


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_training_gives_the_weights_of_one_process(found: dict[str, Outcome], kind: str) -> None:
    assert_same(found[kind].ranks[0]["end"], found[kind].one["end"])


def test_a_full_checkpoint_is_loaded_in_parts(found: dict[str, Outcome]) -> None:
    for rank in found["resumed"].ranks:
        for name, value in rank["start"].items():
            if not bool(value.isnan().all()):
                assert_same(value, found["resumed"].one["start"][name])


def test_random_numbers_go_on_as_in_one_process(found: dict[str, Outcome]) -> None:
    for kind in KINDS:
        for rank in found[kind.__name__].ranks:
            assert torch.equal(rank["state"], found[kind.__name__].one["state"])


@pytest.mark.parametrize("layout", ["pipe", "twins"])
def test_ranks_that_keep_their_shards_go_on_with_them(layout: str) -> None:
    expected = alone(goes_on)
    for rank in together(LAYOUTS[layout], goes_on, checkpoint="sharded"):
        assert_same(rank, expected)


def built_in_setup(run: Run) -> dict[str, Any]:
    return trained(run, kind=InSetup)


def refusals(run: Run) -> list[str]:
    """What is said of a module that keeps its shards: under another layout, and outside of a trainer."""
    torch.manual_seed(7)
    module, said = Late(), []
    run.trainer().fit(module, run.training())
    layout = {"vision": Modality(pp_size=2, **VISION), "language": Modality(**LANGUAGE)}
    other = Run(Layout(layout, 3), run.options)
    for use in (
        lambda: other.trainer().validate(module, run.loader(), verbose=False),
        lambda: float(module.loss(next(iter(run.loader())))),
        lambda: torch.save(module.state_dict(), "/dev/null"),
    ):
        with pytest.raises((ConfigError, RemoteParameterError)) as caught:
            use()
        said.append(str(caught.value))
    return said


def test_shards_that_are_kept_are_no_use_to_others() -> None:
    for rank in together(PIPE, refusals, checkpoint="sharded"):
        assert all("save_checkpoint" in text for text in rank)


def test_tensors_of_the_meta_device_are_equal_on_all_layouts() -> None:
    one = together(Layout({"model": Modality()}, 1), partial(trained, kind=Empty))[0]
    for rank in together(PIPE, partial(trained, kind=Empty)):
        for name, value in rank["start"].items():
            assert bool(value.isnan().all()) or torch.equal(value, one["start"][name]), name


def written_outside(run: Run) -> str:
    trainer = run.trainer()
    module = made_empty(trainer)
    torch.nn.init.ones_(module.decoder.head.weight)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, run.training())
    return str(caught.value)


def test_a_write_to_a_weight_without_memory_is_refused() -> None:
    for rank in together(PAIR, written_outside):
        assert rank.startswith("Linear.weight")
        assert "the write is lost" in rank


def test_a_plan_of_a_module_that_is_not_built_takes_no_memory_and_changes_nothing() -> None:
    module, before = Late(), torch.get_rng_state()
    trainer = Run(PIPE).trainer()
    plan = trainer.strategy.plan(module)
    assert plan.sizes == {name: p.numel() for name, p in Toy().named_parameters()}
    assert module.decoder is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_may_be_built_in_setup(tmp_path: Path) -> None:
    found = outcomes(PAIR, built_in_setup, folder=tmp_path)["built_in_setup"]
    assert_same(found.ranks[0]["end"], found.one["end"])


def test_a_lazy_parameter_is_refused_by_its_name() -> None:
    module = Toy()
    module.decoder.head = nn.LazyLinear(3)
    with pytest.raises(ConfigError, match=r"^decoder\.head\.weight: got 'UninitializedParameter'"):
        Run(PIPE).trainer().strategy.plan(module)


def test_a_sparse_buffer_is_refused_by_its_name_where_there_are_several_ranks() -> None:
    module = Toy()
    module.encoder.register_buffer("heads", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"^encoder\.heads: got 'a tensor of layout torch.sparse_coo'"):
        Run(PIPE).trainer().strategy.plan(module)


def test_a_layout_that_does_not_fit_is_refused_before_there_are_processes() -> None:
    layout = Layout({"vision": Modality(**VISION), "language": Modality(pp_size=5, **LANGUAGE)}, 6)
    with pytest.raises(ConfigError, match="pp_size"):
        Run(layout).trainer().fit(Late(), Run().training(), Run().loader())
