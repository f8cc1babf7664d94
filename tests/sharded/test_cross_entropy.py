"""Cross entropy over sharded classes against torch's own, and how little of the logits travels.

Layout of all tests with processes: ranks 0-1 hold 4 and 3 of 7 classes, ranks 0-2 hold 4, 0 and 3.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_mm5d.sharded.class_operations import cross_entropy
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.tensor import Sharded, from_local
from ranks import run_ranks

LENGTHS = {2: (4, 3), 3: (4, 0, 3)}
CLASSES = 7
TARGET = torch.tensor([0, 3, 6, -100, 4, 3, -100, 5])
WORLDS = pytest.mark.parametrize("world", [2, 3])


class Case:
    """Logits ``[N, C]``, full and local, both leaves."""

    def __init__(self, world: int, rows: int = len(TARGET), dtype: torch.dtype = torch.float64) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        self.group = TensorGroup(dist.group.WORLD)
        self.lengths = LENGTHS[world]
        self.start = sum(self.lengths[: self.group.index])
        self.set(torch.randn(rows, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype))

    def set(self, whole: Tensor) -> None:
        self.whole = whole.clone().requires_grad_()
        self.local = self.group.local_of(whole, -1, self.lengths).clone().requires_grad_()

    def loss(self, target: Tensor = TARGET, **options: Any) -> Tensor:
        return cross_entropy(self.local, target, start=self.start, classes=CLASSES, group=self.group, **options)

    def compare(self, found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
        def close(a: Tensor, b: Tensor) -> None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

        close(found, expected)
        self.local.grad = self.whole.grad = None
        weights = torch.linspace(0.5, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        close(self.local.grad, self.group.local_of(self.whole.grad, -1, self.lengths))


@WORLDS
def test_values_and_gradients_are_those_of_torch(world: int) -> None:
    def compared(rank: int, world: int) -> None:
        case = Case(world)
        for scale in (1.0, 300.0):
            case.set(case.whole.detach() * scale)
            for reduction in ("mean", "sum", "none"):
                for smoothing in (0.0, 0.1, 1.0):
                    for ignored in (-100, 3):
                        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
                        target = torch.where(TARGET < 0, ignored, TARGET)
                        case.compare(case.loss(target, **options), F.cross_entropy(case.whole, target, **options))

    run_ranks(world, compared, world)


@WORLDS
def test_rows_that_do_not_count_and_classes_that_are_masked(world: int) -> None:
    def compared(rank: int, world: int) -> None:
        case = Case(world)
        ignored = torch.full_like(TARGET, -100)
        for smoothing in (0.0, 0.1):
            for reduction in ("mean", "sum", "none"):
                options = {"reduction": reduction, "label_smoothing": smoothing}
                case.compare(case.loss(ignored, **options), F.cross_entropy(case.whole, ignored, **options))
        assert case.loss(ignored).isnan()
        logits = case.whole.detach().clone()
        logits[0, 4:] = logits[1, :2] = logits[2, :4] = -torch.inf  # all classes of a rank, and some of one
        logits[4, 4] = -torch.inf  # a target
        case.set(logits)
        case.compare(case.loss(reduction="none"), F.cross_entropy(case.whole, TARGET, reduction="none"))
        case.set(logits[:0])
        case.compare(case.loss(TARGET[:0], reduction="sum"), F.cross_entropy(case.whole, TARGET[:0], reduction="sum"))
        assert case.loss(TARGET[:0]).isnan()

    run_ranks(world, compared, world)


@WORLDS
def test_low_precision_and_autocast_give_the_dtypes_of_torch(world: int) -> None:
    def compared(rank: int, world: int) -> None:
        case = Case(world, dtype=torch.bfloat16)
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                found, expected = case.loss(), F.cross_entropy(case.whole, TARGET)
            assert found.dtype == expected.dtype == (torch.float32 if enabled else torch.bfloat16)
            case.compare(found, expected, 2e-2)
            assert case.local.grad.dtype == torch.bfloat16
        case.set(case.whole.detach().float())
        case.compare(case.loss(), F.cross_entropy(case.whole, TARGET), 1e-6)

    run_ranks(world, compared, world)


@WORLDS
def test_a_backward_may_run_twice_if_the_graph_is_kept(world: int) -> None:
    def twice(rank: int, world: int) -> None:
        case = Case(world)
        loss = case.loss(label_smoothing=0.1)
        first = torch.autograd.grad(loss, case.local, retain_graph=True)[0]
        again = torch.autograd.grad(loss, case.local, retain_graph=True)[0]
        last = torch.autograd.grad(loss * 2, case.local)[0]
        assert first.equal(again)
        torch.testing.assert_close(first * 2, last, rtol=1e-12, atol=1e-12)

    run_ranks(world, twice, world)


@WORLDS
def test_losses_are_the_same_bits_on_all_ranks(world: int) -> None:
    def lost(rank: int, world: int) -> Tensor:
        return Case(world, dtype=torch.float32).loss(reduction="none").detach()

    results = run_ranks(world, lost, world)
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        (torch.full((8,), CLASSES), {}, IndexError, "Target 7 is out of bounds"),
        (torch.full((8,), -1), {}, IndexError, "Target -1 is out of bounds"),
        (TARGET[:3], {}, ValueError, r"\(3,\)"),
        (TARGET, {"reduction": "most"}, ValueError, "most is not a valid value"),
        (TARGET, {"label_smoothing": 2.0}, ValueError, "label_smoothing must be between"),
    ],
)
def test_what_torch_refuses_is_refused(
    target: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def refused(rank: int) -> None:
        with pytest.raises(error, match=message):
            Case(2).loss(target, **options)

    run_ranks(2, refused)


@WORLDS
def test_sharded_logits_are_never_gathered(world: int) -> None:
    def counted(rank: int, world: int) -> None:
        case = Case(world)
        logits = from_local(case.local, -1, case.lengths, case.group)
        case.compare(F.cross_entropy(logits, TARGET), F.cross_entropy(case.whole, TARGET))
        per_row = 3 * 8 * (world - 1)
        assert case.group.moved == len(TARGET) * per_row
        smooth = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum", ignore_index=3)
        target = TARGET.clamp(min=0)
        case.compare(smooth(logits * 1, target), smooth(case.whole, target))
        assert case.group.moved == len(TARGET) * (per_row + 4 * 8 * (world - 1))

    run_ranks(world, counted, world)


@WORLDS
def test_other_forms_of_cross_entropy_see_the_full_logits(world: int) -> None:
    def compared(rank: int, world: int) -> None:
        case = Case(world)
        target, weight = TARGET.clamp(min=0), torch.linspace(0.5, 1, CLASSES, dtype=torch.float64)
        probabilities = torch.softmax(case.whole.detach().flip(0), -1)
        for function in (
            lambda x: F.cross_entropy(x, target, weight),
            lambda x: F.cross_entropy(x, probabilities),
            lambda x: F.cross_entropy(x[0], target[0]),
            lambda x: F.cross_entropy(x.view(2, 4, CLASSES), target.view(2, 4)[:, :1].expand(2, CLASSES) % 4),
            lambda x: F.cross_entropy(x.view(2, 4, CLASSES).transpose(1, 2), target.view(2, 4)),
            lambda x: F.nll_loss(F.log_softmax(x, dim=-1), target),
        ):
            found, expected = function(from_local(case.local, -1, case.lengths, case.group)), function(case.whole)
            assert not isinstance(found, Sharded)
            case.compare(found, expected)

    run_ranks(world, compared, world)


@WORLDS
def test_the_causal_loss_of_transformers_stays_sharded(world: int) -> None:
    def compared(rank: int, world: int) -> None:
        case = Case(world)
        labels = TARGET.view(2, 4)
        for options in ({}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": labels}):
            for recomputed in (False, True):

                def loss(x: Tensor, options: Any = options, recomputed: bool = recomputed) -> Tensor:
                    x = x.view(2, 4, CLASSES)
                    arguments = (x[:, slice(0, None), :] / 2, labels, CLASSES)
                    if recomputed:
                        return checkpoint(ForCausalLMLoss, *arguments, use_reentrant=False, **options)
                    return ForCausalLMLoss(*arguments, **options)

                before = case.group.moved
                logits = from_local(case.local, -1, case.lengths, case.group)
                # float32 inside, also in transformers
                case.compare(loss(logits), loss(case.whole), 1e-6)
                per_run = len(TARGET) * 3 * 4 * (world - 1)
                assert case.group.moved - before == per_run * (2 if recomputed else 1)

    run_ranks(world, compared, world)
