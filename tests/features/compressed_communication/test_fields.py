"""What `communication_dtype` may say."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.compressed_communication.fields import Communication, check, communication_of

WRONG: dict[str, tuple[Any, str, str]] = {
    "an unknown dtype": ("bf16", "language.communication.communication_dtype", "bfloat16"),
    "a float8 of no kind": ("float8", "language.communication.communication_dtype", "float8_e"),
    "no name": (16, "language.communication.communication_dtype", "bfloat16"),
    "an unknown kind": ({"gradient": "bfloat16"}, "language.communication.communication_dtype", "'gradients'"),
    "an unknown dtype of a kind": (
        {"payloads": "float16"},
        "language.communication.communication_dtype.payloads",
        "float32",
    ),
    "an option that is no bool": (
        {"gradients": "bfloat16", "stochastic_rounding": "yes"},
        "language.communication.communication_dtype.stochastic_rounding",
        "True",
    ),
    "random rounding of nothing": (
        {"stochastic_rounding": True},
        "language.communication.communication_dtype.stochastic_rounding",
        "gradients",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_its_path_with_what_would_work(name: str) -> None:
    said, field, fix = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        check({"modalities": {"language": Modality(communication={"communication_dtype": said})}})
    assert str(caught.value).startswith(f"modalities.{field}:")
    assert fix in str(caught.value)


def test_one_name_is_for_all_traffic_and_a_dict_for_some() -> None:
    assert communication_of(Modality()) == Communication()
    every = communication_of(Modality(communication={"communication_dtype": "bfloat16"}))
    assert every == Communication("bfloat16", "bfloat16", "bfloat16", "bfloat16")
    said: dict[str, Any] = {"gradients": "float8_e5m2", "payloads": None, "stochastic_rounding": True}
    some = communication_of(Modality(communication={"communication_dtype": said}))
    assert (some.of("gradients"), some.of("payloads"), some.stochastic_rounding) == ("float8_e5m2", None, True)
    for good in (None, "float32", said):
        check({"modalities": {"language": Modality(communication={"communication_dtype": good})}})
