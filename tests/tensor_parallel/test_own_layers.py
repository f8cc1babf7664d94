"""A model of the layers in `lightning_mm5d.nn`, as its page writes it, equals one process in each tensor parallel mode.

"tp 2" is "model: ranks 0-1", "tp 2, pp 2" has stage 0 on ranks 0-1 and stage 1 on ranks 2-3; "2d" is "model: ranks
0-3", "2.5d" and "3d" are "model: ranks 0-7".
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality, TensorParallelPlan, nn, register_tensor_parallel_plan
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tensor_parallel.plan_lookup import origins, plans_of
from lightning_mm5d.tensor_parallel.resolve import resolve
from parity.harness import fit, strategy
from ranks import call_ranks

PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallelism.md"
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}],
    3: [{"tp_size": 3}],
    4: [{"tp_size": 4, "tp_mode": "2d"}, {"tp_size": 2, "pp_size": 2}],
    8: [{"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}, {"tp_size": 8, "tp_mode": "3d"}],
}


class Fused(torch.nn.Module):
    """An attention with one projection, which reads numbers of heads; a norm of single heads is in it."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        heads = (num_heads, num_kv_heads, num_kv_heads)
        self.every = nn.Linear(width, sum(heads) * head_dim, bias=False, sharding="column", heads=heads)
        self.q_norm = nn.RMSNorm(head_dim)
        self.merge = nn.Linear(num_heads * head_dim, width, sharding="row", heads=num_heads)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        every = self.every(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = every.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], -2)
        return self.merge(
            nn.attention(self.q_norm(q).flatten(-2), k.flatten(-2), v.flatten(-2), self.head_dim, is_causal=True)
        )


def fused(folder: Path) -> Any:
    """The module of the page with other attentions, MLPs as sequences, and a head that is tied to the table."""
    module = built(folder)
    for block in module.blocks:
        block.attention = Fused(24, 4, 2, 6)
        up, down = nn.Linear(24, 30, sharding="column"), nn.Linear(30, 24, sharding="row")
        block.mlp = torch.nn.Sequential(up, torch.nn.GELU(), torch.nn.Dropout(0.0), down)
    module.head.weight = module.table.weight
    return module


def built(folder: Path) -> Any:
    """The module of the page, from a file, because the code of a module without source is not known."""
    spec = importlib.util.spec_from_file_location("own_layers_of_the_page", folder / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = page
    spec.loader.exec_module(page)
    torch.manual_seed(0)
    return page.Model()


def trained(
    rank: int | None, folder: Path, world: int, layouts: list[dict[str, Any]], build: Callable[[Path], Any]
) -> list[Any]:
    """Losses, gradients and parameters of each layout; of one process without a rank."""
    torch.set_default_dtype(torch.float64)
    batches = [torch.randint(37, (5, 8), generator=torch.Generator().manual_seed(step)) for step in range(2)]
    found = []
    for fields in layouts:
        module = build(folder)
        chosen = "auto" if rank is None else strategy({"model": Modality(**fields)}, num_microbatches=1)
        recorder = fit(module, batches, chosen, world)
        found.append((recorder.losses, recorder.gradients, module.state_dict(), recorder))
    return [one if rank is None else one[:3] for one in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (example,) = re.findall(r"```python\n(import lightning as L\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text(example)
    return tmp_path


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("build", "world"), [*((built, world) for world in LAYOUTS), (fused, 2), (fused, 4)])
def test_a_model_of_these_layers_equals_one_process(folder: Path, build: Callable[[Path], Any], world: int) -> None:
    (_, _, parameters, recorder) = trained(None, folder, 1, [{}], build)[0]
    ranks = call_ranks(world, trained, folder, world, LAYOUTS[world], build)
    for index, fields in enumerate(LAYOUTS[world]):
        found = [one[index] for one in ranks]
        assert_equal_to_one_process(found, recorder, parameters, where=str(fields), **tolerance(exact=True))


def test_each_layer_of_the_page_has_a_plan(folder: Path) -> None:
    module = built(folder)
    plans = plans_of(module)
    roles = resolve(module, plans, lambda name: ("model", 2)).roles
    assert (roles["table"], roles["head"], roles["blocks.1.mlp.drop"]) == ("embedding", "head", "row")
    assert origins(module, [path for path, role in roles.items() if role in ("column", "row")]) == {"its layers": 14}
    assert set(plans) == {f"blocks.{layer}.{part}" for layer in range(2) for part in ("attention", "mlp")}
    (attention,) = plans["blocks.0.attention"]
    assert attention.column["match"] == ("key_value_heads",)


def test_on_one_process_they_are_torch_s() -> None:
    torch.manual_seed(0)
    ours = nn.Linear(4, 6, sharding="column", heads=3)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(4, 6)
    assert nn.Linear.forward is torch.nn.Linear.forward
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert nn.Embedding.forward is torch.nn.Embedding.forward


class Centred(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, sharding="column"), nn.Linear(8, 4, sharding="row")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        return self.down(inner - inner.mean(-1, keepdim=True))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 8, sharding="column", heads=2) for _ in range(3))
        self.out, self.pieces = nn.Linear(8, 4, sharding="row", heads=2), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.pieces, -1)) for layer in (self.q, self.k, self.v))
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(-2))


class Literal(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 2, -1) for layer in (self.q, self.k, self.v))
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(-2))


class Grouped(Fused):
    def __init__(self) -> None:
        super().__init__(8, 2, 2, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.every(hidden).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        return self.merge(nn.attention(q.flatten(-2), k.flatten(-2), v.flatten(-2), self.head_dim))


class Alone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, sharding="column")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Centred, "right on a part of its width"),
        (Counting, "right on a part of its heads"),
        (Literal, "right on a part of its heads"),
        (Grouped, "right on a part of its heads"),
        (Alone, "columns up and rows none"),
    ],
)
def test_a_module_that_may_be_wrong_on_a_part_is_refused(kind: type[torch.nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plans_of(torch.nn.ModuleDict({"one": kind()}))
    assert "one" in str(caught.value)
    assert "register_tensor_parallel_plan" in str(caught.value)


def test_a_registered_plan_comes_first() -> None:
    class Known(Centred):
        pass

    plan = TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)})
    register_tensor_parallel_plan(Known, plan)
    assert plans_of(torch.nn.ModuleDict({"one": Known()})) == {"one": (plan,)}


def test_a_sequence_of_layers_and_an_activation_is_sharded() -> None:
    layers = (nn.Linear(4, 8, sharding="column"), torch.nn.GELU(), nn.Linear(8, 4, sharding="row"))
    for kind in (torch.nn.Sequential(*layers), torch.nn.Sequential(OrderedDict(zip("abc", layers, strict=True)))):
        assert plans_of(torch.nn.ModuleDict({"one": kind})).keys() == {"one"}
    with pytest.raises(ConfigError, match="right on a part"):
        plans_of(torch.nn.ModuleDict({"one": torch.nn.Sequential(*reversed(layers))}))
    with pytest.raises(ConfigError, match="right on a part"):
        plans_of(torch.nn.ModuleDict({"one": torch.nn.Sequential(layers[0], torch.nn.LayerNorm(8), layers[2])}))


@pytest.mark.parametrize(
    "arguments",
    [{"sharding": "rows"}, {"heads": 2}, {"sharding": "row", "heads": (1, 1, 1)}, {"sharding": "column", "heads": 3}],
)
def test_arguments_that_say_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Linear\."):
        nn.Linear(4, 8, **arguments)
