"""The process groups of a run, made in the order of the plan on all ranks.

It refuses ranks that have another plan, or would train or shard other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist

from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.engine.groups import Groups, Wish, Wishes
from lightning_mm5d.engine.ordered_transport import OrderedTransport, Wire
from lightning_mm5d.engine.transport import Transport
from lightning_mm5d.expert_parallel.held_experts import ExpertGroups
from lightning_mm5d.expert_parallel.token_exchange import TokenGroup
from lightning_mm5d.plan.data_shards import DataShards
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.plan.sums import sum_groups
from lightning_mm5d.plan.topology import Topology, pairs_of
from lightning_mm5d.plan.traffic import encoding_of
from lightning_mm5d.sharded.collectives import TensorGroup


@dataclass(frozen=True)
class PayloadGroups:
    """The groups of a transport.

    Attributes:
        worlds: groups of the whole world: on gloo one for payloads to higher ranks and one for those to lower ranks,
            elsewhere one that carries host memory.
        links: on other backends than gloo, by the pairs (source, target) that this rank is in, the group that carries
            their payloads: one for those to higher ranks and one for those to lower ranks.
    """

    worlds: tuple[dist.ProcessGroup, ...]
    links: dict[tuple[int, int], dist.ProcessGroup] | None = None

    def transport(self, device: torch.device, rank: int) -> Wire:
        """Return the transport of a rank that computes on `device`; collective over the ranks of each link."""
        if self.links is None:
            ascending, descending = self.worlds
            return Transport(ascending, descending, device, rank)
        (host,) = self.worlds
        transport = OrderedTransport(self.links, host, device, rank)
        transport.warm_up()
        return transport


@dataclass(frozen=True)
class RunGroups:
    """The groups that one rank is in; None, or a missing key, stands for a group that it is not in.

    Attributes:
        payloads: the groups of the transport; None where nothing is sent.
        replicas: the ranks that work for each replica of the loss modality; no entry for a replica of one rank.
        hosts: the same, for what is in host memory; none where all groups carry that.
        loss: one rank of each replica, where steps end: of those that share a last stage, those of this rank's
            place among them.
        host: the world, with messages in host memory; None for one rank.
        gradients: by their ranks, those whose gradients are summed.
        across: by their ranks, those that sum rows of several blocks, for nothing else.
        gathers: by their ranks, those that gather parameters while gradients may be summed.
        instances: by their ranks, those that share layers: of a stage, its tensor and context parallel ranks.
        sharing: the same by modality.
        tensor: the tensor parallel ranks by modality.
        lines: those within tensor parallel groups whose layers are in blocks, by modality and name.
        context: the context parallel ranks by modality.
        experts: of the experts that this rank shares, by path.
    """

    payloads: PayloadGroups | None = None
    replicas: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
    hosts: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
    loss: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None
    gradients: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    across: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    gathers: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    instances: dict[tuple[int, ...], TensorGroup] = field(default_factory=dict)
    sharing: dict[str, TensorGroup] = field(default_factory=dict)
    tensor: dict[str, TensorGroup] = field(default_factory=dict)
    lines: dict[str, dict[str, TensorGroup]] = field(default_factory=dict)
    context: dict[str, ContextGroups] = field(default_factory=dict)
    experts: dict[str, ExpertGroups] = field(default_factory=dict)


def make_groups(groups: Groups, plan: Plan, rank: int, *, trained: Iterable[str], is_ordered: bool) -> RunGroups:
    """Make all groups of a run; collective over the world.

    Args:
        groups: makes them.
        plan: all stages.
        rank: global rank.
        trained: names of the parameters that require a gradient.
        is_ordered: whether operations between ranks run in the order of issue, as NCCL's do.

    Raises:
        RankMismatchError: on all ranks, when they plan otherwise.
    """
    groups.make(wanted_groups(plan, rank, is_ordered=is_ordered))
    found = _run_groups(groups, plan, rank, is_ordered=is_ordered)
    groups.verify(f"stages {plan.partition.stages}, trained {sorted(trained)}, sharded {sorted(plan.division.shards)}")
    return found


def wanted_groups(plan: Plan, rank: int = 0, *, is_ordered: bool = True) -> list[Wish]:
    """Return the groups that `make_groups` makes, in the same order whatever the rank; starts nothing."""
    wishes = Wishes()
    _run_groups(wishes, plan, rank, is_ordered=is_ordered)
    return [*wishes.wanted]


def _run_groups(groups: Groups | Wishes, plan: Plan, rank: int, *, is_ordered: bool) -> RunGroups:
    layout, topology = plan.layout, plan.topology
    payloads = _payload_groups(groups, topology, rank, is_ordered) if topology.edges else None
    host = groups.host(layout.size)
    several = {
        replica: ranks for replica in range(layout.num_replicas) if len(ranks := layout.replica_ranks(replica)) > 1
    }
    replicas = {replica: groups.get(ranks, f"replica {replica}") for replica, ranks in several.items()}
    hosts = {
        replica: groups.get(ranks, f"host of replica {replica}", backend="gloo")
        for replica, ranks in several.items()
        if is_ordered
    }
    ends = [sorted(ranks) for ranks in zip(*topology.instances(topology.last_stage), strict=True)]
    loss = [groups.get(ranks, "loss") for ranks in ends if len(ranks) > 1]
    shards = DataShards(plan)
    summed = {ranks: groups.get(ranks, "gradients") for ranks in (*sum_groups(plan), *shards.groups())}
    between = {ranks: groups.get(ranks, "across") for ranks in shards.across()}
    gathered = {ranks: groups.get(ranks, "gathers") for ranks in shards.groups()}
    layers = _LayerGroups(groups, plan, rank)
    sharing = {
        place.modality: layers.instances[ranks]
        for place in layout.places_of(rank)
        if (ranks := layout.ranks_of(place.modality, dp=place.dp, pp=place.pp)) in layers.instances
    }
    experts = _expert_groups(groups, plan, shards, layers)
    return RunGroups(
        payloads=payloads,
        replicas=replicas,
        hosts=hosts,
        loss=next(filter(None, loss), None),
        host=host,
        gradients=summed,
        across=between,
        gathers=gathered,
        instances=layers.instances,
        sharing=sharing,
        tensor=layers.tensor,
        lines=layers.lines,
        context=layers.context,
        experts=experts,
    )


def _payload_groups(groups: Groups | Wishes, topology: Topology, rank: int, is_ordered: bool) -> PayloadGroups:
    world = range(topology.layout.size)
    if not is_ordered:
        found = [groups.get(world, tag) for tag in ("ascending", "descending")]
        return PayloadGroups(tuple(group for group in found if group is not None))
    links = dict[tuple[int, int], dist.ProcessGroup]()
    pairs = _pairs(topology)
    for tag, way in (
        ("ascending", [a for a in pairs if a[0] < a[1]]),
        ("descending", [a for a in pairs if a[0] > a[1]]),
    ):
        for ranks, held in _connected(way):
            if (group := groups.get(ranks, tag, is_link=True)) is not None:
                links |= {pair: group for pair in held if rank in pair}
    host = groups.get(world, "host", backend="gloo")
    return PayloadGroups(() if host is None else (host,), links)


def _connected(pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Return the ranks that `pairs` connect, and the pairs among them: the pipeline of a replica, or of several.

    A communicator for each pair would let a rank send and receive in one direction at a time too, for a communicator
    more for each of its neighbours. All messages have one order (`schedule.issue_order`), so they cannot wait for each
    other in a circle within one communicator either.
    """
    found = list[tuple[set[int], list[tuple[int, int]]]]()
    for pair in pairs:
        ranks, held, others = set(pair), [pair], list[tuple[set[int], list[tuple[int, int]]]]()
        for one in found:
            if ranks.isdisjoint(one[0]):
                others.append(one)
            else:
                ranks, held = ranks | one[0], one[1] + held
        found = [*others, (ranks, held)]
    return sorted((tuple(sorted(ranks)), sorted(held)) for ranks, held in found)


