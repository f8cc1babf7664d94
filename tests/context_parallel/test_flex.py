"""FlexAttention of tiles equals dense attention: by torch's definition of it on CPU, and as it is used on CUDA."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from context_parallel.test_kernel import Case, Given, assert_close, documents, give
from lightning_mm5d.context_parallel.kernels import flex, kernel
from lightning_mm5d.context_parallel.kernels.flex import blocks_of, padded_length
from lightning_mm5d.context_parallel.masks.mask import TILE, Scoring

CPU = torch.device("cpu")
by_definition = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch run its definition of FlexAttention's public backward on CPU, which it refuses there."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(rows=2, q_length=256, k_length=512),
        Case(q_length=700, k_length=1500, rows=2),
        Case(q_length=1, k_length=5),
        Case(density=0.0),
    ],
    ids=str,
)
def test_blocks_and_bits_are_the_mask(case: Case) -> None:
    given = give(case)
    tiles = given.tiles()
    blocks = blocks_of(tiles, CPU)
    mask = blocks.mask(tiles)
    b, q, k = (torch.arange(length) for length in (case.rows, blocks.q_length, blocks.k_length))
    allowed = mask.mask_mod(b[:, None, None], torch.tensor(0), q[:, None], k).expand(case.rows, -1, -1)
    assert torch.equal(allowed[:, : case.q_length, : case.k_length], given.allowed)
    assert not allowed[:, :, case.k_length :].any(), "nobody sees padded keys"

    by_tile = allowed.view(case.rows, len(q) // TILE, TILE, len(k) // TILE, TILE).transpose(2, 3).flatten(3)
    assert torch.equal(mask.to_dense()[:, 0].bool(), by_tile.any(-1))
    number, which = mask.full_kv_num_blocks, mask.full_kv_indices
    assert number is not None
    assert which is not None
    listed = torch.arange(which.shape[-1]) < number[..., None]
    assert torch.equal(torch.zeros_like(listed).scatter_(3, which.long(), listed)[:, 0], by_tile.all(-1))


def test_lengths_are_padded_to_few_sizes() -> None:
    lengths = range(1, 200 * TILE, 50)
    padded = [padded_length(length) for length in lengths]
    assert all(length <= long < 1.25 * length + TILE for length, long in zip(lengths, padded, strict=True))
    assert not any(long % TILE for long in padded)
    assert len(set(padded)) <= 30


CASES = [
    Case(),
    Case(rows=2, softcap=2.0, q_length=128, k_length=256),
    Case(heads=3, groups=1, value_width=24, q_length=13),
]


def without_graph(given: Given) -> Given:
    return replace(given, **{name: getattr(given, name).detach() for name in ("q", "k", "v")})


@by_definition
@pytest.mark.usefixtures("definition")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_the_keys_have_exact_gradients(case: Case) -> None:
    given = without_graph(give(case))
    parts = [slice(0, 100), slice(100, case.k_length)]
    outs, gradients = [], []
    with torch.no_grad():
        for part in parts:
            k, v, tiles = given.k[:, :, part], given.v[:, :, part], given.tiles(part)
            outs.append(flex.attend(given.q, k, v, tiles, Scoring(**given.options)))
            whole = (given.out, given.lse)
            gradients.append(flex.attend_backward(given.d_out, given.q, k, v, *whole, tiles, Scoring(**given.options)))
    out, lse = kernel.merge(*outs[0], *outs[1])
    assert_close(out, given.out)
    assert_close(lse, given.lse)
    (dq, *first), (other_dq, *second) = gradients
    joined = [torch.cat(both, 2) for both in zip(first, second, strict=True)]
    for actual, expected in zip((dq + other_dq, *joined), given.gradients, strict=True):
        assert_close(actual, expected)


@by_definition
def test_backwards_run_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    given = without_graph(give(Case()))
    monkeypatch.setattr(flex, "flex_attention", lambda *_, **__: pytest.fail("a forward runs"))
    arguments = (given.d_out, given.q, given.k, given.v, given.out, given.lse, given.tiles())
    for actual, expected in zip(
        flex.attend_backward(*arguments, Scoring(**given.options)), given.gradients, strict=True
    ):
        assert_close(actual, expected)


def test_torch_has_the_backward_of_flex_attention_alone() -> None:
    operation = torch.ops.higher_order.flex_attention_backward
    names = [*inspect.signature(operation.__call__).parameters]
    assert names == [
        *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph"),
        *("block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"),
    ], "it has moved: flex.py calls it"


def test_few_kernels_serve_all_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex.flex_gradients, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "flex_gradients", compiled)

    def kernels(case: Case) -> int:
        given = without_graph(give(case))
        arguments = (given.d_out, given.q, given.k, given.v, given.out, given.lse, given.tiles())
        with torch.no_grad():
            found = flex.attend_backward(*arguments, Scoring(**given.options))
        for actual, expected in zip(found, given.gradients, strict=True):
            assert_close(actual, expected)
        return counter.frame_count

    base = Case(rows=2, q_length=300, k_length=400)
    assert kernels(base) == 1
    assert kernels(replace(base, density=0.7, q_length=310)) == 1, "another mask, and a length padded to the same"
    seen = kernels(replace(base, q_length=700, k_length=900))
    assert kernels(replace(base, q_length=1300, k_length=400)) <= seen + 1, "lengths become arguments"


def test_masks_without_an_allowed_pair_run_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "flex_attention", lambda *_, **__: pytest.fail("a kernel runs"))
    case = Case()
    given = give(case, torch.zeros(1, case.q_length, case.k_length, dtype=torch.bool))
    out, lse = flex.attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert lse.dtype == torch.float64
    found = flex.attend_backward(
        given.d_out, given.q, given.k, given.v, out, lse, given.tiles(), Scoring(**given.options)
    )
    assert not any(gradient.any() for gradient in found)


def test_few_kernels_serve_all_masks_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex.flex_attention, fullgraph=True, backend=counter))

    def compiled(case: Case) -> int:
        given = give(case)
        with torch.no_grad():
            assert_close(flex.attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))[0], given.out)
        return counter.frame_count

    base = Case(rows=2, q_length=300, k_length=400)
    assert compiled(base) == 1
    assert compiled(replace(base, density=0.7, q_length=310)) == 1, "another mask, and a length padded to the same"
    seen = compiled(replace(base, q_length=700))
    seen = max(seen, compiled(replace(base, q_length=700, k_length=900)))
    for q_length, k_length in ((1300, 400), (600, 1100), (400, 2100)):
        assert compiled(replace(base, q_length=q_length, k_length=k_length)) <= seen + 1, "lengths become arguments"
    capped = [compiled(replace(base, softcap=softcap)) for softcap in (2.0, 3.0, 2.0, 3.0)]
    assert capped[1] == capped[3], "a kernel for each soft cap"


# --- on a GPU ---


def moved(given: Given) -> Given:
    names = ("q", "k", "v", "d_out", "allowed", "out", "lse")
    tensors: dict[str, Any] = {name: getattr(given, name).cuda() for name in names}
    dq, dk, dv = (gradient.cuda() for gradient in given.gradients)
    return replace(given, **tensors, gradients=(dq, dk, dv))


GPU_CASES = [
    Case(dtype=torch.float32),
    Case(dtype=torch.bfloat16, rows=2, width=64, value_width=64),
    Case(dtype=torch.float16, rows=2, width=64, value_width=128, softcap=2.0),
    Case(dtype=torch.float32, width=8, value_width=8),
    Case(dtype=torch.float64, softcap=2.0),
    Case(dtype=torch.bfloat16, heads=3, groups=1, width=64, value_width=64, q_length=1000, k_length=1500),
    Case(dtype=torch.bfloat16, width=64, value_width=64, density=2.0),
    Case(dtype=torch.float16, groups=1, width=128, value_width=128, density=2.0),
]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpus_compute_the_same(case: Case) -> None:
    is_full = case.density > 1
    allowed = torch.ones(1, case.q_length, case.k_length, dtype=torch.bool) if is_full else None
    given = moved(give(case, allowed))
    tolerance = TOLERANCES[case.dtype]
    part = slice(0, 250)
    for keys in (slice(None), part):
        arguments = given.q, given.k[:, :, keys], given.v[:, :, keys], given.tiles(keys)
        found = kernel.attend(*arguments, Scoring(**given.options))
        if keys != part:
            assert_close(found[0].double(), given.out, tolerance)
            assert_close(found[1].double(), given.lse, max(1e-3 * (case.dtype != torch.float64), 1e-10))
        for index, (actual, expected) in enumerate(zip(given.gradients_of(keys), given.gradients, strict=True)):
            if index:
                assert_close(actual.double(), expected[:, :, keys], tolerance)
            elif keys != part:
                assert_close(actual.double(), expected, tolerance)


@pytest.mark.gpu
def test_long_packed_sequences_on_gpus() -> None:
    case = Case(
        q_length=3000, k_length=3000, batch=1, heads=2, groups=1, width=64, value_width=64, dtype=torch.bfloat16
    )
    given = moved(give(case, documents(3000)))
    out, lse = kernel.attend(given.q, given.k, given.v, given.tiles(), Scoring(**given.options))
    assert_close(out.double(), given.out, 4e-2)
    given.out, given.lse = out, lse
    for actual, expected in zip(given.gradients_of(), given.gradients, strict=True):
        assert_close(actual.double(), expected, 4e-2)
