"""Every family of language models takes features beside its own embeddings, and generates from them.

Embeddings are scaled in some families (Gemma), positions come from the mask in others (OPT): both must be as they are
without the composer.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.composed_pairs import Composed, Pair, batches_of
from models.tiny_language_models import LANGUAGE_MODELS, PLACEHOLDER

pytestmark = pytest.mark.usefixtures("float64")
NEW_TOKENS = 4


def built(name: str) -> tuple[Composed, dict[str, Tensor]]:
    """The module and a batch whose first samples have one item and two."""
    module = Composed(Pair("siglip", name)).eval()
    return module, batches_of(Pair("siglip", name), module)[0]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_text_without_items_gives_the_logits_of_the_language_model(name: str) -> None:
    module, batch = built(name)
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    text["input_ids"] = text["input_ids"].masked_fill(text["input_ids"] == PLACEHOLDER, PLACEHOLDER + 1)
    with torch.no_grad():
        own = module.model.language_model(**text, use_cache=False).logits
        torch.testing.assert_close(module.model(**text, use_cache=False).logits, own, rtol=0, atol=0)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_features_that_equal_embeddings_give_the_logits_of_these_tokens(name: str) -> None:
    module, batch = built(name)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    places = tokens == PLACEHOLDER
    other = tokens.masked_fill(places, PLACEHOLDER + 1)
    embeds = module.model.get_input_embeddings()(other)
    rows = [row[here] for row, here in zip(embeds, places, strict=True)]
    module.model.encoders["vision"].after_projector = lambda items: list(torch.cat(rows).split([len(i) for i in items]))
    with torch.no_grad():
        found = module.model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
        own = module.model.language_model(input_ids=other, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_generation_with_a_cache_gives_the_tokens_of_whole_passes(name: str) -> None:
    module, batch = built(name)
    one = {key: batch[key][1:2] for key in ("input_ids", "attention_mask", "vision_items")}
    one["pixel_values"] = batch["pixel_values"][1:3]
    length = int(one["attention_mask"].sum())
    tokens = one["input_ids"] = one["input_ids"][:, :length]
    one["attention_mask"] = one["attention_mask"][:, :length]
    with torch.no_grad():
        found = module.model.generate(
            **one, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, suppress_tokens=[PLACEHOLDER]
        )
        for _ in range(NEW_TOKENS):
            whole = {**one, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            logits = module.model(**whole, use_cache=False).logits[:, -1]
            logits[:, PLACEHOLDER] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert found[0, -NEW_TOKENS:].tolist() == tokens[0, -NEW_TOKENS:].tolist()
