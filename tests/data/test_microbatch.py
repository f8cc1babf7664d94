"""Batches of every container are cut by sample, packed fields included, and outputs join again."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.joining import merge
from lightning_mm5d.data.microbatch import batch_samples, split
from lightning_mm5d.data.packed_images import PackedTokens, describe
from packed_batches import AUDIO, IMAGE, TOKENS, VIDEO, ids, numbered, owned


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    name: list[str]
    scale: float


class TestContainers:
    @pytest.mark.parametrize(("samples", "parts"), [(8, 4), (7, 3), (8, 5), (9, 4), (5, 5), (1, 1)])
    def test_sizes_are_those_of_tensor_split(self, samples: int, parts: int) -> None:
        x = torch.randn(samples, 3)
        cut = split(x, parts)
        assert [m.samples for m in cut] == [len(piece) for piece in x.tensor_split(parts)]
        assert torch.equal(torch.cat([m.batch for m in cut]), x)

    def test_a_short_batch_gives_one_sample_per_microbatch(self) -> None:
        assert [m.samples for m in split(torch.zeros(3, 2), 8)] == [1, 1, 1]

    def test_tensors_become_views(self) -> None:
        batch = {"x": torch.zeros(4, 2)}
        split(batch, 2)[1].batch["x"].fill_(1.0)
        assert batch["x"][:, 0].tolist() == [0, 0, 1, 1]

    def test_types_of_containers_are_kept(self) -> None:
        x, y = numbered(4, 2), torch.arange(4)
        for batch in ([x, y], (x, y), Pair(x, y), {"x": x, "y": y}, OrderedDict(x=x, y=y)):
            first, second = split(batch, 2)
            assert type(first.batch) is type(batch)
            values = second.batch.values() if isinstance(second.batch, dict) else second.batch
            assert [value.flatten()[0].item() for value in values] == [2, 2]

    def test_a_dataclass_keeps_its_type_and_its_scalars(self) -> None:
        first, second = split(Record(x=numbered(4), name=["a", "b", "c", "d"], scale=0.5), 2)
        assert isinstance(first.batch, Record)
        assert (second.batch.x.tolist(), second.batch.name, second.batch.scale) == ([2, 3], ["c", "d"], 0.5)

    def test_transformers_containers_keep_their_type(self) -> None:
        from transformers import BatchEncoding, BatchFeature

        for kind in (BatchFeature, BatchEncoding):
            batch = kind({"input_ids": ids([], []), "labels": torch.arange(2)})
            parts = split(batch, 2)
            assert all(type(part.batch) is kind for part in parts)
            assert parts[1].batch["labels"].tolist() == [1]
            assert len(batch["labels"]) == 2

    def test_lists_of_samples_are_cut_and_values_without_length_repeated(self) -> None:
        boxes = [numbered(3, 4), numbered(1, 4), numbered(5, 4), numbered(0, 4)]
        batch = {
            "pixel_values": numbered(4, 3, 2, 2),
            "labels": [{"boxes": box, "class": box[:, 0]} for box in boxes],
            "text": ("a", "b", "c", "d"),
            "weight": torch.tensor(2.0),
            "none": None,
            "prompt": "all of it",
            "layers": [1, 2],
        }
        part = split(batch, 2)[1].batch
        assert [len(label["boxes"]) for label in part["labels"]] == [5, 0]
        assert part["text"] == ("c", "d")
        assert all(part[key] == batch[key] for key in ("weight", "none", "prompt", "layers"))

    def test_numpy_arrays_are_cut(self) -> None:
        x = torch.arange(4)
        assert split({"x": x, "y": x.numpy()}, 2)[1].batch["y"].tolist() == [2, 3]

    def test_a_mapping_inside_a_tuple_names_the_samples(self) -> None:
        batch = ({"input_ids": ids([], [IMAGE], [], [IMAGE])}, {"pixel_values": numbered(2, 3, 4, 4)}, 7)
        first, second = split(batch, 2, image_tokens=TOKENS)
        assert first.batch[1]["pixel_values"].unique().tolist() == [0]
        assert second.batch[1]["pixel_values"].unique().tolist() == [1]
        assert second.batch[2] == 7

    def test_each_mapping_with_ids_counts_its_own_images(self) -> None:
        def side(*samples: list[int]) -> dict[str, Tensor]:
            tokens = ids(*samples)
            return {"input_ids": tokens, "pixel_values": numbered(int((tokens == IMAGE).sum()), 3, 4, 4)}

        batch = {"chosen": side([IMAGE], []), "rejected": side([], [IMAGE, 9, IMAGE])}
        first, second = (m.batch for m in split(batch, 2, image_tokens=TOKENS))
        assert len(first["chosen"]["pixel_values"]) == 1
        assert first["rejected"]["pixel_values"] is second["chosen"]["pixel_values"] is None
        assert len(second["rejected"]["pixel_values"]) == 2

    def test_one_microbatch_is_the_batch_itself_whatever_is_in_it(self) -> None:
        batch = (torch.zeros(3), torch.zeros(5))
        assert split(batch, 1)[0].batch is batch

    def test_position_ids_are_cut_along_the_dim_of_samples(self) -> None:
        for rows in (3, 4):
            positions = torch.arange(3 * 5).view(1, 3, 5).expand(rows, 3, 5)
            part = split({"input_ids": ids([], [], []), "position_ids": positions}, 3)[1]
            assert torch.equal(part.batch["position_ids"], positions[:, 1:2])
        shared = torch.arange(24)[None]
        batch = {"input_ids": ids([], [], []), "position_ids": shared}
        assert split(batch, 3)[1].batch["position_ids"] is shared


class TestRefusals:
    def test_disagreement_without_names_lists_the_sizes_and_the_remedy(self) -> None:
        with pytest.raises(ConfigError, match=r"batch\[0\].*\(4, 2\).*batch\[1\]\['x'\].*\(6,\).*split_batch"):
            split((torch.zeros(4, 2), {"x": torch.zeros(6)}), 2)

    def test_rows_of_no_known_packing_are_named(self) -> None:
        with pytest.raises(ConfigError, match=r"4 samples.*split_batch") as error:
            split({"input_ids": ids([], [], [], []), "graph": torch.zeros(11, 2)}, 2)
        assert error.value.got == {"batch['graph']": (11, 2)}

    def test_images_that_fit_no_count_are_refused(self) -> None:
        batch = {"input_ids": ids([IMAGE] * 3, [IMAGE] * 2), "pixel_values": numbered(3, 3, 4, 4)}
        with pytest.raises(ConfigError, match=r"3 items.*\[3, 2\] image tokens.*split_batch"):
            split(batch, 2, image_tokens=TOKENS)

    def test_packed_images_without_placeholder_ids_are_refused(self) -> None:
        batch = {"input_ids": ids([IMAGE], [IMAGE, 9, IMAGE]), "pixel_values": numbered(3, 3, 4, 4)}
        with pytest.raises(ConfigError, match="pixel_values"):
            split(batch, 2)

    def test_rows_that_can_be_assigned_in_two_ways_are_refused(self) -> None:
        batch = {
            "input_ids": ids([IMAGE], [IMAGE]),
            "pixel_values": numbered(2, 3, 4, 4),
            "pixel_values_local": numbered(2, 3, 4, 4),
            "num_local_patches": torch.tensor([2, 0]),
        }
        with pytest.raises(ConfigError, match="one way"):
            split(batch, 2, image_tokens=TOKENS)

    def test_a_batch_without_any_length_and_zero_microbatches_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="one row per sample"):
            split({"x": torch.tensor(1.0)}, 2)
        with pytest.raises(ConfigError, match="num_microbatches: got 0"):
            split(torch.zeros(2), 0)


class TestPackedFields:
    def test_images_of_equal_size_follow_their_tokens(self) -> None:
        two_tokens = [IMAGE, IMAGE]
        batch = {
            "input_ids": ids(two_tokens * 2, [], two_tokens, two_tokens * 3),
            "pixel_values": numbered(6, 3, 4, 4),
        }
        assert owned(batch, 4) == [[0, 1], [], [2], [3, 4, 5]]
        assert owned(batch, 2) == [[0, 1], [2, 3, 4, 5]]

    def test_as_many_images_as_samples_are_still_assigned_by_tokens(self) -> None:
        batch = {
            "input_ids": ids([IMAGE, 9, IMAGE], [], [IMAGE], [IMAGE]),
            "pixel_values": numbered(4, 3, 4, 4),
            "image_id": torch.arange(4),
        }
        assert owned(batch, 4) == [[0, 1], [], [2], [3]]
        assert split(batch, 4, image_tokens=TOKENS)[1].batch["image_id"].tolist() == [1]

    def test_a_microbatch_without_images_gets_none(self) -> None:
        batch = {
            "input_ids": ids([], [IMAGE]),
            "pixel_values": numbered(4, 8),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
        }
        first, second = (m.batch for m in split(batch, 2, image_tokens=TOKENS))
        assert first["pixel_values"] is first["image_grid_thw"] is None
        assert second["image_grid_thw"].tolist() == [[1, 2, 2]]

    def test_a_batch_whose_pixel_values_are_none_is_split(self) -> None:
        batch = {"input_ids": ids([], [], []), "pixel_values": None}
        assert [m.batch["pixel_values"] for m in split(batch, 3, image_tokens=TOKENS)] == [None] * 3

    def test_patches_follow_the_grid_for_images_and_videos(self) -> None:
        """Images of 4, 16 and 8 patches (1, 4 and 2 tokens) and videos of 8 and 16 (2 and 4 tokens)."""
        batch = {
            "input_ids": ids([IMAGE] * 5 + [VIDEO] * 2, [], [VIDEO] * 2 + [9] + [VIDEO] * 2, [IMAGE] * 2),
            "pixel_values": numbered(28, 6),
            "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4], [1, 2, 4]]),
            "pixel_values_videos": numbered(24, 6),
            "video_grid_thw": torch.tensor([[2, 2, 2], [4, 2, 2]]),
            "second_per_grid_ts": [0.5, 1.5],
        }
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE) + 2 * (batch["input_ids"] == VIDEO)
        for tokens in (TOKENS, PackedTokens()):  # with placeholder ids, and with token types alone
            rows = [len(part) for part in owned(batch, 4, tokens=tokens)]
            videos = [len(part) for part in owned(batch, 4, "pixel_values_videos", tokens)]
            assert (rows, videos) == ([20, 0, 0, 8], [8, 0, 16, 0])
            parts = [m.batch for m in split(batch, 4, image_tokens=tokens)]
            assert [p["second_per_grid_ts"] for p in parts] == [[0.5], None, [1.5], None]
            grids = [p["image_grid_thw"] for p in parts]
            assert [None if g is None else g.tolist() for g in grids] == [
                [[1, 2, 2], [1, 4, 4]],
                None,
                None,
                [[1, 2, 4]],
            ]

    def test_image_sizes_deal_out_images_whose_rows_are_apart(self) -> None:
        """Pixtral: a break follows each row of tokens, and tokens are in proportion to the area."""
        row = [IMAGE, IMAGE, 9]
        batch = {
            "input_ids": ids(row * 2 + row, [], row * 3),
            "pixel_values": numbered(3, 3, 12, 8),
            "image_sizes": torch.tensor([[8, 8], [4, 8], [12, 8]]),
        }
        assert owned(batch, 3) == [[0, 1], [], [2]]

    def test_runs_of_tokens_deal_out_items_of_any_size(self) -> None:
        batch = {
            "input_ids": ids([AUDIO] * 5 + [9] + [AUDIO] * 2, [], [AUDIO] * 3),
            "input_features": numbered(3, 8, 20),
            "feature_attention_mask": torch.ones(3, 20, dtype=torch.long),
            "clip_scores": numbered(3),
        }
        assert owned(batch, 3, "input_features") == [[0, 1], [], [2]]
        assert owned(batch, 3, "feature_attention_mask") == [[1, 1], [], [1]]

    def test_one_item_or_none_per_sample_may_have_any_number_of_tokens(self) -> None:
        batch = {
            "input_ids": ids([AUDIO, 9, AUDIO, AUDIO], [], [AUDIO] * 2),
            "input_features": numbered(2, 8, 20),
            "audio_feature_lengths": torch.tensor([20, 11]),
            "speaker": torch.tensor([4, 5]),
        }
        assert owned(batch, 3, "input_features") == [[0], [], [1]]
        parts = [m.batch for m in split(batch, 3, image_tokens=TOKENS)]
        assert [None if p["speaker"] is None else p["speaker"].item() for p in parts] == [4, None, 5]

    def test_images_padded_per_sample_stay_with_their_sample(self) -> None:
        """Idefics: [B, images, C, H, W], padded with empty images; the first sample of the second half has none."""
        batch = {"input_ids": ids([IMAGE], [IMAGE], [], [IMAGE, 9, IMAGE]), "pixel_values": numbered(4, 2, 3, 4, 4)}
        assert owned(batch, 2) == [[0, 1], [2, 3]]

    def test_describe_finds_the_ids_in_any_config_of_the_tree(self) -> None:
        inner, outer = torch.nn.Linear(1, 1), torch.nn.Module()
        inner.config = type("Config", (), {"image_token_index": 7, "audio_token_id": None})()  # type: ignore
        outer.config = {"video_token_id": 8}  # type: ignore[assignment]
        outer.inner = inner
        assert describe(outer) == PackedTokens(image=7, video=8)
        assert describe(torch.nn.Linear(1, 1)) == PackedTokens()


class TestMerge:
    def test_merging_what_was_split_gives_the_batch_back(self) -> None:
        batch = {"x": torch.randn(7, 2), "pair": (torch.arange(7), list("abcdefg")), "none": None, "k": "v"}
        parts = split(batch, 3)
        merged = merge([m.batch for m in parts], [m.samples for m in parts])
        assert torch.equal(merged["x"], batch["x"])
        assert torch.equal(merged["pair"][0], torch.arange(7))
        assert (merged["pair"][1], merged["none"], merged["k"]) == (list("abcdefg"), None, "v")

    def test_rows_of_numpy_arrays_are_joined_and_other_arrays_are_not(self) -> None:
        joined = merge([{"y": np.array([1, 2])}, {"y": np.array([3])}], [2, 1])
        assert joined["y"].tolist() == [1, 2, 3]
        assert isinstance(merge([np.zeros((2, 3)), np.zeros((1, 4))], [2, 1]), list)

    def test_means_are_weighted_by_samples(self) -> None:
        loss = merge([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        assert isinstance(loss, Tensor)
        assert loss.item() == pytest.approx(2.0)
        assert merge([{"loss": 1.0}, {"loss": 4.0}], [2, 1]) == {"loss": 2.0}

    def test_rows_of_different_shapes_become_the_list_of_outputs(self) -> None:
        outputs = [torch.zeros(2, 3), torch.zeros(2, 5)]
        assert merge(outputs, [2, 2]) is not outputs
        assert [tuple(o.shape) for o in merge(outputs, [2, 2])] == [(2, 3), (2, 5)]

    def test_lists_of_samples_are_joined_and_tuples_of_fields_are_not(self) -> None:
        ragged = [[torch.zeros(2), torch.zeros(5)], [torch.zeros(1)]]
        assert [len(x) for x in merge(ragged, [2, 1])] == [2, 5, 1]
        loss, logits = merge([(torch.tensor(0.0), torch.zeros(2, 3)), (torch.tensor(1.0), torch.ones(2, 3))], [2, 2])
        assert loss.item() == 0.5
        assert logits.shape == (4, 3)

    def test_values_that_differ_become_a_list(self) -> None:
        assert merge([{"n": "1", "s": "a"}, {"n": "2", "s": "a"}], [1, 1]) == {"n": ["1", "2"], "s": "a"}
        assert merge([{"a": 1}, {"b": 1}], [1, 1]) == [{"a": 1}, {"b": 1}]
        assert merge([None, None], [1, 1]) is None

    def test_a_tensor_that_is_reduced_over_samples_is_a_list_with_a_warning(self) -> None:
        with pytest.warns(UserWarning, match=r"in \['y'\], a tensor of \(3,\) for 4 samples.*num_microbatches: 1"):
            merged = merge([{"y": torch.zeros(3)}, {"y": torch.ones(3)}], [4, 4])
        assert [y.tolist() for y in merged["y"]] == [[0, 0, 0], [1, 1, 1]]

    def test_model_outputs_keep_their_type(self) -> None:
        from transformers.modeling_outputs import CausalLMOutput

        parts = [CausalLMOutput(loss=torch.tensor(float(i)), logits=numbered(2, 3)) for i in range(2)]
        merged = merge(parts, [2, 2])
        assert isinstance(merged, CausalLMOutput)
        assert (merged.loss.item(), merged.logits.shape) == (0.5, (4, 3))


def test_batch_samples_is_none_where_nothing_decides() -> None:
    assert batch_samples({"input_ids": ids([], []), "pixel_values": numbered(7, 2)}) == 2
    assert batch_samples((torch.zeros(3), torch.zeros(3, 1), torch.tensor(0.0))) == 3
    assert batch_samples({"text": ["a", "b"]}) == 2
    assert batch_samples((torch.zeros(3), torch.zeros(4))) is None
    assert batch_samples({"x": 1}) is None


@pytest.mark.parametrize(("size", "found"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [4, 1]), (5, [5]), (9, [5])])
def test_microbatches_of_a_size_are_all_of_it_but_the_last(size: int, found: list[int]) -> None:
    rows = torch.arange(5)
    parts = split({"rows": rows}, size=size)
    assert [part.samples for part in parts] == found
    assert torch.equal(torch.cat([part.batch["rows"] for part in parts]), rows)


@pytest.mark.parametrize(("batch", "words"), [({"x": torch.zeros(0, 3)}, "0 samples"), ("text", "'text'"), (3, "3")])
@pytest.mark.parametrize("count", [1, 2])
def test_batches_without_samples_are_refused(batch: object, words: str, count: int) -> None:
    if count == 1 and words != "0 samples":
        assert split(batch, count)[0].batch == batch  # as one process takes it
        return
    with pytest.raises(ConfigError, match=f"batch: got .*{words}"):
        split(batch, count)


def test_counts_of_microbatches_sum_and_numbers_average() -> None:
    """A callback's ``float(outputs["correct"])`` is that of the batch."""
    outputs = [
        {"correct": torch.tensor(3), "seen": 3, "is_late": True, "loss": torch.tensor(2.0), "rate": 0.5},
        {"correct": torch.tensor(0), "seen": 1, "is_late": True, "loss": torch.tensor(6.0), "rate": 0.5},
    ]
    merged = merge(outputs, [3, 1])
    assert {name: float(value) for name, value in merged.items()} == {
        "correct": 3.0,
        "seen": 4.0,
        "is_late": 1.0,
        "loss": 3.0,
        "rate": 0.5,
    }


