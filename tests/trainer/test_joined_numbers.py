"""Numbers and states beside rows: what belongs to a batch stays itself, counts sum, and a guess is told of."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mm5d.data.joining import BatchNumber, Sizes, merge
from lightning_mm5d.source.loops import appended_by_data
from lightning_mm5d.trainer.kept_values import KeptValues

COUNT = "is summed as a count"
DIM = "is joined along dim"


def quiet(outputs: list[Any], samples: list[int]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return merge(outputs, samples)


def test_a_number_of_the_batch_stays_and_counts_sum() -> None:
    outputs = [{"pred": torch.zeros(2), "idx": BatchNumber(2), "n": 2, "right": right} for right in (2, 1)]
    joined = quiet(outputs, [2, 2])
    assert (joined["idx"], joined["n"], joined["right"], len(joined["pred"])) == (2, 4, 3, 4)
    assert type(joined["idx"]) is int


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_means_are_weighed_as_the_loss_is(make: Any) -> None:
    sizes = Sizes([2, 2, 2])
    assert float(merge([make(1.0), make(2.0), make(6.0)], sizes)) == pytest.approx(3.0)
    sizes.weights = (3.0, 1.0, 0.0)  # label tokens
    assert float(merge([make(1.0), make(2.0), make(float("nan"))], sizes)) == pytest.approx(1.25)


def test_an_equal_integer_that_is_no_number_of_samples_is_told_of() -> None:
    with pytest.warns(UserWarning, match=rf"in \['classes'\], .*{COUNT}"):
        assert merge([{"classes": 7}, {"classes": 7}], [2, 2]) == {"classes": 14}
    assert quiet([0, 0], [2, 2]) == 0
    assert quiet([BatchNumber(3), BatchNumber(4)], [2, 2]) == 7  # what differs is no number of the batch


def test_bools_stay_where_they_are_equal() -> None:
    assert quiet([True, True], [2, 2]) is True
    assert quiet([True, False], [2, 2]) == [True, False]
    assert quiet([torch.tensor(False)] * 2, [2, 2]).item() is False


def test_a_number_of_the_batch_is_plain_in_copies_and_files() -> None:
    number = BatchNumber(5)
    for plain in (copy.deepcopy(number), pickle.loads(pickle.dumps(number)), number + 1):
        assert type(plain) is int


@pytest.mark.parametrize(("sizes", "layers"), [((3, 2), 3), ((3, 2), 2), ((4, 3), 2)])
def test_states_are_joined_along_the_dim_that_changes_with_the_microbatch(sizes: tuple[int, int], layers: int) -> None:
    whole = torch.randn(layers, sum(sizes), 4)
    parts = [(part, -part) for part in whole.split(sizes, dim=1)]
    h, c = quiet(parts, list(sizes))
    assert torch.equal(h, whole)
    assert torch.equal(c, -whole)


def test_a_dim_of_samples_that_is_a_guess_is_told_of() -> None:
    whole = torch.randn(2, 4, 3)
    with pytest.warns(UserWarning, match=f"{DIM} 0"):
        assert merge([*whole.split(2, dim=1)], [2, 2]).shape == (4, 2, 3)
    with pytest.warns(UserWarning, match=f"{DIM} 1"):
        assert torch.equal(merge([*whole[:1].split(2, dim=1)], [2, 2]), whole[:1])
    assert quiet([torch.ones(3, 2, 5)] * 2, [2, 2]).shape == (3, 2, 5)  # a constant
    assert quiet([torch.randn(2, 2)] * 2, [2, 2]).shape == (4, 2)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.by_batch: dict[int, Any] = {}


def kept(*entries: Any, samples: list[int], before: list[Any] | None = None) -> Any:
    """What a module's list holds after microbatches have appended these."""
    module: Any = Keeps()
    module.outs += before or []
    values = KeptValues(module)
    for entry in entries:
        module.outs.append(entry)
        values.mark()
    values.join(samples)
    return module.outs


def test_an_entry_with_rows_and_numbers_is_one_of_the_batch() -> None:
    made = [{"pred": torch.ones(2), "idx": BatchNumber(1), "n": 2, "stage": "val", "none": None} for _ in range(2)]
    (joined,) = kept(*made, samples=[2, 2])
    assert joined["pred"].tolist() == [1.0] * 4
    assert (joined["idx"], joined["n"], joined["stage"], joined["none"]) == (1, 4, "val", None)
    assert kept(BatchNumber(1), BatchNumber(1), samples=[2, 2]) == [1]


def test_microbatches_of_one_sample_append_one_entry_of_the_batch() -> None:
    assert kept(torch.tensor(1.0), torch.tensor(3.0), samples=[1, 1]) == [torch.tensor(2.0)]
    module: Any = Keeps()
    module.outs = {"loss": []}
    values = KeptValues(module)
    for loss in (1.0, 3.0):
        module.outs["loss"].append(loss)
        values.mark()
    values.join(Sizes([1, 1]))
    assert module.outs["loss"] == [2.0]


def test_entries_with_integers_that_may_be_anything_stay_apart() -> None:
    made = [{"pred": torch.ones(2), "first": first} for first in (5, 6)]
    assert [one["first"] for one in kept(*made, samples=[2, 2])] == [5, 6]
    assert len(kept({"name": "a"}, {"name": "b"}, samples=[2, 2])) == 2


def test_an_entry_under_the_number_of_the_batch_is_that_of_the_batch() -> None:
    module: Any = Keeps()
    for sizes in ([2, 2], [3, 1]):
        values = KeptValues(module)
        for size in sizes:
            module.by_batch[BatchNumber(0)] = size
            values.mark()
        values.join(sizes)
        assert module.by_batch == {0: 4}


def test_what_microbatches_add_to_one_tensor_is_no_row_for_each_sample() -> None:
    module: Any = Keeps()
    module.right = 0
    values = KeptValues(module)
    for right in ([1, 2, 3], [0, 1, 0]):
        module.right += torch.tensor(right)
        values.mark()
    values.join([3, 3])
    assert module.right.tolist() == [1, 3, 3]


def test_an_attribute_that_code_adds_to_is_known() -> None:
    class Adds(nn.Module):
        def step(self, right: Any) -> None:
            self.right = self.right + right.sum(0)
            self.last = self.right + right
            self.history = self.history + [right]  # noqa: RUF005

    assert appended_by_data(Adds) == {"right"}


def test_a_tensor_put_anew_that_is_reduced_over_samples_is_told_of() -> None:
    module: Any = Keeps()
    values = KeptValues(module)
    for total in ([1.0, 2.0, 3.0], [0.0, 1.0, 0.0]):
        module.total = torch.tensor(total)
        values.mark()
    with pytest.warns(UserWarning, match=r"\(3,\) into 'total' .*that of the last one.*num_microbatches: 1"):
        values.join([4, 4])


@pytest.mark.parametrize(("rows", "is_told"), [((8, 4), True), ((8, 3), False), ((0, 0), False)])
def test_several_rows_for_each_sample_are_a_list_with_a_warning_that_says_how(
    rows: tuple[int, int], is_told: bool
) -> None:
    outputs = [torch.full((count, 2), float(index)) for index, count in enumerate(rows)]
    if not any(rows):
        outputs[1] = torch.zeros(0, 3)
    with pytest.warns(UserWarning, match="has no row for each sample") as caught:
        merged = merge(outputs, [4, 2])
    assert [tuple(part.shape) for part in merged] == [tuple(part.shape) for part in outputs]
    assert ("x.unflatten(0, (-1, 2)), if the rows of a sample follow each other" in str(caught[0].message)) == is_told
