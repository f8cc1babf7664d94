"""What `interleaved_microbatches` may say."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.interleaving.fields import check


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"interleaved_microbatches": 2}, "there are none"),
        ({"interleaved_microbatches": 0, "tp_size": 2}, "at least 1"),
        ({"interleaved_microbatches": 3, "tp_size": 2}, "divides num_microbatches=4"),
        (
            {"interleaved_microbatches": 2, "ep_size": 2, "dp_shard_size": 2},
            r"language\.sharding\.zero_stage=3",
        ),
        ({"interleaved_microbatches": 2, "tp_size": 2, "compile": True}, r"modalities\.language\.compute\.compile"),
        ({"interleaved_microbatches": 2, "tp_size": 4, "tp_mode": "2d"}, "tp_mode='2d'"),
        ({"interleaved_microbatches": 2, "tp_size": 2, "communication_dtype": "bfloat16"}, "on the wire"),
        ({"interleaved_microbatches": 2, "tp_size": 2, "speeds": [1, 2]}, "unlike numbers of microbatches"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check({"modalities": {"language": Modality(**fields)}, "num_microbatches": 4})
    assert "interleaved_microbatches" in str(error.value)


def test_a_size_of_microbatches_leaves_their_number_open() -> None:
    modalities = {"language": Modality(tp_size=2, pipeline={"interleaved_microbatches": 2})}
    with pytest.raises(ConfigError, match="in place of microbatch_size"):
        check({"modalities": modalities, "num_microbatches": None, "microbatch_size": 2})


def test_modalities_that_interleave_take_one_number() -> None:
    modalities = {
        "vision": Modality(tp_size=2, pipeline={"interleaved_microbatches": 2}),
        "language": Modality(tp_size=2, pipeline={"interleaved_microbatches": 4}),
    }
    with pytest.raises(ConfigError, match="take one number"):
        check({"modalities": modalities, "num_microbatches": 4})
