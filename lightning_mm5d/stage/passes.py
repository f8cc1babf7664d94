"""The order in which a step enters layers that are split over stages.

Stages only fit together where all layers of a stage run after those of earlier stages, and where each stage begins with
the layer that it was cut at. Neither the list of layers nor the code that was read proves it, so it is checked whenever
a layer is entered, on every rank. Within a stage layers may run in any order, several times, or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from lightning_mm5d.partition import Partition
from lightning_mm5d.stage.view import StageError


class Pass:
    """The passes of one step through the layers of one modality, one after the other.

    Args:
        partition: what is cut where.
        modality: name of the modality.

    Attributes:
        number: of the pass that is under way, from 0.
    """

    def __init__(self, partition: Partition, modality: str) -> None:
        self._modality, self._paths = modality, partition.parts[modality].paths
        self._firsts = [cut.first for cut in partition.stages[modality]]
        self._stage = self._last = len(self._firsts) - 1
        self._layer, self.number = -1, 0

    def following(self, layers: Sequence[int]) -> int:
        """Return which of `layers`, the calls of one module, is the next one."""
        return next((layer for layer in layers if layer > self._layer), layers[0])

    def enter(self, layer: int) -> None:
        """Note that the step enters a layer.

        Raises:
            StageError: stages would run in another order than they are cut in.
        """
        stage = bisect_right(self._firsts, layer) - 1
        if self._layer < 0 or stage != self._stage:
            follows = stage == self._stage + 1 or (stage == 0 and self._stage == self._last)
            if not follows or (stage and layer != self._firsts[stage]):
                before = self._paths[self._layer] if self._layer >= 0 else "no other"
                self._refuse(f"enters {self._paths[layer]} after {before}")
            self.number += self._layer >= 0 and stage == 0
        elif stage and layer == self._firsts[stage]:
            self._refuse(f"enters {self._paths[layer]} twice")
        self._stage, self._layer = stage, layer

    def end(self) -> None:
        """Note that the step ended.

        Raises:
            StageError: it ended before the last stage.
        """
        if self._layer >= 0 and self._stage != self._last:
            self._refuse(f"ends after {self._paths[self._layer]}")

    def _refuse(self, what: str) -> None:
        firsts = ", ".join(self._paths[first] for first in self._firsts[1:])
        raise StageError(
            f"the step {what}, and the stages of {self._modality} begin with {firsts}, in this order: all that is "
            "before such a layer must run before it, and each of them once in every pass. Choose other cuts with "
            f"modalities.{self._modality}.pipeline_template, or set modalities.{self._modality}.pp_size to 1"
        )
