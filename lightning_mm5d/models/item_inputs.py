"""Runs images, sounds and other items through their processors, one item at a time, and joins the results.

Each item is processed alone, so that what an encoder sees of it does not depend on its neighbours in a batch. Results
of unlike shapes are padded at the end where a mask or sizes among them tell which part is real, and refused elsewhere.

Shapes: N items of a batch, F frames of a video, C channels, H height, W width.

Reads images, sounds and videos from files, as processors take them.

Images become `PIL.Image` objects in RGB and upright, sounds float arrays ``[T]`` in the sampling rate that a processor
asks for, videos lists of images. Files are decoded by Pillow, the standard library and PyAV or soundfile where these
are installed; nothing is fetched from a network, and ``.npy`` files with pickles are refused.
"""

from __future__ import annotations

import importlib
import math
import re
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import FeatureExtractionMixin, ImageProcessingMixin, ProcessorMixin
from transformers.video_processing_utils import BaseVideoProcessor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.lazy import LazyTensor
from lightning_mm5d.models.encoder_kinds import input_names, own_inputs

SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")
VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_UNTOLD = (".npy", *SOUNDS[1:])
"""files whose headers are not read for their form"""
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""a tag of EXIF, and its values for images that lie on a side"""


def read_item(value: Any, *, sampling_rate: int | None = None, frames: int | None = None) -> Any:
    """What a processor takes for one item.

    Args:
        value: a path, or an item (image, array, list of frames), which is returned as it is. The kind of a file follows
            from its ending; a folder is a video whose frames are its images in the order of their numbers, and so is a
            list of paths. A mapping with ``array`` and ``sampling_rate`` is a sound.
        sampling_rate: in which sounds are returned; None keeps that of the file.
        frames: a video gives at most so many, evenly spaced; None gives all.

    Raises:
        ConfigError: there is no such file, or nothing installed can decode it.
    """
    if (files := _frames_of(value, frames)) is not None:
        return [read_image(file) for file in files]
    if isinstance(value, Mapping) and "array" in value:
        sound = torch.as_tensor(np.asarray(value["array"], dtype=np.float32))
        rate = int(value["sampling_rate"])
        return resampled(sound, rate, sampling_rate or rate).numpy()
    if not isinstance(value, str | Path):
        return value
    path = Path(value)
    if not path.is_file():
        remote = re.match(r"[a-z0-9]+://", str(value))
        fix = "Download it first" if remote else "Check the path; relative ones start at the folder of the data file"
        raise ConfigError("file", str(value), "An item is a file on this machine", fix)
    ending = path.suffix.lower()
    if ending == ".npy":
        with _read_as(path, "numpy cannot read it as an array", ValueError):
            return np.load(path, allow_pickle=False)
    if ending in SOUNDS:
        return read_sound(path, sampling_rate)
    return _read_video(path, frames) if ending in VIDEOS else read_image(path)


def blank_of(value: Any, *, sampling_rate: int | None = None, frames: int | None = None) -> tuple[Any, Any] | None:
    """An item without content of the form that `read_item` gives, and its key among forms.

    Args:
        value: as for `read_item`.
        sampling_rate: as for `read_item`.
        frames: as for `read_item`.

    Returns:
        Of an image, a wav file, a video whose header lists all frames (mp4, mov, avi), and frames in a folder or a
        list; None where nothing but decoding tells the form.
    """
    files = _frames_of(value, frames)
    is_one = files is None
    if files is None:
        if not isinstance(value, str | Path) or not Path(value).is_file() or Path(value).suffix.lower() in _UNTOLD:
            return None
        if Path(value).suffix.lower() == ".wav":
            return _blank_sound(Path(value), sampling_rate)
        if Path(value).suffix.lower() in VIDEOS:
            return _blank_video(Path(value), frames)
        files = [Path(value)]
    sizes = [_image_size(file) for file in files]
    if None in sizes:
        return None
    new = importlib.import_module("PIL.Image").new
    blanks = [new("RGB", size) for size in sizes]
    return (is_one, *sizes), blanks[0] if is_one else blanks


def _image_size(path: Path) -> tuple[int, int] | None:
    """Width and height of an image that is turned upright, as its header says; None where it says none."""
    try:
        with importlib.import_module("PIL.Image").open(path) as opened:
            width, height = opened.size
            return (height, width) if opened.getexif().get(_ORIENTATION, 1) in _TURNED else (width, height)
    except (ImportError, OSError, ValueError, SyntaxError):  # which decoding reports
        return None


def _blank_sound(path: Path, sampling_rate: int | None) -> tuple[Any, Any] | None:
    try:
        with wave.open(str(path), "rb") as opened:
            count, rate = opened.getnframes(), opened.getframerate()
            size = count * opened.getnchannels() * opened.getsampwidth()
    except (wave.Error, EOFError):
        return None
    if size > path.stat().st_size:  # a header that was written before the sound
        return None
    length = math.ceil(count * (sampling_rate or rate) / rate) if count else 0
    return (length,), np.zeros(length, np.float32)


def _blank_video(path: Path, frames: int | None) -> tuple[Any, Any] | None:
    try:
        with importlib.import_module("av").open(str(path)) as opened:
            stream = opened.streams.video[0]
            listed = getattr(stream, "index_entries", ())  # since PyAV 17; in mkv and webm of key frames alone
            shown = sum(not entry.is_discard for entry in listed)
            if len(listed) != stream.frames or not shown:  # an edit list leaves some out
                return None
            size = stream.codec_context.width, stream.codec_context.height
    except (ImportError, OSError, ValueError, IndexError):  # which decoding reports
        return None
    count = len(spaced(shown, frames))
    return (False, *[size] * count), [importlib.import_module("PIL.Image").new("RGB", size)] * count


def read_image(path: Path) -> Any:
    """The image at `path`, in RGB and turned upright.

    Raises:
        ConfigError: it is missing or no image, or Pillow is not installed.
    """
    image = _package("PIL.Image", "pillow", "vision", path)
    turned = importlib.import_module("PIL.ImageOps").exif_transpose
    errors = (OSError, ValueError, SyntaxError)
    with _read_as(path, "Pillow cannot read it as an image", *errors), image.open(path) as opened:
        return turned(opened).convert("RGB")


def read_sound(path: Path, sampling_rate: int | None = None) -> np.ndarray:
    """The sound at `path` as float32 ``[T]`` in -1 to 1: the mean of its channels, resampled.

    Raises:
        ConfigError: it is damaged, or no wav file of whole numbers and soundfile is not installed.
    """
    try:
        samples, rate = _read_wave(path)
    except (wave.Error, EOFError):
        soundfile = _package("soundfile", "soundfile", "audio", path)
        with _read_as(path, "soundfile cannot read it as a sound", soundfile.LibsndfileError):
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    sound = torch.from_numpy(np.ascontiguousarray(samples.mean(axis=1), dtype=np.float32))
    return resampled(sound, rate, sampling_rate or rate).numpy()


def resampled(sound: Tensor, rate: int, wanted: int, zeros: int = 16) -> Tensor:
    """`sound` ``[T]`` in `wanted` samples per second instead of `rate`: ``[ceil(T * wanted / rate)]``.

    Interpolates by a sinc of the lower limit of frequency under a Hann window (Smith, "Digital Audio Resampling").

    Args:
        sound: samples.
        rate: samples per second of `sound`.
        wanted: samples per second of the result.
        zeros: crossings of zero on each side of the sinc.
    """
    if rate == wanted or not len(sound):
        return sound
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    low = min(1.0, up / down) * 0.97  # of the limit of frequency, so that nothing folds over
    reach = math.ceil(zeros / low)
    steps = torch.arange(-reach, reach + down, dtype=torch.float64)
    phases = torch.arange(up, dtype=torch.float64).unsqueeze(1) * down / up
    distance = (steps - phases) * low
    window = torch.cos(distance.clamp(-zeros, zeros) * math.pi / zeros / 2) ** 2
    kernel = (torch.sinc(distance) * window * low).to(sound.dtype)  # [up, taps]
    length = math.ceil(len(sound) * up / down)
    padded = torch.nn.functional.pad(sound, (reach, reach + 2 * down))
    blocks = torch.nn.functional.conv1d(padded.view(1, 1, -1), kernel.unsqueeze(1), stride=down)  # [1, up, blocks]
    return blocks[0].T.reshape(-1)[:length].contiguous()


def spaced(count: int, most: int | None) -> list[int]:
    """At most `most` of the numbers 0 to `count` - 1, evenly spaced, each in the middle of its share."""
    if most is None or count <= most:
        return list(range(count))
    return [(2 * index + 1) * count // (2 * most) for index in range(most)]


@contextmanager
def _read_as(path: Path, rule: str, *errors: type[Exception]) -> Iterator[None]:
    """Refuse a file where what reads it raises one of `errors`."""
    try:
        yield
    except errors as error:
        raise ConfigError("file", str(path), f"{rule} ({error})", "Check the file") from error


def _read_wave(path: Path) -> tuple[np.ndarray, int]:
    with wave.open(str(path), "rb") as opened:
        width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
        data = opened.readframes(opened.getnframes())
    if width == 1:  # the only width without a sign
        whole = np.frombuffer(data, np.uint8).astype(np.float32) - 128
    elif width == 3:
        octets = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = ((octets[:, 0] << 8 | octets[:, 1] << 16 | octets[:, 2] << 24) >> 8).astype(np.float32)
    else:
        whole = np.frombuffer(data, f"<i{width}").astype(np.float32)
    return whole.reshape(-1, channels) / float(2 ** (8 * width - 1)), rate


def _frames_of(value: Any, frames: int | None) -> list[Path] | None:
    """The images of a video that is a list of paths or a folder; None for anything else."""
    if isinstance(value, list | tuple) and value and all(isinstance(part, str | Path) for part in value):
        files = [Path(part) for part in value]
    elif isinstance(value, str | Path) and Path(value).is_dir():
        files = [file for file in Path(value).iterdir() if file.is_file() and not file.name.startswith(".")]
        files.sort(key=lambda file: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)])
        if not files:
            rule = "A folder that is a video holds its frames as images"
            raise ConfigError("file", str(Path(value)), rule, "Check the path")
    else:
        return None
    return [files[at] for at in spaced(len(files), frames)]


def _read_video(path: Path, frames: int | None) -> list[Any]:
    av = _package("av", "av", "video", path)
    with _read_as(path, "PyAV cannot read it as a video", OSError, ValueError, IndexError):
        with av.open(str(path)) as opened:
            count = opened.streams.video[0].frames  # as its header says, if it does
        images, decoded = _decoded(av, path, spaced(count, frames))
        if decoded != count:
            images, _ = _decoded(av, path, spaced(decoded, frames))
    return images


def _decoded(av: Any, path: Path, places: Sequence[int]) -> tuple[list[Any], int]:
    """The frames of a video at some places, of which no others are kept, and how many there are."""
    images, wanted, count = list[Any](), set(places), 0
    with av.open(str(path)) as opened:
        for frame in opened.decode(video=0):
            if count in wanted:
                images.append(frame.to_image())
            count += 1
    return images, count


def _package(module: str, package: str, extra: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        rule = f"Reading it needs {package}, which is not installed"
        fix = f"Run pip install 'lightning_mm5d[{extra}]' (or pip install {package})"
        raise ConfigError("file", str(path), rule, fix) from None


Values = dict[str, Tensor]
Processor = Callable[..., Any]

_TELL_REAL_PARTS = ("mask", "sizes", "shapes", "num_frames", "lengths")


def plain_processor(name: str, processor: Any) -> Processor:
    """The image processor, video processor or feature extractor in `processor`, or the function that it is.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(processor, ProcessorMixin):  # CLIP's, Whisper's: it has a tokenizer beside
        parts = [getattr(processor, part, None) for part in ("image_processor", "feature_extractor", "video_processor")]
        processor = next((part for part in parts if part is not None), None)
    if not callable(processor):
        rule = "Items go through an image processor, a video processor or a feature extractor of transformers, or a "
        rule += "function of a list of items"
        raise ConfigError(f"processors[{name!r}]", processor, rule, "Use AutoImageProcessor or AutoFeatureExtractor")
    return processor


