"""Rows that hold several documents, which never see each other.

Position ids restart at the first token of each document, there is no attention mask, and nothing is cached. Most
language models of transformers read the documents from the position ids. Others are given the mask that transformers
makes of them. Models that would let documents see each other in both cases are refused.

Shapes: R rows, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask

from lightning_mm5d.config.errors import ConfigError

# Families whose logits of a packed document were compared with those of the document alone (tests/models).
READ_POSITIONS = frozenset(
    (
        *("arcee", "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2"),
        *("gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama"),
        *("mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    )
)
NEED_A_MASK = frozenset(["falcon", "opt"])


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of the numbers of documents: each goes into the first row that has room, in the given order.

    Args:
        lengths: tokens of each document, none over `capacity`.
        capacity: tokens of a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        at = next((row for row, left in enumerate(room) if left >= length), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(capacity)
        rows[at].append(index)
        room[at] -= length
    return rows


def check_packs(config: Any) -> None:
    """Raise unless documents in one row stay apart in a language model.

    Args:
        config: of the language model.
    """
    family = config.model_type
    if family not in READ_POSITIONS | NEED_A_MASK or getattr(config, "alibi", False):
        rule = "Documents in one row would see each other in a language model of this family, or that was not tried"
        known = ", ".join(sorted(READ_POSITIONS | NEED_A_MASK))
        raise ConfigError("packing", family, rule, f"Use packing=False, or one of {known}")


def packed_options(config: Any, inputs_embeds: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a language model's forward, completed where they are those of packed rows.

    Args:
        config: of the language model.
        inputs_embeds: [R, S, D]
        options: the arguments; packed rows have ``position_ids`` [R, S], and neither a mask nor a cache.
    """
    positions = options.get("position_ids")
    beside = (options.get("attention_mask"), options.get("past_key_values"))
    if positions is None or any(given is not None for given in beside):
        return options
    options = {**options, "use_cache": False}  # a new cache would have transformers read no documents from positions
    if config.model_type in NEED_A_MASK:
        options["attention_mask"] = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
    return options