def test_a_list_of_tensors_of_unequal_lengths_holds_a_sample_in_each() -> None:
    images = [torch.zeros(size, 4) for size in (3, 5, 2, 6, 4)]
    parts = split(images, 2)
    assert [[len(image) for image in part.batch] for part in parts] == [[3, 5, 2], [6, 4]]
    assert [part.samples for part in parts] == [3, 2]
    parts = split({"waves": [torch.zeros(size) for size in (3, 5, 2)], "label": torch.arange(3)}, 3)
    assert [(len(part.batch["waves"]), part.batch["label"].tolist()) for part in parts] == [
        (1, [0]),
        (1, [1]),
        (1, [2]),
    ]


def test_a_list_of_dicts_that_are_no_batches_holds_a_sample_in_each() -> None:
    samples = [{"image": torch.ones(6), "words": torch.ones(5), "label": torch.tensor(at)} for at in range(5)]
    assert [len(part.batch) for part in split(samples, 2)] == [3, 2]
    boxes = [{"image": torch.ones(3, 8, 8), "boxes": torch.ones(count, 4)} for count in (3, 5, 3, 3)]
    assert [[len(sample["boxes"]) for sample in part.batch] for part in split(boxes, 2)] == [[3, 5], [3, 3]]
    of_loaders = [{"image": torch.ones(4, 6), "label": torch.ones(4)}] * 2
    assert [len(part.batch[1]["image"]) for part in split(of_loaders, 2)] == [2, 2]