def item_values(name: str, processor: Processor, config: Any, value: Any, frames: int | None = None) -> Values:
    """One item as its encoder takes it, under the encoder's own names.

    Args:
        name: of the modality, for errors.
        processor: of the modality.
        config: of the encoder.
        value: a path or an item.
        frames: at most so many of a video.

    Raises:
        ConfigError: the file cannot be read, or the processor gives nothing that the encoder takes.
    """
    item = read_item(value, sampling_rate=getattr(processor, "sampling_rate", None), frames=frames)
    names = input_names(config)
    is_video = isinstance(processor, ImageProcessingMixin) and _is_video(item)
    outputs = _called(processor, list(item) if is_video else [item])
    values = {key: torch.as_tensor(part) for key, part in own_inputs(config, outputs).items()}
    if not values:
        rule = f"Its processor returned {sorted(outputs)}, of which the encoder takes none ({', '.join(names)})"
        raise ConfigError(name, type(processor).__name__, rule, "Use the processor of the encoder's own family")
    if is_video and "num_frames" in names:  # [F, C, H, W] of one item
        pixels = values["pixel_values"]
        values = {**values, "pixel_values": pixels.unsqueeze(0), "num_frames": torch.tensor([len(pixels)])}
    return values


@dataclass(frozen=True)
class ItemForm:
    """What all items of one form have in common.

    Attributes:
        main: the encoder's first input, which holds what an item shows.
        values: of an item: `main` without memory, and the others, which are equal for all.
        counts: how many features each gives.
    """

    main: str
    values: Values
    counts: tuple[int, ...]


