"""Checks of the environment variables that tell a process its rank, where Lightning itself starts the processes."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mm5d.config.errors import ConfigError


def check_environment(environment: Mapping[str, str], *, num_processes: int, num_nodes: int) -> None:
    """Refuse ranks and ports that contradict the trainer, since a process would wait for others that never come.

    Args:
        environment: variables of this process.
        num_processes: ranks on each node.
        num_nodes: nodes.

    Raises:
        ConfigError: at the first variable that is no number or out of range.
    """
    world = num_processes * num_nodes
    limits = {
        "LOCAL_RANK": (0, num_processes - 1, f"The trainer has {num_processes} devices on each node"),
        "NODE_RANK": (0, num_nodes - 1, f"The trainer has num_nodes={num_nodes}"),
        "GROUP_RANK": (0, num_nodes - 1, f"The trainer has num_nodes={num_nodes}"),
        "MASTER_PORT": (1, 65535, "A port is a number up to 65535"),
    }
    if "LOCAL_RANK" in environment:  # else the processes that will be started get a new one
        limits["WORLD_SIZE"] = (world, world, f"The trainer has {num_processes} devices on each of {num_nodes} nodes")
    for name, (least, most, rule) in limits.items():
        got = environment.get(name)
        if got is None or (got.isdecimal() and least <= int(got) <= most):
            continue
        between = f"{least}" if least == most else f"a number from {least} to {most}"
        raise ConfigError(
            name, got, f"{rule}, so it is {between}", "Leave the environment variable unset, or correct it"
        )