def test_a_list_with_an_element_for_each_row_of_the_tensors_beside_it_holds_samples() -> None:
    images = [[torch.zeros(6)] * count for count in (1, 3, 2)]
    parts = split({"inputs": {"images": images, "tokens": torch.zeros(3, 5)}, "label": torch.arange(3)}, 2)
    assert [[len(one) for one in part.batch["inputs"]["images"]] for part in parts] == [[1, 3], [2]]
    assert [part.batch["label"].tolist() for part in parts] == [[0, 1], [2]]
    parts = split({"images": [torch.zeros(3, 4, 4)] * 5, "label": torch.arange(5)}, 2)
    assert [(len(part.batch["images"]), part.samples) for part in parts] == [(3, 3), (2, 2)]
    assert split({"images": [torch.zeros(3, 6)], "label": torch.zeros(1)}, 2)[0].samples == 1
    parts = split({"images": [torch.zeros(3, 4, 4)] * 3, "label": torch.arange(3)}, 2)
    assert [([*map(len, part.batch["images"])], part.samples) for part in parts] == [([3, 3], 2), ([3], 1)]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(8, dtype=torch.int64), torch.zeros(30, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)],
        {"levels": [torch.zeros(5, 2), torch.zeros(9, 2)], "label": torch.zeros(4)},
        (torch.zeros(8, 3), torch.zeros(9, 3)),
        [{"image": torch.ones(3, 8, 8), "boxes": torch.ones(3, 4)}] * 4,
    ],
    ids=["labels, tokens and offsets", "no list of samples", "a tuple of fields", "images, or batches of loaders"],
)
def test_lists_whose_samples_would_be_guessed_are_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"agree on dim 0|neither that many rows|may be samples"):
        split(batch, 2)


