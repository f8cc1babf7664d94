"""Numbers of bytes as people write them."""

from __future__ import annotations

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.tables import bytes_of


@pytest.mark.parametrize(
    ("said", "size"), [("16GB", 16 * 10**9), ("80GiB", 80 * 2**30), ("1.5 kb", 1500), ("42", 42), (7, 7)]
)
def test_bytes_are_read_with_their_unit(said: object, size: int) -> None:
    assert bytes_of("memory_limit", said) == size


@pytest.mark.parametrize("said", ["16 apples", "", "-1", "0GB", True, "9" * 400, "1e30", 2**63])
def test_rejects_what_is_no_number_of_bytes(said: object) -> None:
    with pytest.raises(ConfigError, match="memory_limit"):
        bytes_of("memory_limit", said)
