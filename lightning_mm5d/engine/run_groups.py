"""The process groups of a run, made in the order of the plan on all ranks.

It refuses ranks that have another plan, or would train or shard other parameters.

The one place that makes process groups, on all ranks, in one order.

`torch.distributed.new_group` is collective over all ranks, members or not: a rank that calls it in another order hangs
the others for longer than any timeout. So the ranks compare their wishes before they make groups, by a digest of 8
bytes. The hang becomes an immediate error that shows which rank asked for which group.

Groups of NCCL are split from the communicator of the default group, which is collective over the world as well. Groups
that share no rank are therefore made by one split, see `disjoint`: the number of splits grows with the groups of a
rank, and not with the ranks. A group of another backend splits nothing, see `_unbound`.

It refuses ranks that do not ascend: `new_group` would sort them silently, and a mesh over such a group would
compute wrong results.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.config.features import parts
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups
from lightning_mm5d.engine.ordered_transport import OrderedTransport, Wire
from lightning_mm5d.engine.transport import Transport
from lightning_mm5d.plan.holdings import DataShards
from lightning_mm5d.plan.plan import Plan, encoding_of
from lightning_mm5d.plan.sums import sum_groups
from lightning_mm5d.plan.topology import Topology, pairs_of
from lightning_mm5d.sharded.collectives import TensorGroup, backend_of, of_all_ranks
from lightning_mm5d.sharded.removable import meanwhile

_SHOWN_BYTES = 512  # of a text, in an error
_LINK_CTAS = 4
"""Blocks of the device that an operation of a link may occupy: a posted receive keeps them until its sender comes."""


class Wish(NamedTuple):
    """A group that is to be made.

    Attributes:
        ranks: global, ascending.
        tag: what it is for.
        backend: None for the default group's.
        is_link: whether it carries payloads from one rank to another, for which few blocks of a device will do.
    """

    ranks: tuple[int, ...]
    tag: str = ""
    backend: str | None = None
    is_link: bool = False

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}, tag {self.tag!r}"


class Wishes:
    """Notes the groups that are asked of it, in place of `Groups`, which makes them; this rank is in none."""

    def __init__(self) -> None:
        self.wanted: dict[Wish, None] = {}

    def get(
        self, ranks: Sequence[int], tag: str = "", backend: str | None = None, *, is_link: bool = False
    ) -> dist.ProcessGroup | None:
        self.wanted[Wish(tuple(ranks), tag, backend, is_link)] = None
        return None

    def host(self, size: int) -> dist.ProcessGroup | None:
        return None


class Groups:
    """Registry of process groups, equal on all ranks.

    Args:
        timeout: how long an operation on one of the groups may wait for its peers.
        device: where messages of the default group live; None is host memory.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self._device = device
        self._timeout = timeout
        self._registered: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def get(
        self, ranks: Sequence[int], tag: str = "", backend: str | None = None, *, is_link: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` (global, ascending), or None where this rank is not in it.

        Every rank of the world calls this in the same order with the same arguments. The same ranks under the
        same ``tag`` give the same group; another tag gives another communicator.

        Args:
            ranks: of the group.
            tag: what it is for.
            backend: None takes the default group's; one tag has one backend.
            is_link: see `Wish`.

        Raises:
            RankMismatchError: on all ranks, when they do not agree on what to make.
        """
        wish = Wish(tuple(ranks), tag, backend, is_link)
        if (wish.ranks, tag) not in self._registered:
            self.make([wish])
        return self._registered[wish.ranks, tag]

    def make(self, wishes: Iterable[Wish]) -> None:
        """Make groups together, for `get` to return; collective over the world.

        Args:
            wishes: equal on all ranks.

        Raises:
            RankMismatchError: on all ranks, when they do not agree on what to make.
        """
        new = [wish for wish in dict.fromkeys(wishes) if (wish.ranks, wish.tag) not in self._registered]
        for wish in new:
            ascend = list(wish.ranks) == sorted(set(wish.ranks))
            assert ascend, f"ranks of group {wish.tag!r} must ascend, got {list(wish.ranks)}"
        self._agree([f"group {number}: {wish}" for number, wish in enumerate(new, len(self._registered))])
        split = [wish for wish in new if self._splits(wish)]
        for together in disjoint(split):
            self._split(together)
        for wish in new:
            if wish in split:
                continue
            with _unbound() if wish.backend == "gloo" else nullcontext():
                group = dist.new_group(list(wish.ranks), self._timeout, wish.backend, group_desc=wish.tag or None)
            self._registered[wish.ranks, wish.tag] = group if dist.get_rank() in wish.ranks else None

    def _splits(self, wish: Wish) -> bool:
        """Whether a group is split from the default group's communicator: both are of NCCL alone, and that one lives.

        A default group with several backends makes its groups one by one, which torch splits as well.
        """
        default = dist.group.WORLD
        if default is None or default.bound_device_id is None:
            return False
        backends = {pair.split(":")[1] for pair in dist.get_backend_config().split(",")}
        return backends == {"nccl"} and wish.backend in (None, "nccl")

    def _split(self, together: Sequence[Wish]) -> None:
        """Make groups that share no rank; collective over the world."""
        own_wish = next((wish for wish in together if dist.get_rank() in wish.ranks), None)
        options: Any = None
        if own_wish is not None and own_wish.is_link:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = _LINK_CTAS
        group = dist.split_group(
            split_ranks=[list(wish.ranks) for wish in together],
            timeout=self._timeout,
            pg_options=options,
            group_desc=None if own_wish is None else own_wish.tag or None,
        )
        self._registered |= {(wish.ranks, wish.tag): group if wish is own_wish else None for wish in together}

    def host(self, size: int) -> dist.ProcessGroup | None:
        """Return a group of all `size` ranks with messages in host memory; None where there is one rank.

        Every rank of the world calls this, in the order in which it makes groups.
        """
        if size == 1:
            return None
        if backend_of(torch.device("cpu")) == "gloo":
            return dist.group.WORLD
        return self.get(range(size), "agreement", "gloo")

    def verify(self, plan: str = "") -> None:
        """Check, after the last `get`, that no rank makes more groups than another, or for another plan. Collective.

        Args:
            plan: what all ranks must agree on beside the number of groups; only its digest travels.

        Raises:
            RankMismatchError: on all ranks, when some are still making groups, or plan otherwise.
        """
        digest = hashlib.blake2b(plan.encode(), digest_size=8).hexdigest()
        self._agree([f"no more than {len(self._registered)} groups" + (f" and the plan {digest}" if plan else "")])

    def destroy(self) -> None:
        """Destroy the groups that this rank is in. No operation may be under way on them."""
        for group in reversed(self._registered.values()):
            if group is not None:
                dist.destroy_process_group(group)
        self._registered.clear()

    def _agree(self, plans: Sequence[str]) -> None:
        """Raise on all ranks unless all want the same next; collective."""
        if len(set(self._column(_digest("\n".join(plans))))) == 1:
            return
        most = max(self._column(len(plans)))
        digests = torch.tensor([*map(_digest, plans), *[0] * (most - len(plans))], device=self._device)
        columns = of_all_ranks(digests).T.tolist()
        first = next(index for index, column in enumerate(columns) if len(set(column)) > 1)
        texts = gather_texts(plans[first] if first < len(plans) else "no more groups", self._device)
        asked = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        raise RankMismatchError(
            "ranks disagree on the next process group: "
            + "; ".join(f"ranks {ranks} want {text}" for text, ranks in asked.items())
        )

    def _column(self, number: int) -> list[int]:
        """Return the numbers of all ranks; collective."""
        return of_all_ranks(torch.tensor([number], device=self._device))[:, 0].tolist()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def disjoint(wishes: Iterable[Wish]) -> list[list[Wish]]:
    """Return groups in lists in which no two share a rank: each goes to the first list with room for it.

    Equal on all ranks. A rank that is in n groups at most makes about n lists necessary, and there are seldom more.
    """
    lists: list[tuple[set[int], list[Wish]]] = []
    for wish in wishes:
        taken, together = next((each for each in lists if each[0].isdisjoint(wish.ranks)), (set[int](), []))
        if not together:
            lists.append((taken, together))
        taken.update(wish.ranks)
        together.append(wish)
    return [together for _, together in lists]


def communicators(wishes: Iterable[Wish]) -> tuple[int, int]:
    """Return on NCCL the most communicators of a rank, and the splits that make them; that of all ranks is in neither.

    Args:
        wishes: all groups of a run.
    """
    split = [wish for wish in wishes if wish.backend != "gloo"]
    return max(Counter(rank for wish in split for rank in wish.ranks).values(), default=0), len(disjoint(split))


def _unbound() -> AbstractContextManager[None]:
    """Enter around the making of groups that split nothing; the default group has no device of its own inside.

    With one, torch (2.13, `_new_process_group_helper`) has every rank outside of a new group take part in a split of
    NCCL's communicator, a collective, also where the group is gloo's, whose members split nothing. The next collective
    of NCCL would never end. (With ``use_local_synchronization=True`` the others return early, but the group's name then
    depends on how many groups a rank is in, and members with unequal numbers wait for each other under two names.)
    """
    default = dist.group.WORLD
    assert default is not None
    return meanwhile(default, bound_device_id=None)


def gather_texts(text: str, device: torch.device | None) -> list[str]:
    """Return the texts of all ranks, cut off at 512 bytes; collective.

    Args:
        text: of this rank.
        device: where messages of the default group live; None is host memory.
    """
    data = text.encode()[:_SHOWN_BYTES]
    local = torch.tensor([*data, *bytes(_SHOWN_BYTES - len(data))], dtype=torch.uint8, device=device)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in of_all_ranks(local).tolist()]


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
        loss_host: the same ranks, with messages in host memory.
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
    loss_host: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None
    gradients: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    across: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    gathers: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    instances: dict[tuple[int, ...], TensorGroup] = field(default_factory=dict)
    sharing: dict[str, TensorGroup] = field(default_factory=dict)
    tensor: dict[str, TensorGroup] = field(default_factory=dict)
    lines: dict[str, dict[str, TensorGroup]] = field(default_factory=dict)
    context: dict[str, ContextGroups] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)


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
    run_groups = _run_groups(groups, plan, rank, is_ordered=is_ordered)
    groups.verify(f"stages {plan.partition.stages}, trained {sorted(trained)}, sharded {sorted(plan.division.shards)}")
    return run_groups


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
    loss_hosts = [groups.get(ranks, "host of loss", backend="gloo") for ranks in ends if len(ranks) > 1 and is_ordered]
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
    experts: dict[str, Any] = {}
    for part in parts("experts"):
        experts |= part.expert_groups(groups, plan, shards, layers.tensor)
    return RunGroups(
        payloads=payloads,
        replicas=replicas,
        hosts=hosts,
        loss=next(filter(None, loss), None),
        loss_host=next(filter(None, (*loss_hosts, *loss)), None),
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
        directions = [groups.get(world, tag) for tag in ("ascending", "descending")]
        return PayloadGroups(tuple(group for group in directions if group is not None))
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
    components = list[tuple[set[int], list[tuple[int, int]]]]()
    for pair in pairs:
        ranks, held, others = set(pair), [pair], list[tuple[set[int], list[tuple[int, int]]]]()
        for component in components:
            if ranks.isdisjoint(component[0]):
                others.append(component)
            else:
                ranks, held = ranks | component[0], component[1] + held
        components = [*others, (ranks, held)]
    return sorted((tuple(sorted(ranks)), sorted(held)) for ranks, held in components)


def _pairs(topology: Topology) -> list[tuple[int, int]]:
    """The pairs (source, target) of ranks between which payloads travel, in one order on all ranks."""
    layout = topology.layout
    longest = max(layout.sizes(name).dp for name in layout.modalities)  # after which instances take turns again
    places = product(range(layout.num_replicas), range(longest))
    pairs = set[tuple[int, int]]()
    for (source, target), place in product(topology.edges, [*places]):
        ends = topology.ranks_at(source, *place), topology.ranks_at(target, *place)
        for first, second in (ends, ends[::-1]):
            pairs.update((first[i], second[j]) for i, j in pairs_of(first, second) if first[i] != second[j])
    return sorted(pairs)


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
            if (group := self._get(ranks)) is not None and self._rank in ranks:
                encoding = encoding_of(self._plan.modalities[modality], "tensor_parallel")
                # modalities that share these ranks may say otherwise
                self.tensor[modality] = group if encoding is None else encoding.group(group.group)
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
    if given.context.cp_mode == "hybrid":
        assert given.context.ulysses_size is not None
        return given.context.ulysses_size
    if given.context.inner_ring_size is not None:
        return given.context.inner_ring_size
    nodes = [rank // plan.layout.ranks_per_node for rank in ranks]
    size = nodes.count(nodes[0])
    even = all(len(set(nodes[first : first + size])) == 1 for first in range(0, len(nodes), size))
    return size if given.context.cp_mode == "ring" and len(ranks) % size == 0 and even else len(ranks)


def _cut(ranks: tuple[int, ...], size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Inner groups of `size` neighbours, and outer groups of one rank of each; none where either had one rank."""
    if size in (1, len(ranks)):
        return [], []
    inner = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return inner, list(zip(*inner, strict=True))
