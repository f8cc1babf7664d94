"""The core trains without features: without any of them, and without each.

vision: rank 0; language: rank 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from features.absent import ALL, NAMES
from sweeps import swept

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("options", swept([(), ("--both",)], ("--both",)), ids=["in turn", "both"])
def test_the_core_trains_without_any_feature_and_without_each_and_refuses_what_they_own(options: Any) -> None:
    """One set of ranks for all, of an interpreter that has imported the core without any feature."""
    command = [sys.executable, "-m", "features.absent", *options]
    path = os.pathsep.join(str(folder) for folder in (TESTS.parent, TESTS))
    environment = os.environ | {"PYTHONPATH": path}
    found = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-4000:]
    assert [line for line in found.stdout.splitlines() if line.endswith(": equal")] == [
        f"{name}: equal" for name in [ALL, *NAMES]
    ]