class ItemLoad:
    """Decodes and processes the file of an item, for `LazyTensor`.

    Args:
        name: of the modality.
        processor: of the modality.
        config: of the encoder.
        value: as for `item_values`.
        frames: as for `item_values`.
        form: that its header tells.
        source: of the row, for errors.
    """

    def __init__(
        self, name: str, processor: Processor, config: Any, value: Any, frames: int | None, form: ItemForm, source: str
    ) -> None:
        self._name, self._processor, self._config, self._value, self._frames = name, processor, config, value, frames
        self._form, self._source = form, source

    def __call__(self) -> Tensor:
        """The encoder's first input.

        Raises:
            ConfigError: the file cannot be read, or is not what its header says.
        """
        try:
            values = item_values(self._name, self._processor, self._config, self._value, self._frames)
        except ConfigError as error:
            raise ConfigError(f"{self._source}: {error.field}", error.got, error.rule, error.fix) from error
        form = self._form
        others = values.keys() | form.values.keys()
        others.discard(form.main)
        if unlike := [key for key in others if key not in values or not torch.equal(values[key], form.values[key])]:
            rule = f"Its {unlike[0]} is not that of an item of the size in the header of its file"
            raise ConfigError(f"{self._source}: {self._name}", str(self._value), rule, "Use lazy=False")
        return values[form.main]

    def lazily(self) -> Values:
        """What `item_values` returns, with the encoder's first input as a `LazyTensor`."""
        form = self._form.values[self._form.main]
        return {**self._form.values, self._form.main: LazyTensor(self, form.shape, form.dtype)}

    def identity(self) -> bytes:
        """What tells it from other items, on all ranks."""
        return f"{self._name} {self._value} {self._frames}".encode()

    def __repr__(self) -> str:
        return f"{self._source}: {self._name} {self._value}"


