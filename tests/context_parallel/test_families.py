"""Every family, its sequences shared by two or three ranks, computes what it computes on one: losses and gradients.

Ranks 0 and 1 (or 0 to 2) share the sequences of all modalities of a family, encoders included. How they exchange keys,
and who takes which tokens, differs from family to family. All families of a degree run one after the other in the same
processes; where one fails, the others run in new ones.
"""

from __future__ import annotations

import traceback
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.context_parallel.hooks.apply import ContextParallel
from lightning_mm5d.context_parallel.hooks.layer_attention import Interface
from lightning_mm5d.context_parallel.hooks.layer_tensors import Ranks
from lightning_mm5d.context_parallel.hooks.whole_modules import check_layers
from lightning_mm5d.partition.find import find
from lightning_mm5d.sharded.collectives import TensorGroup
from ranks import run_ranks
from sweeps import every
from tensor_parallel.families import Root

from .families import PARTLY, SHARED, Shared

STEPS, RATE, EXACT = 2, 0.01, 1e-9
WAYS = tuple(product(("allgather", "ring", "ulysses"), ("uniform", "zigzag", "makespan_min")))
# three ranks: heads that they do not divide, more ranks than images, masks of all kinds
THREE = (
    *(
        "llama",
        "mistral",
        "gemma2",
        "gpt_oss",
        "deepseek_v3",
        "mixtral",
        "gpt2",
        "bert",
        "modernbert",
        "llama_documents",
    ),
    *("gemma3", "gemma4", "mllama", "qwen2_5_vl", "qwen3_vl_moe", "paligemma", "bart", "qwen2_audio", "vit", "llava"),
)
# the default run has others that are masked as these are
MORE = (
    *("mistral", "gemma2", "mixtral", "gpt2", "modernbert"),
    *("gemma4", "qwen2_5_vl", "paligemma", "qwen2_audio", "vit"),
)
CASES = every(2, SHARED, (2,))
CASES += [pytest.param(name, 3, id=f"{name}-3", marks=pytest.mark.exhaustive if name in MORE else ()) for name in THREE]
pytestmark = pytest.mark.usefixtures("float64")

Gradients = dict[str, Tensor]


class Result(NamedTuple):
    """What a run gave: loss and gradients of each step, and how much the first layer of each modality worked on."""

    steps: list[tuple[float, Gradients]]
    worked: dict[str, int]


def modalities_of(name: str, shared: Shared, degree: int) -> dict[str, Modality]:
    """All modalities shared, in a way of this family's own; some encoders by whole items."""
    turn = (*SHARED,).index(name) + 4 * (degree - 2)
    mode, how = WAYS[turn % len(WAYS)]
    found: dict[str, Modality] = {}
    for place, modality in enumerate(shared.modalities):
        is_encoder = place < len(shared.modalities) - 1
        by_items = is_encoder and turn % 4 == 3
        found[modality] = Modality(
            cp_size=degree, context={"cp_mode": "items" if by_items else mode, "cp_distribution": how}
        )
    return found


def checked(root: Root, modalities: dict[str, Modality]) -> dict[str, str]:
    """The path of the layers of each modality, if these can be shared."""
    layers = find(root, modalities).layers
    check_layers(modalities, root, layers)
    return {name: path for name, path in layers.items() if path is not None}


def train(shared: Shared, modalities: dict[str, Modality], group: TensorGroup | None = None) -> Result:
    """A few steps of gradient descent, with sequences shared over `group` where there is one."""
    root = shared.family.build()
    layers = checked(root, modalities)
    worked: dict[str, dict[str, int]] = {}
    for name, path in layers.items():
        watch(next(root.get_submodule(path).children()), worked.setdefault(name, {}))
    interface, parts = Interface(), []
    if group is not None:
        own = {id(parameter) for parameter in root.parameters()}
        ranks = Ranks(ContextGroups(whole=group), group)
        for name, modality in modalities.items():
            options: dict[str, Any] = {"averages": lambda x: id(x) in own, "interface": interface}
            parts.append(ContextParallel(name, modality, root, layers[name], ranks, **options))
    steps = []
    for step in range(STEPS):
        with Doubling():
            loss = root(shared.family.feed(step))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
        if group is not None:
            gradients = averaged(gradients, group)
        for name, parameter in root.named_parameters():
            parameter.grad = None
            if name in gradients:
                parameter.data.sub_(gradients[name], alpha=RATE)
        steps.append((float(loss.detach()), gradients))
    for part in parts:
        part.remove()
    interface.remove()
    return Result(steps, {name: next(iter(seen.values())) for name, seen in worked.items()})


