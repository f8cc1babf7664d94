"""Reads conversations with files from JSON: the messages format of Hugging Face and the format of LLaVA.

A file has one JSON object on each line, or is one JSON array. Both formats become the same messages of strings and
items, and every error names the file and the line (or the element of the array).

- Hugging Face: ``{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text",
  "text": "What is this?"}]}]}``. A part may name its file by its type, ``path`` or ``url``'s local form; a part without
  a file takes the next one of the row's column (``"images": [...]``, ``"image": ...``). Words in texts stay words.
- LLaVA: ``{"image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt",
  "value": "A cat."}]}``: ``<image>``, ``<video>`` and ``<audio>`` are items, one for each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.chat import Item, Message

_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ALIASES = {"image": "vision", "image_url": "vision"}


class MessagesFile(Sequence[dict[str, Any]]):
    """The rows of a JSONL file or of a JSON array, read when asked for.

    A row gets the key ``"source"``: the file and the line, for errors. A JSONL file is scanned once for the places of
    its lines; the object travels to worker processes as paths and numbers.

    Args:
        path: the file.
        root: the folder in which paths of the rows start; by default that of the file.

    Raises:
        ConfigError: there is no such file, or it has no rows.
    """

    def __init__(self, path: str | Path, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self.root = Path(root) if root is not None else self.path.parent
        if not self.path.is_file():
            raise ConfigError("path", str(path), "Conversations are read from a JSONL file", "Check the path")
        with self.path.open("rb") as file:
            self._is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        self._rows = self._array() if self._is_array else []
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

    def _array(self) -> list[Any]:
        rows = _parsed(self.path.read_bytes(), str(self.path))
        return list(rows)

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
