"""Samples with unlike numbers of images are dealt to microbatches evenly, and every number is that of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from features.balanced_microbatches.albums import COUNTS, Album, Albums, packed
from features.toys import LANGUAGE, VISION, Layout, Run, alone, together, weights
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.joining import Sizes, merge
from lightning_mm5d.data.microbatch import Owned, split
from lightning_mm5d.features.balanced_microbatches.feature import weight_of_pairs
from lightning_mm5d.features.balanced_microbatches.longest_first import dealt, in_line
from lightning_mm5d.schedule.graph import StageKey


def train(run: Run) -> Any:
    module = Album()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(Albums(), 8, collate_fn=packed))
    found = trainer.predict(module, DataLoader(Albums(), batch_size=8, collate_fn=packed))
    return weights(module), module.kept, [module.seen, module.names, [*module.recent]], found, module.sizes


TRIO = Layout({"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3)
"""vision: rank 0; language: ranks 1-2 as stages"""
EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected:
            assert_same(got[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize(
    ("layout", "count"), [(TRIO, 4), (TRIO, 8), (EYES, 4)], ids=["stages", "one sample each", "encoder replicas"]
)
def test_numbers_and_their_order_are_those_of_one_process(layout: Layout, count: int) -> None:
    """ranks as the layout says"""
    expected = alone(train)
    found = together(layout, train, num_microbatches=count, batching={"balance": True})
    for _, kept, seen, predicted, _ in found:
        assert_same(kept, expected[1])
        if count < 8:  # what is appended once for each microbatch of one sample is taken for a row of it
            assert_same(seen, expected[2])
        assert_same(predicted, expected[3])
    for name, weight in expected[0].items():  # those that other ranks hold are NaN
        held = [got[0][name] for got in found if not got[0][name].isnan().any()]
        assert held
        assert_same(held, [weight] * len(held))
    busy = [got[4] for got in found]
    assert max(map(max, filter(None, busy))) == max(COUNTS), "no microbatch has more than the sample with most"


def test_a_batch_without_images_or_with_even_ones_is_cut_as_it_is() -> None:
    assert dealt({}, [2, 2]) is None
    assert dealt({"image": [0, 0, 0, 0]}, [2, 2]) is None
    assert dealt({"image": [3, 1, 2, 2]}, [2, 2]) is None
    assert dealt({"image": [3, 3, 0, 0]}, [4]) is None
    for rows in ([0, 0, 0, 0], [3, 1, 2, 2]):
        assert in_line({"image": rows}, [2, 2], fills=True) is None


def test_the_busiest_microbatch_is_at_most_a_seventh_over_the_mean_or_its_largest_sample() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        rows = np.minimum(30, generator.lognormal(1, 1, 64)).astype(int)
        parts = dealt({"image": rows.tolist()}, [8] * 8)
        assert parts is not None
        assert sorted(sample for part in parts for sample in part) == [*range(64)]
        assert all(len(part) == 8 and part == sorted(part) for part in parts)
        mean, largest = rows.sum() / 8, rows.max()
        fullest = max(rows[part].sum() for part in parts)
        assert fullest <= 1.15 * max(mean, largest), (fullest, mean, largest)


def test_the_cheapest_microbatches_are_at_the_ends_of_a_pipeline() -> None:
    generator = np.random.default_rng(0)
    for samples in (8, 16, 61, 64):
        rows = np.minimum(30, generator.lognormal(1, 1, samples)).astype(int)
        sizes = [len(part) for part in np.array_split(np.arange(samples), 8)]
        parts = in_line({"image": rows.tolist()}, sizes, fills=True)
        assert parts is not None
        assert sorted(sample for part in parts for sample in part) == [*range(samples)]
        assert [len(part) for part in parts] == sizes
        assert all(part == sorted(part) for part in parts)
        costs = [int(rows[part].sum()) for part in parts]
        assert max(costs[0], costs[-1]) <= min(costs[1:-1])
        assert sorted(np.argsort(costs)[-2:]) != [1, 2], "the costliest do not come first"
        if samples % 8 == 0:
            assert costs[:4] == sorted(costs[:4])
            assert costs[4:] == sorted(costs[4:], reverse=True)


def test_the_middle_of_a_pipeline_has_even_microbatches_and_short_ones_have_no_cheap_ends() -> None:
    rows = {"image": np.minimum(30, np.random.default_rng(1).lognormal(1, 1, 64)).astype(int).tolist()}
    for count, fills in ((8, True), (4, True), (8, False)):
        parts = in_line(rows, [64 // count] * count, fills=fills)
        assert parts is not None
        costs = [sum(rows["image"][sample] for sample in part) for part in parts]
        even = costs[1:-1] if (count, fills) == (8, True) else costs
        assert max(even) <= 1.05 * sum(even) / len(even)


def test_encoders_that_take_turns_are_busy_evenly_beside_the_costliest_sample() -> None:
    generator = np.random.default_rng(0)
    for samples, count, turns in ((32, 8, 4), (61, 16, 4), (30, 7, 3), (16, 8, 2)):
        ratios = []
        for _ in range(20):
            rows = generator.lognormal(1, 1, samples)
            sizes = [len(part) for part in np.array_split(np.arange(samples), count)]
            parts = in_line({"image": rows.tolist()}, sizes, fills=False, turns=turns)
            assert parts is not None
            assert sorted(sample for part in parts for sample in part) == [*range(samples)]
            assert [len(part) for part in parts] == sizes
            assert all(part == sorted(part) for part in parts)
            busy = [sum(rows[part].sum() for part in parts[turn::turns]) for turn in range(turns)]
            ratios.append(max(busy) / max(np.mean(busy), rows.max()))
        assert np.mean(ratios) <= 1.05, (samples, count, turns)


def test_an_image_costs_by_the_pairs_of_patches_that_attend_to_each_other() -> None:
    """Samples of as many patches: one image of 16, or four of 4; a video's frames do not see each other."""
    grids = torch.tensor([[1, 4, 4], *[[1, 2, 2]] * 4, *[[1, 2, 4]] * 3])
    batch = {
        "pixel_values": torch.ones(56, 6),
        "image_grid_thw": grids,
        "image_items": torch.tensor([1, 4, 3, 0]),
        "pixel_values_videos": torch.ones(48, 6),
        "video_grid_thw": torch.tensor([[2, 4, 4], [1, 4, 4]]),
        "video_items": torch.tensor([1, 0, 1, 0]),
        "input_ids": torch.ones(4, 2),
    }
    found: list[Mapping[str, Owned]] = []
    split(batch, 2, dealer=lambda owned, sizes: found.append(owned))
    assert found[0] == {
        "image": Owned([16, 16, 24, 0], [256, 64, 192, 0]),
        "video": Owned([32, 0, 16, 0], [512, 0, 256, 0]),
    }


