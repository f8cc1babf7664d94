"""How much memory this host has left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers of our time have it


def free_memory() -> int | None:
    """Return the bytes that processes of this host can still take; None where the system does not say.

    It is what the kernel calls available, or what the limit of this container leaves, whichever is less.
    """
    found = [bytes_ for bytes_ in (_available(), _left_in_container()) if bytes_ is not None]
    return min(found, default=None)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):  # not every system has these names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_container() -> int | None:
    with suppress(OSError, ValueError):
        most, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        caches = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(int(most) - int(used) + int(caches.get("inactive_file", 0)), 0)  # "max" is no number
    return None
