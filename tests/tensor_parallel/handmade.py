"""A small module with every kind of divided parameter, and plans for it without any forward being divided.

For tests of what plans say about parameters; gradients and values are made up.
"""

from __future__ import annotations

from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mm5d import Modality
from lightning_mm5d.config.modality import loss_modality_of
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.layout.layout import Layout, even_ranges
from lightning_mm5d.partition import partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.shards import Shard, heads_of, joined, scaled
from lightning_mm5d.stage import drop_parameters
from lightning_mm5d.tensor_parallel.resolve import Division

WIDTH, HEAD, VOCABULARY = 4, 2, 11


class Layer(nn.Module):
    """Names and shapes of an attention: projections that are fused, by rows and by columns, buffers, and the rest."""

    def __init__(self, query: int, key_value: int) -> None:
        super().__init__()
        rows = (query + 2 * key_value) * HEAD
        self.qkv = nn.Linear(WIDTH, rows)
        self.columns = nn.Parameter(torch.randn(WIDTH, rows))
        self.out = nn.Linear(query * HEAD, WIDTH)
        self.head_norm = nn.LayerNorm(HEAD)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("slopes", torch.randn(query))
        self.register_buffer("unsaved", torch.randn(query, 2), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Model(L.LightningModule):
    """Two layers between a table and a head that is tied to it; equal for equal seeds."""

    def __init__(self, query: int, key_value: int, seed: int = 0) -> None:
        super().__init__()
        self.query, self.key_value = query, key_value
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.table = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Layer(query, key_value) for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.table(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).sum()


def from_local(query: int, key_value: int, degree: int) -> Division:
    """How `Model` is divided over `degree` ranks."""
    heads = heads_of(query, key_value, degree)
    assert heads is not None
    size = (query + 2 * key_value) * HEAD
    parts = [[scaled(one.query, HEAD) for one in heads]]
    parts += [[scaled(one.key_value, HEAD, (query + i * key_value) * HEAD) for one in heads] for i in range(2)]
    fused = joined(parts, 0, size)
    queries = joined(parts[:1], 1, query * HEAD)
    table = joined([even_ranges(VOCABULARY, degree)], 0, VOCABULARY)
    slopes = joined([[one.query for one in heads]], 0, query)
    shards = {"table.weight": table, "head.weight": table}
    shared = set()
    for path in ("layers.0", "layers.1"):
        shards |= {
            f"{path}.qkv.weight": fused,
            f"{path}.qkv.bias": fused,
            f"{path}.columns": Shard(1, size, fused.ranges),
            f"{path}.out.weight": queries,
            f"{path}.slopes": slopes,
            f"{path}.unsaved": slopes,
        }
        shared |= {f"{path}.head_norm.weight", f"{path}.head_norm.bias"}
    return Division(shards=shards, shared=frozenset(shared))


def plan_of(module: L.LightningModule, division: Division, world: int, **modalities: Modality) -> Plan:
    layout = Layout.build(modalities, world_size=world, loss_modality=loss_modality_of(modalities))
    sizes = {name: p.numel() for name, p in module.named_parameters(remove_duplicate=False)}
    return Plan(layout, partition(module, modalities), modalities, sizes, division=division)


def model_plan(world: int, query: int, key_value: int, **fields: int) -> tuple[Model, Plan]:
    """A `Model` with that many heads, and its plan on `world` ranks."""
    module = Model(query, key_value)
    division = from_local(query, key_value, fields["tp_size"])
    return module, plan_of(module, division, world, language=Modality(**fields))


def cut(plan: Plan, module: L.LightningModule, rank: int) -> None:
    """Leave in `module` what `rank` holds."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    here = {name for name, _ in tensors if rank in plan.ownership.ranks_holding(name)}
    drop_parameters(
        module, [name for name in plan.sizes if name not in here], torch.device("cpu"), Guard(plan.ownership.holders)
    )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in here and name in plan.division.shards:
            tensor.data = plan.division.shards[name].cut(tensor.data, plan.ownership.shard_index(name, rank))


def held_by(plan: Plan, module: L.LightningModule, rank: int) -> dict[str, nn.Parameter]:
    """What `rank` holds of the parameters, as new ones, each once."""
    held = {}
    for name, parameter in module.named_parameters():
        if rank in plan.ownership.ranks_holding(name):
            shard = plan.division.shards.get(name)
            part = (
                parameter.data if shard is None else shard.cut(parameter.data, plan.ownership.shard_index(name, rank))
            )
            held[name] = nn.Parameter(part)
    return held


def connect(rank: int, plan: Plan) -> Groups:
    """Join the world of `plan`."""
    dist.init_process_group("gloo", rank=rank, world_size=plan.layout.size, timeout=timedelta(seconds=30))
    return Groups(timedelta(seconds=30))
