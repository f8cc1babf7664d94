"""A parser that builds the strategy does not bury what its constructor refuses: the trainer raises it as it is."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

from lightning_mm5d import ConfigError, MultimodalStrategy

CASES = {
    r"modalities\.vision\.pp_siz: got 2\. .* Did you mean 'pp_size'": {"modalities": {"vision": {"pp_siz": 2}}},
    r"modalities\.vision\.pp_size: got 'two'": {"modalities": {"vision": {"pp_size": "two"}}},
    r"batching\.num_microbatches: got 0": {"num_microbatches": 0},
    r"batching\.num_microbatches: got 'two'\. It is a whole number": {"num_microbatches": "two"},
    r"launch\.bucket_bytes: got 'big'\. It is a whole number": {"bucket_bytes": "big"},
    r"checkpoint\.checkpoint_format: got 'ful'\. .* Did you mean 'full'": {"checkpoint": "ful"},
    r"launch\.timeout: got 'soon'\. It is a datetime\.timedelta": {"timeout": "soon"},
    r"checkpoint\.async_checkpoint: got 3\. It is true or false": {"async_checkpoint": 3},
    r"schedule: got '1f1'": {"schedule": "1f1"},
}


@pytest.mark.parametrize("message", CASES)
def test_the_trainer_raises_what_a_field_of_a_file_is_refused_for(message: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=str | Strategy)
    settings: Any = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": CASES[message]}
    made = parser.instantiate(parser.parse_object({"strategy": settings})).strategy
    with pytest.raises(ConfigError, match=message):
        L.Trainer(accelerator="cpu", strategy=made)
    with pytest.raises(ConfigError, match=message):
        MultimodalStrategy(**CASES[message])
