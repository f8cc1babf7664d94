"""Files whose headers tell their form are decoded where something reads them, to what decoding at once gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as QwenVision

from lightning_mm5d import LazyTensor, ModalityEncoder, MultimodalModel, MultimodalProcessor
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.collating import MultimodalCollator
from models.composed import doubled
from models.test_media import film, wav
from models.tiny_composed import composed, image, language_model, processor, processors
from models.tiny_tokenizers import CHATML, tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def row(*items: dict[str, Any]) -> dict[str, Any]:
    user = {"role": "user", "content": [*items, {"type": "text", "text": "what"}]}
    return {"messages": [user, {"role": "assistant", "content": "this"}], "source": "a.jsonl, line 3"}


def batches(made: MultimodalProcessor, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch of rows, and the same with files that are decoded where they are read."""
    return MultimodalCollator(made)(rows), MultimodalCollator(made, lazy=True)(rows)


def assert_same(lazily: dict[str, Any], at_once: dict[str, Any], *, lazy: set[str]) -> None:
    assert {key for key, value in lazily.items() if isinstance(value, LazyTensor)} == lazy
    assert lazily.keys() == at_once.keys()
    for key, value in at_once.items():
        assert (lazily[key].shape, lazily[key].dtype) == (value.shape, value.dtype)
        assert torch.equal(lazily[key], value), key


def turned(path: Path) -> Path:
    tall = image(0).resize((12, 20))
    exif = tall.getexif()
    exif[0x0112] = 6
    tall.save(path, exif=exif)
    return path


def test_images_that_lie_on_a_side_and_sounds_of_other_rates(tmp_path: Path) -> None:
    image(1).save(tmp_path / "plain.png")
    seen = [{"type": "image", "image": str(path)} for path in (turned(tmp_path / "a.jpg"), tmp_path / "plain.png")]
    sound = wav(tmp_path / "a.wav", np.sin(np.linspace(0, 90, 8820)).reshape(-1, 2), 2, 22050)
    rows = [row(*seen), row({"type": "audio", "path": str(sound)})]
    at_once, lazily = batches(processor(composed()), rows)
    assert_same(lazily, at_once, lazy={"pixel_values", "input_features"})


def test_packed_patches_of_unlike_sizes(tmp_path: Path) -> None:
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    vision = QwenVision(hf.AutoConfig.for_model("qwen2_vl", vision_config=sizes).vision_config)
    model = MultimodalModel(encoders={"vision": ModalityEncoder(vision, "linear")}, language_model=language_model())
    images = hf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    items = []
    for number, size in enumerate([(84, 28), (28, 28), (56, 84)]):
        image(number).resize(size).save(tmp_path / f"{number}.png")
        items.append({"type": "image", "image": str(tmp_path / f"{number}.png")})
    made = MultimodalProcessor(tokenizer(CHATML), {"vision": images}, model)
    at_once, lazily = batches(made, [row(*items[:2]), row(items[2])])
    assert_same(lazily, at_once, lazy={"pixel_values"})


def test_videos_of_unlike_lengths_in_folders_are_padded_where_they_are_read(tmp_path: Path) -> None:
    encoders = {"video": ModalityEncoder(hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)))}
    model = MultimodalModel(encoders=encoders, language_model=language_model())
    made = MultimodalProcessor(tokenizer(CHATML), {"video": processors()["vision"]}, model, frames=4)
    rows = []
    for name, count in (("short", 2), ("long", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            image(number).save(tmp_path / name / f"{number}.png")
        rows.append(row({"type": "video", "path": str(tmp_path / name)}))
    at_once, lazily = batches(made, rows)
    assert lazily["num_frames"].tolist() == [2, 4]
    assert_same(lazily, at_once, lazy={"pixel_values"})


@pytest.mark.parametrize("frames", [None, 4])
def test_videos_whose_headers_list_their_frames_are_decoded_where_they_are_read(
    frames: int | None, tmp_path: Path
) -> None:
    """Decoded at once: one whose edit list leaves out 5 of 9 frames, and one that tells key frames alone."""
    encoders = {"video": ModalityEncoder(hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)))}
    model = MultimodalModel(encoders=encoders, language_model=language_model())
    made = MultimodalProcessor(tokenizer(CHATML), {"video": processors()["vision"]}, model, frames=frames)
    paths = [film(tmp_path / f"{count}.{ending}", count, "mpeg4") for count, ending in ((3, "mp4"), (9, "avi"))]
    at_once, lazily = batches(made, [row({"type": "video", "path": str(path)}) for path in paths])
    assert lazily["num_frames"].tolist() == [3, frames or 9]
    assert_same(lazily, at_once, lazy={"pixel_values"})
    others = [film(tmp_path / "a.mkv", 3, "mpeg4"), without_first_frames(film(tmp_path / "b.mp4", 9, "mpeg4"), 5)]
    at_once, lazily = batches(made, [row({"type": "video", "path": str(path)}) for path in others])
    assert lazily["num_frames"].tolist() == [3, 4]
    assert_same(lazily, at_once, lazy=set())


