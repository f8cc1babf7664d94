"""Makes what the recipes start from: unimodal models that are trained, and conversations about digits as JSONL.

    python examples/recipes/prepare.py runs/recipes

Nothing is downloaded. Scans are scikit-learn's handwritten digits, recordings those of the digits example. Three small
models learn what models on a hub know already: a vision transformer to tell scans apart, a Whisper encoder to tell
recordings apart, and a Qwen2 to answer questions about words. Each is saved as Hugging Face saves it:

- ``vision/``, ``audio/``: the encoder (its classifier is thrown away) and its image processor or feature extractor
- ``language/``: the causal language model and its tokenizer, with a chat template
- ``vision_train.jsonl``, ``vision_val.jsonl``, ``audio_*.jsonl``, ``both_*.jsonl`` and ``files/``

Held out are 384 scans and six of thirty voices. It takes about two minutes on two cores.

Shapes: N samples, B batch, S tokens, V vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = (*WORDS, "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")
QUESTIONS = ("which digit is this ?", "what is this ?", "name it .")
SUM = "what is the sum ?"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text }} {% endfor %}{% endif %} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SIDE = 16  # pixels of a scan in its file
STORED_RATE, RATE, HOP, MELS = 8000, 16000, 250, 32
FRAMES = RATE // HOP  # of one second, which no clip exceeds
ARCHIVE = Path(__file__).parents[1] / "digits" / "data" / "spoken_digits.npz"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; roles and the end of a turn are special."""
    special = ["<|pad|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    words = dict.fromkeys(w for text in (*NUMBERS, *QUESTIONS, SUM, "and") for w in text.split())
    vocabulary = {word: at for at, word in enumerate([*special, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", unk_token="<|unknown|>", eos_token="<|end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:5]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train(parameters: Iterator[nn.Parameter], loss_of: Callable[[], Tensor], steps: int, rate: float) -> None:
    """Minimise `loss_of` by AdamW with a rate that falls linearly."""
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        scheduler.step()


def make_language(folder: Path, effort: float) -> None:
    """A Qwen2 that answers questions about words: it learns to repeat a number word, and to add two digits."""
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
            initializer_range=0.06,
        )
    )
    draw = random.Random(0)

    def conversation() -> tuple[list[int], list[int]]:
        first, second = draw.randrange(10), draw.randrange(10)
        # a scan and a recording take several tokens, so a word is repeated as often as it likes
        shown = [WORDS[first]] * draw.randint(1, 6)
        if draw.random() < 0.5:
            question, answer = draw.choice(QUESTIONS), WORDS[first]
        else:
            shown, question, answer = [*shown, *[WORDS[second]] * draw.randint(1, 32)], SUM, NUMBERS[first + second]
        prompt = tokenizer.encode(f"<|user|> {' '.join(shown)} {question} <|end|> <|assistant|>")
        reply = tokenizer.encode(f"{answer} <|end|>")
        return prompt + reply, [-100] * len(prompt) + reply

    def loss() -> Tensor:
        drawn = [conversation() for _ in range(64)]
        width = max(len(ids) for ids, _ in drawn)
        pad = tokenizer.pad_token_id
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in drawn])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in drawn])
        return model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss

    train(model.parameters(), loss, round(600 * effort), 3e-3)
    print(f"language: loss {loss().item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_encoder(name: str, model: nn.Module, width: int, inputs: Tensor, digits: Tensor, steps: int) -> None:
    """Train an encoder by a classifier of its mean feature, which is thrown away; inputs (N, ...), digits (N,)."""
    classifier = nn.Linear(width, 10)

    def loss() -> Tensor:
        rows = torch.randint(len(inputs), (64,))
        return cross_entropy(classifier(model(inputs[rows]).last_hidden_state.mean(1)), digits[rows])

    train(iter([*model.parameters(), *classifier.parameters()]), loss, steps, 2e-3)
    print(f"{name}: loss {loss().item():.3f}")


def make_vision(folder: Path, scans: list[Image.Image], digits: Tensor, effort: float) -> None:
    """A vision transformer with 4 patches a scan, and its image processor."""
    size = {"height": SIDE, "width": SIDE}
    processor = ViTImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=SIDE,
        patch_size=8,
        initializer_range=0.06,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTModel(config, add_pooling_layer=False)
    pixels = processor(scans, return_tensors="pt")["pixel_values"]
    make_encoder("vision", model, 64, pixels, digits, round(400 * effort))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_audio(folder: Path, clips: list[np.ndarray], digits: Tensor, effort: float) -> None:
    """A Whisper model, of which the encoder is trained: 32 features a second; and its feature extractor."""
    extractor = WhisperFeatureExtractor(
        feature_size=MELS, sampling_rate=RATE, hop_length=HOP, n_fft=400, chunk_length=1
    )
    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        vocab_size=8,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        init_std=0.06,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    model = WhisperModel(config)
    features = extractor(clips, sampling_rate=RATE, return_tensors="pt")["input_features"]
    make_encoder("audio", model.encoder, 64, features, digits, round(400 * effort))
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)


