"""A script of one's own trains ranks that its layout cannot have, as ``mm5d fit`` does with ``elastic: true``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from clusters.elastic_parts import Parts
from features.toys import Samples, Toy
from lightning_mm5d import ConfigError, ElasticStrategy, Modality, MultimodalStrategy
from lightning_mm5d.tools.cli.job import settle
from lightning_mm5d.trainer.process_group import free_port


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as the one rank of an agent."""
    told = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": free_port(),
    }
    told |= {"TORCHELASTIC_RUN_ID": 7}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def made(ranks: int, kind: type[MultimodalStrategy] = ElasticStrategy, **language: Any) -> MultimodalStrategy:
    modalities = {"vision": Modality(module="encoder"), "language": Modality(pp_size=3, **language)}
    strategy = kind(modalities, batching={"num_microbatches": 4})  # type: ignore[arg-type]
    settle(strategy, ranks, 1)
    return strategy


@pytest.mark.usefixtures("torchrun")
def test_fewer_ranks_get_a_layout_with_as_many_samples_and_nothing_of_the_script_has_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    strategy, module = made(3), Toy()
    loader = DataLoader(Samples(48), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    states = torch.get_rng_state(), loader.generator.get_state(), random.getstate()
    attributes = dict(vars(module))
    strategy.validate_before_launch(module, loader, None, None)
    assert strategy.layout.size == 3
    assert "elastic: 3 ranks train 8 samples a step" in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(loader.generator.get_state(), states[1])
    assert random.getstate() == states[2]
    assert vars(module) == attributes
    modalities = dict(strategy.modalities)
    strategy.validate_before_launch(module, loader, None, None)
    assert strategy.modalities == modalities


@pytest.mark.usefixtures("torchrun")
def test_two_replicas_of_a_data_module_become_one_with_twice_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    strategy, data = made(3, dp_size=2), Parts()
    strategy.validate_before_launch(Toy(), None, None, data)
    assert data.batch_size * strategy.num_replicas == 16
    assert "train 16 samples a step" in capsys.readouterr().err


@pytest.mark.usefixtures("torchrun")
def test_a_layout_that_the_ranks_can_have_stays() -> None:
    strategy = made(4)
    modalities = strategy.modalities
    strategy.validate_before_launch(Toy(), DataLoader(Samples(48), 8), None, None)
    assert strategy.modalities is modalities


@pytest.mark.usefixtures("torchrun")
def test_data_that_fail_are_told_of_as_such() -> None:
    with pytest.raises(ConfigError, match=r"data: got None\. .* which fails: "):
        made(3).validate_before_launch(Toy(), (sample for sample in ()), None, None)
