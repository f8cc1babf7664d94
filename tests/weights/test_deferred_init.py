"""A module that is built deferred and made later equals one that was built as ever."""

from __future__ import annotations

import pytest

from zoo import CASES

from .construction import assert_as_ever
from .odd_modules import ODD


@pytest.mark.parametrize("name", list(CASES))
def test_families_of_the_zoo_come_out_as_ever(name: str) -> None:
    assert_as_ever(CASES[name].make_module)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for a deprecated property
@pytest.mark.parametrize("name", list(ODD))
def test_odd_constructors_come_out_as_ever(name: str) -> None:
    assert_as_ever(ODD[name])
