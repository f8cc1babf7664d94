"""Checks of the strategy's plain options: choices, durations and ranks.

They need neither the model nor the number of ranks, and no torch. `checks` has those of modalities, `schedule` those of
schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning_mm5d.config.checks import MOST, check_count
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.groups import path_of

CHOICES = {
    "microbatching": ("split", "loader"),
    "loss_weight": ("auto", "samples", "tokens"),
    "start_method": ("popen", "spawn", "fork"),
}
"""Options that are one of a few words."""
FUNCTIONS = ("microbatching", "loss_weight")
"""Options that may be a function instead."""
MAIN_PARAMS = ("float32", "float64")
"""Precisions of main parameters."""
AXES = ("pp", "dp", "cp", "tp")
"""Axes of a modality, in the order in which ranks lie where no placement says another, outermost first."""
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
"""Backends of torch.distributed that need no package of a user's own."""
LONGEST = timedelta(days=365)
_DURATIONS = {"timeout": 30, "watchdog": 5}  # their defaults in minutes


def check_options(options: Mapping[str, Any], backends: Collection[str] = BACKENDS) -> None:
    """Refuse options that cannot work whatever the model and the number of ranks.

    Args:
        options: by name; those that are missing have their defaults.
        backends: that torch.distributed knows here.

    Raises:
        ConfigError: at the first option that cannot work.
    """
    for name, known in CHOICES.items():
        got = options.get(name, known[0])
        if name in FUNCTIONS and callable(got):
            continue
        check_choice(name, got, known, ", or a function" if name in FUNCTIONS else "")
    if options.get("microbatching") == "loader" and options.get("microbatch_size") is not None:
        rule = "With microbatching='loader' a batch of the dataloader is a microbatch, and its samples are the size"
        fix = "Set num_microbatches, the batches of a step, or microbatching='split'"
        raise ConfigError("batching.microbatch_size", options["microbatch_size"], rule, fix)
    if options.get("placement") is not None:
        _check_placement(options["placement"])
    if options.get("process_group_backend") is not None:
        _check_backend(options["process_group_backend"], backends)
    for name, usual in _DURATIONS.items():
        if name in options:
            _check_duration(name, options[name], usual)
    if options.get("main_params") is not None:
        check_choice("main_params", options["main_params"], MAIN_PARAMS)
    check_count("launch.bucket_bytes", options.get("bucket_bytes", 1), most=2**40)


def check_choice(name: str, got: object, known: Collection[str], more: str = "") -> None:
    """Refuse an option that is none of the words `known`, nor what the rule says `more`; raise ConfigError."""
    if not isinstance(got, str) or got not in known:
        raise ConfigError(path_of(name), got, f"It is one of {', '.join(known)}{more}", did_you_mean(got, known))


def _check_placement(placement: object) -> None:
    if not isinstance(placement, list | tuple) or not placement:
        rule = "It lists the rank of each position of the layout, or names of axes, outermost first"
        raise ConfigError("placement", placement, rule, f"Use for instance [0, 1] or {list(AXES)}, or leave it unset")
    if isinstance(placement[0], str):
        _check_order(placement)
        return
    fix = f"Use {list(range(len(placement)))}, or leave it unset"
    for index, rank in enumerate(placement):
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < MOST:
            rule = "It lists ranks, which are whole numbers of at least 0"
            raise ConfigError(f"placement[{index}]", rank, rule, fix)
    if len(set(placement)) < len(placement):
        raise ConfigError("placement", placement, "It names each rank once", fix)


def _check_order(axes: Sequence[object]) -> None:
    for index, axis in enumerate(axes):
        if not isinstance(axis, str) or axis not in AXES:
            rule = f"Axes are {', '.join(AXES)}"
            fix = did_you_mean(axis, AXES)
            if axis == "ep":
                rule, fix = f"{rule}; ranks that share experts are those of dp and cp", "Leave ep out"
            raise ConfigError(f"placement[{index}]", axis, rule, fix)
    if len(set(axes)) < len(axes):
        raise ConfigError("placement", axes, "It names each axis once", f"Use {list(dict.fromkeys(axes))}")


def _check_backend(backend: object, known: Collection[str]) -> None:
    # "gloo", or one for each kind of device, as "cpu:gloo,cuda:nccl"
    parts = [part.split(":")[-1] for part in backend.split(",")] if isinstance(backend, str) else [backend]
    for part in parts:
        if not isinstance(part, str) or part.lower() not in known:
            rule = "torch.distributed has no such backend"
            raise ConfigError("launch.process_group_backend", backend, rule, did_you_mean(part, known))


def _check_duration(name: str, got: object, usual: int) -> None:
    if not isinstance(got, timedelta):
        near = got if isinstance(got, int | float) and not isinstance(got, bool) else 60 * usual
        fix = f"Use timedelta(seconds={near if 0 < near < MOST else 60 * usual})"
        raise ConfigError(path_of(name), got, "It is a datetime.timedelta", fix)
    if got <= timedelta(0):
        rule = "Operations between ranks take some time"
        raise ConfigError(path_of(name), got, rule, f"Use a positive one, such as timedelta(minutes={usual})")
    if got > LONGEST:
        rule = f"It is at most {LONGEST.days} days"
        raise ConfigError(path_of(name), got, rule, f"Use for instance timedelta(minutes={usual})")
