"""Payloads on a backend that runs operations in the order of issue: what travels, and what is promised."""

from __future__ import annotations

import random
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pack_padded_sequence

import nccl_order
from lightning_mm5d import Modality
from lightning_mm5d.engine.ordered_transport import OrderedTransport
from lightning_mm5d.engine.promises import Promises, _ShapesOfValues
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.engine.transport import UNKNOWN, Channel, Shapes
from lightning_mm5d.stage import Payload
from parity.harness import fit, strategy
from ranks import call_ranks, run_ranks
from zoo import CASES

forth = partial(Channel, "activations", name="vision.0->language.0")  # of (source rank, receiving rank)
back = partial(Channel, "gradients", name="language.0->vision.0")
LIMIT_S = 60.0


def on_ranks(world: int, body: Any, folder: Path) -> list[Any]:
    return run_ranks(world, _on_rank, world, body, str(folder / "store"), limit=LIMIT_S)


def _on_rank(rank: int, world: int, body: Any, store: str) -> Any:
    nccl_order.register()
    timeout = timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("nccl_order_serial", f"file://{store}", timeout, world, rank)
    groups = Groups(timeout)
    pairs = [(src, dst) for src in range(world) for dst in range(world) if src != dst]
    links = {pair: groups.get(sorted(pair), f"from {pair[0]} to {pair[1]}") for pair in pairs}
    host = groups.get(range(world), "host", backend="gloo")
    found = {pair: group for pair, group in links.items() if group is not None}
    transport = OrderedTransport(found, host, torch.device("cpu"), rank)
    transport.warm_up()
    result = body(rank, transport)
    transport.close()
    groups.destroy()
    dist.destroy_process_group()
    return result


def _exchange(rank: int, transport: OrderedTransport) -> Any:
    """Rank 0 sends payloads of two keys, and gets gradients of each in between."""
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(40_000), torch.empty(0, 2), torch.tensor([3, 4])]
    got, sent = [], []
    for shapes in (Shapes("a", True), Shapes("a", True), Shapes("b", False), Shapes("b", False), UNKNOWN):
        if rank == 0:
            transport.send(forth(0, 1), {"x": [1, None]}, tensors, shapes)
            transport.post(back(1, 0), shapes.key)
            got.append(transport.recv(back(1, 0)))
        else:
            transport.post(forth(0, 1), shapes.key)
            got.append(transport.recv(forth(0, 1)))
            transport.send(back(1, 0), [], [got[-1][1][0] * 2], shapes)
        transport.flush()
        sent.append(transport.bytes_sent - transport.bytes_required)
    return got, sent, transport.due, transport.unsent


def test_payloads_arrive_whole_and_promised_ones_without_a_header(tmp_path: Path) -> None:
    (given, first, *counts), (taken, second, *_) = on_ranks(2, _exchange, tmp_path)
    expected = [torch.arange(6.0).view(2, 3), torch.ones(40_000), torch.empty(0, 2), torch.tensor([3, 4])]
    for meta, tensors in taken:
        assert meta == {"x": [1, None]}
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, expected, strict=True))
    assert all(torch.equal(tensors[0], expected[0] * 2) for _, tensors in given)
    for headers in (first, second):
        assert headers[0] == headers[1] < headers[2] < headers[3] < headers[4]
    assert counts[1] == 0


def _local(rank: int, transport: OrderedTransport) -> bool:
    channel, tensor = forth(rank, rank), torch.ones(3)
    transport.post(channel, None)
    transport.send(channel, ["x"], [tensor])
    meta, (same,) = transport.recv(channel)
    return meta == ["x"] and same.data_ptr() == tensor.data_ptr()


def test_what_stays_on_a_rank_is_the_same_memory(tmp_path: Path) -> None:
    assert on_ranks(2, _local, tmp_path) == [True, True]


def _broken(rank: int, transport: OrderedTransport) -> str:
    shapes, channel = Shapes("key", True), forth(0, 1)
    if rank == 1:
        transport.post(channel, "key")
        transport.recv(channel)
        return ""
    transport.send(channel, [], [torch.ones(2)], shapes)
    with pytest.raises(
        RuntimeError, match=r"same shapes and plain values sent float32 .2. before, and sends float32 .3."
    ):
        transport.send(channel, [], [torch.ones(3)], shapes)
    return "refused"


def test_a_payload_that_breaks_its_promise_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    assert on_ranks(2, _broken, tmp_path)[0] == "refused"


class _OneStep:
    trains = True

    def __init__(self, batch: Any, epoch: int = 0) -> None:
        self.epoch = epoch
        self.microbatches = {0: [type("Part", (), {"batch": batch})]}

    def reads(self) -> Any:
        return nullcontext([])


