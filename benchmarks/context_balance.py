"""The work of the busiest context parallel rank over the mean, for masks of multimodal sequences, and the time of
finding it.

The masks are of the four kinds that Cornstarch (arXiv 2503.11367) balances: text that is causal alone; what encoders
put out in one block in front of it; images, sounds and videos embedded in it; and such documents packed one after the
other. Text sees everything before it in its document, what an encoder put out sees its own item alone, both ways. Sizes
of items and documents are drawn from wide ranges (log-uniform), with a seed; each figure is over `SEEDS` of them. A
rank's work is the number of (query, key) pairs that its queries may see.

Beside the makespan: the largest number of tokens of a rank over the mean, the time of the assignment (median), and the
time of finding the work of the blocks from the function of a mask that was not met before (one mask each; a mask that
was costs a digest). Last, both together over the time of the attention that they balance: 16 layers of 8 heads of 64,
forward and backward, on this CPU, measured with one head on every 32nd block of queries and multiplied; and the same
for a mask whose function is evaluated for all pairs, in stripes of 128 queries by all keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_mm5d.context_parallel.balance import BLOCK, balanced, longest_first, uniform, zigzag
from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward
from lightning_mm5d.context_parallel.masks.mask import Mask, MaskFunction, Scoring
from lightning_mm5d.sharded.sequence import TokenSplit

RANKS = 8
SIZES = (16 * 1024, 64 * 1024, 256 * 1024)
SEEDS = 20
AIM = 1.01
HEADS, WIDTH, LAYERS = 8, 64, 16

Result = TypeVar("Result")

Document = list[int]  # lengths of its stretches in turn: text, an item, text, an item, ..., text; any may be 0


def causal(size: int, source: np.random.Generator) -> list[Document]:
    return [[size]]


def in_front(size: int, source: np.random.Generator) -> list[Document]:
    """One to three items, then text."""
    share = source.uniform(0.1, 0.9)
    items = [int(length) for length in source.dirichlet(np.ones(source.integers(1, 4))) * share * size]
    return [[*(stretch for item in items for stretch in (0, item)), size - sum(items)]]


def embedded(size: int, source: np.random.Generator) -> list[Document]:
    """Items of 64 tokens to a quarter of the sequence, anywhere in the text."""
    left = int(source.uniform(0.1, 0.9) * size)
    items = []
    while left:
        items.append(min(left, _log_uniform(source, 64, max(size // 4, 65))))
        left -= items[-1]
    text = size - sum(items)
    cuts = [0, *sorted(source.integers(0, text + 1, len(items)).tolist()), text]
    texts = np.diff(cuts).tolist()
    return [[*(stretch for pair in zip(texts, items, strict=False) for stretch in pair), texts[-1]]]


def packed(size: int, source: np.random.Generator) -> list[Document]:
    """Documents of 256 tokens to half the sequence, each with items embedded."""
    documents: list[Document] = []
    while left := size - sum(map(sum, documents)):
        documents += embedded(min(left, _log_uniform(source, 256, size // 2)), source)
    return documents


KINDS: dict[str, Callable[[int, np.random.Generator], list[Document]]] = {
    "causal": causal,
    "encoder outputs in front": in_front,
    "encoder outputs embedded": embedded,
    "packed documents": packed,
}


def seen(documents: list[Document]) -> Tensor:
    """int64 [S]: how many keys each query may see."""
    parts = []
    for document in documents:
        at = 0
        for index, length in enumerate(document):
            parts.append(torch.full((length,), length) if index % 2 else torch.arange(at + 1, at + length + 1))
            at += length
    return torch.cat(parts)


def mask_function(documents: list[Document]) -> MaskFunction:
    """The same as a function of indices."""
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor([sum(document) for document in documents]))
    lengths = torch.tensor([length for document in documents for length in document])
    is_item = torch.tensor([index % 2 > 0 for document in documents for index in range(len(document))])
    items = (torch.arange(len(lengths)) * is_item).repeat_interleave(lengths)  # 0 for text, which comes first

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        text = (items[q] == 0) & (k <= q) & (numbers[q] == numbers[k])
        return text | ((items[q] > 0) & (items[q] == items[k]))

    return allowed


def longest(work: list[int], size: int) -> TokenSplit:
    """Blocks, largest first, to the least busy rank."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(RANKS)]
    for index, rank in enumerate(longest_first(work, RANKS)):
        parts[rank].append((index * BLOCK, (index + 1) * BLOCK))
    return TokenSplit.of(parts, size)


WAYS: dict[str, Callable[[list[int], int], TokenSplit]] = {
    "uniform": lambda _, size: uniform(size, RANKS),
    "zigzag": lambda _, size: zigzag(size, RANKS),
    "longest first": longest,
    "makespan_min": lambda work, size: balanced(work, size, RANKS),
}


