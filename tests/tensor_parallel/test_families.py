"""Every family, divided over two or three ranks, computes what it computes on one: losses, gradients, parameters.

Ranks 0 and 1 (or 0 to 2) hold one model together. All families of a degree run one after the other in the same
processes; where one fails, the others run in new ones.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of
from lightning_mm5d.tensor_parallel.resolve import Division, resolve
from ranks import run_ranks
from sweeps import every

from .families import FAMILIES, Family, Root

STEPS, RATE = 3, 0.01
# three ranks: uneven heads, one key and value head for two ranks, widths and vocabularies with a remainder
THREE = (
    *("llama", "falcon_groups", "falcon_heads", "falcon_multi_query", "falcon_alibi", "bloom", "gpt2", "bert", "t5"),
    *("phi3", "mixtral", "glm", "beit", "swin", "swinv2", "sam", "blip_2", "internvl", "qwen2_5_vl", "chatglm"),
    *("qwen3", "gpt_oss", "whisper", "opt", "llama_eager", "falcon_alibi_eager"),
)
# the default run has others whose layers are divided as these are
MORE = (
    *("falcon_heads", "falcon_multi_query", "falcon_alibi", "falcon_alibi_eager", "phi3", "glm", "beit", "swinv2"),
    *("sam", "internvl", "qwen3", "opt", "llama_eager"),
)
CASES = every(2, FAMILIES, (2,))
CASES += [pytest.param(name, 3, id=f"{name}-3", marks=pytest.mark.exhaustive if name in MORE else ()) for name in THREE]

Step = tuple[float, dict[str, Tensor]]


def train(
    family: Family, division: Division | None = None, group: TensorGroup | None = None, **options: Any
) -> list[Step]:
    """Losses and whole gradients of a few steps of gradient descent, divided where a division is given."""
    root = family.build()
    tensor_parallel = None
    if division is not None and group is not None:
        tensor_parallel = TensorParallel(root, division, {"all": group}, **options)
    steps: list[Step] = []
    for step in range(STEPS):
        loss = root(family.feed(step))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
        if division is not None and group is not None:
            gradients = merged(gradients, division, group)
        for name, parameter in root.named_parameters():
            parameter.grad = None
            if name in gradients:
                held = gradients[name]
                if division is not None and group is not None and name in division.shards:
                    held = division.shards[name].cut(held, group.index)
                parameter.data.sub_(held, alpha=RATE)
        steps.append((float(loss.detach()), gradients))
    if tensor_parallel is not None:
        tensor_parallel.remove()
    return steps


def merged(gradients: dict[str, Tensor], division: Division, group: TensorGroup) -> dict[str, Tensor]:
    """Whole gradients: rows that several ranks hold, and what is shared, are summed; the rest is equal on all ranks."""
    ranks: list[Any] = [None] * group.size
    dist.all_gather_object(ranks, gradients)
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        parts = [rank[name] for rank in ranks]
        shard = division.shards.get(name)
        if shard is not None:
            found[name] = gradient.new_zeros(shard.full_shape(gradient.shape))
            for index, (part, held) in enumerate(zip(parts, shard.ranges, strict=True)):
                other = torch.zeros_like(found[name])
                shard.put(shard.beside(other, index), part, held)
                found[name] += other
        elif name in division.shared:
            found[name] = torch.stack(parts).sum(0)
        elif division.in_blocks and any(grid.holds(name) for grid in division.in_blocks.values()):
            raise AssertionError(f"{name} is in a layer on a grid, and neither sharded nor shared")
        else:
            for part in parts:
                torch.testing.assert_close(part, gradient, msg=lambda m, name=name: f"{name}, whole, differs: {m}")
            found[name] = gradient
    return found


def divided_as(root: Root, degree: int) -> Division:
    return resolve(root, plans_of(root), lambda name: ("all", degree))


def run(rank: int, names: list[str], degree: int) -> tuple[dict[str, list[Step]], str | None]:
    """One rank: what each family gave, up to the first that fails, and why that did."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    done: dict[str, list[Step]] = {}
    for name in names:
        try:
            done[name] = train(FAMILIES[name], divided_as(FAMILIES[name].build(), degree), group)
        except BaseException:
            # the others notice that this rank is gone; no barrier waits for them
            dist.destroy_process_group()
            return done, traceback.format_exc()
    return done, None


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[tuple[str, int], list[Step] | str]:
    """What each family that is asked for gave on each of the ranks, or why it failed."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = [item.callspec.params for item in items if getattr(item, "callspec", None)]  # type: ignore[attr-defined]
    found: dict[tuple[str, int], list[Any] | str] = {}
    for degree in (2, 3):
        names = [one["name"] for one in asked if one.get("degree") == degree]
        for name in names:
            FAMILIES[name].build()  # imports its modules once, before ranks are forked
        while names:
            ranks = run_ranks(degree, run, names, degree, limit=180 + 30 * len(names))
            whole = [name for name in names if all(name in done for done, _ in ranks)]
            found |= {(name, degree): [done[name] for done, _ in ranks] for name in whole}
            if len(whole) < len(names):
                failed = names[len(whole)]
                found[failed, degree] = "\n".join(why or "" for _, why in ranks)
            names = names[len(whole) + 1 :]
    return found


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("name", "degree"), CASES)
def test_a_divided_family_trains_like_a_whole_one(
    name: str, degree: int, runs: dict[tuple[str, int], list[Any] | str]
) -> None:
    ranks = runs[name, degree]
    assert not isinstance(ranks, str), ranks
    family = FAMILIES[name]
    expected = train(family)
    for rank, steps in enumerate(ranks):
        for step, (loss, gradients) in enumerate(steps):
            wanted_loss, wanted = expected[step]
            assert loss == pytest.approx(wanted_loss, rel=family.tolerance), f"rank {rank}, step {step}"
            assert set(gradients) == set(wanted), f"rank {rank}, step {step}"
            scale = max(float(gradient.abs().max()) for gradient in wanted.values())
            for key, gradient in wanted.items():
                largest = max(float(gradient.abs().max()), 1e-3 * scale)
                difference = float((gradients[key] - gradient).abs().max()) / largest
                assert difference <= family.tolerance, f"rank {rank}, step {step}, {key}"