def takes_blanks(processor: Processor) -> bool:
    """Whether what a processor returns has a form that follows from its items' sizes: not known of functions."""
    return isinstance(processor, BaseVideoProcessor | ImageProcessingMixin | FeatureExtractionMixin)


def joined(name: str, values: Sequence[Values], padding_value: float = 0.0) -> Values:
    """What the encoder takes of all items together: one after the other along dim 0.

    Args:
        name: of the modality, for errors.
        values: of each item or group of items, under the same names.
        padding_value: for floating point values.

    Raises:
        ConfigError: items differ in shape, and nothing tells how large each is.
    """
    keys = {key for value in values for key in value}
    for key in keys:
        if any(key not in value for value in values):
            rule = f"Its processor returned {key} for some items and not for others"
            raise ConfigError(name, sorted(keys), rule, "Use one processor and one kind of item for a modality")
    tell = any(key.endswith(_TELL_REAL_PARTS) for key in keys)
    return {key: _stacked(name, key, [value[key] for value in values], padding_value, tell) for key in keys}


def _stacked(name: str, key: str, parts: list[Tensor], padding_value: float, tell: bool) -> Tensor:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) == 1:
        return torch.cat(parts)
    if not tell or len({len(shape) for shape in shapes}) > 1:
        rule = f"Items of a batch differ in the shape of {key}, and no mask or sizes tell their real parts"
        fix = "Let the processor resize or pad all items to one size"
        raise ConfigError(name, sorted(tuple(shape) for shape in shapes), rule, fix)
    full = [max(sizes) for sizes in zip(*shapes, strict=True)]
    fill = padding_value if parts[0].is_floating_point() else 0
    pads = [_Padded(part, (len(part), *full), fill) for part in parts]
    return torch.cat(
        [LazyTensor(pad, pad.shape, pad.part.dtype) if isinstance(pad.part, LazyTensor) else pad() for pad in pads]
    )


