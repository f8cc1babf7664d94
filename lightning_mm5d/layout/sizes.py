"""How long each modality's axes are: solves for the replicas that the configuration leaves open.

Every unset `dp_size` gets the same value, the one that fills the world exactly. A colocated modality follows its owner:
where it shares all ranks, it divides them by its own sizes; where it shares a pipeline rank, it has as many replicas as
its owner, and ranks of its own for its earlier stages.

It refuses sizes that do not fill the world, and replicas that do not pair up. It expects modalities that passed
`checks.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.modality import Modality, colocated_dp

_WORLD = "Trainer(devices=..., num_nodes=...)"


class Sizes(NamedTuple):
    """Lengths of a modality's axes."""

    dp: int
    pp: int
    cp: int
    tp: int


def solve(modalities: Mapping[str, Modality], world_size: int, loss_modality: str) -> dict[str, Sizes]:
    """Return the sizes of all modalities, with one common value for every unset `dp_size`.

    Args:
        modalities: configuration by name.
        world_size: number of ranks.
        loss_modality: name of the modality that computes the loss.

    Raises:
        ConfigError: when the sizes do not fill the world or do not pair up; it names the nearest worlds that fit.
    """
    own_ranks = {name: m.own_ranks_per_replica for name, m in modalities.items() if m.own_ranks_per_replica}
    given = {name: _owner(modalities, name).dp_size for name in own_ranks}
    fixed = sum(modalities[name].own_ranks(dp) for name, dp in given.items() if dp is not None)
    free = sum(own_ranks[name] for name, dp in given.items() if dp is None)
    needs = " + ".join(
        f"{name}: {'+'.join(map(str, modalities[name].lengths))} stages"
        if modalities[name].lengths
        else f"{name}: {own} * {'dp_size' if given[name] is None else given[name]}"
        for name, own in own_ranks.items()
    )
    if not free:
        axes = _axes(modalities, 1, loss_modality)
        if fixed != world_size:
            rule = f"The modalities ({needs}) fill {fixed} ranks"
            raise ConfigError(_WORLD, world_size, rule, f"Use {fixed} ranks")
        return axes
    common, remainder = divmod(world_size - fixed, free)
    rule = f"The modalities ({needs}) fill {f'{fixed} plus ' if fixed else ''}a multiple of {free} ranks"
    problem = ConfigError(_WORLD, world_size, rule, "")
    if common >= 1 and not remainder:
        try:
            return _axes(modalities, common, loss_modality)
        except ConfigError as error:
            problem = error
    fits = [fixed + n * free for n in nearest(common, lambda n: _fits(modalities, n, loss_modality))]
    if not fits:  # what is wrong is no matter of the size of the world
        return _axes(modalities, max(common, 1), loss_modality)
    fix = f"Nearest that fit: {one_of(fits)} ranks"
    if len(own_ranks) > 1 and world_size < fixed + free:
        fix += ", or let modalities share ranks with colocate_with"
    raise ConfigError(problem.field, problem.got, problem.rule, fix)


_SHARING = ("dp_shard_size", "ep_size")
"""fields that say how many of the ranks that hold the same layers share something"""


def _owner(modalities: Mapping[str, Modality], name: str) -> Modality:
    """The modality itself, or the one whose ranks it shares."""
    owner = modalities[name].owner
    return modalities[name if owner is None else owner.modality]


def _fits(modalities: Mapping[str, Modality], common: int, loss_modality: str) -> bool:
    """Whether `_axes` would succeed, without the cost of its advice."""
    replicas = {}
    for name, modality in modalities.items():
        owner = _owner(modalities, name)
        replicas[name], rest = owner.dp_size or common, 0
        if modality.owner is not None and modality.owner.pp is None:
            replicas[name], rest = divmod(replicas[name] * owner.ranks_per_replica, modality.ranks_per_replica)
        if rest or (owner is not modality and modality.dp_size not in (None, replicas[name])):
            return False
        copies = replicas[name] * modality.cp_size
        if any(copies % (getattr(modality, field) or 1) for field in _SHARING):
            return False
    if _unlike(modalities) is not None:
        return len(set(replicas.values())) == 1
    return all(_pair(dp, replicas[loss_modality]) for dp in replicas.values())


