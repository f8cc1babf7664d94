"""What is found in a module: its modalities, their boundaries and their layers."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mm5d.partition.parts import Parts
from lightning_mm5d.partition.step_uses import StepUses


@dataclass(frozen=True)
class Boundary:
    """A callable whose result is all that other modalities need: `method` of the module at `path`."""

    path: str
    method: str = "forward"

    @property
    def name(self) -> str:
        return self.path if self.method == "forward" else f"{self.path}.{self.method}" if self.path else self.method


@dataclass(frozen=True)
class Encoder:
    """A modality that another one consumes.

    Attributes:
        owns: paths of the modules and parameters that belong to it.
        boundaries: where its result leaves it.
        precedes: whether its result is made before the first layers of the modalities that it feeds run.
        used_late: whether its result is used after the last layer of the modality that it feeds.
        runs_after: whether encoders feed it: it is the language model, or runs after that. Shards of its result are
            gathered in its own stage, too, where the step goes on with it.
    """

    owns: tuple[str, ...]
    boundaries: tuple[Boundary, ...]
    precedes: bool = True
    used_late: bool = False
    runs_after: bool = False


@dataclass(frozen=True)
class Found:
    """The modalities of a module: the `loss_modality` one, and the `encoders`.

    Attributes:
        layers: the list of layers of each, if any.
        parts: what each can be cut between.
        ends: the loss modality, where it feeds from another; beside this it owns what no other one does.
        main: the language model, where another modality computes the loss.
        used_again: paths inside of the language model that the step uses after its boundary, in the loss modality.
        step: what the step's own code uses, with a `main`.
    """

    loss_modality: str
    encoders: dict[str, Encoder]
    layers: dict[str, str | None]
    parts: dict[str, Parts]
    ends: Encoder | None = None
    main: str | None = None
    used_again: tuple[str, ...] = ()
    step: StepUses | None = None