def test_rows_that_are_numbered_anew_in_each_microbatch_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"in \['ids'\], whole numbers that count up, start again in each microbatch"):
        joined = merge([{"ids": torch.arange(4) + 8}, {"ids": torch.arange(3) + 8}], [4, 3])
    assert joined["ids"].tolist() == [8, 9, 10, 11, 8, 9, 10]
    for quiet in ([[0, 1, 2], [3, 4, 5]], [[0, 1], [0, 1]], [[0, 2, 1], [0, 2, 1]]):
        parts = [torch.tensor(part) for part in quiet]
        assert merge(parts, [len(part) for part in parts]).tolist() == quiet[0] + quiet[1]


def test_a_field_of_one_modality_is_not_counted_by_the_items_of_another() -> None:
    """A video in the second sample, a sound in the first: `num_frames` has a row, as either has an item."""
    named = {"vision": (7, frozenset({"pixel_values", "num_frames"})), "audio": (8, frozenset({"input_features"}))}
    batch = {
        "input_ids": torch.tensor([[8, 8, 1], [7, 7, 1]]),
        "pixel_values": numbered(1, 2, 3, 8, 8),
        "num_frames": torch.tensor([2]),
        "input_features": numbered(1, 4, 6),
        "vision_items": torch.tensor([0, 1]),
        "audio_items": torch.tensor([1, 0]),
    }
    frames, sounds = (owned(batch, 2, key, PackedTokens(named=named)) for key in ("pixel_values", "input_features"))
    counts = [microbatch.batch["num_frames"] for microbatch in split(batch, 2, image_tokens=PackedTokens(named=named))]
    assert (frames, sounds) == ([[], [0.0]], [[0.0], []])
    assert counts[0] is None
    assert counts[1].tolist() == [2]