class Doubling(TorchFunctionMode):
    """Keeps models in float64 that would drop to float32 on the way: in norms, softmaxes or the loss."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def watch(layer: nn.Module, seen: dict[str, int]) -> None:
    """Note how many numbers each linear layer of `layer` was given the last time; the first that ran comes first."""

    def note(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, args[0].numel())

    for name, module in layer.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_pre_hook(note(name))


def averaged(gradients: Gradients, group: TensorGroup) -> Gradients:
    """The mean over ranks, of which some may have none."""
    ranks: list[Any] = [None] * group.size
    dist.all_gather_object(ranks, gradients)
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: torch.stack([rank[name] for rank in ranks if name in rank]).sum(0) / group.size for name in names}


# --- processes ---


def run(rank: int, names: list[str], degree: int) -> tuple[dict[str, Result | str], str | None]:
    """One rank: what each family gave or by what it was refused, up to the first that fails, and why that did."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    done: dict[str, Result | str] = {}
    for name in names:
        shared = SHARED[name]
        try:
            done[name] = train(shared, modalities_of(name, shared, degree), group)
        except ConfigError as error:
            done[name] = str(error)
        except BaseException:
            # the others notice that this rank is gone; no barrier waits for them
            dist.destroy_process_group()
            return done, traceback.format_exc()
    return done, None


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[tuple[str, int], list[Result | str]]:
    """What each family that is asked for gave on each of the ranks, or why it failed."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = [item.callspec.params for item in items if getattr(item, "callspec", None)]  # type: ignore[attr-defined]
    found: dict[tuple[str, int], list[Result | str]] = {}
    for degree in (2, 3):
        names = list(dict.fromkeys(one["name"] for one in asked if one.get("degree") == degree))
        for name in names:
            SHARED[name].family.build()  # imports its modules once, before ranks are forked
        while names:
            ranks = run_ranks(degree, run, names, degree, limit=180 + 30 * len(names))
            whole = [name for name in names if all(name in done for done, _ in ranks)]
            found |= {(name, degree): [done[name] for done, _ in ranks] for name in whole}
            if len(whole) < len(names):
                found[names[len(whole)], degree] = [why or "the others failed" for _, why in ranks]
            names = names[len(whole) + 1 :]
    return found


# --- claims ---


@pytest.mark.parametrize(("name", "degree"), CASES)
def test_a_family_with_shared_sequences_trains_like_a_whole_one(
    name: str, degree: int, runs: dict[tuple[str, int], list[Result | str]]
) -> None:
    shared, ranks = SHARED[name], runs[name, degree]
    expected = train(shared, modalities_of(name, shared, degree))
    results = []
    for rank, result in enumerate(ranks):
        assert isinstance(result, Result), f"rank {rank}: {result}"
        results.append(result)
        for step, (loss, gradients) in enumerate(result.steps):
            wanted_loss, wanted = expected.steps[step]
            assert loss == pytest.approx(wanted_loss, rel=EXACT), f"rank {rank}, step {step}"
            assert set(gradients) == set(wanted), f"rank {rank}, step {step}"
            scale = max(float(gradient.abs().max()) for gradient in wanted.values())
            for key, gradient in wanted.items():
                largest = max(float(gradient.abs().max()), 1e-3 * scale)
                difference = float((gradients[key] - gradient).abs().max()) / largest
                assert difference <= EXACT, f"rank {rank}, step {step}, {key}"
    for modality in shared.modalities:
        each = [result.worked[modality] for result in results]
        assert min(each) > 0, f"{modality}: some rank has no tokens: {each}"
        if name in PARTLY or (name, degree) == ("llava", 3):  # five tokens are too few for three ranks
            continue
        assert sum(each) == expected.worked[modality], f"{modality}: tokens are computed more than once: {each}"
