"""A saved composed model is the same when it is read again, whatever its encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_mm5d import MultimodalModel
from models.composed_pairs import Composed, Pair, batches_of
from models.tiny_encoders import ENCODERS, available


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENCODERS)
def test_a_saved_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    if not available(name):
        pytest.skip("needs timm")
    module = Composed(Pair(name, "llama")).eval()
    batch = batches_of(Pair(name, "llama"), module)[0]
    del batch["labels"]
    module.model.save_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = module.model(**batch, use_cache=False).logits
        # what transformers keeps in no file, such as frequencies of rotations, is made anew
        torch.testing.assert_close(again(**batch, use_cache=False).logits, expected, rtol=0, atol=1e-6)
