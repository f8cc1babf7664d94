"""Which modality feeds which, and where its result is needed.

Encoders feed the language model. Modalities with `Modality.feeds_from` run after those that they name. All that runs
after encoders also feeds the last stage of the loss modality, where the rest of the step runs: so several losses become
one number there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality, decoders_of, loss_modality_of, main_modality_of

Where = Literal["first", "all", "ends", "last"] | list[int]
"""The stages of a consumer that are sent a result: ``ends`` are the first and the last one."""


def consumers_of(modalities: Mapping[str, Modality]) -> dict[str, dict[str, Where]]:
    """Return for each modality but the loss modality those that it feeds, and which of their stages.

    With ``language``, ``vision``, and a ``talker`` that feeds from ``language``, it is
    ``{"language": {"talker": "ends"}, "vision": {"language": "first"}}``.
    """
    main, loss, decoders = main_modality_of(modalities), loss_modality_of(modalities), decoders_of(modalities)
    found: dict[str, dict[str, Where]] = {name: {} for name in modalities if name != loss}
    for name, fed in found.items():
        if name != main and name not in decoders:
            fed[main] = modalities[name].feeds
    for decoder, sources in decoders.items():
        for source in sources:
            found[source][decoder] = "ends"
    for name in (main, *decoders):
        if name != loss:
            found[name].setdefault(loss, "last")
    return found


def running_order(modalities: Mapping[str, Modality]) -> tuple[str, ...]:
    """Return the names of the modalities, those that feed another before it."""
    consumers = consumers_of(modalities)
    before: dict[str, list[str]] = {name: [] for name in modalities}
    for name, fed in consumers.items():
        for other in fed:
            before[other].append(name)
    return tuple(TopologicalSorter(before).static_order())


def check_feeds_from(modalities: Mapping[str, Modality]) -> None:
    """Refuse names that are none, circles, and modalities that run after nothing.

    Raises:
        ConfigError: at the first ``feeds_from`` that cannot work.
    """
    for name, modality in modalities.items():
        said, field = modality.feeds_from, f"modalities.{name}.feeds_from"
        if said is None:
            continue
        if not isinstance(said, str | list | tuple) or not said or not all(isinstance(one, str) for one in said):
            rule = "It is the name of a modality, or a list of names"
            raise ConfigError(field, said, rule, "Use for instance 'language'")
        sources = [said] if isinstance(said, str) else list(said)
        others = [other for other in modalities if other != name]
        for source in sources:
            if source not in others:
                rule = "It names another modality, whose result this one computes with"
                raise ConfigError(field, said, rule, did_you_mean(source, others) if others else "Leave it unset")
            if sources.count(source) > 1:
                raise ConfigError(field, said, "Each modality is named once", f"Use {list(dict.fromkeys(sources))}")
    decoders = decoders_of(modalities)
    for name, modality in modalities.items():
        if name in decoders and modality.feeds != "first":
            rule = "A modality that feeds from another is needed by the rest of the step, so it says no stages"
            raise ConfigError(f"modalities.{name}.feeds", modality.feeds, rule, "Leave feeds unset")
    if decoders:
        _check_order(modalities, decoders)


def _check_order(modalities: Mapping[str, Modality], decoders: Mapping[str, tuple[str, ...]]) -> None:
    try:
        order = list(TopologicalSorter({name: decoders.get(name, ()) for name in modalities}).static_order())
    except CycleError as error:
        circle = list(reversed(error.args[1]))
        rule = f"{' -> '.join(circle)} is a circle, and a step runs modalities one after the other"
        field = f"modalities.{circle[0]}.feeds_from"
        fix = "Name what runs before it alone, such as 'language'"
        raise ConfigError(field, modalities[circle[0]].feeds_from, rule, fix) from None
    main = main_modality_of(modalities)
    if modalities[main].feeds != "first":
        rule = f"{', '.join(decoders)} says that it feeds from others, and {main!r} feeds the whole rest of the step"
        raise ConfigError(f"modalities.{main}.feeds", modalities[main].feeds, rule, "Leave feeds unset")
    after = {main}
    for name in order:
        if name in decoders and after.intersection(decoders[name]):
            after.add(name)
        elif name in decoders:
            rule = f"It runs after {main!r}, which encoders feed, so it feeds from {main!r} or from one that does"
            fix = f"Use {[main, *decoders[name]]}, or leave it unset for an encoder"
            raise ConfigError(f"modalities.{name}.feeds_from", list(decoders[name]), rule, fix)
