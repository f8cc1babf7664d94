"""A cluster and what it takes: seconds of messages and collectives from the latency and bandwidth of its links.

A message of n bytes takes ``alpha + n * beta`` seconds: alpha is the latency of a link, beta one over its bandwidth.
There are two classes of links, inside a node and between nodes; a group that spans nodes goes at the pace of the
latter. Collectives are rings of p ranks, and pairwise for all-to-all (R. Thakur, R. Rabenseifner, W. Gropp,
*Optimization of Collective Communication Operations in MPICH*, IJHPCA 19, 2005). A group of one rank takes no time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One class of links.

    Attributes:
        latency: seconds of an empty message, alpha.
        bandwidth: bytes per second of one rank while all ranks of its node send.
    """

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes from one rank to another."""
        return self.latency + size / self.bandwidth

    def all_gather(self, ranks: int, size: float) -> float:
        """Return the seconds until each of `ranks` has all `size` bytes, of which each had an equal part.

        A reduce-scatter of `size` bytes on each rank takes as long, and so does an all-to-all of which each rank has
        `size` bytes: ``(p - 1) * alpha + (p - 1) / p * n * beta``.
        """
        return (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    reduce_scatter = all_to_all = all_gather

    def all_reduce(self, ranks: int, size: float) -> float:
        """Return the seconds of a sum of `size` bytes over `ranks`: a reduce-scatter and an all-gather."""
        return self.reduce_scatter(ranks, size) + self.all_gather(ranks, size)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks, their devices and links.

    Attributes:
        nodes: number of nodes.
        ranks: of each node.
        memory: bytes of each rank.
        inside: links within a node.
        between: links between nodes.
        flops: floating-point operations per second of a device.
        efficiency: part of them that matrix products reach, above 0 and at most 1.
        memory_bandwidth: bytes per second that a device reads or writes.
    """

    nodes: int
    ranks: int
    memory: int
    inside: Link = Link(5e-6, 300e9)
    between: Link = Link(1e-5, 25e9)
    flops: float = 400e12
    efficiency: float = 1.0
    memory_bandwidth: float = 2e12

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.ranks

    def link(self, ranks: Collection[int]) -> Link:
        """Return the links of a group: those inside a node where all of its ranks are on one."""
        return self.inside if len({rank // self.ranks for rank in ranks}) < 2 else self.between

    def seconds(self, flops: float, moved: float) -> float:
        """Return how long a device computes: products by its flops, all else by the bytes that it reads and writes."""
        return flops / (self.flops * self.efficiency) + moved / self.memory_bandwidth
