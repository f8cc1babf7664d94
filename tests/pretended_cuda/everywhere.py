"""A plugin of pytest: ranks that any test forks train on the pretended device, and compare with the CPU.

``python -m pytest -p pretended_cuda.everywhere tests/features/test_logging.py``
"""

from __future__ import annotations

import subprocess
import sys
from functools import wraps
from typing import Any

import lightning as L

import pretended_cuda
import ranks


def _served(index: int, *rest: Any) -> None:
    pretended_cuda.enter()
    made = L.Trainer.__init__

    @wraps(made)
    def on_gpu(self: L.Trainer, *args: Any, **options: Any) -> None:
        if options.get("accelerator", "cpu") == "cpu":
            options["accelerator"] = "gpu"
        made(self, *args, **options)

    L.Trainer.__init__ = on_gpu  # type: ignore[method-assign]
    _serve(index, *rest)


# before the limits of calls count, and not in this process, which forks ranks
subprocess.run([sys.executable, "-c", "import pretended_cuda; pretended_cuda.built()"], check=True)
_serve = ranks._serve
ranks._serve = _served
