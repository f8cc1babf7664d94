"""Attention by tiles equals dense attention: outputs, log-sum-exp and gradients, for any mask, shards and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.context_parallel.kernels import kernel
from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward, merge, plan
from lightning_mm5d.context_parallel.masks.mask import EMPTY, FULL, PARTIAL, TILE, Mask, Scoring, Tiles

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """One call. A mask has squares of 64 x 64, `density` of them with most of their pairs allowed."""

    q_length: int = 300
    k_length: int = 400
    batch: int = 2
    rows: int = 1
    heads: int = 4
    groups: int = 2
    width: int = 16
    value_width: int = 16
    density: float = 0.4
    softcap: float | None = None
    by_tokens: bool = True
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


@dataclass
class Given:
    """Arguments and what dense attention makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    allowed: Tensor  # [rows, Sq, Sk]
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]

    def tiles(self, keys: slice = slice(None)) -> Tiles:
        rows, q_length, k_length = self.allowed.shape
        table, batch = self.allowed, len(self.q)

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return table[b if rows > 1 else 0, q, k]

        mask = Mask(allowed, batch=batch, q_length=q_length, k_length=k_length, device=table.device)
        return mask.tiles(torch.arange(q_length), torch.arange(k_length)[keys])

    def gradients_of(self, keys: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.k[:, :, keys], self.v[:, :, keys]
        return attend_backward(self.d_out, self.q, k, v, self.out, self.lse, self.tiles(keys), Scoring(**self.options))


def dense(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, with all scores."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(ratio, 1) for each in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return weights @ v, lse


def random_mask(case: Case) -> Tensor:
    """Squares that are empty, mixed and full, not in line with tiles; queries that see nothing, keys nobody sees."""
    shape = (case.rows, case.q_length, case.k_length)
    squares = torch.rand(case.rows, *(-(-length // 64) + 1 for length in shape[1:])) < case.density
    allowed = squares.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, 31 : 31 + shape[1], 17 : 17 + shape[2]]
    allowed = allowed & (torch.rand(shape) < 0.8)
    allowed[:, 128:260, :700] = True
    allowed[:, case.q_length // 2 - 60 :][:, :1] = False
    allowed[0, :, case.k_length // 2] = False
    allowed[-1, :20] = case.q_length < 20
    return allowed


def give(case: Case, allowed: Tensor | None = None) -> Given:
    torch.manual_seed(0)
    allowed = random_mask(case) if allowed is None else allowed

    def values(length: int, heads: int, width: int) -> Tensor:
        if case.by_tokens:
            made = torch.randn(case.batch, length, heads, width, dtype=torch.float64).transpose(1, 2)
        else:
            made = torch.randn(case.batch, heads, width, length, dtype=torch.float64).mT
        return made.to(case.dtype)

    q = values(case.q_length, case.heads, case.width)
    k, v = (values(case.k_length, case.groups, width) for width in (case.width, case.value_width))
    d_out = values(case.q_length, case.heads, case.value_width)
    precise = [each.double().requires_grad_() for each in (q, k, v)]
    out, lse = dense(*precise, allowed, SCALE, case.softcap)
    dq, dk, dv = torch.autograd.grad(out, precise, d_out.double())
    options = {"scale": SCALE, "softcap": case.softcap}
    return Given(q, k, v, d_out, allowed, out.detach(), lse.detach(), (dq, dk, dv), options)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(rows=2),
        Case(rows=2, softcap=2.0),
        Case(softcap=50.0, q_length=700, k_length=1200, heads=2, groups=1),
        Case(heads=4, groups=4),
        Case(heads=4, groups=1, rows=2),
        Case(heads=3, groups=1),
        Case(value_width=8),
        Case(width=8, value_width=24, rows=2),
        Case(value_width=8, softcap=2.0),
        Case(q_length=1, k_length=1, density=1.0),
        Case(q_length=5, k_length=1, rows=2),
        Case(q_length=1, k_length=5, softcap=2.0),
        Case(q_length=128, k_length=256),
        Case(q_length=129, k_length=2300, density=0.05, rows=2),
        Case(q_length=1500, k_length=130, density=0.05, heads=2, groups=1),
        Case(q_length=700, k_length=1500, density=0.9, heads=2, groups=1, by_tokens=False),
        Case(density=0.0, by_tokens=False),
    ],
    ids=str,
)
def test_equals_dense_attention(case: Case) -> None:
    given = give(case)
    out, lse = attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    assert_close(out, given.out)
    assert_close(lse, given.lse)
    assert out.dtype == lse.dtype == torch.float64
    for actual, expected in zip(given.gradients_of(), given.gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("case", [Case(), Case(rows=2, softcap=2.0), Case(groups=1, value_width=8)], ids=str)
@pytest.mark.parametrize("boundary", [1, 128, 271, 400])
def test_parts_of_the_keys_add_up_to_the_whole(case: Case, boundary: int) -> None:
    given = give(case)
    parts = [slice(0, boundary), slice(boundary, case.k_length)]
    found = [
        attend(given.q, given.k[:, :, part], given.v[:, :, part], given.tiles(part), Scoring(**given.options))
        for part in parts
    ]
    out, lse = merge(*found[0], *found[1])
    assert_close(out, given.out)
    assert_close(lse, given.lse)
    (dq, *first), (other_dq, *second) = (given.gradients_of(part) for part in parts)
    joined = [torch.cat(both, 2) for both in zip(first, second, strict=True)]
    for actual, expected in zip((dq + other_dq, *joined), given.gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_shards_are_positions_among_other_tokens(softcap: float | None) -> None:
    case = Case(q_length=600, k_length=600, rows=2, softcap=softcap)
    given = give(case)
    q_tokens, k_tokens = torch.arange(40, 500, 2), torch.arange(600)[torch.rand(600) < 0.6]
    mask = Mask(
        lambda b, h, q, k: given.allowed[b, q, k], batch=2, q_length=600, k_length=600, device=torch.device("cpu")
    )
    q, k, v = given.q[:, :, q_tokens], given.k[:, :, k_tokens], given.v[:, :, k_tokens]
    out, lse = attend(q, k, v, mask.tiles(q_tokens, k_tokens), Scoring(**given.options))
    expected, expected_lse = dense(q, k, v, given.allowed[:, q_tokens][:, :, k_tokens], SCALE, softcap)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


def test_a_sink_in_the_log_sum_exp_takes_its_share_of_the_gradients() -> None:
    given = give(Case())
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    inputs = [each.detach().requires_grad_() for each in (given.q, given.k, given.v)]
    out, lse = dense(*inputs, given.allowed, SCALE)
    whole = torch.logaddexp(lse, sink[:, None])
    out = out * torch.exp(lse - whole)[..., None]
    expected = torch.autograd.grad(out, inputs, given.d_out)
    given.out, given.lse = out.detach(), whole.detach()
    for actual, gradient in zip(given.gradients_of(), expected, strict=True):
        assert_close(actual, gradient)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_queries_without_keys_get_nothing_and_give_nothing(softcap: float | None) -> None:
    case = Case(softcap=softcap)
    given = give(case, torch.zeros(1, case.q_length, case.k_length, dtype=torch.bool))
    out, lse = attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(gradient.any() for gradient in given.gradients_of())


@pytest.mark.parametrize(("q_length", "k_length"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_shards_may_be_empty(q_length: int, k_length: int, softcap: float | None) -> None:
    given = give(Case(), torch.ones(1, 300, 400, dtype=torch.bool))
    mask = Mask(None, batch=2, q_length=300, k_length=400, device=torch.device("cpu"))
    tiles = mask.tiles(torch.arange(q_length), torch.arange(k_length))
    q, k, v, d_out = given.q[:, :, :q_length], given.k[:, :, :k_length], given.v[:, :, :k_length], given.d_out
    out, lse = attend(q, k, v, tiles, Scoring(SCALE, softcap))
    assert out.shape == q.shape
    assert (lse == -torch.inf).all()
    found = attend_backward(d_out[:, :, :q_length], q, k, v, out, lse, tiles, Scoring(SCALE, softcap))
    for gradient, value in zip(found, (q, k, v), strict=True):
        assert gradient.shape == value.shape
        assert not gradient.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_other_precisions_are_as_close_as_their_inputs_are(
    dtype: torch.dtype, tolerance: float, softcap: float | None
) -> None:
    given = give(Case(rows=2, dtype=dtype, softcap=softcap))
    out, lse = attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_close(out.double(), given.out, tolerance)
    assert_close(lse.double(), given.lse, 1e-5)
    given.out, given.lse = out, lse
    for actual, expected in zip(given.gradients_of(), given.gradients, strict=True):
        assert actual.dtype == dtype
        assert_close(actual.double(), expected, tolerance)


def test_autocast_changes_nothing() -> None:
    given = give(Case(dtype=torch.float32, softcap=2.0))
    plain = attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    for one, other in zip(plain, mixed, strict=True):
        assert_close(one, other, 0.0)


def test_merging_nothing_with_something_is_something() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for pair in (((out, lse), nothing), (nothing, (out, lse))):
        merged, merged_lse = merge(*pair[0], *pair[1])
        assert_close(merged, out, 0.0)
        assert_close(merged_lse, lse, 0.0)
    merged, merged_lse = merge(*nothing, *nothing)
    assert not merged.any()
    assert (merged_lse == -torch.inf).all()


# --- work and memory ---


def documents(length: int) -> Tensor:
    """A packed multimodal sequence: causal documents, images that are seen from within in both directions."""
    at = torch.arange(length)
    document = (at[:, None] >= torch.tensor([length // 5, length // 2, length * 5 // 6])).sum(1)
    image = torch.where(at % 500 < 200, at // 500, -1)
    seen = (at[:, None] >= at) | ((image[:, None] == image) & (image >= 0))
    return (seen & (document[:, None] == document))[None]


def test_cases_have_long_stretches_without_a_mask() -> None:
    given = give(Case(q_length=700, k_length=1500, rows=2))
    spans = [
        span
        for by_keys in (False, True)
        for row in plan(given.tiles(), by_keys=by_keys).bands
        for band in row
        for span in band.spans
    ]
    assert any(not span.is_mixed and span.at.stop - span.at.start >= kernel.LONG * TILE for span in spans)
    assert any(span.is_mixed for span in spans)


def test_only_tiles_with_an_allowed_pair_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = give(Case(q_length=1500, k_length=1500, heads=1, groups=1, batch=1), documents(1500))
    pairs = {"_flash": 0, "_flash_backward": 0}

    def counted(name: str, q_at: int) -> Any:
        original = getattr(kernel, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            pairs[name] += args[q_at].shape[2] * args[q_at + 1].shape[2]
            return original(*args, **kwargs)

        return count

    for name, q_at in (("_flash", 0), ("_flash_backward", 1)):
        monkeypatch.setattr(kernel, name, counted(name, q_at))
    tiles = given.tiles()
    assert {EMPTY, PARTIAL, FULL} == set(tiles.kinds.unique().tolist())
    assert_close(attend(given.q, given.k, given.v, tiles, Scoring(SCALE))[0], given.out)
    given.gradients_of()
    sides = torch.full((tiles.kinds.shape[1],), TILE)
    sides[-1] = 1500 - (len(sides) - 1) * TILE
    needed = int(((tiles.kinds[0] != EMPTY) * sides[:, None] * sides).sum())
    assert pairs == {"_flash": needed, "_flash_backward": needed}


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return found


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_tensor_grows_with_the_square_of_the_sequence(softcap: float | None) -> None:
    length, width = 4096, 8
    values = torch.randn(1, 1, length, width)
    mask = Mask(lambda b, h, q, k: q >= k, batch=1, q_length=length, k_length=length, device=torch.device("cpu"))
    tiles = mask.tiles(torch.arange(length), torch.arange(length))
    with Largest() as largest:
        out, lse = attend(values, values, values, tiles, Scoring(SCALE, softcap))
        attend_backward(values, values, values, values, out, lse, tiles, Scoring(SCALE, softcap))
    assert largest.elements <= kernel.MIXED_PAIRS
    assert length**2 >= kernel.MIXED_PAIRS * 16


def test_wide_masks_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(q_length=900, k_length=1100, heads=1, groups=1, rows=2)
    allowed = torch.rand(2, case.q_length, case.k_length) < 0.5
    monkeypatch.setattr(kernel, "MIXED_PAIRS", 3 * TILE * TILE)
    given = give(case, allowed)
    sizes: list[int] = []
    made = kernel.Bias.__init__
    monkeypatch.setattr(
        kernel.Bias,
        "__init__",
        lambda self, values, blind: (sizes.append(values.numel()), made(self, values, blind))[1],
    )
    out, _ = attend(given.q, given.k, given.v, given.tiles(), Scoring(SCALE))
    assert_close(out, given.out)
    for actual, expected in zip(given.gradients_of(), given.gradients, strict=True):
        assert_close(actual, expected)
    assert sizes
    assert max(sizes) <= kernel.MIXED_PAIRS


def test_plans_and_masks_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = give(Case(q_length=500, k_length=500, heads=1, groups=1))
    tiles = given.tiles()
    first = attend(given.q, given.k, given.v, tiles, Scoring(SCALE))
    monkeypatch.setattr(Tiles, "allowed", lambda *_: pytest.fail("the mask is asked again"))
    monkeypatch.setattr(kernel, "Plan", lambda *_: pytest.fail("a plan is made again"))
    second = attend(given.q, given.k, given.v, tiles, Scoring(SCALE))
    assert torch.equal(first[0], second[0])
