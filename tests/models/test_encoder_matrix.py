"""Composed models in any layout give the losses, gradients and parameters of one process.

Every encoder is trained with two language models, and every language model with two encoders, in the layouts of
`composed_pairs.py`: each part on ranks of its own, with two stages of the language model, and with both parts tensor
parallel.
"""

from __future__ import annotations

import pytest

from models.composed_pairs import LAYOUTS, Pair, assert_equal
from models.tiny_encoders import ENCODERS, available
from models.tiny_language_models import LANGUAGE_MODELS

pytestmark = pytest.mark.usefixtures("float64")
PAIRS = [
    *(Pair(encoder, language) for language in ("llama", "gpt2") for encoder in ENCODERS),
    *(
        Pair(encoder, language)
        for encoder in ("clip", "whisper")
        for language in LANGUAGE_MODELS
        if language not in ("llama", "gpt2")
    ),
]
NOT_SHARDED = ("convnext",)
"""encoders that `tp_size` refuses"""
REDUCED = [
    ("qwen2_5_vl", "gemma2", "pp 2"),
    ("clip_video", "qwen3_moe", "modality parallel"),
    ("phi4_audio", "phi3", "tp 2"),
]


@pytest.mark.parametrize(("encoder", "language", "which"), REDUCED, ids=str)
def test_some_composed_models_equal_one_process(encoder: str, language: str, which: str) -> None:
    assert_equal(Pair(encoder, language), which)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", LAYOUTS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_composed_model_equals_one_process(pair: Pair, which: str) -> None:
    if not available(pair.encoder):
        pytest.skip("needs timm")
    if which == "tp 2" and pair.encoder in NOT_SHARDED:
        pytest.skip("no plan is known for it")
    assert_equal(pair, which)