def main() -> None:
    torch.set_num_threads(1)
    print(f"Work of the busiest of {RANKS} ranks over the mean: worst (mean) of {SEEDS} masks. Aim: {AIM}.\n")
    print(f"| mask | tokens | {' | '.join(WAYS)} | most tokens / mean | assignment, ms | work of a new mask, ms |")
    print("| --- " * (len(WAYS) + 5) + "|")
    for (kind, make), size in ((item, size) for item in KINDS.items() for size in SIZES):
        busiest: dict[str, list[float]] = {way: [] for way in WAYS}
        tokens, dealing = [], []
        for seed in range(SEEDS):
            documents = make(size, np.random.default_rng([seed, size]))
            keys = seen(documents)
            upto = [0, *keys.cumsum(0).tolist()]
            work = keys.view(-1, BLOCK).sum(1)
            if not seed:
                finding, mask_work = timed(work_of, mask_function(documents), size)
                assert torch.equal(mask_work, work), "the mask's function and its closed form differ"
            for way, split_up in WAYS.items():
                seconds, split = timed(split_up, work.tolist(), size)
                shares = [sum(upto[end] - upto[start] for start, end in part) for part in split.ranges]
                assert sum(shares) == upto[-1]
                busiest[way].append(max(shares) * RANKS / sum(shares))
                if way == "makespan_min":
                    dealing.append(seconds)
                    tokens.append(max(split.lengths) * RANKS / size)
        figures = " | ".join(f"{max(ratios):.4f} ({mean(ratios):.4f})" for ratios in busiest.values())
        times = f"{median(dealing) * 1e3:.1f} | {finding * 1e3:.0f}"
        print(f"| {kind} | {size:,} | {figures} | {max(tokens):.3f} | {times} |", flush=True)
    share_of_attention()


def share_of_attention(every: int = 32) -> None:
    """Print the time of a new mask over the attention of a step, traced, and evaluated on stripes of queries."""
    print(f"\n| mask | tokens | new mask and assignment, traced | the same on stripes | attention of {LAYERS} layers |")
    print("| --- " * 5 + "|")
    for (kind, make), size in ((item, size) for item in KINDS.items() for size in (16 * 1024, 128 * 1024)):
        function = mask_function(make(size, np.random.default_rng([0, size])))
        finding, work = timed(work_of, function, size)
        dealing, _ = timed(balanced, work.tolist(), size, RANKS)
        mask = Mask(function, batch=1, q_length=size, k_length=size, device="cpu")
        some = torch.arange(size).view(-1, BLOCK)[every // 2 :: every]
        striping, striped = timed(stripes, mask, some)
        assert torch.equal(striped, work[every // 2 :: every])
        tiles = mask.tiles(some.flatten(), torch.arange(size))
        q, k, v = (torch.randn(1, 1, length, WIDTH) for length in (some.numel(), size, size))
        attend(q, k, v, tiles, Scoring(WIDTH**-0.5))  # plans once for all layers
        forward, (out, lse) = timed(partial(attend, q, k, v, tiles, Scoring(WIDTH**-0.5)))
        attend_backward(out, q, k, v, out, lse, tiles, Scoring(WIDTH**-0.5))
        backward, _ = timed(partial(attend_backward, out, q, k, v, out, lse, tiles, Scoring(WIDTH**-0.5)))
        whole = (forward + backward) * every * HEADS * LAYERS
        ways = [
            f"{seconds:.3f} s, {seconds / whole:.4%}" for seconds in (finding + dealing, striping * every + dealing)
        ]
        print(f"| {kind} | {size:,} | {' | '.join(ways)} | {whole:.0f} s |", flush=True)


def stripes(mask: Mask, some: Tensor) -> Tensor:
    """Pairs of blocks of queries, from the mask's function on each of them by all keys; tiles have their kinds too."""
    k, counts = torch.arange(mask.k_length), []
    for q in some:
        tiles = mask.allowed(0, q, k).view(len(q), -1, BLOCK).sum(2).sum(0)
        (tiles == 0) | (tiles == len(q) * BLOCK)
        counts.append(tiles.sum())
    return torch.stack(counts)


def work_of(function: MaskFunction, size: int) -> Tensor:
    """Pairs of each block of queries."""
    return Mask(function, batch=1, q_length=size, k_length=size, device="cpu").work(BLOCK)


def timed(call: Callable[..., Result], *args: Any) -> tuple[float, Result]:
    """The seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - start, result


def _log_uniform(source: np.random.Generator, least: int, most: int) -> int:
    return int(np.exp(source.uniform(np.log(least), np.log(most))))


if __name__ == "__main__":
    main()
