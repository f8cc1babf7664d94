"""What the step's own code uses, in order: which module it calls the language model by, and what around that call.

It refuses steps whose code calls a modality before what that feeds from, and models that cannot be cut off.

What is found in a module: its modalities, their boundaries and their layers.

Where the language model is cut off from what runs after it.

A modality that feeds from the language model (a speech talker, an image head) runs after it. So the language model has
a boundary as encoders have one: the innermost module that the step calls and that holds its layers, without the other
modality. What the step uses before that call belongs to the language model, what it uses after it to the loss modality.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.parts import Parts, is_in, joined
from lightning_mm5d.source.order import accesses, touched

_STEP = "training_step"
EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


class StepUses:
    """What the step's own code uses, in order.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._module_at = dict(root.named_modules(remove_duplicate=False))
        self.paths = list(self._expanded("", _STEP))

    def boundary(self, field: str, layers: str | None, others: Sequence[str]) -> str:
        """Return the path of the innermost module that the step calls, which has `layers` and calls none of `others`.

        Args:
            field: the path of the field that the user may set in its place.
            layers: path of the language model's list of layers.
            others: paths of the modalities that feed from it.

        Raises:
            ConfigError: there is none.
        """
        here, method = "", _STEP
        while layers is not None:
            module = self._module_at[here]
            uses = [(joined(here, item), is_called) for item, is_called in touched(module, method)]
            holders = [
                full
                for full, is_called in uses
                if full != here and full in self._module_at and layers.startswith(f"{full}.")
                if is_called or not any(is_in(other, full) for other in others)
            ]
            if not holders:
                break
            here, method = max(holders, key=len), "forward"
            if not self._reaches(here, others):
                return here
        parts = [] if layers is None else layers.split(".")
        around = (".".join(parts[:length]) for length in range(1, len(parts)))
        outermost = next((path for path in around if not any(is_in(other, path) for other in others)), None)
        if outermost is None:
            what = "no list of layers was found in it" if layers is None else f"no module has {layers} without them"
            rule = f"The language model is cut off where its result leaves it for {', '.join(others)}, and {what}"
            raise ConfigError(field, None, rule, "Name the callable whose result the step computes with")
        return outermost

    def unused(self, known: Sequence[str]) -> list[str]:
        """Return paths of modules that the step's code names nowhere, such as a vocoder; nothing where it is unread.

        Args:
            known: paths of modules that are used.
        """
        used = [*self.paths, *known]
        return [
            path
            for path in self._module_at
            if path and self.paths and not any(is_in(path, used_path) or is_in(used_path, path) for used_path in used)
        ]

    def around(self, path: str, other: str) -> tuple[bool, bool] | None:
        """Tell whether the step uses `path` before and after its first use of `other`; None where it does not say."""
        uses, others = list[int](), list[int]()
        for index, used in enumerate(self.paths):
            depth, other_depth = _matched(used, path), _matched(used, other)
            if depth > other_depth or (depth == other_depth and used == path):
                uses.append(index)
            elif other_depth > depth or used == other:
                others.append(index)
        others = [index for index in others if self.paths[index] == other] or others  # where it is called itself
        return (uses[0] < others[0], uses[-1] > others[0]) if uses and others else None

    def after(self, boundary: str, layers: str | None) -> list[str]:
        """Return what the step uses of the inside of `boundary` after it called that: embeddings and heads."""
        if boundary not in self.paths:
            return []
        later = self.paths[self.paths.index(boundary) + 1 :]
        inside = [path for path in later if path != boundary and is_in(path, boundary)]
        return [path for path in dict.fromkeys(inside) if layers is None or not is_in(layers, path)]

    def check_order(self, name: str, path: str, source_name: str, source_path: str) -> None:
        """Refuse a modality whose only uses in the step come before those of the one that it feeds from.

        Raises:
            ConfigError: with the names of both.
        """
        sides = self.around(path, source_path)
        if sides == (True, False) and not is_in(source_path, path):
            rule = f"The step uses {path} before {source_path} alone, so it cannot compute with the result of that"
            fix = f"Leave it unset for an encoder, which feeds {source_name!r}, or call {path} later"
            raise ConfigError(f"modalities.{name}.feeds_from", source_name, rule, fix)

    def _expanded(self, path: str, method: str, depth: int = 0) -> Iterator[str]:
        """What a method uses, with methods of submodules in the place of their own uses."""
        for item in accesses(self._module_at[path], method):
            full = joined(path, item)
            owner, _, name = full.rpartition(".")
            if full in self._module_at or owner == path or owner not in self._module_at or depth > 2:
                yield full
            elif name in EMBEDDINGS:
                table = getattr(self._module_at[owner], name)()
                yield from (path for path, module in self._module_at.items() if module is table and is_in(path, owner))
            else:
                yield full
                yield from self._expanded(owner, name, depth + 1)

    def _reaches(self, path: str, others: Sequence[str]) -> bool:
        """Whether the forward of the module at `path` uses any of `others`, itself or through its submodules."""
        for item in accesses(self._module_at[path], "forward"):
            full = joined(path, item)
            if any(is_in(full, other) for other in others):
                return True
            holds = full in self._module_at and full != path and any(is_in(other, full) for other in others)
            if holds and self._reaches(full, others):
                return True
        return False


def _matched(used: str, path: str) -> int:
    """How many names `used` and `path` share, where one is inside of the other; else 0."""
    return min(used.count("."), path.count(".")) + 1 if is_in(used, path) or is_in(path, used) else 0


@dataclass(frozen=True)
class Boundary:
    """A callable whose result is all that other modalities need: `method` of the module at `path`."""

    path: str
    method: str = "forward"

    @property
    def name(self) -> str:
        return self.path if self.method == "forward" else joined(self.path, self.method)


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
class Structure:
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


# What runs after the language model; the module's own call is the boundary.
_DECODERS = {"talker": "talker", "image_head": "generation_head"}


def cut_language(
    step: StepUses,
    name: str,
    configured: Encoder | None,
    layers: str | None,
    encoders: Mapping[str, Encoder],
    decoders: Mapping[str, tuple[str, ...]],
) -> Encoder:
    """Return the language model as what other modalities feed from.

    Args:
        step: what the step uses.
        name: of the language model's modality.
        configured: where the user said that it is cut, if at all.
        layers: path of its list of layers.
        encoders: what was found of the other modalities.
        decoders: those that feed from others, with the names of these.

    Raises:
        ConfigError: the step calls nothing that it could be cut at, or calls a modality before what that feeds from.
    """
    lm = configured
    if lm is None:
        others = [path for decoder in decoders for path in encoders[decoder].owns]
        path = step.boundary(f"modalities.{name}.boundary", layers, others)
        lm = Encoder((path,), (Boundary(path),))
    paths = {decoder: encoders[decoder].boundaries[-1].path for decoder in decoders} | {name: lm.boundaries[-1].path}
    for decoder, sources in decoders.items():
        for source in (source for source in sources if source in paths):
            step.check_order(decoder, paths[decoder], source, paths[source])
    return lm


def named_decoders(root: nn.Module) -> dict[str, Encoder]:
    """Return what `root` has under the customary names of modalities that run after the language model."""
    decoders: dict[str, Encoder] = {}
    for path, module in root.named_modules():
        for name, attribute in _DECODERS.items():
            if isinstance(getattr(module, attribute, None), nn.Module) and name not in decoders:
                inner = joined(path, attribute)
                decoders[name] = Encoder((inner,), (Boundary(inner),))
    return decoders
