"""Prompts of a batch of training samples, and what the model answers to them.

A prompt is everything before the last stretch of labelled tokens: the last answer of a conversation.
Shapes: B batch, S sequence, P longest prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mm5d.models.processing import IGNORED

_TEXT = ("labels", "position_ids", "loss_mask")


def prompts(batch: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the batch as ``generate`` takes it: prompts ``(B, P)``, padded on the left, and what encoders take.

    Args:
        batch: ``input_ids``, ``labels`` and ``attention_mask`` ``(B, S)``, and inputs of encoders.
        tokenizer: names the token that pads.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    mask = ids.new_ones(ids.shape) if mask is None else mask
    starts = [_last_answer(row)[0] for row in batch["labels"]]
    kept = [row[:start][seen[:start].bool()] for row, seen, start in zip(ids, mask, starts, strict=True)]
    width = max(len(row) for row in kept)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prompt = ids.new_full((len(kept), width), 0 if padding is None else padding)
    seen = mask.new_zeros(len(kept), width)
    for at, row in enumerate(kept):
        prompt[at, width - len(row) :] = row
        seen[at, width - len(row) :] = 1
    rest = {key: value for key, value in batch.items() if key not in ("input_ids", "attention_mask", *_TEXT)}
    return {"input_ids": prompt, "attention_mask": seen, **rest}


def targets(batch: Mapping[str, Any]) -> list[Tensor]:
    """Return the tokens of each sample's last answer."""
    found = []
    for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        start, stop = _last_answer(labels)
        found.append(row[start:stop])
    return found


def _last_answer(labels: Tensor) -> tuple[int, int]:
    """Where the last stretch of labelled tokens starts and stops; at the end where there is none."""
    counted = (labels != IGNORED).tolist()
    stop = len(counted)
    while stop and not counted[stop - 1]:
        stop -= 1
    start = stop
    while start and counted[start - 1]:
        start -= 1
    return (start, stop) if stop else (len(counted), len(counted))


def exact(tokenizer: Any, answer: Tensor, target: Tensor) -> dict[str, Any]:
    """Return what was generated and what was right, as text, and whether they are equal but for blanks around."""
    got, wanted = (tokenizer.decode(one, skip_special_tokens=True).strip() for one in (answer, target))
    return {"answer": got, "target": wanted, "right": got == wanted}


def write_samples(path: Path, step: int, shown: Sequence[Mapping[str, Any]]) -> None:
    """Append samples to a JSONL file, each with the optimizer step at which it was generated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for one in shown:
            file.write(json.dumps({"step": step, **one}, ensure_ascii=False) + "\n")
