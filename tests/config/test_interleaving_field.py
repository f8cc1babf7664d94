"""What `interleaved_microbatches` may say."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d import Modality
from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"interleaved_microbatches": 2}, "there are none"),
        ({"interleaved_microbatches": 0, "tp_size": 2}, "at least 1"),
        ({"interleaved_microbatches": 3, "tp_size": 2}, "divides num_microbatches=4"),
        ({"interleaved_microbatches": 2, "tp_size": 2, "ep_size": 2}, "With ep_size"),
        ({"interleaved_microbatches": 2, "tp_size": 2, "dp_shard_size": 2}, "zero_stage=3"),
        ({"interleaved_microbatches": 2, "tp_size": 2, "compile": True}, "Compiled"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check({"language": Modality(**fields)}, num_microbatches=4, schedule="1f1b", schedules=("1f1b",))
    assert "interleaved_microbatches" in str(error.value)


def test_modalities_that_interleave_take_one_number() -> None:
    modalities = {
        "vision": Modality(tp_size=2, interleaved_microbatches=2),
        "language": Modality(tp_size=2, interleaved_microbatches=4),
    }
    with pytest.raises(ConfigError, match="take one number"):
        check(modalities, num_microbatches=4, schedule="1f1b", schedules=("1f1b",))
