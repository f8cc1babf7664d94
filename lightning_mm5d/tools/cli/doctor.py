"""``mm5d doctor``: versions, devices and backends of this machine, and what would not work on it."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lightning_mm5d.config.tables import Table
from lightning_mm5d.tools.cli.terminal import show

_BACKENDS = ("gloo", "nccl", "mpi")
_CONNECTIONS = 32


def doctor() -> int:
    """Print what is here and what would not work; return 1 where training cannot work at all, else 0."""
    failures, warnings, versions = _packages()
    devices, backends = ["cpu"], dict.fromkeys(_BACKENDS, "unknown, since torch cannot be imported")
    if not any(failure.startswith("torch ") for failure in failures):
        devices, backends, more = _torch()
        failures += more["failures"]
        warnings += more["warnings"]
    page: list[str | Table] = [
        Table.of(("package", "version"), versions),
        Table.of(("device",), [(device,) for device in devices]),
        Table.of(("backend", "works here"), backends.items()),
    ]
    page += [f"error: {failure}" for failure in failures] + [f"warning: {warning}" for warning in warnings]
    show([*page, "Training cannot work here." if failures else "Training can work here."])
    return 1 if failures else 0


def _packages() -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """What is missing or of a wrong version, what is missing for pictures, and all versions."""
    failures, warnings = [], []
    versions = [("python", platform.python_version()), ("lightning_mm5d", version("lightning_mm5d"))]
    for line in requires("lightning_mm5d") or ():
        requirement = Requirement(line)
        extra = requirement.marker is not None
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "plot"}):
            continue
        installed = _version(requirement.name)
        versions.append((requirement.name, installed or "missing"))
        if installed in ("2.6.2", "2.6.3") and requirement.name == "lightning":
            failures.append(
                f"lightning {installed} was a malicious upload (GHSA-w37p-236h-pfx3); install another version"
            )
        elif extra and installed is None:
            warnings.append("matplotlib is missing, so no pictures are drawn: pip install 'lightning_mm5d[plot]'")
        elif installed is None:
            failures.append(f"{requirement.name} is missing: pip install '{requirement}'")
        elif not requirement.specifier.contains(installed.partition("+")[0], prereleases=True):
            warnings.append(f"{requirement.name} {installed} was not tested: pip install '{requirement}'")
    versions.append(("numpy", _version("numpy") or "missing"))
    for name in ("torch", "lightning", "transformers"):
        if _version(name) and not any(failure.startswith(f"{name} ") for failure in failures):
            failures += _problem(f"{name} cannot be imported", _import(name))
    return failures, warnings, versions


def _torch() -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """Devices, backends, and what would not work of them."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [
        f"cpu, {torch.get_num_threads()} threads",
        *(f"cuda:{n}, {torch.cuda.get_device_name(n)}" for n in range(gpus)),
    ]
    problems: dict[str, list[str]] = {"failures": [], "warnings": []}
    if not dist.is_available():
        problems["failures"].append("torch is built without torch.distributed")
        return devices, dict.fromkeys(_BACKENDS, "no"), problems
    backends = {
        "gloo": "yes" if dist.is_gloo_available() else "no",
        "nccl": "no" if not dist.is_nccl_available() else "yes" if gpus else "no, there is no GPU",
        "mpi": "yes" if dist.is_mpi_available() else "no",
    }
    if backends["gloo"] == "no":
        problems["failures"].append("gloo is missing, which groups on CPUs and the control messages of all groups need")
    if backends["nccl"] != "yes":
        reason = "the GPUs exchange through gloo, which is slow" if gpus else "only CPUs train here"
        problems["warnings"].append(f"process_group_backend=nccl would not work: {reason}")
    if gpus:
        problems["warnings"] += gpu_settings(os.environ)
    problems["failures"] += _problem("a gloo group cannot start; try GLOO_SOCKET_IFNAME=lo", _start_group)
    problems["failures"] += _problem("the strategy cannot be imported", _import("lightning_mm5d.strategy"))
    return devices, backends, problems


def gpu_settings(environment: Mapping[str, str]) -> list[str]:
    """Return what to set in the environment of ranks on GPUs, and why; nothing where all is set."""
    advice = []
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not connections.isdecimal() or int(connections) < _CONNECTIONS:
        advice.append(
            f"set CUDA_DEVICE_MAX_CONNECTIONS={_CONNECTIONS} (it is {connections}): messages of several groups, copies "
            "and computation have streams of their own, which would wait for each other in fewer queues of the device"
        )
    allocator = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" not in allocator:
        settings = ",".join(filter(None, (allocator, "expandable_segments:True")))
        advice.append(f"set PYTORCH_ALLOC_CONF={settings}: batches of unlike lengths leave fewer fragments of memory")
    return advice


def _start_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _import(module: str) -> Callable[[], object]:
    return lambda: importlib.import_module(module)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _problem(words: str, attempt: Callable[[], object]) -> list[str]:
    """The words and the reason, where an attempt fails."""
    try:
        attempt()
    except Exception as error:
        return [f"{words}: {type(error).__name__}: {error}"]
    return []
