"""A plugin of pytest: ranks that any test forks train on the pretended device, and compare with the CPU.

``python -m pytest -p pretended_cuda.everywhere tests/features/test_logging.py``
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pretended_cuda
import ranks


def _served(index: int, *rest: Any) -> None:
    pretended_cuda.enter_with_trainers()
    _serve(index, *rest)


# before the limits of calls count, and not in this process, which forks ranks
subprocess.run([sys.executable, "-c", "import pretended_cuda; pretended_cuda.built()"], check=True)
_serve = ranks._serve
ranks._serve = _served
# operations take several times as long as on the CPU
_results = ranks._results
ranks._results = lambda waited, limit, killed=(): _results(waited, 3 * limit, killed)