def load_scans() -> tuple[list[Image.Image], list[int], list[int]]:
    """Scans, what they show, and in which order they are drawn; the first 384 of that order are held out."""
    bunch = load_digits()
    pixels = (bunch.images * 255 / 16).astype(np.uint8)  # (N, 8, 8)
    scans = [Image.fromarray(scan).resize((SIDE, SIDE)).convert("RGB") for scan in pixels]
    return scans, bunch.target.tolist(), torch.randperm(len(scans), generator=torch.Generator().manual_seed(0)).tolist()


def load_clips() -> tuple[list[np.ndarray], list[int], list[bool]]:
    """Recordings in [-1, 1], what is said, and whether their voice is held out."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        compressed = archive["samples"].astype(np.float32) / 255 * 2 - 1  # mu-law, a byte each
        waves = np.sign(compressed) * (256 ** np.abs(compressed) - 1) / 255
        stored = np.split(waves.astype(np.float32), np.cumsum(archive["lengths"])[:-1])
        # Whisper's features reach to 8 kHz, so recordings need twice as many samples as their archive has
        times = [np.arange(RATE * len(clip) // STORED_RATE) * STORED_RATE / RATE for clip in stored]
        clips = [np.interp(at, np.arange(len(clip)), clip) for at, clip in zip(times, stored, strict=True)]
        held_out = archive["held_out"][archive["speakers"]]
        return clips, archive["digits"].tolist(), held_out.tolist()


def write_wave(path: Path, clip: np.ndarray) -> None:
    """Write a mono recording with 16 bits a sample."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((clip * 32767).astype("<i2").tobytes())


def llava(image: str, question: str, answer: str) -> dict[str, object]:
    """A sample as LLaVA's files have it."""
    turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
    return {"image": image, "conversations": turns}


def messages(files: dict[str, str], question: str, answer: str) -> dict[str, object]:
    """A sample in the messages format, with files by kind: ``{"image": path, "audio": path}``."""
    shown = [{"type": kind, kind: path} for kind, path in files.items()]
    asked = {"role": "user", "content": [*shown, {"type": "text", "text": question}]}
    return {"messages": [asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]}


def write_lines(path: Path, samples: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")


def main(folder: Path, effort: float = 1.0) -> None:
    """Make all of it in `folder`, which may exist already; models train for `effort` times the usual steps."""
    torch.manual_seed(0)
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    scans, seen, order = load_scans()
    clips, heard, held_out = load_clips()
    for at, scan in enumerate(scans):
        scan.save(files / f"scan_{at:04}.png")
    for at, clip in enumerate(clips):
        write_wave(files / f"clip_{at:03}.wav", clip)
    draw = random.Random(0)
    for split, images in (("val", order[:384]), ("train", order[384:])):
        voices = [at for at, out in enumerate(held_out) if out == (split == "val")]
        ask = lambda: draw.choice(QUESTIONS)  # noqa: E731
        vision = [llava(f"files/scan_{at:04}.png", ask(), WORDS[seen[at]]) for at in images]
        rounds = voices if split == "val" else voices * 3
        audio = [messages({"audio": f"files/clip_{at:03}.wav"}, ask(), WORDS[heard[at]]) for at in rounds]
        pairs = [(image, draw.choice(voices)) for image in (images if split == "val" else images * 4)]
        both = [
            messages(
                {"image": f"files/scan_{image:04}.png", "audio": f"files/clip_{clip:03}.wav"},
                SUM,
                NUMBERS[seen[image] + heard[clip]],
            )
            for image, clip in pairs
        ]
        for name, samples in (("vision", vision), ("audio", audio), ("both", both)):
            if split == "train":
                draw.shuffle(samples)
            write_lines(folder / f"{name}_{split}.jsonl", samples)
    shown = order[384:]
    make_vision(folder / "vision", [scans[at] for at in shown], torch.tensor([seen[at] for at in shown]), effort)
    spoken = [at for at, out in enumerate(held_out) if not out]
    make_audio(folder / "audio", [clips[at] for at in spoken], torch.tensor([heard[at] for at in spoken]), effort)
    make_language(folder / "language", effort)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes"))
