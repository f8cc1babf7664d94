"""The import graph is the map of the house: it runs one way through the rooms, and configuration needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_mm5d

ROOT = Path(lightning_mm5d.__file__).parent
# A room imports from rooms that stand before it.
ROOMS = (
    "config",
    "layout",
    "storage",
    "schedule",
    "source",
    "models",
    "data",
    "partition",
    "sharded",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "plan",
    "data_parallel",
    "weights",
    "stage",
    "monitor",
    "engine",
    "gradients",
    "checkpoint",
    "planner",
    "export",
    "trainer",
    "strategy",
    "recipes",
    "cli",
)


def _imports() -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports, also inside functions and for types only."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found[name] = {node.module for node in nodes if node.module and node.module.startswith("lightning_mm5d.")}
    return found


def _room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_is_on_the_map() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(ROOMS)


def test_imports_run_one_way_through_the_rooms() -> None:
    against = [
        f"{module} imports {other}"
        for module, others in _imports().items()
        for other in others
        if module != "lightning_mm5d" and ROOMS.index(_room(other)) > ROOMS.index(_room(module))
    ]
    assert against == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {module: {other for other in others if other != module} for module, others in _imports().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_file_names_are_unique() -> None:
    names = Counter(path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    same_kind = {"apply.py", "balance.py"}
    assert {name for name, count in names.items() if count > 1} <= same_kind


def test_no_module_has_over_400_lines() -> None:
    folders = [ROOT, *(ROOT.parent / name for name in ("tests", "benchmarks", "examples"))]
    sizes = {str(path): len(path.read_text().splitlines()) for folder in folders for path in folder.rglob("*.py")}
    assert {path: size for path, size in sizes.items() if size > 400} == {}


def test_config_imports_no_torch() -> None:
    code = "import sys, lightning_mm5d.config; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
