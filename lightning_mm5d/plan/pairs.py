"""Which ranks of a stage send to which ranks of the next one."""

from __future__ import annotations

from collections.abc import Sequence


def pairs_of(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the indices of sources and targets between which pieces of a payload travel, in the order of issue.

    Source i of a covers the share from i / a to (i + 1) / a of a payload, target j of b that from j / b to (j + 1) / b.
    Those that overlap make a pair, also where sender and receiver are one rank. Nothing is sent where every target is a
    source. From ranks 0 and 1 to ranks 2, 3 and 4: ``[(0, 0), (0, 1), (1, 1), (1, 2)]``.
    """
    if set(targets) <= set(sources):
        return [(sources.index(target), j) for j, target in enumerate(targets)]
    a, b = len(sources), len(targets)
    return [(i, j) for i in range(a) for j in range(b) if i * b < (j + 1) * a and j * a < (i + 1) * b]
