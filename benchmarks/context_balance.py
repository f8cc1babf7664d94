"""The work of the busiest context parallel rank over the mean, for masks of multimodal sequences, and what finding out
takes.

The masks are of the four kinds that Cornstarch (arXiv 2503.11367) balances: text that is causal alone; what encoders
put out in one block in front of it; images, sounds and videos embedded in it; and such documents packed one behind the
other. Text sees everything before it in its document, what an encoder put out sees its own item alone, both ways. Sizes
of items and documents are drawn from wide ranges (log-uniform), with a seed; each figure is over `SEEDS` of them. A
rank's work is the number of (query, key) pairs that its queries may see.

Beside the makespan: the largest number of tokens of a rank over the mean, and the time of one distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import numpy as np
import torch

from lightning_mm5d.context_parallel.makespan import longest_first
from lightning_mm5d.context_parallel.split import BLOCK, Split, balanced, uniform, zigzag

RANKS = 8
SIZES = (16 * 1024, 64 * 1024, 256 * 1024)
SEEDS = 20
AIM = 1.01

Seen = np.ndarray  # int64 [S]: how many keys each query may see


def causal(size: int, source: np.random.Generator) -> Seen:
    return np.arange(1, size + 1)


def in_front(size: int, source: np.random.Generator) -> Seen:
    """One to three items, then text."""
    share = source.uniform(0.1, 0.9)
    lengths = source.dirichlet(np.ones(source.integers(1, 4))) * share * size
    seen = causal(size, source)
    at = 0
    for length in lengths.astype(int):
        seen[at : at + length] = length
        at += length
    return seen


def embedded(size: int, source: np.random.Generator) -> Seen:
    """Items of 64 tokens to a quarter of the sequence, anywhere in the text."""
    left = int(source.uniform(0.1, 0.9) * size)
    lengths = []
    while left:
        lengths.append(min(left, _log_uniform(source, 64, max(size // 4, 65))))
        left -= lengths[-1]
    seen = causal(size, source)
    at = gone = 0
    for text, length in zip(np.sort(source.integers(0, size - sum(lengths) + 1, len(lengths))), lengths, strict=True):
        at += int(text) - gone
        gone = int(text)
        seen[at : at + length] = length
        at += length
    return seen


def packed(size: int, source: np.random.Generator) -> Seen:
    """Documents of 256 tokens to half the sequence, each with items embedded."""
    documents: list[Seen] = []
    while left := size - sum(map(len, documents)):
        documents.append(embedded(min(left, _log_uniform(source, 256, size // 2)), source))
    return np.concatenate(documents)


KINDS: dict[str, Callable[[int, np.random.Generator], Seen]] = {
    "causal": causal,
    "encoder outputs in front": in_front,
    "encoder outputs embedded": embedded,
    "packed documents": packed,
}


def longest(work: list[int], size: int, ranks: int) -> Split:
    """Blocks, largest first, to the least busy rank."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for index, rank in enumerate(longest_first(work, ranks)):
        parts[rank].append((index * BLOCK, (index + 1) * BLOCK))
    return Split.of(parts, size)


WAYS: dict[str, Callable[[list[int], int, int], Split]] = {
    "uniform": lambda _, size, ranks: uniform(size, ranks),
    "zigzag": lambda _, size, ranks: zigzag(size, ranks),
    "longest first": longest,
    "makespan_min": balanced,
}


def main() -> None:
    torch.set_num_threads(1)
    print(f"Work of the busiest of {RANKS} ranks over the mean: worst (mean) of {SEEDS} masks. Aim: {AIM}.\n")
    print(f"| mask | tokens | {' | '.join(WAYS)} | most tokens / mean | distribution, ms |")
    print("| --- " * (len(WAYS) + 4) + "|")
    for (kind, make), size in ((item, size) for item in KINDS.items() for size in SIZES):
        busiest: dict[str, list[float]] = {way: [] for way in WAYS}
        tokens, seconds = [], []
        for seed in range(SEEDS if make is not causal else 1):
            seen = make(size, np.random.default_rng([seed, size]))
            upto = torch.from_numpy(np.concatenate([[0], np.cumsum(seen)]))
            for way, split_up in WAYS.items():
                start = time.perf_counter()
                work = seen.reshape(-1, BLOCK).sum(1).tolist()
                split = split_up(work, size, RANKS)
                end = time.perf_counter()
                shares = [sum(int(upto[last] - upto[first]) for first, last in part) for part in split.ranges]
                assert sum(shares) == seen.sum()
                busiest[way].append(max(shares) * RANKS / sum(shares))
                if split_up is balanced:
                    seconds.append(end - start)
                    tokens.append(max(split.lengths) * RANKS / size)
        figures = " | ".join(f"{max(ratios):.4f} ({mean(ratios):.4f})" for ratios in busiest.values())
        print(f"| {kind} | {size:,} | {figures} | {max(tokens):.3f} | {median(seconds) * 1e3:.1f} |", flush=True)


def _log_uniform(source: np.random.Generator, least: int, most: int) -> int:
    return int(np.exp(source.uniform(np.log(least), np.log(most))))


if __name__ == "__main__":
    main()
