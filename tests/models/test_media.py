"""Images, sounds and videos are read from files; what cannot be read is named."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.item_inputs import read_item, read_sound, resampled, spaced


def wav(path: Path, samples: np.ndarray, width: int, rate: int = 8000) -> Path:
    """`samples` [T, channels] in -1 to 1, in whole numbers of `width` bytes."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    data = b"".join(int(number).to_bytes(width, "little", signed=width > 1) for number in whole.flatten())
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_any_width_are_the_mean_of_their_channels(tmp_path: Path, width: int) -> None:
    samples = np.linspace(-0.9, 0.9, 40).reshape(20, 2)
    found = read_sound(wav(tmp_path / "a.wav", samples, width))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples.mean(axis=1), atol=2 / 2 ** (8 * width - 1))


@pytest.mark.parametrize(
    ("rate", "wanted"), [(44100, 16000), (8000, 16000), (16000, 8000), (22050, 16000), (48000, 16000)]
)
def test_a_tone_keeps_its_frequency_when_resampled(rate: int, wanted: int) -> None:
    tone = torch.sin(2 * math.pi * 440 * torch.arange(rate, dtype=torch.float64) / rate)
    found = resampled(tone, rate, wanted)
    expected = torch.sin(2 * math.pi * 440 * torch.arange(wanted, dtype=torch.float64) / wanted)
    assert len(found) == wanted
    assert (found - expected)[200:-200].abs().max() < 5e-3
    above = torch.sin(2 * math.pi * 0.48 * rate * torch.arange(rate, dtype=torch.float64) / rate)
    if wanted < rate:  # a tone that the new rate cannot hold vanishes, and does not fold over
        assert resampled(above, rate, wanted)[200:-200].abs().max() < 1e-2


def test_images_are_upright_and_have_three_channels(tmp_path: Path) -> None:
    image = Image.new("L", (4, 2), 7)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "a.jpg", exif=exif)
    found = read_item(tmp_path / "a.jpg")
    assert (found.size, found.mode) == ((2, 4), "RGB")


def test_a_folder_and_a_list_are_videos_in_the_order_of_numbers(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in (1, 2, 10)]
    for value in (tmp_path, files):
        assert [frame.getpixel((0, 0))[0] for frame in read_item(value)] == [1, 2, 10]
        assert [frame.getpixel((0, 0))[0] for frame in read_item(value, frames=1)] == [2]
    assert spaced(8, 4) == [1, 3, 5, 7]


def film(path: Path, count: int, codec: str) -> Path:
    """A video of `count` frames, each one brighter than the frame before."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(count):
            pixels = np.full((48, 64, 3), 40 + 5 * number, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize(("ending", "codec"), [("mp4", "mpeg4"), ("avi", "mpeg4"), ("mkv", "mpeg4")])
def test_frames_of_a_video_file_are_decoded_and_no_more_are_kept(tmp_path: Path, ending: str, codec: str) -> None:
    path = film(tmp_path / f"a.{ending}", 32, codec)
    every = read_item(path)
    assert len(every) == 32
    assert all(frame.size == (64, 48) for frame in every)
    for frames in (8, 1, 40):
        shown = read_item(path, frames=frames)
        places = spaced(32, frames)
        assert len(shown) == len(places)
        for frame, place in zip(shown, places, strict=True):
            assert abs(frame.getpixel((30, 20))[0] - (40 + 5 * place)) <= 4
    (tmp_path / "b.mp4").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"b\.mp4.*PyAV cannot read it as a video"):
        read_item(tmp_path / "b.mp4")


def test_items_and_arrays_pass_as_they_are(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert read_item(array) is array
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(read_item(tmp_path / "a.npy"), array)
    np.save(tmp_path / "b.npy", np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=r"b\.npy"):
        read_item(tmp_path / "b.npy")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", 4) + b"WAVE")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("b.png", "Check the path"),
        ("a.png", "cannot read it as an image"),
        ("a.wav", "soundfile"),
        ("empty", "frames"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            read_item(str(tmp_path / name))
        assert caught.value.got == str(tmp_path / name)
    with pytest.raises(ConfigError, match="Download it first"):
        read_item("https://example.org/a.png")
