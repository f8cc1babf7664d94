"""The host knows what decides about masks, and never waits for the device to learn it.

The device is torch's "meta", on which every read of a value fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from host_reads import PretendedDevice
from lightning_mm5d.context_parallel.hooks.context_mask import ContextMask, StepMasks
from lightning_mm5d.context_parallel.hooks.layer_attention import Interface, name_attention
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.sharded.host_copies import HostCopies
from lightning_mm5d.sharded.sequence import TokenSplit
from lightning_mm5d.trainer.cut_module import CutModule

META, TOKENS = torch.device("meta"), 300
LENGTHS = ((300, 0), (200, 100), (120, 180), (299, 1))  # tokens and padding, or two documents, of four samples


@pytest.fixture
def interface() -> Iterator[Interface]:
    made = Interface()
    yield made
    made.remove()


def padding() -> Tensor:
    return torch.stack([torch.cat([torch.ones(a), torch.zeros(b)]) for a, b in LENGTHS]).long()


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(a), torch.arange(b)]) for a, b in LENGTHS])


def causal(config: LlamaConfig, attention_mask: Tensor | None, position_ids: Tensor, device: torch.device) -> Mask:
    """The mask that transformers makes of the second microbatch of two."""
    attention_mask = None if attention_mask is None else attention_mask.chunk(2)[1]
    embeds = torch.empty(2, TOKENS, 8, device=device)
    found: Any = create_causal_mask(
        config, inputs_embeds=embeds, attention_mask=attention_mask, past_key_values=None, position_ids=position_ids[2:]
    )
    assert isinstance(found, ContextMask)
    return found.mask


@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_of_a_batch_are_digested_without_a_wait(interface: Interface, is_packed: bool) -> None:
    config, host = LlamaConfig(), interface.caches.host
    name_attention(config, "mm5d_context")
    given = None if is_packed else padding()
    expected = causal(config, given, positions(), torch.device("cpu"))
    split = TokenSplit.of([[(0, 100), (200, 300)], [(100, 200)]], TOKENS)
    tokens = split.indices(0), torch.arange(TOKENS)
    tiles = expected.tiles(*tokens)
    work = expected.work().clone()
    for _ in range(2):
        with host:
            moved = None if given is None else given.to(META, non_blocking=True)
            mask = causal(config, moved, positions().to(META), META)
            own = [split.indices(0, META), tokens[1].to(META)]
        assert mask.key == expected.key
        assert torch.equal(mask.work(), work)
        mask.device = torch.device("cpu")  # of the masks of tiles
        assert mask.tiles(own[0], own[1]).kinds.equal(tiles.kinds)
        assert host.waits == 0


def test_packed_boundaries_and_dense_masks_are_read_on_the_host(interface: Interface) -> None:
    masks = StepMasks(lambda *_: pytest.fail("refused"), interface.caches)  # type: ignore[arg-type, return-value]
    shape: dict[str, Any] = {"is_causal": False, "batch": 1, "q_length": 7, "k_length": 7}
    bounds = torch.tensor([0, 3, 7])
    dense = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -1e9)
    for given in ((None, bounds), (dense, None)):
        expected = masks.of(*given, device=torch.device("cpu"), **shape).key
        with interface.caches.host:
            moved = [None if one is None else one.to(META) for one in given]
            assert masks.of(*moved, device=META, **shape).key == expected
    assert interface.caches.host.waits == 0


def test_questions_are_answered_by_the_host() -> None:
    with HostCopies() as host:
        grid = torch.tensor([[1, 2, 3], [1, 4, 5]]).to(META)
        areas = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0], output_size=2)
        assert areas.tolist() == [6, 20]
        assert (areas == 6).any()
        assert int(areas.sum()) == 26
        assert host.waits == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_model_that_asks_whether_a_batch_is_padded_does_not_wait(attention: str, is_padded: bool) -> None:
    """Without context parallelism too: the device would be asked for each microbatch, on each stage."""
    config, mask = LlamaConfig(), padding() if is_padded else torch.ones(4, TOKENS, dtype=torch.long)
    name_attention(config, attention)
    for device in (torch.device("cpu"), META):
        with HostCopies() as host:
            moved = mask.to(device).chunk(2)[1]
            embeds = torch.empty(2, TOKENS, 8, device=device)
            made: Any = create_causal_mask(config, inputs_embeds=embeds, attention_mask=moved, past_key_values=None)
        assert host.waits == 0
        assert attention == "eager" or (made is None) == (not is_padded)


def test_the_host_answers_for_every_device_unless_code_is_compiled() -> None:
    known = HostCopies()
    for device, is_compiled, answers in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
        cut: Any = SimpleNamespace(_host=known, _device=torch.device(device), _is_compiled=is_compiled)
        assert (CutModule.host_copies(cut) is known) == answers


def test_a_batch_of_an_evaluation_stays_known_until_somebody_writes_to_it() -> None:
    known = PretendedDevice()
    cut: Any = SimpleNamespace(_host=known, _device=torch.device("cuda"), _is_compiled=False)
    cut.host_copies = lambda: CutModule.host_copies(cut)
    with torch.inference_mode():
        with CutModule.moving(cut):
            x = known.moved(torch.tensor([3, 4]))
            assert not torch.is_grad_enabled()
        assert known.find(x) is not None
        x[0] = 5
        assert known.find(x) is None


def test_what_was_written_to_or_drawn_is_not_known() -> None:
    with HostCopies() as host:
        x = torch.arange(4).to(META)
        before = x + 1
        x += 1
        later = x + 1
        drawn = torch.randint_like(x, 5)
        x_of_float = torch.ones(2).to(META)
    assert host.find(x) is None
    assert host.find(later) is None
    assert host.find(drawn) is None
    assert host.find(x_of_float) is None, "no mask is made of it"
    found = host.find(before)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4]


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda x, _: dist.all_reduce(x),
    "all_reduce of a view": lambda x, _: dist.all_reduce(x[:1]),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
    "reduce": lambda x, _: dist.reduce(x, 0),
    "all_gather": lambda x, y: dist.all_gather([x], y),
    "all_gather_into_tensor": dist.all_gather_into_tensor,
    "gather": lambda x, y: dist.gather(y, [x], 0),
    "scatter": lambda x, y: dist.scatter(x, [y], 0),
    "reduce_scatter": lambda x, y: dist.reduce_scatter(x, [y]),
    "reduce_scatter_tensor": dist.reduce_scatter_tensor,
    "all_to_all_single": dist.all_to_all_single,
    "all_to_all": lambda x, y: dist.all_to_all([x], [y]),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # older names, which users have
def test_what_collectives_write_to_is_not_known(tmp_path: Path) -> None:
    known, other = PretendedDevice(), torch.ones(2, dtype=torch.long)
    before = {name: vars(dist.ProcessGroup)[name] for name in dir(dist.ProcessGroup) if name in vars(dist.ProcessGroup)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    end = known.watch_collectives()
    try:
        for name, collective in COLLECTIVES.items():
            with known:
                x = known.moved(torch.tensor([3, 4]))
                y = x + 1
                collective(x, other)
                assert known.find(x) is None, name
                assert known.find(x + 1) is None, name
                found = known.find(y)
                assert found is not None, name
                assert found.tolist() == [4, 5], "which was made before"
    finally:
        end()
        dist.destroy_process_group()
    assert all(vars(dist.ProcessGroup)[name] is one for name, one in before.items())


def test_what_inference_mode_writes_to_is_not_known() -> None:
    known = PretendedDevice()
    with torch.inference_mode():
        with known:
            count = torch.tensor(0)
            assert known.find(count) is not None
            count += 3
            rows = torch.arange(4)
            rows[1:].fill_(7)
            assert known.find(count) is None
            assert known.find(rows) is None
            kept = torch.arange(4) + 1
            assert known.find(kept) is not None
        kept.zero_()
        assert known.find(kept) is None


def test_what_is_written_through_data_is_not_known() -> None:
    with PretendedDevice() as known:
        x, y = known.moved(torch.tensor([3, 4])), known.moved(torch.tensor([3, 4]))
        x.data.zero_()
        y.data = torch.tensor([0, 0])
        assert known.find(x) is None
        assert known.find(y) is None


def test_a_batch_whose_memory_on_the_host_is_used_again_is_known_as_it_was_moved() -> None:
    with HostCopies() as host:
        memory = np.arange(4)
        x = torch.from_numpy(memory).to(META)
        later = x + 1
        memory += 7
        for one, values in ((x, [0, 1, 2, 3]), (later, [1, 2, 3, 4])):
            found = host.find(one)
            assert found is not None
            assert found.tolist() == values


def test_a_large_batch_that_was_written_to_on_the_host_is_not_known() -> None:
    with HostCopies() as host:
        batch = torch.zeros(2, 1, 1024, 1024)
        x = batch.to(META)
        batch += 1
        assert host.find(x) is None
        assert host.find(x + 1) is None


def test_what_is_unknown_is_read_once() -> None:
    host, x = HostCopies(), torch.arange(3)
    assert host.of(x) is x
    assert host.waits == 0
    with pytest.raises(NotImplementedError, match="meta"):
        host.of(x.to(META))
    assert host.waits == 1


def test_masks_that_are_made_under_vmap_are_those_without_the_host() -> None:
    """As transformers makes them: each index is a tensor in no memory of its own."""

    def mask(row: Tensor, column: Tensor) -> Tensor:
        allowed = row.new_ones((), dtype=torch.bool)
        allowed = allowed & (column <= row)
        return allowed & (row - column < 3)

    made = torch.vmap(torch.vmap(mask, (None, 0)), (0, None))
    with PretendedDevice() as device:
        index = device.moved(torch.arange(6))
        found = made(index, index)
    assert torch.equal(found, made(torch.arange(6), torch.arange(6)))
