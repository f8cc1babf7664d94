"""Rows of both formats become the same messages, and errors name the file and the line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.chat import Item, Message, MessagesFile, messages_of

NAMES = ("vision", "audio")


def of(row: dict[str, Any], names: tuple[str, ...] = NAMES) -> list[tuple[str, tuple[Any, ...]]]:
    return [(message.role, message.content) for message in messages_of(row, names)]


def test_both_formats_give_the_same_messages() -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "\nWhat?"}]
    hugging_face = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]}
    listed = {"images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}, parts[1]]}]}
    listed["messages"] += hugging_face["messages"][1:]
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    expected = [("user", (Item("vision", "/d/a.png"), "\nWhat?")), ("assistant", ("A cat.",))]
    for row in (hugging_face, listed, {"image": "a.png", "conversations": turns}):
        assert of({**row, "root": "/d"}) == expected


def test_items_stand_in_any_turn_and_in_order() -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "<image> and <image>"},
        {"from": "gpt", "value": "see <image>"},
        {"from": "human", "value": "<audio>"},
    ]
    row = {"image": ["1.png", "2.png", "3.png"], "audio": "s.wav", "conversations": turns, "root": "/d"}
    images = [Item("vision", f"/d/{n}.png") for n in (1, 2, 3)]
    assert of(row) == [
        ("system", ("be brief",)),
        ("user", (images[0], " and ", images[1])),
        ("assistant", ("see ", images[2])),
        ("user", (Item("audio", "/d/s.wav"),)),
    ]


def test_words_in_messages_stay_words() -> None:
    row = {"messages": [{"role": "user", "content": "what does <image> mean?"}]}
    assert of(row) == [("user", ("what does <image> mean?",))]


def test_frames_of_a_video_are_images_where_no_modality_is_a_video() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "video", "video": ["1.png", "2.png"]}]}], "root": "/d"}
    frames = ["/d/1.png", "/d/2.png"]
    assert of(row) == [("user", tuple(Item("vision", frame) for frame in frames))]
    assert of(row, ("vision", "video")) == [("user", (Item("video", frames),))]


def test_further_keys_of_messages_reach_the_template() -> None:
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}
    assert messages_of(row, NAMES) == [Message("assistant", ("",), {"tool_calls": [1]})]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "list of messages"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "depth", "depth": "a"}]}]}, "depth"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "lists 0 files of image"),
        ({"messages": [{"role": "user", "content": "a"}], "image": "a.png"}, "places for 0 of its 1 files of image"),
        ({"conversations": [{"from": "human", "value": "<image>"}]}, "lists 0 files of image"),
        ({"conversations": [{"from": "cat", "value": "a"}]}, "who speaks"),
        ({"conversations": [{"from": "human"}]}, "from and value"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        of({**row, "source": "train.jsonl, line 7"})
    assert caught.value.field.startswith("train.jsonl, line 7")


def test_lines_are_read_by_number_in_any_order_and_in_other_processes(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "é🐈", "c")]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "train.jsonl"
    path.write_bytes("\ufeff".encode() + "\r\n\n".join(lines).encode())  # a mark at the start, empty lines, no end
    file = pickle.loads(pickle.dumps(MessagesFile(path)))
    assert len(file) == 3
    for at in (2, 0, 1, -1):
        expected = {"source": f"{path}, line {2 * (at % 3) + 1}", "root": str(tmp_path)}
        assert file[at] == {**rows[at], **expected}
    array = tmp_path / "train.json"
    array.write_text(json.dumps(rows))
    assert [row["messages"] for row in MessagesFile(array)] == [row["messages"] for row in rows]
    assert MessagesFile(array, root="/d")[1] == {**rows[1], "source": f"{array}, element 1", "root": "/d"}


def test_a_row_costs_what_its_items_and_its_text_are(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Who?"}, {"type": "audio", "path": "a.wav"}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]},
        {"image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "<image><image>Say <audio"}]},
        {"messages": [{"role": "user", "content": "<image>"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    file = MessagesFile(path)
    assert file.sample_costs() == {}
    file.names = NAMES
    assert file.sample_costs() == {"vision": [1, 2, 0], "audio": [1, 0, 0], "characters of text": [10, 10, 7]}
    path.write_text(path.read_text().replace("b.png", 'b.png", "c.png'))
    file = MessagesFile(path)
    file.names = NAMES
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2"):
        file.sample_costs()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(ConfigError, match="Check the path"):
        MessagesFile(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="at least one row"):
        MessagesFile(path)
    path.write_text('{"messages": []}\n{"messages": [}\n')
    with pytest.raises(ConfigError, match="line 2"):
        MessagesFile(path)[1]
    path.write_text('"a"\n')
    with pytest.raises(ConfigError, match="line 1"):
        MessagesFile(path)[0]
