"""Shards the modalities of a module that have a tensor parallel degree: which plans apply, and what follows.

It refuses plans that do not fit, and parameters that colocated modalities of different degrees share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition import Partition
from lightning_mm5d.tensor_parallel.plan_lookup import Plans, plans_of, unplanned
from lightning_mm5d.tensor_parallel.resolve import Division, resolve

_log = logging.getLogger(__name__)


class OtherDivision(Protocol):
    """Layers that a feature divides: what ``begin(root, partition, modalities)`` of its `layers_in_blocks` returns."""

    def pieces(self, path: str) -> int | None:
        """Return in how many pieces the units of the module at `path` are cut; None for the number of its ranks."""

    def divided(self, division: Division, shared: Collection[str]) -> Division:
        """Return `division` with these layers in blocks; `shared` are parameters that several modalities use."""


def divide(
    root: nn.Module,
    partition: Partition,
    modalities: Mapping[str, Modality],
    experts: Mapping[str, tuple[str, ...]] | None = None,
) -> Division:
    """Return what tensor parallelism makes of `root`; logs which modules of a sharded modality stay full.

    Args:
        root: the LightningModule; the meta device will do.
        partition: which stage uses which parameter.
        modalities: the configuration.
        experts: modules whose experts ranks share besides, by path, with the names of their parameters.

    Raises:
        ConfigError: a plan does not fit.
    """
    _check_shared(partition, modalities)
    others: list[OtherDivision] = [module.begin(root, partition, modalities) for module in parts("layers_in_blocks")]

    def pieces(path: str, degree: int) -> int:
        return next((count for one in others if (count := one.pieces(path)) is not None), degree)

    degrees = {name: modality.tp_size for name, modality in modalities.items()}
    if set(degrees.values()) == {1}:
        return Division()

    def place(parameter: str) -> tuple[str, int] | None:
        # what several modalities share stays full: their ranks are in different groups
        users = partition.users(parameter)
        return (user, degrees[user]) if len(users) == 1 and (user := next(iter(users))) else None

    sharded = [name for name in partition.owners if (found := place(name)) is not None and found[1] > 1]
    around = {name.rsplit(".", cut)[0] for name in sharded for cut in range(1, name.count(".") + 1)} | {""}
    layers = [path for name, path in partition.layers.items() if path is not None and degrees[name] > 1]
    plans, whole = plans_of(root, around.__contains__), dict[str, tuple[str, str]]()
    full = {path: why for path, why in unplanned(root, plans, layers).items() if path in around}
    for path, names in (experts or {}).items():
        found = place(names[0])
        if found is not None and found[1] > 1 and modalities[found[0]].tensor.expert_tp_size == 1:
            whole |= dict.fromkeys(names, (path, found[0]))
    plans = _without(plans, {path for path, _ in whole.values()})
    full_embeddings = {name for name, modality in modalities.items() if not modality.tensor.shard_embedding}
    multiples = {
        name: modality.tensor.make_vocab_size_divisible_by
        for name, modality in modalities.items()
        if modality.tensor.make_vocab_size_divisible_by is not None
    }
    division = resolve(root, plans, place, full_embeddings, pieces, multiples)
    _check_vocabularies(division, multiples)
    _check_divided(division, modalities, experts or {}, place)
    # each rank sends some of the tokens to whole experts, and so has a part of their gradients
    division = replace(
        division,
        shared=division.shared | whole.keys(),
        groups={**division.groups, **{name: modality for name, (_, modality) in whole.items()}},
        whole={**division.whole, **full},
    )
    several = [name for name in partition.owners if place(name) is None]
    for one in others:
        division = one.divided(division, several)
    for why in dict.fromkeys(division.whole.values()):
        paths = [path for path, said in division.whole.items() if said == why]
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        _log.warning("%s%s is computed in full on every tensor parallel rank: %s", paths[0], more, why)
    return division


def _without(plans: Mapping[str, Plans], paths: Collection[str]) -> dict[str, Plans]:
    """Return `plans` without what they say of modules at `paths` and in them."""

    def is_in(name: str) -> bool:
        return any(name == path or name.startswith(f"{path}.") for path in paths)

    found = {}
    for path, several in plans.items():
        join = f"{path}.".lstrip(".")
        kept = tuple(
            replace(
                plan,
                column={key: parts for key, parts in plan.column.items() if not is_in(join + key)},
                row={key: parts for key, parts in plan.row.items() if not is_in(join + key)},
                experts=tuple(key for key in plan.experts if not is_in(join + key)),
                parameters={key: parts for key, parts in plan.parameters.items() if not is_in(join + key)},
            )
            for plan in several
        )
        if not is_in(path):
            found[path] = kept
    return found


def _check_divided(
    division: Division,
    modalities: Mapping[str, Modality],
    experts: Mapping[str, tuple[str, ...]],
    place: Callable[[str], tuple[str, int] | None],
) -> None:
    for path, names in experts.items():
        found = place(names[0])
        given = 1 if found is None else modalities[found[0]].tensor.expert_tp_size
        cut = [shard for name in names if (shard := division.shards.get(name)) is not None]
        if found is not None and given > 1 and (division.roles.get(path) != "experts" or any(s.dim == 0 for s in cut)):
            rule = f"No plan says how the experts of {path} are divided"
            raise ConfigError(f"modalities.{found[0]}.tensor.expert_tp_size", given, rule, "Use expert_tp_size=1")


def _check_vocabularies(division: Division, multiples: Mapping[str, int]) -> None:
    for name, multiple in multiples.items():
        if not any(
            kind in ("embedding", "head") and division.groups[at] == name for at, kind in division.roles.items()
        ):
            rule = f"It is said of a vocabulary that tensor parallel ranks share, and those of {name!r} share none"
            raise ConfigError(
                f"modalities.{name}.tensor.make_vocab_size_divisible_by", multiple, rule, "Leave it unset"
            )


def _check_shared(partition: Partition, modalities: Mapping[str, Modality]) -> None:
    for parameter, stages in partition.owners.items():
        users = list(dict.fromkeys(stage.modality for stage in stages))
        for size in ("tp_size", "cp_size"):
            degrees = {user: getattr(modalities[user], size) for user in users}
            unlike = [user for user in users if degrees[user] != degrees[users[0]]]
            if unlike and any(modalities[user].owner is not None for user in users):
                rule = f"{parameter!r} is shared by {' and '.join(map(repr, users))}, which are colocated"
                fix = f"Use {size}={degrees[users[0]]}, or ranks of their own"
                raise ConfigError(f"modalities.{unlike[0]}.{size}", degrees[unlike[0]], rule, fix)
