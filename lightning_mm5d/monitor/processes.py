"""What the operating system says of the process of a rank on the same machine."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Literal

State = Literal["alive", "stopped", "gone", "unknown"]


def machine() -> str:
    """Return a name that is equal for processes that see each other's process numbers; empty where there is none."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state_of(pid: int) -> State:
    """Return the state of a process on this machine."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if Path("/proc/self").exists() else "unknown"
    except (OSError, IndexError):
        return "unknown"
    return "gone" if letter in "ZX" else "stopped" if letter == "T" else "alive"


def ended_how(code: int) -> str:
    """Return an exit code as English, negative for a signal."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"
