"""The page of families says what its file of cells holds, and some families still hold what it says.

The default run measures one family; another one is `exhaustive`.
"""

from __future__ import annotations

import pytest
import torch

from sweeps import swept

from . import table
from .family import MAPPINGS, SHARDFORMER
from .measure import Measured

FEW = ("llava", "clip")


def test_the_page_is_made_of_the_file() -> None:
    assert table.PAGE.read_text() == table.page(table.load()), "python benchmarks/families.py --page"


@pytest.mark.parametrize("name", swept(FEW, "clip"))
@pytest.mark.usefixtures("float64")
def test_a_family_holds_what_the_page_says(name: str) -> None:
    """Each column of the table: "audio: rank 0; language: rank 1", and others that `cells` draws."""
    written = table.load()["families"][name]["cells"]
    one = Measured(name)
    found = {column: one.cell(column) for column in table.COLUMNS}
    assert {column: cell["status"] for column, cell in found.items()} == {
        column: cell["status"] for column, cell in written.items()
    }, found


def test_a_difference_is_no_green_cell() -> None:
    from .cells import Trained
    from .measure import compared

    one = Trained([1.0], [{"weight": torch.ones(2, dtype=torch.float64)}], {"weight": torch.ones(2)})
    other = Trained([1.0], [{"weight": torch.ones(2, dtype=torch.float64) + 1e-5}], {"weight": torch.ones(2)})
    assert compared(one, [one], 1e-6)["status"] == "ok"
    assert compared(one, [other], 1e-6)["status"] == "wrong"
    assert compared(one, [Trained([1.0], [{}], one.state)], 1e-6)["status"] == "wrong"


@pytest.mark.parametrize(
    ("cell", "text"),
    [({"status": "ok"}, "✓"), ({"status": "no", "note": "why"}, "✗ [1](#reasons)"), (None, "not measured")],
)
def test_a_cell_that_was_not_measured_is_not_green(cell: table.Table | None, text: str) -> None:
    assert table.shown(cell, {}) == text


def test_families_have_names_and_classes() -> None:
    assert len(MAPPINGS) >= 10
    assert len(SHARDFORMER) >= 20
