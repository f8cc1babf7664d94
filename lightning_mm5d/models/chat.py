r"""Renders a conversation with a chat template and tells which of its tokens the assistant says.

Items (images, sounds, videos) take part in a conversation as `Item` objects between strings, never as words: a
placeholder token that somebody typed into a message stays text. While the template runs, each item is one character
that no message uses, so that any template that copies strings can be used.

What the assistant says is marked by ``{% generation %}`` in the template. For templates without that mark it is the
difference between renderings of the first n and n + 1 messages; a template that does not extend its own output is
refused.

Reads conversations with files from JSON: the messages format of Hugging Face and the format of LLaVA.

A file has one JSON object on each line, or is one JSON array. Both formats become the same messages of strings and
items, and every error names the file and the line (or the element of the array).

- Hugging Face: ``{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text",
  "text": "What is this?"}]}]}``. A part may name its file by its type, ``path`` or ``url``'s local form; a part without
  a file takes the next one of the row's column (``"images": [...]``, ``"image": ...``). Words in texts stay words.
- LLaVA: ``{"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt",
  "value": "A cat."}]}``: ``<image>``, ``<video>`` and ``<audio>`` are items, one for each file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightning_mm5d.config.errors import ConfigError, did_you_mean

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
    spoken: list[bool]


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
        spoken = [any(start < end and stop > begin for begin, end in spans) for start, stop in places]
        if with_labels and not marked:
            spoken = self._without_space_after_turns(ids, spoken)
        return EncodedChat(ids, spoken)

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

    def _without_space_after_turns(self, ids: list[int], spoken: list[bool]) -> list[bool]:
        """`spoken` without white space after the token that ends a turn: a model stops at that token."""
        special = set(self._tokenizer.added_tokens_decoder) - {
            self._tokenizer.convert_tokens_to_ids(token) for token in self._tokens.values()
        }
        result = list(spoken)
        for is_turn, group in groupby(range(len(ids)), key=spoken.__getitem__):
            places = list(group)
            after = places[-1] + 1
            last = next((at for at in reversed(places) if is_turn and ids[at] in special), None)
            if last is not None and not str(self._tokenizer.decode(ids[last + 1 : after])).strip():
                result[last + 1 : after] = [False] * (after - last - 1)
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
        encoded = self._tokenizer(lead + words, add_special_tokens=False, return_offsets_mapping=True, **options)
        if encoded["input_ids"][: len(skipped)] != skipped:
            return self._piece(words, first=True, typed=typed)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
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


_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ALIASES = {"image": "vision", "image_url": "vision"}
_TEXT = "characters of text"


class MessagesFile(Sequence[dict[str, Any]]):
    """The rows of a JSONL file or of a JSON array, read when asked for.

    A row gets the key ``"source"``: the file and the line, for errors. A JSONL file is scanned once for the places of
    its lines; the object travels to worker processes as paths and numbers.

    Args:
        path: the file.
        root: the folder in which paths of the rows start; by default that of the file.

    Attributes:
        names: modalities whose items `sample_costs` counts; without any it says nothing.

    Raises:
        ConfigError: there is no such file, or it has no rows.
    """

    names: tuple[str, ...] = ()

    def __init__(self, path: str | Path, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self.root = Path(root) if root is not None else self.path.parent
        if not self.path.is_file():
            raise ConfigError("path", str(path), "Conversations are read from a JSONL file", "Check the path")
        with self.path.open("rb") as file:
            self._is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        self._rows: list[Any] = list(_parsed(self.path.read_bytes(), str(self.path))) if self._is_array else []
        self._places = [] if self._is_array else list(self._lines())
        if not len(self):
            raise ConfigError("path", str(path), "A file of conversations has at least one row", "Check the file")

    def __len__(self) -> int:
        return len(self._rows) + len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        if self._is_array:
            row, source = self._rows[index], f"{self.path}, element {index}"
        else:
            place, number = self._places[index]
            source = f"{self.path}, line {number}"
            with self.path.open("rb") as file:
                file.seek(place)
                row = _parsed(file.readline(), source)
        if not isinstance(row, dict):
            raise ConfigError(source, row, "A row is a JSON object", 'Write {"messages": [...]}')
        return {**row, "source": source, "root": str(self.root)}

    def sample_costs(self) -> dict[str, list[int]]:
        """Return how many items of each of `names`, and how many characters of text, each row has.

        It reads every row, and no item.

        Raises:
            ConfigError: a row does not fit, as `messages_of` says.
        """
        if not self.names:
            return {}
        costs: dict[str, list[int]] = {kind: [] for kind in (*self.names, _TEXT)}
        for row in self:
            parts = [part for message in messages_of(row, self.names) for part in message.content]
            counts = Counter(part.name for part in parts if isinstance(part, Item))
            counts[_TEXT] = sum(len(part) for part in parts if isinstance(part, str))
            for kind, column in costs.items():
                column.append(counts[kind])
        return costs

    def _lines(self) -> Iterator[tuple[int, int]]:
        place = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield place, number
                place += len(line)


def messages_of(row: Mapping[str, Any], names: Iterable[str]) -> list[Message]:
    """The conversation of a row of either format.

    Args:
        row: ``{"messages": ...}`` or ``{"conversations": ...}``; ``"root"`` is the folder of its paths, ``"source"``
            what errors call it.
        names: the modalities that exist; ``image`` means ``vision`` where there is no modality ``image``, and a video
            of which no modality is called ``video`` becomes one image per frame where it is a list.

    Raises:
        ConfigError: the row has neither format, names a modality that does not exist, or has more or fewer files than
            places for them.
    """
    source = str(row.get("source", "sample"))
    reader = _Reader(row, tuple(names), source)
    if isinstance(row.get("messages"), list | tuple):
        messages = [reader.message(f"{source}: messages[{i}]", m) for i, m in enumerate(row["messages"])]
    elif isinstance(row.get("conversations"), list | tuple):
        messages = [reader.turn(f"{source}: conversations[{i}]", m) for i, m in enumerate(row["conversations"])]
        if isinstance(row.get("system"), str):
            messages.insert(0, Message("system", (row["system"],), {}))
    else:
        rule = "A sample has a list of messages (Hugging Face) or of conversations (LLaVA)"
        raise ConfigError(source, sorted(row), rule, 'Write {"messages": [{"role": "user", "content": "..."}, ...]}')
    reader.check_files()
    return messages


class _Reader:
    """Reads the messages of one row; files that the row lists beside its messages are handed out in order."""

    def __init__(self, row: Mapping[str, Any], names: tuple[str, ...], source: str) -> None:
        self._row, self._names, self._source = row, names, source
        self._root = Path(row["root"]) if row.get("root") else None
        self._listed: dict[str, Any] = {}
        self._taken: dict[str, int] = {}

    def message(self, field: str, message: Any) -> Message:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(field, message, "A message is an object with a role and a content", "Add a role")
        content = message.get("content")
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        if content is None or isinstance(content, str):
            return Message(message["role"], (content or "",), extra)
        if not isinstance(content, list | tuple):
            rule = "The content of a message is a string or a list of parts"
            raise ConfigError(f"{field}.content", content, rule, 'Write [{"type": "text", "text": "..."}]')
        parts = [p for i, part in enumerate(content) for p in self._part(f"{field}.content[{i}]", part)]
        return Message(message["role"], tuple(parts), extra)

    def turn(self, field: str, turn: Any) -> Message:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise ConfigError(field, turn, "A turn of LLaVA's format has from and value", "Add them")
        speaker = turn.get("from")
        if speaker not in _SPEAKERS:
            raise ConfigError(f"{field}.from", speaker, "It says who speaks", did_you_mean(speaker, _SPEAKERS))
        kinds = {kind for kind in ("image", "video", "audio", *self._names) if f"<{kind}>" in turn["value"]}
        pattern = "|".join(re.escape(f"<{kind}>") for kind in sorted(kinds))
        parts: list[str | Item] = []
        for index, text in enumerate(re.split(f"({pattern})", turn["value"]) if kinds else [turn["value"]]):
            if index % 2:
                parts += self._items(field, text[1:-1], self._next(field, text[1:-1]))
            elif text:
                parts.append(text)
        return Message(_SPEAKERS[speaker], tuple(parts), {})

    def check_files(self) -> None:
        """Raise where the row lists more files than its messages have places for."""
        for kind in {"image", "video", "audio", *self._names}:
            files, taken = self._files(kind), self._taken.get(kind, 0)
            if len(files) != taken:
                rule = f"Its messages have places for {taken} of its {len(files)} files of {kind}"
                place = f'<{kind}> or {{"type": "{kind}"}}'
                raise ConfigError(self._source, files, rule, f"Put {place} into the messages once for each file")

    def _part(self, field: str, part: Any) -> list[str | Item]:
        if isinstance(part, str):
            return [part]
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return [part["text"]]
        if not isinstance(kind, str) or kind == "text":
            rule = "A part of a message has a type, and a text or a file"
            raise ConfigError(field, part, rule, 'Write {"type": "text", "text": "..."}')
        value = next((part[key] for key in (kind, "path", "url", "value") if part.get(key) is not None), None)
        if isinstance(value, Mapping):  # OpenAI's {"image_url": {"url": ...}}
            value = value.get("url")
        return self._items(field, kind, self._next(field, kind) if value is None else value)

    def _items(self, field: str, kind: str, value: Any) -> list[str | Item]:
        name = kind if kind in self._names else _ALIASES.get(kind, kind)
        if kind == "video" and name not in self._names and "vision" in self._names and isinstance(value, list | tuple):
            return [Item("vision", self._located(frame)) for frame in value]
        if name not in self._names:
            raise ConfigError(f"{field}.type", kind, "It names a modality", did_you_mean(kind, self._names))
        return [Item(name, self._located(value))]

    def _next(self, field: str, kind: str) -> Any:
        files, at = self._files(kind), self._taken.get(kind, 0)
        if at >= len(files):
            rule = f"The sample lists {len(files)} files of {kind}, and this is place {at + 1}"
            raise ConfigError(field, f"<{kind}>", rule, f'Add "{kind}": [...] with a file for each place')
        self._taken[kind] = at + 1
        return files[at]

    def _files(self, kind: str) -> list[Any]:
        value: Any = next((self._row[key] for key in (kind, f"{kind}s") if self._row.get(key) is not None), [])
        return list(value) if isinstance(value, list | tuple) else [value]

    def _located(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._located(part) for part in value]
        if isinstance(value, Mapping) and "array" not in value and isinstance(value.get("path"), str):
            value = value["path"]
        if not isinstance(value, str | Path) or self._root is None or "://" in str(value):
            return value
        return str(self._root / Path(value))


def _parsed(line: bytes, source: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # also of characters that are not UTF-8
        raise ConfigError(source, line[:80], f"It is not JSON: {error}", "Write one JSON object") from None
