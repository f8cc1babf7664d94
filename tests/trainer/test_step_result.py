"""Results of a step: what microbatches weigh, and what every rank of a replica gets."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_mm5d.engine import codec
from lightning_mm5d.stage.payload import Packer
from lightning_mm5d.trainer.logs import LogOptions, MergedLog
from lightning_mm5d.trainer.user_step import ResultChannel, StepResult, Weights
from ranks import run_ranks


def sample_logs() -> list[MergedLog]:
    options = LogOptions(name="loss", prog_bar=True, on_step=True, sync_dist=True, reduce_fx="max")
    metric = LogOptions(name="metric", metric_attribute="nested.sum")
    return [
        MergedLog(options=options, value=torch.tensor(0.1), batch_size=3),
        MergedLog(options=metric, value=None, batch_size=4),
        MergedLog(options=metric, value=torch.tensor(0.1, dtype=torch.float64), batch_size=2**40 + 1),
    ]


def test_a_share_is_of_all_replicas_and_a_sum_is_of_this_one() -> None:
    weights = Weights((1.0, 3.0), total=8.0)
    assert [weights.share(index) for index in range(2)] == [1 / 8, 3 / 8]
    assert weights.weighted_sum([torch.tensor(2.0), torch.tensor(4.0)]) == 2 + 3 * 4


def test_a_loss_of_no_weight_is_left_out_of_a_sum_and_shares_of_nothing_are_nan() -> None:
    weights = Weights((0.0, 3.0), total=3.0)
    assert weights.weighted_sum([torch.tensor(float("nan")), torch.tensor(4.0)]) == 12
    assert weights.share(0) == 0
    assert Weights((0.0,), total=3.0).weighted_sum([torch.tensor(float("nan"))]) == 0
    assert math.isnan(Weights((0.0,), total=0.0).share(0))


def test_alone_the_result_is_the_very_same() -> None:
    result = StepResult(logs=sample_logs())
    assert ResultChannel(src=0, group=None, device=torch.device("cpu")).share(result) is result


def steps(rank: int) -> dict[str, Any]:
    """Results of rank 2 for ranks 0 to 2: nothing, logs, the same, more new keys than are kept, and outputs."""
    dist.init_process_group("gloo")
    sent: list[int] = []
    broadcast = dist.broadcast
    with (
        patch.object(codec, "HEADER_SLOTS", 4),
        patch.object(dist, "broadcast", lambda x, *a, **k: (sent.append(x.numel()), broadcast(x, *a, **k))[1]),
    ):
        channel = ResultChannel(src=2, group=dist.group.WORLD, device=torch.device("cpu"))
        value = torch.tensor(1.0)
        new_keys = [[MergedLog(options=LogOptions(name=f"key_{i}"), value=value, batch_size=i)] for i in range(9)]
        outputs = {"logits": torch.arange(200_000.0).view(2, -1), "none": None, "empty": torch.zeros(0, 3)}
        results = [StepResult(logs=logs) for logs in ([], sample_logs(), sample_logs(), *new_keys, sample_logs())]
        results += [StepResult(torch.tensor(0.1, dtype=dtype), outputs) for dtype in (torch.bfloat16, torch.float64)]
        received, messages = [], []
        for result in results:
            sent.clear()
            received.append(channel.share(result if rank == 2 else None))
            messages.append(len(sent))
    return {"received": received, "messages": messages, "sent": results}


def test_every_rank_gets_the_result_of_the_source_in_few_messages() -> None:
    """ranks 0 and 1: cut off before the step ends; rank 2: the last stage"""
    for result in run_ranks(3, steps):
        for received, sent in zip(result["received"], result["sent"], strict=True):
            assert received.logs == sent.logs
            torch.testing.assert_close(received.loss, sent.loss, rtol=0, atol=0)
            if sent.outputs is None:
                assert received.outputs is None
            else:
                torch.testing.assert_close(received.outputs["logits"], sent.outputs["logits"], rtol=0, atol=0)
                assert received.outputs["empty"].shape == (0, 3)
                assert received.outputs["none"] is None
        assert result["messages"] == [1] * 13 + [2, 2]  # what has no room in the first message follows


def test_an_object_of_a_users_own_is_refused() -> None:
    with pytest.raises(ValueError, match="object"):
        codec.TreeChannel(lambda message: None, torch.device("cpu")).send({"x": object()})


def test_sparse_tensors_are_refused_with_what_would_work() -> None:
    with pytest.raises(ValueError, match=r"sparse_coo .* to_dense"):
        Packer().describe({"hits": torch.eye(2).to_sparse()})


def with_host(rank: int) -> list[Any]:
    """A result that rank 0 shares, with two groups, and what each group carried."""
    dist.init_process_group("gloo")
    host, carried = dist.new_group(), {"host": list[int](), "device": list[int]()}
    broadcast = dist.broadcast

    def spy(x: torch.Tensor, *a: Any, group: Any = None, **k: Any) -> Any:
        carried["host" if group is host else "device"].append(x.numel())
        return broadcast(x, *a, group=group, **k)

    outputs = {"a": torch.arange(6.0).view(2, 3), "none": None, "empty": torch.zeros(0, 3), "b": torch.ones(2).bool()}
    with patch.object(dist, "broadcast", spy):
        channel = ResultChannel(src=0, group=dist.group.WORLD, device=torch.device("cpu"), host=host)
        found = [channel.share(StepResult(torch.tensor(0.5), outputs) if rank == 0 else None) for _ in range(2)]
    dist.barrier()
    return [found, carried]


def test_tensors_of_the_device_go_by_themselves_and_what_describes_them_by_the_host() -> None:
    for found, carried in run_ranks(2, with_host):
        for result in found:
            assert float(result.loss) == 0.5
            assert torch.equal(result.outputs["a"], torch.arange(6.0).view(2, 3))
            assert result.outputs["b"].tolist() == [True, True]
            assert result.outputs["empty"].shape == (0, 3)
        assert carried == {"host": [4096, 4096], "device": [4, 8, 24, 2] * 2}
