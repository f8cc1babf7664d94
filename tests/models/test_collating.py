"""Batches of conversations: what is learned, what is too long, and rows of several samples."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_mm5d import MultimodalCollator, MultimodalModel
from lightning_mm5d.config.errors import ConfigError
from models.tiny_composed import composed, image, processor, sound, talk

ROWS = [
    {**talk(image(0), "what is this?", image(1)), "source": "a.jsonl, line 1"},
    {**talk("hello", answer="a dog and a cat"), "source": "a.jsonl, line 2"},
    {**talk(sound(0), "and this?", image(2), answer=""), "source": "a.jsonl, line 3"},
]


@pytest.fixture(scope="module", params=["llama", "opt"])
def model(request: pytest.FixtureRequest) -> MultimodalModel:
    return composed(request.param).eval()


def logits(model: MultimodalModel, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of each document of a packed batch, in order."""
    with torch.no_grad():
        found = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    result = []
    for row, positions in zip(found, batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        result += [row[start:end] for start, end in pairwise(starts)]
    return result


def test_packed_samples_never_see_each_other(model: MultimodalModel) -> None:
    made = processor(model)
    packed = MultimodalCollator(made, 400, packing=True)
    batch = packed(ROWS)
    assert batch["input_ids"].shape[0] == 1
    assert "attention_mask" not in batch
    assert batch["vision_items"].tolist() == [3]
    single = MultimodalCollator(made)
    found = logits(model, batch)
    for index, row in enumerate(ROWS):
        with torch.no_grad():
            alone = model(**single([row])).logits[0]
        torch.testing.assert_close(found[index], alone, atol=1e-5, rtol=0)
        others = [{**talk(image(7), "cat?"), "source": "b"} if at < index else other for at, other in enumerate(ROWS)]
        torch.testing.assert_close(logits(model, packed(others))[index], alone, atol=1e-5, rtol=0)


def test_the_loss_of_packed_samples_is_that_of_padded_ones(model: MultimodalModel) -> None:
    made = processor(model)
    padded = MultimodalCollator(made)(ROWS)
    for length in (400, len(padded["input_ids"][0])):
        packed = MultimodalCollator(made, length, packing=True)(ROWS)
        torch.testing.assert_close(model(**packed).loss, model(**padded).loss)
    padded_out = MultimodalCollator(made, 400, packing=True, pad_to_max_length=True)(ROWS)
    assert padded_out["input_ids"].shape == padded_out["position_ids"].shape == (1, 400)
    torch.testing.assert_close(model(**padded_out).loss, model(**padded).loss)


def test_items_follow_their_samples_into_rows(model: MultimodalModel) -> None:
    made = processor(model)
    lengths = [len(made.encode(row)) for row in ROWS]
    batch = MultimodalCollator(made, lengths[0] + lengths[2], packing=True)([ROWS[0], ROWS[1], ROWS[2]])
    rows = batch["position_ids"].eq(0).sum(1)
    assert batch["vision_items"].sum() == 3
    assert len(rows) == 2 or lengths[1] <= lengths[2]
    torch.testing.assert_close(model(**batch).loss, model(**MultimodalCollator(made)(ROWS)).loss)


def test_the_first_token_of_a_document_is_not_learned() -> None:
    marked = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    made = processor(composed(), marked)
    rows: list[Any] = [{"messages": [{"role": "assistant", "content": text}]} for text in ("ab", "cd")]
    batch = MultimodalCollator(made, 100, packing=True)(rows)
    starts = batch["position_ids"] == 0
    assert (batch["labels"][starts] == -100).all()
    assert (batch["labels"][~starts] >= 0).all()


def test_samples_that_are_too_long_are_refused_dropped_or_cut_by_name() -> None:
    made = processor(composed())
    image_last = {**talk("a", answer="b"), "source": "c.jsonl, line 4"}
    image_last["messages"] = [*image_last["messages"], *talk(image(0))["messages"]]
    lengths = [len(made.encode(row)) for row in ROWS]
    limit = lengths[0] - 1
    short = [{**talk("a"), "source": "short"}]
    with pytest.raises(ConfigError, match=rf"line 1.*{lengths[0]} tokens, more than max_length={limit}"):
        MultimodalCollator(made, limit)(ROWS[:1])
    with pytest.warns(UserWarning, match="line 1 is left out"):
        batch = MultimodalCollator(made, limit, too_long="drop")([*ROWS[:1], *short])
    assert len(batch["input_ids"]) == 1
    with pytest.warns(UserWarning, match="left out"), pytest.raises(ConfigError, match="at least one sample"):
        MultimodalCollator(made, limit, too_long="drop")(ROWS[:1])
    batch = MultimodalCollator(made, limit, too_long="cut")(ROWS[:1])
    assert batch["input_ids"].shape == (1, limit)
    whole = MultimodalCollator(made)(ROWS[:1])
    for key in ("input_ids", "labels"):
        assert torch.equal(batch[key], whole[key][:, :limit])
    last = max(at for at, token in enumerate(made.encode(image_last).ids) if token == made.token_ids["vision"])
    with pytest.raises(ConfigError, match=r"line 4.*features of its items"):
        MultimodalCollator(made, last, too_long="cut")([image_last])
    MultimodalCollator(made, last + 1, too_long="cut")([image_last])
    with pytest.raises(ConfigError, match="nothing to learn"):
        MultimodalCollator(made, 5, too_long="cut")([talk("a long question without items", answer="b")])


def test_a_sample_without_an_answer_is_refused_by_name() -> None:
    row = {"messages": talk("a")["messages"][:1], "source": "a.jsonl, line 9"}
    with pytest.raises(ConfigError, match=r"line 9.*no labels"):
        MultimodalCollator(processor(composed()))([row])


def test_prompts_are_padded_on_the_left_and_have_no_answers() -> None:
    made = processor(composed())
    batch = MultimodalCollator(made, prompts=True)(ROWS)
    assert "labels" not in batch
    assert (batch["attention_mask"][:, -1] == 1).all()
    for ids in batch["input_ids"]:
        assert made.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing": True}, "Set max_length"),
        ({"too_long": "trim"}, "too_long"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": 8, "packing": True, "prompts": True}, "one sample each"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MultimodalCollator(processor(composed()), **options)


def test_a_language_model_that_cannot_be_packed_is_refused() -> None:
    made = processor(composed())
    made.config.text_config.model_type = "bloom"
    with pytest.raises(ConfigError, match="would see each other"):
        MultimodalCollator(made, 8, packing=True)


def test_a_collator_in_another_process_makes_the_same_batch() -> None:
    made = MultimodalCollator(processor(composed()), 400, packing=True)
    again = pickle.loads(pickle.dumps(made))
    one, other = made(ROWS), again(ROWS)
    assert all(torch.equal(one[key], other[key]) for key in one)