def without_first_frames(path: Path, count: int) -> Path:
    """A copy that begins `count` frames late, as a program makes it that cuts without encoding again."""
    cut = path.with_stem("cut")
    options = {"avoid_negative_ts": "disabled"}
    with av.open(str(path)) as file, av.open(str(cut), "w", options=options) as written:
        source = file.streams.video[0]
        stream = written.add_stream_from_template(source)
        for packet in file.demux(source):
            if packet.dts is not None:
                late = count * int(1 / (source.average_rate * source.time_base))
                packet.pts, packet.dts, packet.stream = packet.pts - late, packet.dts - late, stream
                written.mux(packet)
    return cut


def test_a_video_that_changes_its_number_of_frames_is_refused(tmp_path: Path) -> None:
    path, made = film(tmp_path / "a.mp4", 3, "mpeg4"), processor(composed())
    sample = made.encode(row({"type": "image", "image": str(path)}), lazy=True)
    film(path, 2, "mpeg4")
    with pytest.raises(ConfigError, match="Its num_frames is not that of an item"):
        sample.values["vision"][0]["pixel_values"].sum()


def damaged(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def other_size(path: Path) -> None:
    Image.new("RGB", (8, 8)).save(path)


@pytest.mark.parametrize(("change", "said"), [(damaged, "cannot read it as an image"), (None, "cannot read")])
def test_what_cannot_be_decoded_is_named_with_its_row(
    change: Callable[[Path], None] | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    made = processor(composed())
    sample = made.encode(row({"type": "image", "image": str(path)}), lazy=True)
    (change or (lambda path: path.write_text("no image")))(path)
    with pytest.raises(ConfigError, match=said) as caught:
        sample.values["vision"][0]["pixel_values"].sum()
    assert caught.value.field.startswith("a.jsonl, line 3")


def test_a_file_that_changes_its_size_is_refused(tmp_path: Path) -> None:
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    vision = QwenVision(hf.AutoConfig.for_model("qwen2_vl", vision_config=sizes).vision_config)
    model = MultimodalModel(encoders={"vision": ModalityEncoder(vision, "linear")}, language_model=language_model())
    images = hf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    made = MultimodalProcessor(tokenizer(CHATML), {"vision": images}, model)
    path = tmp_path / "a.png"
    image(0).resize((84, 28)).save(path)
    sample = made.encode(row({"type": "image", "image": str(path)}), lazy=True)
    image(0).resize((28, 84)).save(path)
    with pytest.raises(ConfigError, match="Its image_grid_thw is not that of an item of the size in the header"):
        sample.values["vision"][0]["pixel_values"].sum()


def test_a_header_that_says_more_than_the_file_holds_is_not_believed(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", np.zeros((800, 1)), 2, 16000)
    data = bytearray(path.read_bytes())
    data[40:44] = (2**31 - 2).to_bytes(4, "little")  # as a program writes it that does not know the length yet
    path.write_bytes(data)
    at_once, lazily = batches(processor(composed()), [row({"type": "audio", "path": str(path)})])
    assert_same(lazily, at_once, lazy=set())


def _pixels(items: list[Any]) -> dict[str, Any]:
    return {"pixel_values": np.stack(items).transpose(0, 3, 1, 2).astype(np.float32)}


def test_functions_and_encoders_with_a_callback_before_them_decode_at_once(tmp_path: Path) -> None:
    image(0).resize((8, 8)).save(tmp_path / "a.png")
    rows = [row({"type": "image", "image": str(tmp_path / "a.png")})]
    vision = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4))
    for processing, before in ((_pixels, None), (processors()["vision"], doubled)):
        encoders = {"vision": ModalityEncoder(vision, before=before)}
        model = MultimodalModel(encoders=encoders, language_model=language_model())
        made = MultimodalProcessor(tokenizer(CHATML), {"vision": processing}, model)
        at_once, lazily = batches(made, rows)
        assert_same(lazily, at_once, lazy=set())


def test_items_go_to_other_processes_and_are_known_by_their_files(tmp_path: Path) -> None:
    for name in "ab":
        image(ord(name)).save(tmp_path / f"{name}.png")
    made = processor(composed())
    (one, same), (other, _) = ([made.encode(row({"type": "image", "image": str(tmp_path / f"{name}.png")}), lazy=True)
        .values["vision"][0]["pixel_values"] for _ in range(2)] for name in "ab")  # fmt: skip
    assert one.key() == same.key() != other.key()
    assert torch.equal(pickle.loads(pickle.dumps(one)) * 1, same * 1)
