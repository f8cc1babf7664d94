"""Batches of families whose inputs cannot be found by their names, and what those families take beside text.

Each function gives a batch of as many samples as it is asked for; placeholder tokens have the ids of `shrunk`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .feeds import FIRST_TEXT_ID, LABELS, VOCABULARY, Batch, text

IMAGE, VIDEO, AUDIO = 3, 4, 5


def sentence(samples: int, counts: dict[int, int], *takes: str) -> Batch:
    """Tokens with placeholders, and labels at their end."""
    batch = text(samples, counts, set(takes))
    labels = batch["input_ids"].clone()
    labels[:, :-LABELS] = -100
    return batch | {"labels": labels}


def targets(samples: int) -> Tensor:
    return torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, LABELS))


def queried(samples: int) -> Batch:
    """InstructBLIP: four latent queries read the image and a question of their own."""
    return sentence(samples, {IMAGE: 4}) | {
        "pixel_values": torch.randn(samples, 3, 16, 16),
        "qformer_input_ids": torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, 5)),
    }


def queried_frames(samples: int) -> Batch:
    """InstructBLIP for videos of two frames, each with four latent queries."""
    return sentence(samples, {VIDEO: 8}) | {
        "pixel_values": torch.randn(samples, 2, 3, 16, 16),
        "qformer_input_ids": torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, 5)),
    }


def seen_by_all(samples: int) -> Batch:
    """IDEFICS: one image in each sample, to which all tokens attend."""
    batch = sentence(samples, {})
    return batch | {
        "pixel_values": torch.randn(samples, 1, 3, 16, 16),
        "image_attention_mask": torch.ones(*batch["input_ids"].shape, 1).long(),
    }


def of_two_resolutions(samples: int) -> Batch:
    """DeepSeek-VL with SAM beside SigLIP: the same image twice."""
    return sentence(samples, {IMAGE: 16}) | {
        "pixel_values": torch.randn(samples, 3, 16, 16),
        "high_res_pixel_values": torch.randn(samples, 3, 16, 16),
    }


def heard(samples: int) -> Batch:
    """Qwen2-Audio: 32 frames are eight features."""
    return sentence(samples, {AUDIO: 8}) | {
        "input_features": torch.randn(samples, 8, 32),
        "feature_attention_mask": torch.ones(samples, 32).long(),
    }


def heard_music(samples: int) -> Batch:
    """Music Flamingo: 32 frames are eight features."""
    return text(samples, {AUDIO: 8}, set()) | {
        "input_features": torch.randn(samples, 8, 32),
        "input_features_mask": torch.ones(samples, 32).long(),
    }


def cropped(samples: int) -> Batch:
    """Phi-4: the whole image and one crop, each 2 x 2 features with a separator after each row and one between."""
    return sentence(samples, {IMAGE: 13}) | {
        "image_pixel_values": torch.randn(samples, 2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]] * samples),
        "image_attention_mask": torch.ones(samples, 2, 4, 4).long(),
    }


def moved(samples: int) -> Batch:
    """Pi0: actions that are read off an image, a command and a state; noise and time are drawn here."""
    return text(samples, {IMAGE: 16}, set()) | {
        "pixel_values": torch.randn(samples, 1, 3, 16, 16),
        "pixel_attention_mask": torch.ones(samples, 1).bool(),
        "state": torch.randn(samples, 6),
        "actions": torch.randn(samples, 4, 5),
        "noise": torch.randn(samples, 4, 5),
        "timestep": torch.rand(samples),
    }


def spoken(samples: int) -> Batch:
    return {"input_values": torch.randn(samples, 400), "labels": targets(samples)}


BATCHES: dict[str, Callable[[int], Batch]] = {
    "deepseek_vl_hybrid": of_two_resolutions,
    "idefics": seen_by_all,
    "instructblip": queried,
    "instructblipvideo": queried_frames,
    "musicflamingo": heard_music,
    "phi4_multimodal": cropped,
    "pi0": moved,
    "qwen2_audio": heard,
    "speech-encoder-decoder": spoken,
    "speecht5": spoken,
}
"""By model type."""
