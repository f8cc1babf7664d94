"""Puts features at the placeholder tokens of their modality, and makes sure that there are as many of both.

On a CPU the numbers are compared at once. Elsewhere reading them would make the host wait for the device, so they are
copied aside and compared when the next batch comes. Until then the result of a wrong number is NaN, never a number.

Shapes: B samples, S tokens, E width of the embeddings, T rows of features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError

Items = tuple[Sequence[int], Sequence[int] | None]
"""The rows of each item, and how many items each sample has, or None."""


@dataclass(frozen=True)
class _Copied:
    """Placeholders of each sample, on their way to the host.

    Attributes:
        name: of the modality.
        token: id of its placeholder.
        counts: of each sample. (B,)
        rows: T.
        done: what tells whether the copy is there; None where it is.
    """

    name: str
    token: int
    counts: Tensor
    rows: int
    done: Any

    def settled(self) -> bool:
        """Whether the copy is there; raises ConfigError where it is, and differs."""
        if self.done is not None and not self.done.query():
            return False
        _compare(self.name, self.token, self.counts.tolist(), self.rows)
        return True


@dataclass
class Placeholders:
    """Places features, and keeps the numbers that have not been compared yet."""

    _copied: list[_Copied] = field(default_factory=list)

    def settle(self) -> None:
        """Compare the numbers of earlier batches that have come to the host.

        Raises:
            ConfigError: a batch had another number of features than of placeholders.
        """
        self._copied = [one for one in self._copied if not one.settled()]

    def place(
        self,
        name: str,
        token: int,
        input_ids: Tensor,
        embeds: Tensor,
        features: Tensor | None,
        items: Callable[[], Items] | None = None,
    ) -> Tensor:
        """Return `embeds` with the rows of `features` at the placeholders, in order.

        Args:
            name: of the modality.
            token: id of its placeholder.
            input_ids: (B, S).
            embeds: (B, S, E).
            features: (T, E), or None where the batch has no items.
            items: tells the rows of each item and, where it is known, how many items each sample has. Asked on a CPU
                alone.

        Raises:
            ConfigError: their number or their width differs, or features of an item would come to another sample.
        """
        mask = input_ids == token
        rows = 0 if features is None else len(features)
        if features is not None and features.shape[-1] != embeds.shape[-1]:
            rule = f"Its features are {features.shape[-1]} wide, and the language model's embeddings {embeds.shape[-1]}"
            raise ConfigError(f"encoders.{name}.projector", features.shape[-1], rule, "Use a projector between them")
        if mask.is_meta or torch.compiler.is_compiling():
            pass
        elif mask.device.type == "cpu":
            counts = mask.sum(dim=1).tolist()
            _compare(name, token, counts, rows)
            if items is not None and len(counts) > 1:
                _compare_samples(name, token, counts, *items())
        else:
            embeds, features = self._compare_later(name, token, mask, embeds, features)
        return embeds if features is None else embeds.masked_scatter(mask.unsqueeze(-1), features.to(embeds.dtype))

    def _compare_later(
        self, name: str, token: int, mask: Tensor, embeds: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Copy the numbers aside; where they differ, all embeddings are NaN, and there are features enough."""
        counts, rows = mask.sum(dim=1), 0 if features is None else len(features)
        wrong = torch.where(counts.sum() == rows, 0.0, float("nan")).to(embeds.dtype)
        if features is not None:
            features = torch.cat([features, features.new_zeros(max(0, mask.numel() - rows), features.shape[-1])])
        done = torch.Event(mask.device.type) if mask.device.type != "cpu" else None
        self._copied.append(_Copied(name, token, counts.to("cpu", non_blocking=True), rows, done))
        if done is not None:
            done.record()
        return embeds + wrong, features

    def __deepcopy__(self, memo: Any) -> Placeholders:
        return Placeholders()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Placeholders, ()


def _compare(name: str, token: int, counts: list[int], rows: int) -> None:
    if sum(counts) != rows:
        rule = f"Its encoder gave {rows} features, and there are {sum(counts)} placeholder tokens of id {token}"
        fix = "Write as many tokens for each item as `num_features` tells, as MultimodalProcessor does"
        if rows == 0:
            fix = f"Pass the inputs of the {name} encoder, or leave its tokens out"
        raise ConfigError(f"input_ids.{name}", f"{counts} tokens in the samples", rule, fix)


def _compare_samples(
    name: str, token: int, counts: Sequence[int], lengths: Sequence[int], items: Sequence[int] | None
) -> None:
    """Refuse samples that would get features of each other's items, though all numbers add up."""
    ends, places = [0, *accumulate(lengths)], list(accumulate(counts))
    rule = f"{name}_items says {items} items for the samples, and the items have {list(lengths)} features"
    if items is None:
        rule = f"The items have {list(lengths)} features, so some of an item would come to another sample"
        wrong = [sample for sample, place in enumerate(places) if place not in ends]
    elif len(items) != len(counts) or sum(items) != len(lengths):
        wrong = [0]
    else:
        last = [ends[end] for end in accumulate(items)]
        wrong = [sample for sample, place in enumerate(places) if place != last[sample]]
    if wrong:
        fix = "Order the items as their samples are, and write as many tokens in each as `num_features` tells"
        got = f"{counts[wrong[0]]} tokens of id {token} in sample {wrong[0]}"
        raise ConfigError(f"input_ids.{name}", got, rule, fix)
