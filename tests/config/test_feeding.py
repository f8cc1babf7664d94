"""Which modality feeds which, and what no step could run."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.config.checks import check
from lightning_mm5d.config.modality import consumers_of, loss_modality_of, running_order


def make(**said: dict[str, Any]) -> dict[str, Modality]:
    return {name: Modality(**fields) for name, fields in said.items()}


def test_the_last_that_no_other_feeds_from_computes_the_loss() -> None:
    both = make(language={}, image={"feeds_from": "language"}, talker={}, vision={})
    assert loss_modality_of(both) == "talker"
    assert loss_modality_of(make(talker={}, language={}, wave={"feeds_from": "talker", "module": "wave"})) == "wave"
    assert loss_modality_of(make(vision={}, language={})) == "language"


def test_encoders_feed_the_language_model_and_all_losses_meet_in_the_last_stage() -> None:
    found = make(language={}, image={"feeds_from": ["language"]}, talker={}, vision={"feeds": "all"})
    assert consumers_of(found) == {
        "language": {"image": "ends", "talker": "ends"},
        "image": {"talker": "last"},
        "vision": {"language": "all"},
    }
    assert running_order(found)[-1] == "talker"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"feeds_from": "langage"}, r"modalities.a.feeds_from: got 'langage'.*names another modality.*'language'"),
        ({"feeds_from": "a"}, r"modalities.a.feeds_from: got 'a'.*names another modality"),
        ({"feeds_from": 3}, r"modalities.a.feeds_from: got 3.*name of a modality, or a list"),
        ({"feeds_from": ["language", "language"]}, r"each modality is named once"),
        ({"feeds_from": "language", "feeds": "all"}, r"modalities.a.feeds: got 'all'.*Leave feeds unset"),
        ({"feeds_from": "b"}, r"is a circle"),
        ({"feeds_from": "vision"}, r"runs after 'language'.*Use \['language', 'vision'\]"),
        ({"feeds_from": "language", "cp_mode": "items"}, r"modalities.a.context.cp_mode"),
    ],
)
def test_what_no_step_could_run_is_refused(said: dict[str, Any], error: str) -> None:
    modalities = make(language={}, vision={}, b={"feeds_from": "a", "module": "b"}, a={"module": "a", **said})
    with pytest.raises(ConfigError, match=f"(?i){error}"):
        check(modalities, num_microbatches=1, schedule="1f1b")


def test_stages_that_the_language_model_feeds_are_not_said() -> None:
    modalities = make(language={"feeds": "all"}, talker={})
    with pytest.raises(ConfigError, match=r"modalities.language.feeds.*Leave feeds unset"):
        check(modalities, num_microbatches=1, schedule="1f1b")
