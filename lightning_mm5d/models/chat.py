"""Renders a conversation with a chat template and tells which of its tokens the assistant says.

Items (images, sounds, videos) take part in a conversation as `Item` objects between strings, never as words: a
placeholder token that somebody typed into a message stays text. While the template runs, each item is one character
that no message uses, so that any template that copies strings can be used.

What the assistant says is marked by ``{% generation %}`` in the template. For templates without that mark it is the
difference between renderings of the first n and n + 1 messages; a template that does not extend its own output is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightning_mm5d.config.errors import ConfigError

_PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning; those that a message uses are left alone
_DEFAULT_TEMPLATE = (
    "BOS{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "ASSISTANT:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }}{{ '\\n' }}"
    "{% else %}{{ message['role'] | upper }}: {{ message['content'] }}{{ '\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class Item:
    """One image, sound or other item of modality `name` in a message; `value` is a path or the item itself."""

    name: str
    value: Any


@dataclass(frozen=True)
class Message:
    """One turn: `content` holds strings and items in order; `extra` holds further keys that a template may read."""

    role: str
    content: tuple[str | Item, ...]
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class EncodedChat:
    """Token ids ``[S]`` with one placeholder per item, and for each token whether the assistant says it."""

    ids: list[int]
    said: list[bool]


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """A plain template (``USER: ...``, ``ASSISTANT: ...</s>``) that starts as `tokenizer` starts a text.

    Raises:
        ConfigError: `tokenizer` has no token that ends a turn.
    """
    if tokenizer.eos_token is None:
        rule = "A turn of the assistant ends with the tokenizer's eos_token, and this tokenizer has none"
        raise ConfigError("tokenizer.eos_token", None, rule, "Set tokenizer.eos_token, or tokenizer.chat_template")
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return _DEFAULT_TEMPLATE.replace("BOS", "{{ bos_token }}" if begins else "", 1)


class ChatEncoder:
    """Encodes conversations for one tokenizer.

    Args:
        tokenizer: a fast tokenizer with a chat template, in which each of `tokens` is one token.
        tokens: the placeholder token of each modality.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> None:
        self._tokenizer, self._tokens = tokenizer, dict(tokens)

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation as text with one placeholder token per item."""
        marks = _Marks(messages, self._tokens)
        template = self._template()
        text, _ = self._rendered(marks.plain(messages), template, with_spans=False, **options)
        marks.check(text, messages, template)
        return marks.spelled(text)[0]

    def encode(self, messages: Sequence[Message], *, with_labels: bool, **options: Any) -> EncodedChat:
        """Render and tokenize a conversation.

        Args:
            messages: the conversation.
            with_labels: whether to find what the assistant says; else no token is marked.
            options: for the template, such as ``add_generation_prompt`` and ``tools``.

        Raises:
            ConfigError: the template fails, loses an item, or does not extend its own output.
        """
        marks = _Marks(messages, self._tokens)
        plain, template = marks.plain(messages), self._template()
        marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        text, spans = self._rendered(plain, template, with_spans=with_labels and marked, **options)
        marks.check(text, messages, template)
        if with_labels and not marked:
            spans = list(self._turns(plain, template, text, options))
        ids, places = self._tokenized(text, marks)
        said = [any(start < end and stop > begin for begin, end in spans) for start, stop in places]
        if with_labels and not marked:
            said = self._without_space_after_turns(ids, said)
        return EncodedChat(ids, said)

    def _template(self) -> str:
        return str(self._tokenizer.get_chat_template())

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], template: str, *, with_spans: bool, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        if not messages:
            raise ConfigError("messages", [], "A conversation has at least one message", "Add one")
        options = {**self._tokenizer.special_tokens_map, **options}
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=template,
                return_assistant_tokens_mask=with_spans,
                **options,
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            rule = f"The tokenizer's chat template refuses these roles: {error}"
            raise ConfigError("messages", roles, rule, "Change the messages, or set tokenizer.chat_template") from error
        texts, spans = rendered  # annotated as a string
        return texts[0], list(spans[0]) if with_spans else []

    def _turns(
        self, messages: Sequence[Mapping[str, Any]], template: str, text: str, options: Mapping[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """The characters of each turn of the assistant, by rendering the conversation up to it."""
        options = {**options, "add_generation_prompt": False}
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            fix = (
                "Put {% generation %} and {% endgeneration %} around what the assistant says in tokenizer.chat_template"
            )
            if index == 0:
                rule = "A template without {% generation %} shows turns of the assistant only after another message"
                raise ConfigError("messages[0].role", "assistant", rule, fix)
            prompt = {**options, "add_generation_prompt": True}
            before, _ = self._rendered(messages[:index], template, with_spans=False, **prompt)
            after, _ = self._rendered(messages[: index + 1], template, with_spans=False, **options)
            if not (text.startswith(after) and after.startswith(before)):
                rule = f"Its text up to message {index} does not start the text of the whole conversation, so what the "
                rule += "assistant says cannot be told"
                raise ConfigError("tokenizer.chat_template", template[:200], rule, fix)
            yield len(before), len(after)

    def _without_space_after_turns(self, ids: list[int], said: list[bool]) -> list[bool]:
        """`said` without white space after the token that ends a turn: a model stops at that token."""
        special = set(self._tokenizer.added_tokens_decoder) - {
            self._tokenizer.convert_tokens_to_ids(token) for token in self._tokens.values()
        }
        result, end = list(said), len(ids)
        while end > 0:
            start = end
            while start > 0 and said[start - 1]:
                start -= 1
            last = next((at for at in range(end - 1, start - 1, -1) if ids[at] in special), None)
            if last is not None and not str(self._tokenizer.decode(ids[last + 1 : end])).strip():
                result[last + 1 : end] = [False] * (end - last - 1)
            end = start - 1 if start == end else start
        return result

    def _tokenized(self, text: str, marks: _Marks) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the first character in `text` of each token and the one after its last."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for piece, typed in marks.pieces(text):
            words, origins = marks.spelled(piece, at)
            for token, (start, stop) in self._piece(words, first=not ids, typed=typed):
                ids.append(token)
                places.append((origins[start], origins[stop - 1] + 1) if stop > start else (-1, -1))
            at += len(piece)
        return ids, places

    def _piece(self, words: str, *, first: bool, typed: bool) -> list[tuple[int, tuple[int, int]]]:
        """Tokens of `words` and their characters; `typed` words are text even where they spell a placeholder."""
        lead = "" if first else "\n"  # tokenizers put a space before the first word of a text
        options = {"split_special_tokens": True} if typed else {}
        skipped = self._tokenizer(lead, add_special_tokens=False)["input_ids"] if lead else []
        found = self._tokenizer(lead + words, add_special_tokens=False, return_offsets_mapping=True, **options)
        if found["input_ids"][: len(skipped)] != skipped:
            return self._piece(words, first=True, typed=typed)
        pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return [(token, (max(0, a - len(lead)), b - len(lead))) for token, (a, b) in list(pairs)[len(skipped) :]]


class _Marks:
    """Characters that stand for items, and for placeholder tokens that somebody typed, while a template runs."""

    def __init__(self, messages: Sequence[Message], tokens: Mapping[str, str]) -> None:
        used = set(json.dumps([m.extra for m in messages], default=str, ensure_ascii=False))
        used.update(*(part for m in messages for part in m.content if isinstance(part, str)))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self._items = {name: next(free) for name in tokens}
        self._typed = {token: next(free) for token in sorted(tokens.values(), key=len, reverse=True)}
        self._words = {mark: tokens[name] for name, mark in self._items.items()}
        self._words |= {mark: token for token, mark in self._typed.items()}

    def plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as templates take them, with marks in place of items and of typed placeholders."""
        return [
            {**self._cleaned(m.extra), "role": m.role, "content": "".join(self._part(part) for part in m.content)}
            for m in messages
        ]

    def check(self, text: str, messages: Sequence[Message], template: str) -> None:
        """Raise unless `text` has the items of `messages`, in their order."""
        given = [part.name for m in messages for part in m.content if isinstance(part, Item)]
        names = {mark: name for name, mark in self._items.items()}
        shown = [names[character] for character in text if character in names]
        if given != shown:
            rule = f"It gives a text with the items {shown} of a conversation with the items {given}"
            fix = "Set tokenizer.chat_template to one that writes the content of each message once, in order"
            raise ConfigError("tokenizer.chat_template", template[:200], rule, fix)

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """`text` cut at typed placeholders, and for each piece whether it is one."""
        marks = "".join(self._typed.values())
        cut = re.split(f"([{marks}])", text) if marks else [text]
        return [(piece, index % 2 == 1) for index, piece in enumerate(cut) if piece]

    def spelled(self, piece: str, at: int = 0) -> tuple[str, list[int]]:
        """`piece` with tokens in place of marks, and for each character its place in the text, of which `at` is cut."""
        words = [self._words.get(character, character) for character in piece]
        return "".join(words), [at + index for index, word in enumerate(words) for _ in word]

    def _part(self, part: str | Item) -> str:
        return self._items[part.name] if isinstance(part, Item) else self._hidden(part)

    def _hidden(self, text: str) -> str:
        for token, mark in self._typed.items():
            text = text.replace(token, mark)
        return text

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden(value)
        if isinstance(value, Mapping):
            return {key: self._cleaned(child) for key, child in value.items()}
        return [self._cleaned(child) for child in value] if isinstance(value, list | tuple) else value
