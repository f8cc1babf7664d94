"""Linear layers whose rows travel around a ring beside their products train as on one process.

Each run asserts at its end that rows have travelled. Ranks are those of the language model: as many as its degrees say.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_mm5d.sharded import sequence
from lightning_mm5d.sharded.collectives import TensorGroup, dry_run
from lightning_mm5d.sharded.sequence import Hop, ring_gather, ring_sum_scattered
from ranks import run_ranks
from tensor_parallel.layouts import Compared, check_all

RING: dict[str, Any] = {"tp_size": 2, "sequence_parallel": "ring"}
HOPS: list[int] = []  # elements of each one of this process


def travels(module: L.LightningModule) -> None:
    """Assert at the end of a run on ranks that rows have travelled on one of them."""
    HOPS.clear()

    class Noted(Hop):
        def __init__(self, group: TensorGroup, sent: torch.Tensor, shape: Any) -> None:
            HOPS.append(sent.numel())
            super().__init__(group, sent, shape)

    def on_train_end() -> None:
        sequence.Hop = Hop  # type: ignore[misc]
        if dist.is_initialized() and dist.get_world_size() > 1:
            hops = torch.tensor(len(HOPS))  # an encoder has none
            dist.all_reduce(hops, dist.ReduceOp.MAX)
            assert hops > 0, "rows were gathered at once"

    sequence.Hop = Noted  # type: ignore[misc]
    module.on_train_end = on_train_end  # type: ignore[method-assign]


def reentrant(module: L.LightningModule) -> None:
    module.model.gradient_checkpointing_enable({"use_reentrant": True})
    module.train()
    travels(module)


def run(name: str, fields: dict[str, Any], other: dict[str, Any] | None = None, **options: Any) -> Compared:
    known = {key: options.pop(key) for key in ("replicas", "variant", "exact", "prepare") if key in options}
    modalities = {**(other or {}), "language": {**RING, **fields}}
    return Compared(name=name, fields=modalities, options=options, **{"prepare": travels, **known})


@pytest.mark.usefixtures("float64")
def test_rings_of_two_ranks_equal_one_process() -> None:
    """language: ranks 0-1."""
    check_all(
        2,
        run("gpt2", {"activation_checkpointing": "full"}, accumulate_grad_batches=2),
        run("llama_tied", {"interleaved_microbatches": 2}, gradient_clip_val=0.05),
    )


@pytest.mark.usefixtures("float64")
def test_rings_beside_stages_equal_one_process() -> None:
    """language: ranks 0-1 and 2-3 as stages."""
    check_all(4, run("llama_tied", {"pp_size": 2}, schedule="zero_bubble"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
def test_rings_beside_all_else_equal_one_process() -> None:
    """language: ranks 0-1; then ranks 0-2; then ranks 0-3, or behind an encoder on rank 0."""
    check_all(
        2,
        run("llama", {}, prepare=reentrant),
        run("llama", {"activation_checkpointing": "selective"}),
        run("llama", {"fused_linear_cross_entropy": True}),
        run("bert", {"offload": "activations"}, exact=True),
        run("llava", {}, {"vision": {**RING, "colocate_with": "language"}}),
    )
    check_all(
        3,
        run("llama_tied", {"tp_size": 3}),
        run("gpt2", {"tp_size": 3, "activation_checkpointing": "full"}),
        run("llava", {}, {"vision": {}}, variant="projector_only"),
        run("llava", {}, {"vision": {}}, variant="encoder", schedule="zero_bubble"),
        run("t5", {}, {"encoder": {}}, exact=True),
    )
    check_all(
        4,
        run("llama_tied", {"tp_size": 4}),
        run("llama", {}, replicas=2, gradient_clip_val=0.01),
        run("llama", {"cp_size": 2}),
        run("llama", {"cp_size": 2, "cp_mode": "ring", "activation_checkpointing": "full"}),
        run("llama", {"pp_size": 2, "interleaved_microbatches": 2}),
        run("llama", {"cp_size": 2, "interleaved_microbatches": 2}),
        run("qwen2_vl", {}, {"vision": RING}, schedule="zero_bubble"),
    )


def collected(rank: int) -> Any:
    """What rings give beside what collectives give, for shards of unlike lengths, and in a dry run."""
    dist.init_process_group("gloo")
    group = TensorGroup(dist.group.WORLD)  # type: ignore[arg-type]
    found = []
    for lengths in ((2, 2, 2), (3, 1, 2), (2, 0, 1), (1, 0, 0)):
        full = torch.randn(2, sum(lengths), 5, generator=torch.Generator().manual_seed(3)) + rank
        local, before = group.local_of(full, -2, lengths).contiguous(), group.moved
        seen: list[tuple[torch.Tensor, int]] = []
        gathered = ring_gather(local, -2, lengths, group, lambda *one: seen.append(one))  # noqa: B023
        whole = group.gather(local, -2, lengths)
        parts = [gathered.equal(whole)]
        parts += [rows.equal(whole.narrow(-2, start, rows.shape[-2])) for rows, start in seen]
        parts.append(len(seen) == 3 and seen[0][1] == sum(lengths[:rank]))
        total = ring_sum_scattered(lambda start, n: full.narrow(-2, start, n).contiguous(), -2, lengths, group)  # noqa: B023
        parts.append(torch.allclose(total, group.sum_scattered(full, -2, lengths), atol=1e-6))
        moved = group.moved - before
        with dry_run([group]):
            ring_gather(local, -2, lengths, group, lambda rows, start: None)
            ring_sum_scattered(lambda start, n: full.narrow(-2, start, n).contiguous(), -2, lengths, group)  # noqa: B023
        parts.append(group.moved - before == moved == 2 * 2 * (2 * 2 * max(lengths) * 5 * 4))
        found.append(parts)
    return found


def test_a_ring_gathers_and_sums_what_collectives_gather_and_sum() -> None:
    for found in run_ranks(3, collected):
        assert found == [[True] * 7] * 4
