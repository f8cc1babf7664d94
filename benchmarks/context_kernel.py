"""Attention by tiles on CPU against PyTorch's own with a dense mask: time, and memory as sequences grow.

Both have the same queries, keys and values, in one process with one thread each, and must have the same results. The
masks are what models of text and images have; documents and images have uneven lengths that know nothing of tiles.

Time: tiles that are empty need no work, so the least that tiles can take is their share that is not. The aim is that
share and 0.2. What a mask that was not met before costs on top, finding its tiles and planning, is a row of its own; a
mask serves all layers.

Memory: what the process grows by in a forward and backward, over what it had before; masks included, which PyTorch's
has to be given. It should grow with the sequence, not with its square.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from turns import WARMUP, Raced, Side, Turns, race, row, run

from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward
from lightning_mm5d.context_parallel.masks.mask import EMPTY, Caches, Mask, MaskFunction, Scoring

TOKENS, HEADS, WIDTH = 4096, 8, 64
CACHES = Caches()  # as a session has them
STEPS = WARMUP + 7
SCALE = WIDTH**-0.5


def masks(length: int, shift: int = 0, device: torch.device | None = None) -> dict[str, MaskFunction]:
    """The masks by name: images have 576 tokens, documents 0.2 to 0.3 of the sequence; `shift` moves their ends.

    Their tensors are on `device`.
    """
    at = torch.arange(length, device=device)
    document = (at[:, None] >= (torch.tensor([0.22, 0.47, 0.8], device=device) * length).long() + shift).sum(1)
    image = torch.where((at % 1000 >= 100) & (at % 1000 < 676), at // 1000, -1)

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def images(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) | ((image[q] == image[k]) & (image[q] >= 0))

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    def both(first: MaskFunction, second: MaskFunction) -> MaskFunction:
        return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)

    return {
        "causal": causal,
        "causal with images": images,
        "four documents": both(causal, same),
        "four documents with images": both(images, same),
        "sliding window of 512": both(causal, lambda b, h, q, k: q - k < 512),
        "no mask": lambda b, h, q, k: q >= 0,
    }


def described(name: str, length: int, shift: int = 0) -> Mask:
    function = masks(length, shift)[name]
    return Mask(function, batch=1, q_length=length, k_length=length, device=torch.device("cpu"), caches=CACHES)


def values(length: int, heads: int) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, [1, H, S, D], as projections leave them."""
    torch.manual_seed(0)
    return [torch.randn(1, length, heads, WIDTH).transpose(1, 2) for _ in range(4)]


Call = Callable[[], list[Tensor]]


def ours(name: str, length: int, heads: int, with_backward: bool, is_new: bool = False) -> Call:
    q, k, v, d_out = values(length, heads)
    tokens, shifts = torch.arange(length), count()

    def call() -> list[Tensor]:
        tiles = described(name, length, next(shifts) if is_new else 0).tiles(tokens, tokens)
        out, lse = attend(q, k, v, tiles, Scoring(SCALE))
        return [out, *attend_backward(d_out, q, k, v, out, lse, tiles, Scoring(SCALE))] if with_backward else [out]

    return call


def theirs(name: str, length: int, heads: int, with_backward: bool) -> Call:
    q, k, v, d_out = values(length, heads)
    mask = described(name, length).dense()

    def call() -> list[Tensor]:
        if not with_backward:
            return [scaled_dot_product_attention(q, k, v, mask, scale=SCALE)]
        inputs = [each.detach().requires_grad_() for each in (q, k, v)]
        out = scaled_dot_product_attention(*inputs, mask, scale=SCALE)
        return [out, *torch.autograd.grad(out, inputs, d_out)]

    return call


# --- time ---


def repeat(turns: Turns, make: Callable[[], Call]) -> list[Any]:
    """Call once a turn; return the last results as arrays."""
    call = make()
    results: list[Tensor] = []
    for _ in range(STEPS):
        turns()
        results = call()
    turns.end()
    return [result.detach().numpy() for result in results]


def share(name: str) -> float:
    """The share of tiles that are not empty."""
    tokens = torch.arange(TOKENS)
    return float((described(name, TOKENS).tiles(tokens, tokens).kinds != EMPTY).float().mean())


def compare(first: Callable[[], Call], second: Callable[[], Call]) -> tuple[Raced, Raced]:
    return race(
        Side(1, lambda turns, rank: repeat(turns, first)), Side(1, lambda turns, rank: repeat(turns, second)), STEPS
    )


def times() -> None:
    for name in masks(TOKENS):
        least = share(name)
        for with_backward in (False, True):
            what = "forward and backward" if with_backward else "forward"
            arguments = (name, TOKENS, HEADS, with_backward)
            tiled, dense = compare(partial(ours, *arguments), partial(theirs, *arguments))
            for result, expected in zip(tiled.results[0], dense.results[0], strict=True):
                torch.testing.assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-4)
            figure = f"{name}, {least:.3f} of the tiles: {what}, tiles / dense mask"
            aim = f"{least + 0.2:.3f}" if least < 1 else ""
            fastest(figure, tiled, dense, aim)


def new_masks() -> None:
    for name in ("four documents", "four documents with images"):
        arguments = (name, TOKENS, HEADS, True)
        mine, other = compare(partial(ours, *arguments, is_new=True), partial(ours, *arguments))
        figure = f"{name}: forward and backward of one layer, mask not met before / met"
        fastest(figure, mine, other, "")


def fastest(figure: str, mine: Raced, other: Raced, aim: str) -> None:
    """Compare the fastest calls: all calls do the same, so longer ones are other work on the machine."""
    a, b = min(mine.seconds), min(other.seconds)
    row(figure, a / b, aim, f"{a * 1e3:.1f} ms / {b * 1e3:.1f} ms")


# --- memory ---


def growth(turns: Turns, make: Callable[[int], Call], length: int) -> int:
    """Return the bytes by which the largest resident memory of this process grows."""
    make(128)()  # what libraries keep
    before = _peak()
    make(length)()
    return _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> None:
    lengths, heads = (4096, 8192, 16384), 2
    for name in ("causal", "four documents with images"):
        for side, build in (("tiles", ours), ("dense mask", theirs)):

            def make(length: int, build: Any = build, name: str = name) -> Call:
                return build(name, length, heads, True)

            grown = [run(Side(1, lambda turns, rank, n=n, make=make: growth(turns, make, n)))[0] for n in lengths]  # type: ignore[misc]
            measured = " / ".join(f"{each / 2**20:.0f} MiB" for each in reversed(grown))
            ratio = grown[-1] / grown[0]
            sizes = f"{lengths[-1]} / {lengths[0]} tokens"
            row(f"{name}: growth of memory, {side}, {sizes}", ratio, "4" * (build is ours), measured)


if __name__ == "__main__":
    # memory first: later, processes are forked with holes of this one's that they fill without growing
    figures = {"memory": memory, "time": times, "new": new_masks}
    for chosen in sys.argv[1:] or figures:
        figures[chosen]()
