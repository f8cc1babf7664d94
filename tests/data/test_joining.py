"""Results of microbatches of fewer samples than others are joined as theirs are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_mm5d.data.joining import merge


def test_a_list_of_samples_stays_one_where_fewer_are_as_many_as_their_rows() -> None:
    full, last = ([{"rows": list(torch.ones(size, 3))} for _ in range(2)] for size in (4, 3))
    lists = set[str]()
    merge(full, [4, 4], lists=lists)
    assert lists == {"['rows']"}
    assert [len(row) for row in merge(last, [3, 3], lists=lists)["rows"]] == [3] * 6


def test_a_row_of_a_microbatch_of_one_sample_may_be_squeezed() -> None:
    parts = [{"p": torch.ones(size, 1).squeeze(), "q": np.ones((size, 2)).squeeze()} for size in (3, 1)]
    merged = merge(parts, [3, 1])
    assert (merged["p"].shape, merged["q"].shape) == ((4,), (4, 2))
    with pytest.warns(UserWarning, match="has no row for each sample"):
        assert len(merge([torch.tensor(1.0), torch.zeros(3)], [2, 2])) == 2
