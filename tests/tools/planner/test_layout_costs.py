"""Costs of links and layers: formulas and flops by hand, other layouts from two traces, and what a step adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.balance import uniform
from lightning_mm5d.context_parallel.exchange.attention import STEP_BYTES, ContextGroups, context_attention
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.partition.costs import Unit, step_costs
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tools.planner.activation_trace import Trace
from lightning_mm5d.tools.planner.layout_costs import Cluster, LayoutCosts, Link
from lightning_mm5d.tools.planner.profile import Measured, Work
from lightning_mm5d.tools.planner.search import LayoutSearch
from tools.planner.searches import searching
from zoo import CASES

LINK = Link(latency=1.0, bandwidth=10.0)


def test_collectives_take_what_rings_take() -> None:
    assert LINK.message(20) == 3.0
    # three steps of four ranks, each of a quarter of 40 bytes
    assert LINK.all_gather(4, 40) == LINK.reduce_scatter(4, 40) == LINK.all_to_all(4, 40) == 3 * (1 + 1)
    assert LINK.all_reduce(4, 40) == 12.0
    assert LINK.all_reduce(1, 40) == 0.0


def test_a_group_over_nodes_goes_at_the_pace_of_the_links_between_them() -> None:
    cluster = Cluster(nodes=2, ranks=4, memory=1, inside=LINK, between=Link(2.0, 1.0))
    assert cluster.size == 8
    assert cluster.link((0, 3)) is cluster.link(()) is LINK
    assert cluster.link((3, 4)).latency == 2.0


def test_devices_compute_products_by_flops_and_all_else_by_bytes() -> None:
    cluster = Cluster(nodes=1, ranks=1, memory=1, flops=100.0, efficiency=0.5, memory_bandwidth=10.0)
    assert cluster.seconds(100.0, 20.0) == pytest.approx(2 + 2)


def test_devices_compute_longer_beside_each_other_and_messages_take_as_long() -> None:
    cluster = Cluster(nodes=1, ranks=2, memory=1, flops=50.0, memory_bandwidth=10.0, inside=LINK, compute_slowdown=1.5)
    assert cluster.seconds(100.0, 20.0) == pytest.approx(1.5 * (2 + 2))
    assert cluster.link((0, 1)).message(20) == 3.0


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def one() -> LayoutSearch:
    return searching("llama", 4, samples=4, inside=Link(1e-6, 1e9), flops=1e9, memory_bandwidth=1e10)


def kept(trace: Trace) -> int:
    return sum(sum(unit.saved.values()) for unit in trace.units["language"])


def test_a_layer_takes_two_flops_for_each_weight_and_token_and_the_pairs_of_its_mask(one: LayoutSearch) -> None:
    batch = CASES["llama"].make_batch([1] * 2)
    samples, length = batch["input_ids"].shape
    layer = CASES["llama"].build().get_submodule("model.model.layers.0")
    weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    work = one.costs.of_one.units["language"][1].work
    assert work.flops == work.trained == 2 * weights * samples * length
    heads_width = layer.self_attn.q_proj.out_features
    pairs = batch["attention_mask"].bool()[:, None].expand(-1, length, -1).tril()
    assert work.attention == 4 * int(pairs.sum()) * heads_width
    assert work.moved > 0


def test_two_traces_give_that_of_other_ranks_and_samples(one: LayoutSearch) -> None:
    plan, costs = one.plan, one.costs
    assert costs.samples == 2
    two = {"language": replace(plan.modalities["language"], tp_size=2)}
    assert kept(costs.trace(two, 2)) == kept(costs.of_two)
    assert kept(costs.trace(plan.modalities, 4)) == 2 * kept(costs.of_one)
    four = {"language": replace(plan.modalities["language"], tp_size=4)}
    assert kept(costs.of_two) > kept(costs.trace(four, 2)) > kept(costs.of_two) / 2


def test_tensor_parallel_ranks_share_products_and_wait_for_sums(one: LayoutSearch) -> None:
    def forward(tp_size: int, link: Link) -> float:
        cluster = replace(one.costs.cluster, inside=link)
        costs = replace(one.costs, cluster=cluster, known={})
        return costs.units("language", Modality(tp_size=tp_size), 2)[1].forward

    free, slow = Link(0.0, 1e30), Link(1.0, 1e30)
    assert forward(1, free) / 2 < forward(2, free) < forward(1, free)
    # two sums of two ranks: a step to scatter and one to gather each
    assert forward(2, slow) - forward(2, free) == pytest.approx(2 * 2)


def test_a_step_of_replicas_waits_for_their_sums_but_not_for_what_a_backward_hides(one: LayoutSearch) -> None:
    def step(link: Link, flops: float) -> float:
        cluster = replace(one.costs.cluster, inside=link, flops=flops)
        costs = replace(one.costs, cluster=cluster, known={})
        return costs.step_time(one.plan, "1f1b", 2, 2, 2).seconds

    free = Link(0.0, 1e30)
    assert step(Link(1e-6, 1e6), 1e12) > 2 * step(free, 1e12)
    slow = step(free, 1e3)
    assert step(Link(1e-6, 1e6), 1e3) == pytest.approx(slow, rel=0.01)


@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_each_end_of_a_message_takes_its_overhead_of_the_forward_and_of_the_backward(recomputation: str) -> None:
    fields = {"language": {"activation_checkpointing": recomputation}}
    link, count = Link(0.0, 1e30, overhead=10.0), 2
    two = searching("llama", 2, fields=fields, inside=link, flops=1e15, memory_bandwidth=1e15)
    plan = two.plan_of({"language": replace(two.plan.modalities["language"], pp_size=2)})
    # both stages are as long as their message, and the second begins when the first has sent
    seconds = two.costs.step_time(plan, "gpipe", 2, count, count).seconds
    assert seconds == pytest.approx(2 * (count + 1) * 10.0, rel=1e-6)
    assert Link(0.0, 1.0, 10.0, 0.5).taken(4) == 12.0


def test_measured_backwards_scale_backwards_and_forwards_alone_scale_both(one: LayoutSearch) -> None:
    plain = one.costs.units("language", Modality(), 2)

    def scaled(*seconds: Measured) -> list[Unit]:
        return one.costs.measured({"language": seconds}, "language").units("language", Modality(), 2)

    forward = sum(unit.forward for unit in plain)
    backward = sum(step_costs(plain, one.costs.step.trainable, False)) - forward
    for seconds, slower in ((Measured(2 * forward, 3 * backward), 3.0), (Measured(2 * forward), 2.0)):
        found = scaled(seconds)
        assert sum(unit.forward for unit in found) == pytest.approx(2 * forward)
        assert sum(step_costs(found, one.costs.step.trainable, False)) == pytest.approx(2 * forward + slower * backward)


def test_what_a_rank_takes_that_computes_alone_takes_longer_beside_others(one: LayoutSearch) -> None:
    cluster, plan = replace(one.costs.cluster, inside=Link(0.0, 1e30)), one.plan
    alone = replace(one.costs, cluster=cluster, known={})
    beside = replace(one.costs, cluster=replace(cluster, compute_slowdown=1.5), known={})

    def step(costs: LayoutCosts) -> float:
        return costs.step_time(plan, "1f1b", 2, 2, 2).seconds

    assert step(beside) == pytest.approx(1.5 * step(alone), rel=1e-6)
    told = {"language": [Measured(1.0, 2.0)] * len(one.costs.rows["language"])}
    slower = step(beside.measured(told, "language", 5.0))
    assert slower == pytest.approx(1.5 * step(alone.measured(told, "language", 5.0)), rel=1e-6)


@pytest.mark.parametrize(
    ("language", "part"),
    [({"dp_size": 2}, 1.0), ({"dp_size": 2, "zero_stage": 1}, 0.5), ({"tp_size": 2}, 0.5), ({"pp_size": 2}, 0.5)],
    ids=["replicas", "zero_stage 1", "tp_size 2", "pp_size 2"],
)
def test_a_rank_takes_its_part_of_a_measured_update_after_the_schedule(language: dict[str, int], part: float) -> None:
    two = searching("llama", 2, inside=Link(0.0, 1e30), flops=1e9, memory_bandwidth=1e10)
    plan = two.plan_of({"language": with_fields(two.plan.modalities["language"], **language)})

    def costs(update: float) -> LayoutCosts:
        return two.costs.measured({}, "language", update)

    def step(update: float) -> float:
        return costs(update).step_time(plan, "1f1b", 2, 2, 2).seconds

    # what is not sharded, as norms, and the larger of two stages make it a little more than half
    assert part <= (step(3.0) - step(1.0)) / 2.0 < part + 0.2 * (part < 1) + 1e-9
    assert costs(3.0).timed(plan, 2).partition.units == costs(1.0).timed(plan, 2).partition.units  # orders stay
    assert two.costs.measured({}, "language").step_time(plan, "1f1b", 2, 2, 2) == two.costs.step_time(
        plan, "1f1b", 2, 2, 2
    )


class Attended(NamedTuple):
    """What ranks that share sequences exchange for an attention.

    Attributes:
        mode: its name.
        heads: of queries and of keys.
        inner: ranks of the inner groups, of four.
        dtype: of all tensors.
    """

    mode: Any
    heads: tuple[int, int]
    inner: int = 1
    dtype: torch.dtype = torch.float32


def sent(attended: Attended, tokens: int, width: int) -> float:
    """Bytes that one of four ranks sends for the forward and the backward of an attention, on a backend without any."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        made = [TensorGroup(dist.group.WORLD)]  # type: ignore[arg-type]
        if attended.inner > 1:
            for ranks in (range(attended.inner), range(0, 4, attended.inner)):
                made.append(TensorGroup(dist.new_group(list(ranks))))
        groups = ContextGroups(*made)
        split = uniform(4 * tokens, 4)
        shapes = ((1, heads, tokens, width) for heads in (attended.heads[0], attended.heads[1], attended.heads[1]))
        q, k, v = (torch.randn(shape, dtype=attended.dtype, requires_grad=True) for shape in shapes)
        mask = Mask(lambda b, h, i, j: i >= j, batch=1, q_length=4 * tokens, k_length=4 * tokens, device="cpu")
        context_attention(q, k, v, mask, split, groups, mode=attended.mode, scale=1.0).sum().backward()
        return sum(group.moved for group in made)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "attended",
    [
        Attended("allgather", (8, 4)),
        Attended("allgather", (8, 4), dtype=torch.bfloat16),
        Attended("ring", (8, 4)),
        Attended("ring", (8, 4), dtype=torch.bfloat16),
        Attended("ulysses", (8, 4)),
        Attended("ulysses", (8, 2), dtype=torch.bfloat16),
        Attended("hybrid", (8, 4), inner=2),
        Attended("hybrid", (8, 1), inner=2, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_each_mode_of_context_parallel_ranks_sends_the_bytes_that_it_is_counted_with(
    one: LayoutSearch, attended: Attended
) -> None:
    tokens, width = 32, 16
    work, shapes = Work(), [(1, heads, tokens, width) for heads in attended.heads]
    queries, keys = (torch.empty(shape, dtype=attended.dtype) for shape in shapes)
    work.attend(queries, keys, keys, 1.0, 1.0, 1)
    cluster = Cluster(nodes=1, ranks=4, memory=1, inside=Link(0.0, 1.0), flops=1e300, memory_bandwidth=1e300)
    options: dict[str, Any] = {"ulysses_size": attended.inner} if attended.mode == "hybrid" else {}
    modality = with_fields(Modality(cp_size=4), cp_mode=attended.mode, **options)
    waits = replace(one.costs, cluster=cluster)._context_waits(modality, work, Measured(1.0, 1.0), 1.0)
    assert sum(waits) == pytest.approx(sent(attended, tokens, width))


def waits(one: LayoutSearch, mode: str, work: Work, cluster: Cluster, size: int) -> tuple[float, float]:
    costs = replace(one.costs, cluster=cluster)
    return costs._context_waits(with_fields(Modality(cp_size=size), cp_mode=mode), work, Measured(1.0, 1.0), 1.0)


def test_a_ring_computes_while_blocks_travel_and_an_exchange_of_heads_does_not(one: LayoutSearch) -> None:
    """Blocks take 1 of keys, 1 of gradients; ranks compute 8 of a forward, in 4 parts, and 20 of a backward."""
    work = Work(attention=8.0, keys=1.0, key_sums=1.0, queries=4.0, heads=8.0, key_heads=4.0)
    cluster = Cluster(nodes=1, ranks=4, memory=1, inside=Link(0.0, 1.0), flops=1.0, memory_bandwidth=1e300)
    assert waits(one, "ring", work, cluster, 4) == pytest.approx((0.0, 1.0)), "the last hop of gradients is waited for"
    assert waits(one, "ring", work, replace(cluster, flops=8.0), 4) == pytest.approx(
        (3 * (1 - 0.25), 3 * (2 - 0.625) + 1)
    )
    assert waits(one, "ulysses", work, cluster, 4) == pytest.approx((0.75 * 5, 0.75 * 5))
    assert waits(one, "allgather", work, cluster, 4) == pytest.approx((3.0, 6.0)), "one step of all heads"
    many = replace(work, keys=STEP_BYTES / 4, key_sums=STEP_BYTES / 4)  # four heads of 2 MiB over four ranks: one step
    assert waits(one, "allgather", many, cluster, 4) == pytest.approx((3 * many.keys, 6 * many.keys))
    steps = replace(many, keys=STEP_BYTES, key_sums=STEP_BYTES, attention=4 * 3 * STEP_BYTES)  # of one head each
    assert waits(one, "allgather", steps, cluster, 4) == pytest.approx((3 / 4 * STEP_BYTES, 6 / 4 * STEP_BYTES))


def test_a_ring_over_nodes_sends_between_them_once_a_round_and_heads_are_computed_by_the_rank_with_most(
    one: LayoutSearch,
) -> None:
    work = Work(attention=8.0, keys=1.0, key_sums=1.0, queries=4.0, heads=6.0, key_heads=6.0)
    slow = Cluster(
        nodes=2, ranks=2, memory=1, inside=LINK, between=Link(0.0, 0.01), flops=1e300, memory_bandwidth=1e300
    )
    hop, far = 1.1, 100.0  # two rounds of a hop in each node, and one hop between nodes beside the first round
    forward, backward = waits(one, "ring", work, slow, 4)
    assert forward == pytest.approx(2 * hop + far - hop)
    assert backward == pytest.approx(2 * (3 * hop) + 2 * far - 3 * hop + far)
    free = replace(slow, nodes=1, ranks=4, inside=Link(0.0, 1e300), flops=1.0)
    # of six heads two ranks have two: they compute 8 / 4 * 4 / 6 * 2 where a quarter is 2
    assert waits(one, "ulysses", work, free, 4) == pytest.approx((8 / 3, 20 / 3))


def test_key_heads_that_attentions_repeat_for_a_mask_do_not_travel_so(one: LayoutSearch) -> None:
    config = CASES["llama"].build().model.config
    work = one.costs.of_one.units["language"][1].work
    assert (work.heads, work.key_heads) == (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    samples, length = CASES["llama"].make_batch([1] * 2)["input_ids"].shape
    assert work.keys == work.key_sums == samples * length * 2 * config.num_key_value_heads * config.head_dim * 4
    assert work.queries == 2 * work.keys
