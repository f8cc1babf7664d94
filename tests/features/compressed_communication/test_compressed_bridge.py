"""Compressed payloads between groups of ranks: all targets get the same bits, in fewer bytes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mm5d.engine.bridge import Bridge
from lightning_mm5d.engine.run_groups import Groups
from lightning_mm5d.engine.transport import Transport
from lightning_mm5d.features.compressed_communication.encoding import Compression
from ranks import run_ranks

PAIRS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((0,), (1,)),
    ((0,), (1, 2)),
    ((0, 1), (2, 3)),
    ((0, 1, 2), (2, 3)),
    ((1,), (0, 1)),
    ((0, 1, 2), (3,)),
    ((0, 1), (1, 2)),
    ((0, 1, 2), (1,)),
]
LIMIT_S = 40.0


def payload(own: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 33, generator=generator)
    mask = torch.where(hidden > 0, 0.0, torch.finfo(torch.float32).min)
    kept = [torch.arange(7), hidden > 0, torch.tensor(2.5), torch.empty(0), hidden[:3].to(torch.complex64)]
    return [hidden, hidden.t(), hidden.double(), hidden.bfloat16(), mask, *kept, torch.full((300 + own, 2), 1.1 + own)]


def on_ranks(rank: int) -> list[float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S / 2))
    groups = Groups(timedelta(seconds=LIMIT_S / 2))
    pair = [groups.get(range(4), tag=tag) for tag in ("ascending", "descending")]
    transport, shares = Transport(*pair, torch.device("cpu"), rank), []
    for wire in (torch.bfloat16, torch.float8_e4m3fn):
        for sources, targets in PAIRS:
            group = groups.get(targets) if len(targets) > 1 else None
            sent = []
            for compression in (None, Compression(wire)):
                way = Bridge(
                    transport,
                    rank=rank,
                    direction="gradients",
                    name=f"{wire}, {sources}, {targets}",
                    sources=sources,
                    targets=targets,
                    group=group,
                    encoding=compression,
                )
                before = transport.bytes_required + way.gathered
                own = frozenset({10}) if len(sources) == len(targets) else frozenset[int]()
                if rank in sources:
                    way.send([1, 2], payload(sources.index(rank) if own else 0), own)
                if rank in targets:
                    way.expect(1)
                    meta, tensors = way.recv()
                    assert meta == [1, 2]
                    is_exact = compression is None or set(targets) <= set(sources)
                    for got, tensor in zip(tensors, payload(targets.index(rank) if own else 0), strict=True):
                        expected = tensor if is_exact else Compression(wire).rounded(tensor)
                        assert got.dtype == tensor.dtype
                        assert torch.equal(got, expected)
                transport.flush()
                sent.append(transport.bytes_required + way.gathered - before)
            shares += [sent[1] / sent[0]] if sent[0] else []
    dist.barrier()
    transport.close()
    return shares


def test_all_targets_get_the_same_rounded_payload_in_fewer_bytes() -> None:
    """four ranks, as groups of one to three that are apart or share ranks"""
    shares = [share for rank in run_ranks(4, on_ranks, limit=LIMIT_S) for share in rank]
    assert shares
    assert max(shares) < 0.6
