"""State comes back from JSON with equal values of equal types; hostile text makes nothing."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mm5d.config.errors import CheckpointCorruptError, CheckpointUntrustedError
from lightning_mm5d.features.sharded_checkpoints.json_state import decode_state, encode_state


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Attributes(dict):
    pass


@dataclass(frozen=True)
class Point:
    x: float
    y: Any = None


Pair = namedtuple("Pair", "a b")

VALUES = {
    "plain": [None, True, False, 0, -3, 2**63 - 1, 2**63, -(2**400), "", "ä\ud800\0", 0.1, -0.0, 5e-324],
    "not finite": [math.inf, -math.inf, math.nan, complex(math.nan, -0.0), 1 + 2j],
    "containers": [
        [],
        {},
        (),
        (1, (2,), [3]),
        {1, 2},
        frozenset({(1, "a")}),
        deque([1, 2], 5),
        deque(),
        range(1, 9, 2),
    ],
    "mappings": [
        {1: "a", 2: "b"},
        {"$": 1},
        {(1, 2): 3, None: 4, 2.5: 5},
        OrderedDict(b=1, a=2),
        Counter("aab"),
    ],
    "defaults": [defaultdict(list, a=[1]), defaultdict(None, {1: 2}), defaultdict(int)],
    "bytes": [
        b"",
        b"\0\xff",
        bytearray(b"ab"),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("/x"),
        pathlib.PureWindowsPath("c:/"),
    ],
    "times": [
        datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime(2026, 1, 2, tzinfo=UTC),
        date(1, 1, 1),
        time(1, 2),
        timedelta(-1, 2, 3),
    ],
    "zones": [datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2, minutes=30)))],
    "torch": [
        torch.float32,
        torch.bfloat16,
        torch.Size([1, 2]),
        torch.Size([]),
        torch.device("cuda:1"),
        torch.device("cpu"),
    ],
    "numpy": [
        np.float32(0.1),
        np.int64(7),
        np.bool_(True),
        np.str_("a"),
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.array("ab"),
    ],
    "dates of numpy": [np.datetime64("2026-01-01"), np.zeros((0, 3)), np.array([1 + 2j])],
}


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad) and torch.equal(*bits)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        extra = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return extra and len(a) == len(b) and all(_same(*pair) for pair in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        extra = getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return extra and len(a) == len(b) and all(_same(*pair) for pair in zip(a, b, strict=True))
    return repr(a) == repr(b)


def _through_text(value: Any) -> tuple[Any, Any]:
    encoded = encode_state(value)
    return decode_state(encoded.text, encoded.tensors.__getitem__, encoded.objects), encoded


@pytest.mark.parametrize("case", VALUES)
def test_plain_values_come_back_with_their_types(case: str) -> None:
    for value in VALUES[case]:
        decoded, encoded = _through_text(value)
        assert _same(decoded, value), (value, decoded)
        assert not encoded.objects, value
        assert not encoded.tensors
        assert _same(_through_text({"a": [value, (value,)]})[0], {"a": [value, (value,)]})


def test_tensors_are_kept_beside_the_text_under_names_that_tell_where_they_are() -> None:
    shared = torch.randn(3)
    state = {
        "optimizer": {0: {"exp_avg": shared, "again": shared, "step": torch.tensor(2.0)}},
        "views": (torch.randn(4, dtype=torch.complex128), torch.randn(2, dtype=torch.complex64).conj()),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "grad": torch.ones(2, requires_grad=True),
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    decoded, encoded = _through_text(state)
    assert _same(decoded, state)
    assert decoded["optimizer"][0]["exp_avg"] is decoded["optimizer"][0]["again"]
    assert {"optimizer.0.exp_avg", "optimizer.0.step", "views.0", "parameter", "half"} <= encoded.tensors.keys()
    assert len(encoded.tensors) == 9


def test_what_json_cannot_hold_is_kept_as_an_object_with_its_place() -> None:
    circle: list[Any] = [1]
    circle.append([circle])
    deep: Any = 1
    for _ in range(500):
        deep = [deep]

    class Own(dict):
        pass

    attributes = Attributes(a=1)
    attributes.more = 2  # type: ignore[attr-defined]
    state = {
        "function": len,
        "own": Own(a=1),
        "circle": {"here": circle},
        "deep": deep,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "key": {len: 1},
        "factory": defaultdict(lambda: 3),
        "zone": datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "UTC here")),
        "objects": np.array([len]),
        "more": attributes,
        **{type(one).__name__: one for one in (Color.RED, Level.HIGH, Attributes(a=1), Point(1.0, (2,)), Pair(1, [2]))},
        "kept": 7,
    }
    decoded, encoded = _through_text(state)
    assert decoded.pop("kept") == 7
    places = {name.partition(".")[0] for name in encoded.objects}
    assert places == state.keys() - {"kept"}
    assert all(value is state[name] for name, value in decoded.items() if name not in ("circle", "deep"))
    assert decoded["circle"]["here"] is circle
    assert json.dumps(decoded["deep"]) == json.dumps(deep)


TEXTS = [
    "",
    "{",
    "\ufeff{}",
    "[" * 100_000,
    '{"a":' * 150 + "1" + "}" * 150 + "x",
    "[" * 400 + "]" * 400,
    '{"$":"unknown"}',
    '{"$":["int"]}',
    '{"$":"int","hex":"zz"}',
    '{"$":"float","bits":"00"}',
    '{"$":"bytes","base64":"***"}',
    '{"$":"path","kind":"Popen","path":"x"}',
    '{"$":"dtype","name":"load"}',
    '{"$":"dtype","name":7}',
    '{"$":"device","name":"nowhere"}',
    '{"$":"array","dtype":"O","shape":[1],"base64":"AAAAAAAAAAA="}',
    '{"$":"array","dtype":"<f4","shape":[1000000000],"base64":""}',
    '{"$":"array","dtype":"V8,O","shape":[1],"base64":"AAAAAAAAAAA="}',
    '{"$":"defaultdict","factory":"eval","items":[]}',
    '{"$":"set","items":[[1]]}',
    '{"$":"dict","items":[[[1],2]]}',
    '{"$":"tensor","name":"absent"}',
    '{"$":"object","name":"absent"}',
    '{"$":"timedelta","parts":[1e300,0,0]}',
    '{"$":"size","lengths":["a"]}',
    '{"$":"tuple"}',
    '{"$":"array","dtype":",","shape":[],"base64":""}',
    '{"$":"number","dtype":"<U1","shape":[],"base64":"/////w=="}',
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_no_encoder_made_is_refused(text: str) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_state(text.encode("utf-8", "surrogatepass"), {}.__getitem__, {})


def test_a_class_in_the_text_is_refused_by_its_name() -> None:
    for tag in ("enum", "dataclass", "mapping", "namedtuple", "set"):
        text = json.dumps({"$": tag, "class": "subprocess.Popen", "items": [], "fields": {}, "name": "RED"}).encode()
        with pytest.raises(CheckpointUntrustedError, match=r"subprocess\.Popen"):
            decode_state(text, {}.__getitem__, {})
