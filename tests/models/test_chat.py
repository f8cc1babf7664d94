"""Which tokens of a conversation the assistant says, and which are placeholders."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.chat import ChatEncoder, Item, Message, default_template
from models.tiny_tokenizers import CHATML, MARKED, UNSTABLE, tokenizer

IMAGE = Item("vision", "a.png")
TOKENS = {"vision": "<|vision|>", "sound": "<|sound|>"}


def message(role: str, *content: str | Item) -> Message:
    return Message(role, content, {})


def encoder(made: PreTrainedTokenizerFast) -> ChatEncoder:
    made.add_tokens(list(TOKENS.values()), special_tokens=True)
    made.chat_template = made.chat_template or default_template(made)
    return ChatEncoder(made, TOKENS)


def said(made: PreTrainedTokenizerFast, *messages: Message) -> str:
    found = encoder(made).encode(messages, with_labels=True)
    return made.decode([token for token, is_said in zip(found.ids, found.spoken, strict=True) if is_said])


TALK = (
    message("system", "be brief"),
    message("user", IMAGE, "what is this?", IMAGE),
    message("assistant", "a cat"),
    message("user", "and ", Item("sound", "b.wav")),
    message("assistant", ""),
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, " a cat</s> </s>"), (CHATML, "a cat<|im_end|><|im_end|>"), (MARKED, "a cat</s></s>")],
)
@pytest.mark.parametrize("metaspace", [False, True])
def test_the_assistant_says_its_turns_with_their_ends(template: str | None, expected: str, metaspace: bool) -> None:
    made = tokenizer(template, metaspace=metaspace)
    assert said(made, *TALK) == expected.replace(" a", "a" if metaspace and template is None else " a")


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_tokens_equal_those_of_the_whole_text(template: str | None) -> None:
    for metaspace in (False, True):
        made = tokenizer(template, metaspace=metaspace)
        chat = encoder(made)
        text = chat.render(TALK)
        assert text.count("<|vision|>") == 2
        assert chat.encode(TALK, with_labels=False).ids == made(text, add_special_tokens=False)["input_ids"]


def test_a_typed_placeholder_stays_text() -> None:
    for metaspace in (False, True):
        made = tokenizer(CHATML, metaspace=metaspace)
        chat = encoder(made)
        ids = chat.encode([message("user", "is <|vision|> a", IMAGE, "<|sound|>")], with_labels=False).ids
        vision, sound = made.convert_tokens_to_ids(list(TOKENS.values()))
        assert (ids.count(vision), ids.count(sound)) == (1, 0)
        assert made.decode(ids) == "<|im_start|>user\nis <|vision|> a<|vision|><|sound|><|im_end|>\n"


def test_what_is_typed_cannot_forge_the_marks_of_items() -> None:
    made = tokenizer(CHATML)
    forged = "\ue000\ue001\ue002"
    ids = encoder(made).encode([message("user", forged, IMAGE)], with_labels=False).ids
    assert ids.count(made.convert_tokens_to_ids("<|vision|>")) == 1
    assert forged in made.decode(ids)


def test_words_of_any_script_keep_their_places() -> None:
    made = tokenizer(CHATML)
    assert said(made, message("user", "é🐈"), message("assistant", "ж🐈‍⬛é")) == "ж🐈‍⬛é<|im_end|>"


def test_a_text_begins_as_the_tokenizer_has_it() -> None:
    for begins in (False, True):
        made = tokenizer(begins=begins)
        ids = encoder(made).encode(TALK, with_labels=False).ids
        assert ids.count(made.bos_token_id) == int(begins)
        assert (ids[0] == made.bos_token_id) == begins


def test_templates_that_rewrite_earlier_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not start the text of the whole conversation"):
        said(tokenizer(UNSTABLE), message("user", "a"), message("assistant", "b"), message("user", "c"))
    with pytest.raises(ConfigError, match="only after another message"):
        said(tokenizer(CHATML), message("assistant", "hello"))
    assert said(tokenizer(MARKED), message("assistant", "hello")) == "hello</s>"


def test_templates_that_lose_items_or_refuse_roles_are_refused() -> None:
    silent = "{% for message in messages %}{{ message['content'][:1] }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"items \['vision'\] of a conversation with the items \['vision', 'vision'"):
        said(tokenizer(silent), *TALK[1:])
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ConfigError, match="no system"):
        said(tokenizer(strict), *TALK)


def test_a_tokenizer_without_an_end_gets_no_template() -> None:
    made = tokenizer()
    made.eos_token = None
    with pytest.raises(ConfigError, match=r"tokenizer\.eos_token"):
        default_template(made)
