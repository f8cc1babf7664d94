"""Fields in groups: mappings and classes mean the same, and names without their group are taken with one warning."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

import lightning_mm5d
from lightning_mm5d import (
    BatchingOptions,
    CheckpointOptions,
    ConfigError,
    LaunchOptions,
    Modality,
    MultimodalStrategy,
    PipelineOptions,
    ShardingOptions,
)
from lightning_mm5d.config.groups import (
    FIELDS,
    OF_MODALITY,
    OF_STRATEGY,
    fields_of_strategy,
    names_of,
    path_of,
    value_of,
    with_fields,
)

GROUPED = Modality(pp_size=2, sharding=ShardingOptions(zero_stage=3), pipeline=PipelineOptions(pp_chunks=2))


def parsed(init_args: dict[str, Any], *options: str, tmp_path: Path | None = None) -> MultimodalStrategy:
    """The strategy that a parser of a LightningCLI's makes."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=str | Strategy)
    given = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": init_args}
    config = parser.parse_args([f"--strategy={given}", *options])
    made = parser.instantiate(config).strategy
    assert isinstance(made, MultimodalStrategy)
    return made


def test_no_name_is_in_two_groups_and_every_group_is_public() -> None:
    groups = [*OF_MODALITY.values(), *OF_STRATEGY.values()]
    names = [name for group in groups for name in names_of(group)]
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint({*FIELDS, *names_of(Modality)})
    assert {group.__name__ for group in groups} <= set(lightning_mm5d.__all__)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Modality(pp_size=2, sharding={"zero_stage": 3}, pipeline={"pp_chunks": 2}),  # type: ignore[arg-type]
        lambda: with_fields(Modality(pp_size=2), zero_stage=3, pp_chunks=2),
        lambda: pickle.loads(pickle.dumps(GROUPED)),
        lambda: copy.deepcopy(GROUPED),
    ],
)
def test_mappings_and_classes_mean_the_same(made: Callable[[], Modality]) -> None:
    assert made() == GROUPED
    assert (value_of(made(), "zero_stage"), value_of(made(), "pp_size")) == (3, 2)


def test_what_is_shown_of_a_modality_is_what_was_said() -> None:
    text = "Modality(pp_size=2, pipeline=PipelineOptions(pp_chunks=2), sharding=ShardingOptions(zero_stage=3))"
    assert repr(GROUPED) == text


def test_names_without_their_group_are_taken_with_one_warning_that_shows_where_they_are_now() -> None:
    with pytest.warns(FutureWarning, match=r"zero_stage is now sharding\.zero_stage, pp_chunks is now pip") as caught:
        made = Modality(pp_size=2, zero_stage=3, pp_chunks=2)  # type: ignore[call-arg]
    assert (made, len(caught), caught[0].filename) == (GROUPED, 1, __file__)
    with pytest.warns(FutureWarning, match=r"num_microbatches is now batching\.num_microbatches, async") as caught:
        strategy = MultimodalStrategy(num_microbatches=4, checkpoint="sharded", async_checkpoint=True)
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert (strategy.num_microbatches, strategy.checkpoint_format) == (4, "sharded")  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"modalities\.a\.zero_stage is now modalities\.a\.sharding\.zero_stage"):
        assert MultimodalStrategy({"a": {"zero_stage": 3}}).modalities["a"].sharding.zero_stage == 3