def test_a_microbatch_that_is_dealt_only_samples_without_rows_has_an_empty_tensor() -> None:
    rows, counts = torch.arange(15.0).reshape(5, 3), torch.tensor([2, 0, 3, 0])
    batch = {"images": rows, "num_images": counts, "input_ids": torch.arange(8).reshape(4, 2)}
    full, empty = split(batch, 2, dealer=lambda costs, sizes: [[0, 2], [1, 3]])
    assert torch.equal(full.batch["images"], rows)
    assert empty.batch["images"].shape == (0, 3)
    assert empty.batch["num_images"].tolist() == [0, 0]


def test_images_are_counted_where_there_are_by_chance_as_many_as_samples() -> None:
    images, counts = numbered(4, 3, 8, 8), torch.tensor([0, 3, 1, 0])
    ids = torch.arange(8).reshape(4, 2)
    for name in ("images", "pixel_values"):
        first, last = split({name: images, "num_images": counts, "input_ids": ids}, 2)
        assert torch.equal(first.batch[name], images[:3])
        assert torch.equal(last.batch[name], images[3:])


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 1, 8, 8)], ids=str)
def test_images_that_are_padded_to_one_row_a_sample_are_not_counted(shape: tuple[int, ...]) -> None:
    images, counts = numbered(*shape), torch.tensor([0, 3, 1, 0])
    batch = {"images": images, "num_images": counts, "input_ids": torch.arange(8).reshape(4, 2)}
    assert torch.equal(split(batch, 2)[0].batch["images"], images[:2])


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 2)], ids=str)
def test_rows_are_counted_where_there_are_by_chance_as_many_as_samples_and_no_row_is_padded(
    shape: tuple[int, ...],
) -> None:
    rows, counts = numbered(*shape), torch.tensor([0, 3, 1, 0])
    batch = {"images": rows, "num_images": counts, "image_sizes": numbered(4, 7), "labels": torch.arange(4)}
    first, last = split(batch, 2)
    assert torch.equal(first.batch["images"], rows[:3])
    assert torch.equal(last.batch["images"], rows[3:])
    assert torch.equal(first.batch["image_sizes"], batch["image_sizes"][:2])  # of more than what is counted
    for padding in (0.0, -1.0, float("nan")):
        padded = rows.clone()
        for row, count in zip(padded, counts.tolist(), strict=True):
            row[count:] = padding
        assert torch.equal(split(batch | {"images": padded}, 2)[0].batch["labels"], torch.arange(2))
        assert len(split(batch | {"images": padded}, 2)[0].batch["images"]) == 2


def test_a_count_of_another_modality_that_adds_up_to_as_much_is_not_asked() -> None:
    images, sounds = numbered(5, 3, 8, 8), numbered(5, 6, 8)
    counts, others = torch.tensor([3, 0, 1, 1]), torch.tensor([1, 2, 0, 2])
    batch = {"pixel_values": images, "num_images": counts, "input_features": sounds, "audio_lengths": others}
    first, last = split(batch | {"labels": torch.arange(4)}, 2)
    assert [len(first.batch["pixel_values"]), len(first.batch["input_features"])] == [3, 3]
    assert torch.equal(last.batch["pixel_values"], images[3:])


@pytest.mark.parametrize("name", ["num_sounds", "n_waves"])
def test_a_count_that_is_named_after_another_field_is_asked_for_that_alone(name: str) -> None:
    batch = {"pixel_values": numbered(5, 3, 8, 8), "input_features": numbered(5, 6, 8), "labels": torch.arange(4)}
    batch |= {"num_images": torch.tensor([3, 0, 1, 1]), name: torch.tensor([0, 1, 3, 1])}
    first, _ = split(batch, 2)
    assert [len(first.batch["pixel_values"]), len(first.batch["input_features"])] == [3, 1]