def test_attention_costs_as_much_as_all_else_where_an_image_has_six_times_the_width() -> None:
    """vision of one layer of width 8, before a language model"""
    width = 8
    layer = nn.ModuleDict({"attention": nn.Linear(width, 4 * width), "mlp": nn.Linear(width, 8 * width)})
    row = tuple(SimpleNamespace(forward=sum(p.numel() for p in part.parameters() if p.ndim > 1)) for part in
        (nn.Linear(width, width), layer, nn.Linear(width, 99 * width)))  # fmt: skip
    partition = SimpleNamespace(
        units={StageKey("vision", 0): row, StageKey("language", 0): row[:1]}, encoders=["vision"]
    )
    plan: Any = SimpleNamespace(topology=SimpleNamespace(partition=partition))
    module = nn.Linear(1, 1)
    assert weight_of_pairs(module, plan) == pytest.approx(1 / (6 * width))
    module.config = SimpleNamespace(fullatt_block_indexes=[7], depth=8)
    assert weight_of_pairs(module, plan) == pytest.approx(1 / 8 / (6 * width))


def test_several_kinds_are_even_together() -> None:
    rows = {"image": [9, 9, 0, 0, 0, 0, 9, 9], "audio": [0, 0, 4, 4, 4, 4, 0, 0]}
    parts = dealt(rows, [2, 2, 2, 2])
    assert parts is not None
    for own in rows.values():
        assert {sum(own[sample] for sample in part) for part in parts} == {sum(own) / 4}


def test_uneven_sizes_and_every_kind_of_field_are_dealt() -> None:
    batch = {
        "pixel_values": torch.arange(10.0)[:, None],
        "image_items": torch.tensor([4, 4, 0, 1, 1]),
        "position_ids": torch.arange(15).view(3, 5, 1),
        "names": ["a", "b", "c", "d", "e"],
        "input_ids": torch.ones(5, 2),
        "table": np.arange(5),
        "constant": 3,
    }
    owned: dict[str, Owned] = {}

    def dealer(kinds: Mapping[str, Owned], sizes: Sequence[int]) -> Any:
        owned.update(kinds)
        return dealt({kind: sample.rows for kind, sample in kinds.items()}, sizes)

    parts = split(batch, 2, dealer=dealer)
    assert owned == {"image": Owned([4, 4, 0, 1, 1], [0] * 5)}
    assert [part.samples for part in parts] == [3, 2]
    for part in parts:
        assert part.places is not None
        names = [batch["names"][place] for place in part.places]
        assert part.batch["names"] == names
        assert part.batch["table"].tolist() == [*part.places]
        assert part.batch["position_ids"].shape == (3, part.samples, 1)
        assert len(part.batch["pixel_values"]) == part.batch["image_items"].sum()
        assert part.batch["constant"] == 3
    sizes = Sizes.of(parts)
    assert merge([part.batch["names"] for part in parts], sizes) == batch["names"]
    assert torch.equal(merge([part.batch["image_items"] for part in parts], sizes), batch["image_items"])
    assert np.array_equal(merge([part.batch["table"] for part in parts], sizes), batch["table"])


def test_it_is_refused_where_somebody_else_splits() -> None:
    modalities = {"language": Modality(pp_size=2)}
    for batching in ({"microbatching": "loader"}, {"microbatching": lambda batch, count: [batch]}):
        with pytest.raises(ConfigError, match=r"batching.balance"):
            MultimodalStrategy(modalities=modalities, batching={"balance": True, **batching})
    with pytest.raises(ConfigError, match=r"batching.balance: got 'yes'. It is true or false"):
        MultimodalStrategy(modalities=modalities, batching={"balance": "yes"})