def test_every_name_without_its_group_is_known_to_constructors() -> None:
    for groups, make in ((OF_MODALITY, Modality), (OF_STRATEGY, fields_of_strategy)):
        for kind in groups.values():
            for each in fields(kind):
                # said as checkpoint; were always in their groups
                if each.name in ("checkpoint_format", "balance", "in_memory_every_n_steps"):
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)
                    make(**{each.name: getattr(kind(), each.name)})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"balance": True}, "balance: got True. The strategy has no such field. Write batching.balance"),
        ({"num_microbatch": 2}, "num_microbatch: got 2. .* Did you mean 'batching.num_microbatches'"),
        ({"zero_stage": 2}, "zero_stage: got 2. .* write modalities.<name>.sharding.zero_stage"),
        ({"tp_size": 2}, "tp_size: got 2. .* write modalities.<name>.tp_size"),
        ({"batching": 4}, "batching: got 4. It is a group of fields: num_microbatches, microbatch_size"),
        ({"batching": {"num_microbatchs": 4}}, "batching.num_microbatchs: got 4. .* Did you mean 'num_microbatches'"),
        ({"batching": {"timeout": 4}}, "batching.timeout: got 4. There is no such field. Write launch.timeout"),
        ({"batching": {"schedule": "1f1b"}}, "batching.schedule: .* Write schedule beside batching, not in it"),
        (
            {"modalities": {"a": {"tensor": {"tp_size": 2}}}},
            "modalities.a.tensor.tp_size: .* Write tp_size beside tensor",
        ),
        ({"checkpoint": "shard"}, "checkpoint.checkpoint_format: got 'shard'. .* Did you mean 'sharded'"),
        ({"checkpoint": {"async_checkpoint": True}}, "checkpoint.async_checkpoint: got True. Only sharded"),
        ({"launch": {"bucket_bytes": 0}}, "launch.bucket_bytes: got 0"),
        ({"modalities": {"a": {"tensor": 3}}}, "modalities.a.tensor: got 3. It is a group of fields: tp_mode"),
        ({"modalities": {"a": {"tensor": {"tp_mod": 3}}}}, "modalities.a.tensor.tp_mod: .* Did you mean 'tp_mode'"),
        ({"modalities": {"a": {"zero_stag": 3}}}, "modalities.a.zero_stag: .* Did you mean 'sharding.zero_stage'"),
        ({"modalities": {"a": Modality(sharding={"zero": 3})}}, "modalities.a.sharding.zero: got 3"),  # type: ignore[arg-type]
        (
            {"modalities": {"a": {"zero_stage": 1, "sharding": {"zero_stage": 3}}}},
            "modalities.a.zero_stage: got 1. modalities.a.sharding.zero_stage=3 says it already",
        ),
        (
            {"num_microbatches": 2, "batching": BatchingOptions(num_microbatches=4)},
            "num_microbatches: got 2. batching.num_microbatches=4 says it already",
        ),
    ],
)
def test_what_is_no_group_or_is_said_twice_is_refused_by_its_path(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        MultimodalStrategy(**said)


def test_a_group_of_the_strategy_is_a_mapping_a_class_or_for_checkpoints_a_word() -> None:
    for said in ("sharded", {"checkpoint_format": "sharded"}, CheckpointOptions(checkpoint_format="sharded")):
        assert MultimodalStrategy(checkpoint=said).checkpoint_format == "sharded"  # type: ignore[arg-type, attr-defined]
    for size in ({"bucket_bytes": 2**20}, LaunchOptions(bucket_bytes=2**20)):
        assert MultimodalStrategy(launch=size).bucket_bytes == 2**20  # type: ignore[arg-type]


def test_parsers_read_groups_and_an_old_option_loses_nothing_beside_a_file() -> None:
    layout = {"modalities": {"language": {"pp_size": 2}}}
    path = "--strategy.init_args.modalities.language"
    made = parsed(layout, f"{path}.sharding.zero_stage=3", "--strategy.init_args.launch.timeout=0:01:00")
    assert made.modalities["language"] == Modality(pp_size=2, sharding=ShardingOptions(zero_stage=3))
    assert made._timeout.total_seconds() == 60
    with pytest.warns(FutureWarning):
        made = parsed(layout, f"{path}.zero_stage=3", "--strategy.init_args.num_microbatches=4")
    assert made.modalities["language"] == Modality(pp_size=2, sharding=ShardingOptions(zero_stage=3))
    assert made.num_microbatches == 4


def test_a_name_knows_its_path() -> None:
    assert [path_of(name) for name in ("zero_stage", "timeout", "tp_size")] == [
        "sharding.zero_stage",
        "launch.timeout",
        "tp_size",
    ]