@dataclass(frozen=True)
class _Padded:
    """A tensor with `fill` after it, as `shape`."""

    part: Tensor
    shape: tuple[int, ...]
    fill: float

    def __call__(self) -> Tensor:
        result = torch.full(self.shape, self.fill, dtype=self.part.dtype)
        result[tuple(slice(size) for size in self.part.shape)] = self.part
        return result

    def identity(self) -> bytes:
        """What tells it from other tensors, on all ranks."""
        key = self.part.key() if isinstance(self.part, LazyTensor) else b""
        return key + f"{self.shape} {self.fill}".encode()


def _called(processor: Processor, items: list[Any]) -> Mapping[str, Any]:
    if isinstance(processor, BaseVideoProcessor):
        return dict(processor(videos=items, return_tensors="pt"))
    if isinstance(processor, ImageProcessingMixin):
        return dict(processor(images=items, return_tensors="pt"))
    if isinstance(processor, FeatureExtractionMixin):
        _check_sound(processor, items[0])
        options = {"sampling_rate": getattr(processor, "sampling_rate", None), "return_attention_mask": True}
        return dict(processor(items[0], return_tensors="pt", **options))
    return dict(processor(items))


def _check_sound(processor: Any, sound: Any) -> None:
    """Refuse what a feature extractor would take for several sounds, or of which it would leave out the end."""
    shape = tuple(getattr(sound, "shape", (len(sound),)))
    limit = getattr(processor, "n_samples", None)
    if len(shape) != 1 or shape[0] == 0:
        fix = "Take the mean over its channels, or remove it"
        raise ConfigError("sound", shape, "A sound is one row of samples", fix)
    if limit is not None and shape[0] > limit:
        rule = f"Its feature extractor leaves out what is beyond {limit} samples"
        raise ConfigError("sound", shape, rule, "Cut the sound into several, or set a longer chunk_length")


def _is_video(item: Any) -> bool:
    return isinstance(item, list | tuple) or (getattr(item, "ndim", 0) == 4)