def _axes(modalities: Mapping[str, Modality], common: int, loss_modality: str) -> dict[str, Sizes]:
    """Sizes where each unset `dp_size` is `common`; refuses replicas that do not pair up."""
    axes: dict[str, Sizes] = {}
    owned: dict[str, int] = {}
    for name, modality in modalities.items():
        owner = _owner(modalities, name)
        dp = owner.dp_size or common
        owned[name] = owner.ranks(dp)
        if modality.owner is not None and modality.owner.pp is None:
            dp = colocated_dp(name, modality, owned[name])
        elif modality.dp_size not in (None, dp) and owner is not modality:
            rule = f"Its last stage shares the ranks of '{modality.owner}', of which there are {dp} replicas"
            fix = f"Use dp_size={dp}, or leave it unset"
            raise ConfigError(f"modalities.{name}.dp_size", modality.dp_size, rule, fix)
        axes[name] = Sizes(dp, modality.stages, modality.cp_size, modality.tp_size)
        _check_shards(name, modality, axes[name])
    _check_unlike(modalities, axes)
    for name, modality in modalities.items():
        if modality.owner is not None and modality.owner.pp is not None:
            continue  # it has the replicas of its owner, which is checked itself
        # of an owner and a colocated modality, only the colocated one's sizes can change alone
        colocated, other = (
            (loss_modality, name) if modalities[loss_modality].colocate_with == name else (name, loss_modality)
        )
        _check_pairs(colocated, modalities[colocated], axes[colocated].dp, owned[colocated], other, axes[other].dp)
    return axes


def _unlike(modalities: Mapping[str, Modality]) -> str | None:
    """The modality that says what each replica is like."""
    return next((name for name, modality in modalities.items() if modality.lengths or modality.speeds), None)


def _check_unlike(modalities: Mapping[str, Modality], axes: Mapping[str, Sizes]) -> None:
    """Refuse ranks that work for several replicas where these have unlike numbers of microbatches."""
    unlike = _unlike(modalities)
    for name, size in axes.items():
        if unlike is not None and size.dp != axes[unlike].dp:
            what = "pipelines" if modalities[unlike].lengths else "speeds"
            rule = f"With {what} for each replica of {unlike!r} every modality has as many replicas, {axes[unlike].dp}"
            raise ConfigError(f"modalities.{name}.dp_size", size.dp, rule, f"Use dp_size={axes[unlike].dp}")


def _check_shards(name: str, modality: Modality, size: Sizes) -> None:
    ranks = size.dp * size.cp
    for field in _SHARING:
        shards = getattr(modality, field)
        if shards is None or ranks % shards == 0:
            continue
        what = "With the inferred dp_size it" if modality.dp_size is None else "It"
        rule = f"{what} must divide dp_size * cp_size = {size.dp} * {size.cp}"
        fits = nearest(shards, lambda n: ranks % n == 0, reach=ranks)
        raise ConfigError(f"modalities.{name}.{field}", shards, rule, f"Use {one_of(fits)}")


def _check_pairs(name: str, modality: Modality, dp: int, ranks: int, other: str, replicas: int) -> None:
    if _pair(dp, replicas):
        return
    what = "The inferred dp_size" if modality.dp_size is None else "It"
    rule = f"{what} must divide the dp_size {replicas} of {other!r}, or be a multiple of it"
    if modality.colocate_with is None:
        each = modality.ranks_per_replica
        choices = nearest(dp, lambda n: _pair(n, replicas))
        fix = f"Use dp_size={one_of(f'{n} ({(n - dp) * each:+d} ranks)' for n in choices)}"
    else:
        products = sorted(ranks // n for n in nearest(dp, lambda n: ranks % n == 0 and _pair(n, replicas)))
        fix = f"A product pp_size * cp_size * tp_size of {one_of(products)} would fit"
    raise ConfigError(f"modalities.{name}.dp_size", dp, rule, fix)


def _pair(dp: int, replicas: int) -> bool:
    return dp % replicas == 0 or replicas % dp == 0