def _pairs(topology: Topology) -> list[tuple[int, int]]:
    """The pairs (source, target) of ranks between which payloads travel, in one order on all ranks."""
    layout = topology.layout
    longest = max(layout.sizes(name).dp for name in layout.modalities)  # after which instances take turns again
    places = product(range(layout.num_replicas), range(longest))
    found = set[tuple[int, int]]()
    for (source, target), place in product(topology.edges, [*places]):
        ends = topology.ranks_at(source, *place), topology.ranks_at(target, *place)
        for first, second in (ends, ends[::-1]):
            found.update((first[i], second[j]) for i, j in pairs_of(first, second) if first[i] != second[j])
    return sorted(found)


def _expert_groups(
    groups: Groups | Wishes, plan: Plan, shards: DataShards, layers: _LayerGroups
) -> dict[str, ExpertGroups]:
    """The groups of this rank for the experts of each of its stages."""
    found = dict[str, ExpertGroups]()
    for stage in plan.topology.members:
        held = shards.expert_layers(stage)
        beside = dict.fromkeys(shards.sharing_experts(stage, one) for one in plan.topology.ranks_of(stage))
        hosts = {ranks: groups.get(ranks, "rounds of experts", backend="gloo") for ranks in beside if ranks}
        for layer in held:
            blocks = dict.fromkeys(shards.expert_block(layer, one) for one in plan.topology.ranks_of(stage))
            made = {ranks: groups.get(ranks, "tokens") for ranks in blocks}
            for ranks, group in made.items():
                if group is None:
                    continue
                around, host = next((around, host) for around, host in hosts.items() if host is not None)
                places = tuple(around.index(one) for one in ranks)
                copies = layers.tensor.get(layer.modality) if layer.parameters[0] in plan.division.shared else None
                found[layer.path] = ExpertGroups(TokenGroup(group), places, host, copies)
    return found


