"""The walks through the house that ARCHITECTURE.md describes are those that a batch and its gradients take."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L

import lightning_mm5d
from features.toys import TWINS, Run, Toy, together

ROOT = Path(lightning_mm5d.__file__).parent
OVER_NCCL = {"engine/ordered_transport.py"}
SPLIT_BACKWARDS = {"stage/deferred.py"}
MOST = 42
"""files of the core that one batch passes, with those that only its hooks, logs and dataloaders need"""
OF_STRUCTURE = {"config", "layout", "storage", "schedule", "source", "partition", "plan", "data_parallel", "checkpoint"}
"""rooms that answer by layout, model and fields alone, or only ranks that share parameters: no batch asks them again"""


class Walk(L.Callback):
    """Notes the package's files in the order in which the third batch comes by, from loading to the optimizer."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self.note if batch_idx == 1 else None)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            self.files[str(Path(frame.f_code.co_filename).relative_to(ROOT))] = None


def walk(run: Run) -> list[str]:
    seen = Walk()
    run.trainer(callbacks=[seen]).fit(Toy(), run.training(32))
    return [*seen.files]


def described() -> set[str]:
    """The files that both walks name; a name without its room is one of the room that stands before it."""
    text = (ROOT.parent / "ARCHITECTURE.md").read_text()
    walks = re.findall(r"^## The walk of .*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert len(walks) == 2
    found, room = set[str](), ""
    for name in re.findall(r"`(?!tests/)(\w+/)?(\w+\.py)?`", "".join(walks)):
        room = name[0] or room
        if name[1]:
            found.add("strategy.py" if name[1] == "strategy.py" else room + name[1])
    return found


@cache
def passed_files() -> set[str]:
    """vision: rank 0, for both replicas of language: ranks 1-2"""
    return {file for files in together(TWINS, walk) for file in files}


def test_a_batch_passes_few_files_and_none_that_the_structure_has_answered() -> None:
    core = {file for file in passed_files() if not file.startswith("features/")}
    assert {file for file in core if file.partition("/")[0] in OF_STRUCTURE} == set()
    assert len(core) <= MOST


def test_a_batch_passes_every_file_of_the_walks() -> None:
    passed, named = passed_files(), described()
    assert len(named) > 20
    assert {file for file in named if not (ROOT / file).exists()} == set()
    assert named - passed == OVER_NCCL | SPLIT_BACKWARDS