def promised(body: Any, batch: Any = None) -> bool:
    """Whether the second run of `body` promises its payload."""
    promises, batch = Promises(), torch.ones(2, 3) if batch is None else batch
    for _ in range(2):
        step: Any = _OneStep(batch)
        promises.begin(step, frozenset())
        with promises.watching(step, "language.0", (0, 0), []) as shapes:  # type: ignore[arg-type]
            body(torch.ones(2, 3))
    return shapes.promised


def test_stages_that_make_shapes_of_values_promise_nothing() -> None:
    def masked(x: Tensor) -> Tensor:
        return x[x > 0] + 1

    for body in (masked, lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.nonzero() + 1,
                 lambda x: int(x[0, 0]), lambda x: torch.masked_select(x, x > 0) * 2):  # fmt: skip
        assert not promised(body)
    assert not promised(lambda x: x, batch=[object()])
    assert not promised(lambda x: x.nonzero().shape[0])
    assert not promised(lambda x: x.nonzero(as_tuple=True))
    assert not promised(lambda x: torch.tensor_split(x, torch.tensor([1])))
    assert not promised(lambda x: pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True))
    assert not promised(lambda x: x + 1 if (x > 0).any() else None), "a branch of the user's own"
    assert not promised(lambda x: x + 1 if len(x[x < 0]) else None), "on a count of rows"
    assert not promised(lambda x: x + 1 if random.random() < 0.5 else None)
    assert not promised(lambda x: x + 1 if np.random.rand() < 0.5 else None)


def test_promises_end_with_their_epoch() -> None:
    promises, known = Promises(), []
    for epoch in (0, 0, 1, 1):
        step: Any = _OneStep(torch.ones(2), epoch)
        promises.begin(step, frozenset())
        with promises.watching(step, "language.0", (0, 0), []) as shapes:  # type: ignore[arg-type]
            known.append(shapes.promised)
    assert known == [False, True, False, True]


def test_checks_texts_and_branches_do_not_keep_a_stage_from_promising() -> None:
    theirs: dict[str, Any] = {"__name__": "transformers.masking_utils"}
    exec("def is_any(x): return bool((x > 0).any())\ndef count(x): return x[x > 0].numel()", theirs)

    def checked(x: Tensor) -> Tensor:
        assert theirs["count"](x) == 6, f"{x.sum()}"
        theirs["is_any"](x)
        f"{x.sum()}"
        return x[torch.tensor([0, 1])] @ x.T

    assert promised(checked)
    assert promised(checked, batch={"a": [torch.ones(2), 1, 2.0, None, True]})


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_compiled_functions_and_flex_attention_run_while_a_stage_is_watched() -> None:
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    assert promised(compiled)
    assert graphs, "torch.compile would skip it from its first call on"
    with _ShapesOfValues():
        flex_attention(*(torch.ones(1, 1, 128, 16) for _ in range(3)))


def test_a_promise_holds_for_all_senders_and_orders_of_microbatches() -> None:
    """A stage gets microbatches of equal shapes from two ranks, of which the second one has yet to watch its first."""
    promises, step = Promises(), cast("Any", _OneStep(torch.ones(2)))
    promises.begin(step, frozenset())
    known = []
    for varies in (True, False, True):
        payload = Payload({"varies": varies}, [])
        with promises.watching(step, "language.0", (0, 0), [payload]) as shapes:  # type: ignore[arg-type]
            known.append(shapes.promised)
    assert known == [False, True, True]
    assert promises.shapes("language.0", (0, 0)).promised, "the backward of the first microbatch may come last"  # type: ignore[arg-type]


def _headers(rank: int, name: str) -> list[int]:
    """How many headers a rank has sent after each of three steps, of which the first ones are compared before."""
    nccl_order.register()
    case, sent, counts, send = CASES[name], list[str](), list[int](), OrderedTransport._send_header

    def spy(self: OrderedTransport, channel: Channel, header: str) -> None:
        sent.append(header)
        send(self, channel, header)

    module = case.build()
    module.on_train_batch_end = lambda *_: counts.append(len(sent))  # type: ignore[method-assign]
    *encoders, language = case.modalities
    fields = {**dict.fromkeys(encoders, Modality()), language: Modality(pp_size=2)}
    OrderedTransport._send_header = spy  # type: ignore[method-assign]
    try:
        chosen = strategy(fields, num_microbatches=4, process_group_backend="nccl_order")
        fit(module, [case.batch(8, seed=step) for step in range(5)], chosen, 3)
    finally:
        OrderedTransport._send_header = send  # type: ignore[method-assign]
    return counts[2:]


def test_headers_travel_for_new_shapes_only_unless_shapes_depend_on_values() -> None:
    for counts in call_ranks(3, _headers, "llava"):
        assert counts[0] == counts[1] == counts[2]
    assert all(counts[0] < counts[1] < counts[2] for counts in call_ranks(3, _headers, "qwen2_vl"))
