"""What a rank states is the same in every process of a sound run, and holds every field."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from features.toys import PAIR, PIPE, Run, Toy
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.config.groups import FIELDS, OF_STRATEGY, names_of
from lightning_mm5d.tools.cli.job import settle
from lightning_mm5d.trainer.statements import configuration, loader, optimizers, structure
from zoo.case import TinyModule
from zoo.text import LLAMA


@pytest.fixture
def stated() -> dict[str, Any]:
    trainer = Run(PIPE).trainer()
    return configuration(trainer.strategy, trainer, Toy())


def test_every_field_of_the_strategy_is_stated(stated: dict[str, Any]) -> None:
    grouped = {name for group in OF_STRATEGY.values() for name in names_of(group)}
    fields = (set(FIELDS) - OF_STRATEGY.keys()) | grouped
    named = {name.partition(".")[0] for name in stated}
    assert fields <= named, fields - named


def test_a_table_is_stated_by_its_text_wherever_that_is(tmp_path: Path) -> None:
    text, file = "0,F0,F1,B0,B1\n1,F0,B0,F1,B1\n", tmp_path / "table.csv"
    file.write_text(text)
    first, second = (Run(PAIR, {"schedule": given}).trainer() for given in (text, str(file)))
    stated = [configuration(trainer.strategy, trainer, Toy())["schedule"] for trainer in (first, second)]
    assert stated[0] == stated[1]


def test_the_users_own_source_files_and_versions_are_stated(stated: dict[str, Any]) -> None:
    assert {"source of Toy", "source of lightning_mm5d", "version of torch", "version of lightning"} <= set(stated)


def test_an_interval_of_validations_is_stated_in_batches_or_as_time() -> None:
    trainers = [Run(PIPE).trainer(val_check_interval=interval) for interval in (3, "00:00:00:02", {"seconds": 2})]
    stated = [configuration(one.strategy, one, Toy())["Trainer.val_check_interval"] for one in trainers]
    assert stated == [3, "2.0 s", "2.0 s"]


class Odd(torch.nn.Module):
    """What it says of itself differs between processes, or fails."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def extra_repr(self) -> str:
        if self.fails:
            raise RuntimeError("not yet")
        return f"{object()}, cuda:{id(self) % 7}"


def test_addresses_and_devices_by_number_are_left_out() -> None:
    first, second = (structure(torch.nn.Sequential(Odd(False), Odd(True))) for _ in range(2))
    assert first == second
    assert first["0"] == "Odd(<object object>, cuda)"


class Names:
    def __init__(self, *names: str) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"Names(keys={{{', '.join(self.names)}}}, shape={{'a': 1}})"


def test_sets_in_texts_are_stated_in_one_order() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    first, second = (
        optimizers([torch.optim.SGD([{"params": [parameter], "of": names}], lr=0.1)])
        for names in (Names("'c'", "'a'", "'b'"), Names("'b'", "'c'", "'a'"))
    )
    assert first == second
    assert first["optimizer 0, group 0: of"] == "Names(keys={'a', 'b', 'c'}, shape={'a': 1})"


def test_a_class_of_a_notebook_has_no_source_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    module = type("InNotebook", (Toy,), {"__module__": "__main__"})()
    trainer = Run(PIPE).trainer()
    assert "source of Toy" in configuration(trainer.strategy, trainer, module)


def test_statements_are_json() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "tags": {"b", "a"}}], lr=0.1)
    for statement in (optimizers([optimizer]), loader(Run().loader(8)), structure(Toy())):
        json.dumps(statement)
    assert optimizers([optimizer])["optimizer 0, group 0: tags"] == ["a", "b"]


def test_an_iterable_of_ones_own_is_stated_by_its_class() -> None:
    assert loader([1, 2]) == {"dataloader": "list"}


def test_norms_of_which_ranks_hold_unlike_parts_state_the_full_shape() -> None:
    """language: ranks 0-3 as 2 x 2, of which some hold 18 and some 17 of the width."""
    sizes = {"hidden_size": 35, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6}
    module = TinyModule(hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA | sizes)))
    strategy = MultimodalStrategy({"language": Modality(tp_size=4, tensor={"tp_mode": "2d"})})
    settle(strategy, 4, 1)
    plan = strategy.plan(module)
    expected, lengths = structure(module, plan), set()
    for index in range(4):
        kept = copy.deepcopy(module)
        for name, parameter in kept.named_parameters():
            if name in plan.division.shards:
                parameter.data = plan.division.shards[name].cut(parameter.data, index)
        lengths.add(len(kept.get_parameter("model.model.layers.0.input_layernorm.weight")))
        assert structure(kept, plan) == expected
    assert lengths == {17, 18}
