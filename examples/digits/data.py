"""Pairs of a handwritten and a spoken digit, with the question in text and its answer: what the example learns.

A sample is a scan of a digit, a recording of a digit, and the answer in text, "7+5=12": what is seen, what is
heard, and their sum (padded with a blank, "1+2= 3", so that every answer has as many tokens).
The scans are scikit-learn's bundled 8x8 digits, the recordings those of `make_audio.py`. Held out for validation
are 384 scans drawn at random and six of the thirty voices: no validation pair shares either with training.

Which scan meets which recording, and in what order, is drawn once from the seed, so the loader does not shuffle
and a run sees the same batches in one process and in many, as long as Lightning is told not to shuffle either
(`use_distributed_sampler: false`, which suits layouts with one replica).
Refuses an archive with clips longer than 0.77 s.

Shapes: N samples, B batch, S tokens.
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset
from transformers.audio_utils import mel_filter_bank

SAMPLE_RATE, HOP, WINDOW = 8000, 128, 256  # Hz, samples, samples
MELS, FRAMES = 32, 48
IMAGE_TOKENS, AUDIO_TOKENS = 4, FRAMES // 2  # patches of 4x4 pixels; Whisper halves the frames
VOCABULARY = ("<scan>", "<recording>", "?", " ", "+", "=", *"0123456789")
IMAGE_ID, AUDIO_ID = 0, 1
ANSWER_LENGTH = len("7+5=12")
HELD_OUT_SCANS = 384
ARCHIVE = Path(__file__).parent / "data" / "spoken_digits.npz"


def encode(text: str) -> list[int]:
    """The token of each character; raises ValueError for one that is not in the vocabulary."""
    return [VOCABULARY.index(character) for character in text]


def decode(tokens: Tensor) -> str:
    """The text of tokens, shape (S,)."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def log_mel(waves: Tensor) -> Tensor:
    """Log-mel features as Whisper normalises them: (N, FRAMES * HOP) samples -> (N, MELS, FRAMES)."""
    spectrum = torch.stft(waves, n_fft=WINDOW, hop_length=HOP, window=torch.hann_window(WINDOW), return_complex=True)[
        ..., :-1
    ]
    filters = mel_filter_bank(
        num_frequency_bins=WINDOW // 2 + 1,
        num_mel_filters=MELS,
        min_frequency=60.0,
        max_frequency=SAMPLE_RATE / 2,
        sampling_rate=SAMPLE_RATE,
    )
    power = torch.from_numpy(filters).float().T @ spectrum.abs().square()
    log_power = power.clamp(min=1e-10).log10()
    return (log_power.clamp(min=log_power.amax(dim=(1, 2), keepdim=True) - 8) + 4) / 4


def mu_law_decoded(stored: Tensor) -> Tensor:
    """Samples in [-1, 1] of those that `make_audio.py` stored as one byte each, shape kept."""
    compressed = stored.float() / 255 * 2 - 1
    return compressed.sign() * (256 ** compressed.abs() - 1) / 255


def load_scans(held_out: bool) -> tuple[Tensor, Tensor]:
    """Scans (N, 1, 8, 8) in [-1, 1] and what they show (N,), of one split."""
    bunch = load_digits()
    scans = torch.tensor(bunch.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    digits = torch.tensor(bunch.target)
    order = torch.randperm(len(scans), generator=torch.Generator().manual_seed(0))
    part = order[:HELD_OUT_SCANS] if held_out else order[HELD_OUT_SCANS:]
    return scans[part], digits[part]


def load_recordings(held_out: bool) -> tuple[Tensor, Tensor, list[str]]:
    """Log-mel features (N, MELS, FRAMES), what is said (N,), and who says it, of the voices of one split."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        lengths, speakers = archive["lengths"], archive["speakers"]
        if lengths.max() > FRAMES * HOP:
            raise ValueError(f"{ARCHIVE.name}: a clip has {lengths.max()} samples; at most {FRAMES * HOP} fit")
        samples = mu_law_decoded(torch.from_numpy(archive["samples"]))
        chosen = np.flatnonzero(archive["held_out"][speakers] == held_out)
        clips = samples.split(lengths.tolist())
        waves = torch.stack([pad(clips[i], (0, FRAMES * HOP - len(clips[i]))) for i in chosen])
        voices = [str(archive["voices"][speakers[i]]) for i in chosen]
        return log_mel(waves), torch.from_numpy(archive["digits"][chosen].astype(np.int64)), voices


class Pairs(Dataset[dict[str, Tensor]]):
    """`size` pairs of one split; pair i is a function of (seed, i) alone.

    Every scan comes once before any comes again. An item holds `pixel_values` (1, 8, 8), `input_features`
    (MELS, FRAMES), `input_ids` and `labels` (S,), where labels are -100 but at the answer, and the digits
    `seen` and `heard` (scalars), which only the pictures use.
    """

    def __init__(self, size: int, held_out: bool, seed: int) -> None:
        self.scans, self.seen = load_scans(held_out)
        self.recordings, self.heard, self.voices = load_recordings(held_out)
        generator = torch.Generator().manual_seed(seed)
        rounds = -(-size // len(self.scans))
        orders = [torch.randperm(len(self.scans), generator=generator) for _ in range(rounds)]
        self.scan_order = torch.cat(orders)[:size]
        self.recording_order = torch.randint(len(self.recordings), (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.scan_order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        scan, recording = self.scan_order[index], self.recording_order[index]
        seen, heard = int(self.seen[scan]), int(self.heard[recording])
        answer = encode(f"{seen}+{heard}={seen + heard:2d}")
        prompt = [IMAGE_ID] * IMAGE_TOKENS + [AUDIO_ID] * AUDIO_TOKENS + encode("?")
        return {
            "pixel_values": self.scans[scan],
            "input_features": self.recordings[recording],
            "input_ids": torch.tensor(prompt + answer),
            "labels": torch.tensor([-100] * len(prompt) + answer),
            "seen": torch.tensor(seen),
            "heard": torch.tensor(heard),
        }


class DigitsData(L.LightningDataModule):
    """The two splits. The training split is one pass over `train_samples` pairs, drawn from `seed`."""

    def __init__(self, train_samples: int = 12800, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.train_samples, self.batch_size, self.seed = train_samples, batch_size, seed

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """In the order of the pairs."""
        pairs = Pairs(self.train_samples, held_out=False, seed=self.seed)
        return DataLoader(pairs, batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Every held-out scan once, each with a recording by a held-out voice."""
        return DataLoader(Pairs(HELD_OUT_SCANS, held_out=True, seed=self.seed), batch_size=self.batch_size)