class _LayerGroups:
    """The groups of ranks that share layers: whole instances, tensor parallel and context parallel ranks of each."""

    def __init__(self, groups: Groups | Wishes, plan: Plan, rank: int) -> None:
        self.instances: dict[tuple[int, ...], TensorGroup] = {}
        self.tensor: dict[str, TensorGroup] = {}
        self.lines: dict[str, dict[str, TensorGroup]] = {}
        self.context: dict[str, ContextGroups] = {}
        self._groups, self._plan, self._rank = groups, plan, rank
        for stage in plan.topology.members:
            for ranks in plan.topology.instances(stage):
                self._get(ranks)
        for name in plan.layout.modalities:
            size = plan.layout.sizes(name)
            for pp, dp in product(range(size.pp), range(size.dp)):
                if not plan.layout.has(name, dp=dp, pp=pp):
                    continue
                self._add_tensor(name, pp, dp, size.cp)
                if size.cp > 1:
                    self._add_context(name, pp, dp, size.tp)

    def _get(self, ranks: tuple[int, ...]) -> TensorGroup | None:
        """Return this rank's view of a group; None where it is not in it, or alone."""
        group = self._groups.get(ranks, "layers") if len(ranks) > 1 else None
        return None if group is None else self.instances.setdefault(ranks, TensorGroup(group))

    def _add_tensor(self, modality: str, pp: int, dp: int, cp_size: int) -> None:
        for cp in range(cp_size):
            ranks = self._plan.layout.ranks_of(modality, pp=pp, dp=dp, cp=cp)
            if (found := self._get(ranks)) is not None and self._rank in ranks:
                encoding = encoding_of(self._plan.modalities[modality], "tensor_parallel")
                # modalities that share these ranks may say otherwise
                self.tensor[modality] = found if encoding is None else encoding.group(found.group)
            if (layers := self._plan.division.in_blocks.get(modality)) is not None:
                self.lines.setdefault(modality, {}).update(layers.lines(ranks, self._groups.get))

    def _add_context(self, modality: str, pp: int, dp: int, tp_size: int) -> None:
        for tp in range(tp_size):
            ranks = self._plan.layout.ranks_of(modality, pp=pp, dp=dp, tp=tp)
            whole = self._get(ranks)
            cut = _cut(ranks, _inner_size(self._plan, modality, ranks))
            inner, outer = ([self._get(group) for group in way] for way in cut)
            if whole is not None and self._rank in ranks:
                mine = [next(filter(None, way), None) for way in (inner, outer)]
                self.context[modality] = ContextGroups(whole=whole, inner=mine[0], outer=mine[1])


def _inner_size(plan: Plan, modality: str, ranks: tuple[int, ...]) -> int:
    """Ranks of the inner groups of a hybrid, or of a double ring: as given, or those of a node."""
    given = plan.modalities[modality]
    if given.cp_mode == "hybrid":
        assert given.ulysses_size is not None
        return given.ulysses_size
    if given.inner_ring_size is not None:
        return given.inner_ring_size
    nodes = [rank // plan.layout.ranks_per_node for rank in ranks]
    size = nodes.count(nodes[0])
    even = all(len(set(nodes[first : first + size])) == 1 for first in range(0, len(nodes), size))
    return size if given.cp_mode == "ring" and len(ranks) % size == 0 and even else len(ranks)


def _cut(ranks: tuple[int, ...], size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Inner groups of `size` neighbours, and outer groups of one rank of each; none where either had one rank."""
    if size in (1, len(ranks)):
        return [], []
    inner = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return inner, list(zip(*inner, strict=True))
