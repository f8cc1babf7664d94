"""Random state of a GPU, doubled by generators of the CPU: all of it is seeded, kept and put back with torch's own."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_mm5d
from lightning_mm5d.data.random_state import kept_random_state, seed_all, seed_torch, set_torch_states, torch_states
from lightning_mm5d.stage.remote import ShapeMemory

ROOT = Path(lightning_mm5d.__file__).parent


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Two devices; the second is the current one."""
    found = [torch.Generator().manual_seed(index) for index in range(2)]

    def index(device: Any) -> int:
        place = torch.device(device).index
        return 1 if place is None else place

    def put(state: Tensor, device: Any) -> None:
        found[index(device)].set_state(state)

    monkeypatch.setattr(torch.cuda, "default_generators", tuple(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": found[index(device)].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    return found


def draw(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


@pytest.mark.parametrize(("name", "place"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_one_seed_gives_one_stream_on_the_rank_s_own_device(gpus: list[torch.Generator], name: str, place: int) -> None:
    other = gpus[1 - place].get_state()
    for seed in (lambda: seed_torch(7, torch.device(name)), lambda: seed_all(7, torch.device(name))):
        seed()
        first = draw(gpus[place])
        seed()
        assert draw(gpus[place]) == first
    assert torch.equal(gpus[1 - place].get_state(), other)


def test_draws_of_a_device_are_taken_back_with_those_of_the_cpu(gpus: list[torch.Generator]) -> None:
    device = torch.device("cuda", 0)
    before = torch_states(device)
    with kept_random_state(device):
        draw(gpus[0])
        torch.rand(())
    assert all(map(torch.equal, before, torch_states(device)))
    draw(gpus[0])
    set_torch_states(before, device)
    assert all(map(torch.equal, before, torch_states(device)))


def test_finding_the_shapes_of_a_remote_module_leaves_the_device_s_generator_alone(gpus: list[torch.Generator]) -> None:
    module = SimpleNamespace(buffers=lambda: iter([]), modules=lambda: iter([]))
    module.parameters = lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))])
    before, drawn = gpus[0].get_state(), []
    ShapeMemory().computed(module, lambda: drawn.append(draw(gpus[0])), (), {})  # type: ignore[arg-type]
    assert len(drawn) == 1
    assert torch.equal(gpus[0].get_state(), before)


def test_one_file_alone_seeds_and_keeps_generators_by_default() -> None:
    """`fork_rng` with a list of devices, and `manual_seed`, forget the device where a rank computes."""
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("torch.manual_seed", "torch.seed", "torch.set_rng_state") or name.endswith("fork_rng"):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == ["data/random_state.py: torch.set_rng_state"]
