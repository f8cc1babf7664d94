"""Deals the samples of a batch to its microbatches so that each has as many images, frames and sounds to encode.

A microbatch of the first samples may have thirty images and the next none: then the encoder's rank works while others
wait, and encoder replicas, which take turns with microbatches, are busy unequally. What a sample costs is seen in the
batch alone: how many rows of each packed kind it owns. So all ranks of a replica deal the same samples without a word,
and weights, losses, outputs and their order are those of the batch (`data.microbatch.Dealer`).

Text is no cost here: its rows are padded to one length. What follows each other in a pipeline has an order of its own
(`longest_first.in_line`), where no encoder's replicas take turns.

Before that, replicas exchange samples where the data set says what these cost (`longest_first`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_mm5d.config.errors import ConfigError
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
        takes_turns = any(axes.dp > layout.num_replicas for axes in layout.axes.values())
        dealer = partial(in_line, fills=bool(plan.topology.edges) and not takes_turns)
        dealing = Attached()
        dealing.put_attribute(running.steps.batch_parts, "dealer", dealer)
        return dealing


FEATURE = BalancedMicrobatches
