"""Deals the samples of a batch to its microbatches so that each has as many images, frames and sounds to encode.

A microbatch of the first samples may have thirty images and the next none: then the encoder's rank works while others
wait, and encoder replicas, which take turns with microbatches, are busy unequally. What a sample costs is seen in the
batch alone: how many rows of each packed kind it owns, and how many of them attend to each other. So all ranks of a
replica deal the same samples without a word, and weights, losses, outputs and their order are those of the batch
(`data.microbatch.Dealer`).

A row of an image of l rows costs a layer of P parameters P products, and attention 2 * l * d, with its width d. Of a
transformer layer P is 12 * d ** 2 about, so attention costs as much as all else at l = 6 * d = sqrt(3 * P).

Text is no cost here: its rows are padded to one length. What follows each other in a pipeline has an order of its own
(`longest_first.in_line`), where no encoder's replicas take turns.

Before that, replicas exchange samples where the data set says what these cost (`longest_first`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import Owned
from lightning_mm5d.data.samplers import MOVABLE, leaf_of
from lightning_mm5d.engine.agreement import Agreement
from lightning_mm5d.features.balanced_microbatches.longest_first import Exchange, costs_of, digest_of, in_line
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class BalancedMicrobatches(Feature):
    """The field `batching.balance`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._is_on: bool = fields["balance"]

    def check(self, module: Any, plan: Plan, device: Any) -> None:
        """Refuse a module that splits its batches.

        Raises:
            ConfigError: it has `split_batch`.
        """
        if self._is_on and callable(getattr(module, "split_batch", None)):
            rule = f"Samples are dealt where the strategy splits batches, and {type(module).__name__}.split_batch does"
            raise ConfigError("batching.balance", True, rule, "Leave out the method, or balance")

    def loading(self, dataloader: Any, trainer: pl.Trainer, agreement: Agreement | None) -> None:
        """Deal the samples of each training step over the replicas, where the data set says what they cost.

        Raises:
            ConfigError: it says so wrongly.
            RankMismatchError: it does not say the same on all ranks.
        """
        if not (self._is_on and trainer.training):
            return
        leaf = leaf_of(getattr(dataloader, "served_indices", None))
        costs = costs_of(dataloader.dataset) if type(leaf) in MOVABLE else {}
        if agreement is not None:
            agreement.check("sample costs", {"digest of sample_costs": digest_of(costs)})
        if costs:
            dataloader.served_order.exchange = Exchange(costs)

    def attach(self, running: Running) -> Attached | None:
        """Deal the samples of all batches that are split."""
        if not self._is_on:
            return None
        plan, layout = running.plan, running.plan.layout
        turns = max(1, *(axes.dp // layout.num_replicas for axes in layout.axes.values()))
        fills = bool(plan.topology.edges) and turns == 1
        dealing, weighed = Attached(), weight_of_pairs(running.module, plan)
        dealing.put_attribute(running.steps.batch_parts, "dealer", _Dealer(fills=fills, turns=turns, weighed=weighed))
        return dealing


@dataclass(frozen=True, kw_only=True)
class _Dealer:
    """Deals samples by what their encoders cost.

    Attributes:
        fills: as for `in_line`.
        turns: as for `in_line`.
        weighed: what a pair of rows that attend to each other costs beside a row.
    """

    fills: bool
    turns: int
    weighed: float

    def __call__(self, owned: Mapping[str, Owned], sizes: Sequence[int]) -> list[list[int]] | None:
        costs = {
            kind: [rows + self.weighed * pairs for rows, pairs in zip(sample.rows, sample.pairs, strict=True)]
            for kind, sample in owned.items()
        }
        return in_line(costs, sizes, fills=self.fills, turns=self.turns)


def weight_of_pairs(module: nn.Module, plan: Plan) -> float:
    """Return what attention of a row to another one costs an encoder, beside all else that it computes of a row.

    Of several encoders that of the smallest layers; where attention has windows, by the share of layers without.
    """
    partition = plan.topology.partition
    layers = [
        statistics.median_high(unit.forward for unit in row)
        for stage, row in partition.units.items()
        if stage.modality in partition.encoders and row
    ]
    configs: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
    shares = [
        len(config.fullatt_block_indexes) / config.depth  # of Qwen2.5-VL and its kin
        for config in configs
        if hasattr(config, "fullatt_block_indexes") and getattr(config, "depth", None)
    ]
    return min([1.0, *shares]) / math.sqrt(3 * max(1.0, min(layers, default=0.0)))


FEATURE = BalancedMicrobatches
