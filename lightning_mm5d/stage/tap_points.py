"""Which modules and parameters outside of layers a stage may have to send results of, because later stages lack them.

Layers and boundaries are not among these: the run knows itself which of them it computes. Modules around layers are
none either, because all stages run their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.compiled import is_compiled, is_compiled_in_place
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.schedule.stage_key import StageKey


@dataclass(frozen=True)
class TapPoints:
    """What one stage of this rank has, and what later ones have.

    Attributes:
        modules: paths of modules that this stage computes and a later stage of the modality cannot.
        parameters: names of parameters outside of layers that this stage has and the last one of the modality has not.
        later: names of parameters that this stage lacks and later ones have.
    """

    modules: frozenset[str]
    parameters: frozenset[str]
    later: frozenset[str]


def watched_modules(root: nn.Module, partition: Partition) -> dict[str, nn.Module]:
    """Return the modules with parameters beside layers that are split over stages, by path."""
    split = [name for name, stages in partition.stages.items() if len(stages) > 1]
    if not split:
        return {}
    layers = [path for name in split for path in partition.parts[name].paths]
    single = [path for name, one in partition.encoders.items() if name not in split for path in one.owns]
    found = {}
    compiled: list[str] = []
    for path, module in root.named_modules():
        if is_compiled(module) or is_compiled_in_place(module):
            compiled.append(path)
        around = not path or any(is_in(layer, path) for layer in layers)
        inside = any(is_in(path, one) for one in (*layers, *single, *compiled))
        if not around and not inside and next(module.parameters(), None) is not None:
            found[path] = module
    return found


def tap_points(
    root: nn.Module, partition: Partition, members: Iterable[StageKey], modules: Mapping[str, nn.Module]
) -> TapPoints:
    """Return those of the stage that `members` of the partition run as; `modules` are the watched ones."""
    members = tuple(members)
    names = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    owners = {name: frozenset(partition.owners[name]) for name in names}
    own, owned, later = set[str](), set[str](), set[str]()
    for member in members:
        after = [cut.name for cut in partition.stages[member.modality] if cut.index > member.number]
        if after:
            paths = partition.parts[member.modality].paths
            held = {name for name in names if member in owners[name]}
            outside = {name for name in held if not any(is_in(name, path) for path in paths)}
            owned |= {name for name in outside if after[-1] not in owners[name]}
            for path, module in modules.items():
                inner = [f"{path}.{name}" for name, _ in module.named_parameters()]
                if held.issuperset(inner) and any(stage not in owners[name] for stage in after for name in inner):
                    own.add(path)
        if member.modality in partition.encoders:
            after += [cut.name for cut in partition.stages[partition.loss_modality]]
        later |= {name for name in names if owners[name].isdisjoint(members) and not owners[name].isdisjoint(after)}
    return TapPoints(frozenset(own), frozenset(owned), frozenset(later))
