"""A model whose attention works on whole sequences (T5) equals one process in layouts of several axes, on four ranks.

Its first layers make biases by position that all later ones take: over tensor parallel ranks with sharded sequences,
over pipeline stages, and where layers are computed again, with operations in the order of issue as on NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest

from nccl_order import NAMES
from sweeps import swept
from tensor_parallel.layouts import Compared, check_all

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"cp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "stages": {"cp_size": 2, "pp_size": 2, "cp_mode": "ring", "activation_checkpointing": "full"},
    "zigzag": {"cp_size": 4, "activation_checkpointing": "full", "cp_distribution": "zigzag"},
}


@pytest.mark.parametrize("which", swept(LAYOUTS, "zigzag"))
def test_whole_modules_equal_one_process_with_tensor_parallelism_stages_and_recomputation(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BACKEND", NAMES[1])
    check_all(4, Compared(name="t5", fields={"language": LAYOUTS[which]}, off=1e-6))
