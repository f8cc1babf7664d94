"""One layer of GPT-2 on 4 to 64 ranks, sharded along one dim and on grids: bytes against the formulas of the papers.

For each rank it counts the bytes of the weights of linear layers, of what the forward keeps for the backward, and of
what the rank sends in a forward and a backward between the layer's entry and its exit. The table has the mean of ranks.
On 4 and 8 ranks processes run and talk over gloo; on 16, 27 and 64 the same code runs as each of the ranks in turn,
with a backend that sends nothing. Sums of gradients over ranks with equal weights (``2.5d``) come once a step, and are
not among the bytes sent here.

Formulas, for T tokens, width D and p ranks with q to a side: a layer has 12 D^2 weights; its linear layers take 7 T D
numbers and give 9 T D. With broadcasts and reductions that each rank but the last passes on once, a rank sends

- 1d: 4 all-reduces of T D (Shoeybi et al. 2019): 8 (p - 1) / p T D
- 2d: one round of panels in the forward, two in the backward (Xu et al. 2021): 3 (q - 1) / q^2 (7 T D + 12 D^2)
- 2.5d: the same with T / depth (Wang et al. 2021)
- 3d: two gathers and a scatter in the forward, five of these in the backward (Bian et al. 2021):
  (q - 1) / q^3 (39 T D + 36 D^2)

What is kept is compared with the p-th part of what one process keeps. Sizes are such that q divides them; where p does
not divide the heads (``1d`` on 27), ranks differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.block import AXES, GridShape
from lightning_mm5d.features.grids.fields import grid_side
from lightning_mm5d.features.grids.grid_operations import Line
from lightning_mm5d.features.grids.layers_in_blocks import Grids
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of
from lightning_mm5d.tensor_parallel.resolve import Division, resolve
from lightning_mm5d.trainer.process_group import free_port

SAMPLES, TOKENS, WIDTH, HEADS, BYTES = 144, 4, 768, 192, 4
RUN, COUNTED = (4, 8), (16, 27, 64)
DEPTHS = {8: 2, 16: 4, 27: 3, 64: 4}
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


class Bytes(NamedTuple):
    """What one rank has and sends."""

    weights: float
    saved: float
    sent: float


def modes(ranks: int) -> list[Modality]:
    """Return the modes that have a grid of so many ranks."""
    modalities = [Modality(tp_size=ranks, tensor={"tp_mode": mode}) for mode in ("1d", "2d", "3d")]
    modalities.insert(2, Modality(tp_size=ranks, tensor={"tp_mode": "2.5d", "tp_depth": DEPTHS.get(ranks, 1)}))
    return [
        modality
        for modality in modalities
        if modality.tensor.tp_mode == "1d"
        or (
            grid_side(modality.tensor.tp_mode, ranks, modality.tensor.tp_depth) > 1
            and (modality.tensor.tp_mode != "2.5d" or modality.tensor.tp_depth > 1)
        )
    ]


def build() -> nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(vocab_size=8, n_embd=WIDTH, n_layer=1, n_head=HEADS, n_positions=TOKENS, **drops)
    return hf.GPT2Model(config)


def divided(root: nn.Module, modality: Modality) -> Division:
    shape = GridShape.of(modality)

    def parts(path: str, degree: int) -> int:
        return degree if shape is None else shape.side

    plans = {path: plan for path, plan in plans_of(root).items() if path.startswith("h.")}
    division = resolve(root, plans, lambda name: ("all", modality.tp_size), parts=parts)
    return division if shape is None else Grids(root, {"all": shape}, {"all": ["h.0"]}).divided(division, ())


def count(rank: int, modality: Modality | None) -> Bytes:
    """Run one layer as `rank`; None stands for one process."""
    root, lines, group = build(), dict[Any, Line](), None
    if modality is not None:
        assert dist.group.WORLD is not None
        group, shape = TensorGroup(dist.group.WORLD), GridShape.of(modality)
        for axis in AXES if shape is not None else ():
            for line in shape.lines(axis) if shape is not None else ():
                process_group = dist.new_group(list(line)) if len(line) > 1 else None
                if process_group is not None and rank in line:
                    lines[axis] = Line(process_group)
        TensorParallel(root, divided(root, modality), {"all": group}, lines={"all": lines})
    layer: Any = root.h[0]  # type: ignore[index]
    held = {parameter.untyped_storage().data_ptr() for parameter in root.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(hidden)
        result = result[0] if isinstance(result, tuple) else result
        local = result.local if lines else result
    local.sum().backward()
    sent = sum(line.moved for line in lines.values()) if lines else 0.0 if group is None else group.moved
    weights = sum(layer.get_submodule(name).weight.nbytes for name in LINEARS)
    return Bytes(weights, sum(saved.values()), sent)


def expected(modality: Modality, whole: Bytes) -> Bytes:
    """The formulas."""
    shape, ranks, state = GridShape.of(modality), modality.tp_size, SAMPLES * TOKENS * WIDTH
    weights = 12 * WIDTH**2
    if shape is None:
        return Bytes(BYTES * weights / ranks, whole.saved / ranks, BYTES * 8 * (ranks - 1) / ranks * state)
    side = shape.side
    if shape.mode == "3d":
        sent = (side - 1) / side**3 * (39 * state + 3 * weights)
    else:
        sent = 3 * (side - 1) / side**2 * (7 * state / shape.depth + weights)
    parts = ranks if shape.mode == "3d" else side**2
    return Bytes(BYTES * weights / parts, whole.saved / ranks, BYTES * sent)


def _process(rank: int, ranks: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    counts = []
    for index, modality in enumerate(modes(ranks)):
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port + index}", rank=rank, world_size=ranks)
        counts.append(count(rank, modality))
        dist.barrier()
        dist.destroy_process_group()
    results.put(counts)


def run(ranks: int) -> list[list[Bytes]]:
    """What each rank counts in each mode, in processes that talk over gloo."""
    context = get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=_process, args=(rank, ranks, port, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    counts = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return counts


def counted(ranks: int) -> list[list[Bytes]]:
    """For each mode the same of ranks that this process is one after the other, without sending anything.

    Where everything divides evenly all ranks count the same, and three of them stand for all.
    """
    counts = []
    for modality in modes(ranks):
        is_even = modality.tensor.tp_mode != "1d" or HEADS % ranks == 0
        of_ranks = []
        for rank in (0, ranks // 2, ranks - 1) if is_even else range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            of_ranks.append(count(rank, modality))
            dist.destroy_process_group()
        counts.append(of_ranks)
    return counts


def main(chosen: list[int], show: Callable[[str], object] = print) -> None:
    whole = count(0, None)
    show("| ranks | `tp_mode` | weights MB | / formula | kept MB | / one process' p-th | sent MB | / formula |")
    show("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in chosen:
        counts = list(zip(*run(ranks), strict=True)) if ranks in RUN else counted(ranks)
        for modality, of_ranks in zip(modes(ranks), counts, strict=True):
            mean = Bytes(*(sum(column) / len(of_ranks) for column in zip(*of_ranks, strict=True)))
            pairs = zip(mean, expected(modality, whole), strict=True)
            cells = " | ".join(f"{got / 1e6:.2f} | {got / formula:.3f}" for got, formula in pairs)
            depth = f", depth {modality.tensor.tp_depth}" * (modality.tensor.tp_mode == "2.5d")
            show(f"| {ranks} | {modality.tensor.tp_mode}{depth} | {cells} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [*RUN, *COUNTED])
