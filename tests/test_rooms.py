"""The import graph is the map of the house: it runs one way through the rooms, and configuration needs no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_mm5d
from code_lines import code_lines
from lightning_mm5d.config.features import FEATURES, parts

ROOT = Path(lightning_mm5d.__file__).parent
# A room imports from rooms that stand before it.
ROOMS = (
    "config",
    "layout",
    "storage",
    "schedule",
    "source",
    "data",
    "partition",
    "sharded",
    "nn",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "plan",
    "data_parallel",
    "stage",
    "monitor",
    "engine",
    "gradients",
    "checkpoint",
    "trainer",
    "features",
    "strategy",
)
# Packages that import the core, and that the core does not import.
SATELLITES = (
    "models",
    "recipes",
    "export",
    "tools.convert",
    "tools.planner",
    "tools.dryrun",
    "tools.cli",
)


# What the map's words mean, as beginnings of modules; its third column says which of them a room does not import.
WORDS = {
    "torch": ("torch",),
    "groups": ("torch.distributed",),
    "ranks": ("torch.distributed", "lightning_mm5d.layout", "lightning_mm5d.plan"),
    "layout": ("lightning_mm5d.layout", "lightning_mm5d.plan"),
    "modalities": ("lightning_mm5d.config.modality", "lightning_mm5d.partition", "lightning_mm5d.plan"),
    "stages": ("lightning_mm5d.partition", "lightning_mm5d.schedule", "lightning_mm5d.plan", "lightning_mm5d.stage"),
    "schedules": ("lightning_mm5d.schedule",),
    "the pipeline": ("lightning_mm5d.schedule", "lightning_mm5d.stage", "lightning_mm5d.engine"),
    "Lightning": ("lightning", "lightning_utilities", "pytorch_lightning", "torchmetrics"),
}
NAMES_OF_STAGES = "lightning_mm5d.schedule.graph"
# Outside of the trainer, features and the strategy.
KNOW_LIGHTNING = {
    "data.samplers",
    "data.loader",
    "partition.parts",
    "checkpoint.full_file",
}


def _imports() -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports, also inside functions and for types only."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found[name] = {node.module for node in nodes if node.module and node.module.startswith("lightning_mm5d.")}
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[1] == "tools" else parts[1]


def _rooms_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def test_every_room_is_on_the_map() -> None:
    found = _rooms_in(ROOT) | {f"tools.{name}" for name in _rooms_in(ROOT / "tools")}
    assert found - {"__init__", "tools", "tools.__init__"} == {*ROOMS, *SATELLITES}


def test_the_core_names_no_satellite() -> None:
    names = tuple(f"lightning_mm5d.{name}" for name in SATELLITES)
    found = [
        f"{path.relative_to(ROOT)}: {text.value}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).with_suffix("").parts[0] in ROOMS
        for text in ast.walk(ast.parse(path.read_text()))
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.startswith(names)
    ]
    assert found == []


def test_the_strategy_is_imported_without_any_satellite() -> None:
    code = """
import sys
names = sys.argv[1:]
class Absent:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith(tuple(names)), name
sys.meta_path.insert(0, Absent())
import lightning_mm5d.strategy
"""
    names = [f"lightning_mm5d.{name}" for name in SATELLITES]
    assert subprocess.run([sys.executable, "-c", code, *names], check=False).returncode == 0


def test_imports_run_one_way_through_the_rooms() -> None:
    order = (*ROOMS, *SATELLITES, "tools")
    against = [
        f"{module} imports {other}"
        for module, others in _imports().items()
        for other in others
        if "." in module and order.index(_room(other)) > order.index(_room(module))
    ]
    assert against == []


def _modules(node: ast.AST) -> set[str]:
    """Every module that a statement may import: of ``from a import b`` both ``a`` and ``a.b``."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def _all_imports() -> dict[str, set[str]]:
    """For each module of the package, by its name within it, whatever it imports."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            module for node in ast.walk(ast.parse(path.read_text())) for module in _modules(node)
        }
        for path in ROOT.rglob("*.py")
    }


def _is_in(module: str, beginnings: Iterable[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in beginnings)


def test_a_room_knows_nothing_of_what_the_map_says() -> None:
    rows = re.findall(
        r"^\| `(\w+)(?:/|\.py)` \|.*\|(.*)\|$", (ROOT.parent / "ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    unknown = {room: [word.strip() for word in words.split(",") if word.strip()] for room, words in rows}
    assert tuple(unknown)[: len(ROOMS)] == ROOMS
    against = [
        f"{name} imports {module}, of {word}"
        for name, modules in _all_imports().items()
        for word in (unknown[name.split(".")[0]] if name.split(".")[0] in ROOMS else ())
        for module in modules
        if _is_in(module, WORDS[word]) and not _is_in(module, [NAMES_OF_STAGES])
    ]
    assert against == []


def test_few_files_outside_the_trainer_know_lightning() -> None:
    found = {
        name
        for name, modules in _all_imports().items()
        if name.split(".")[0] in {*ROOMS} - {"trainer", "features", "strategy"}
        and any(_is_in(module, WORDS["Lightning"]) for module in modules)
    }
    assert found == KNOW_LIGHTNING


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {module: {other for other in others if other != module} for module, others in _imports().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_no_feature_is_imported_by_the_core_or_by_another_feature() -> None:
    """`config.features` alone imports them, by the names of its list; satellites need the whole package."""
    against = [
        f"{module} imports {other}"
        for module, others in _imports().items()
        for other in others
        if "." in module
        and _room(module) in ROOMS
        and _room(other) == "features"
        and module.split(".")[:3] != other.split(".")[:3]
    ]
    assert against == []
    named = [
        path.relative_to(ROOT)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] in {*ROOMS, "strategy.py"} - {"features"}
        and any(
            isinstance(text, ast.Constant) and str(text.value).startswith("lightning_mm5d.features")
            for text in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert named == [Path("config/features.py")]


def test_the_list_names_every_feature_and_each_has_its_hooks() -> None:
    found = _rooms_in(ROOT / "features") - {"__init__"}
    assert [feature.name for feature in FEATURES if feature.name not in found] == []
    assert found == {feature.name for feature in FEATURES}
    named = (
        *("feature", "construction", "encoding", "schedules", "checkpoints", "pipelines"),
        *("sharding_plans", "remaining", "experts"),
    )
    hooks = {part: [module.__name__.split(".")[2] for module in parts(part)] for part in named}
    assert {name for names in hooks.values() for name in names} == found
    assert hooks["checkpoints"] == [feature.name for feature in FEATURES if feature.saves]
    assert hooks["construction"] == [feature.name for feature in FEATURES if feature.builds]
    assert hooks["schedules"] == [feature.name for feature in FEATURES if feature.schedules]
    assert [one.__name__.split(".")[2] for one in parts("costs")] == ["recomputation"]
    assert len([*parts("fields")]) == sum(bool(one.options or one.modality) for one in FEATURES)


def test_file_names_are_unique() -> None:
    names = Counter(path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    same_kind = {"apply.py", "balance.py", "costs.py", "features.py", "feature.py", "fields.py", "construction.py"}
    same_kind |= {"checkpoints.py"}
    assert {name for name, count in names.items() if count > 1} <= same_kind


def test_no_module_has_over_400_code_lines() -> None:
    folders = [ROOT, *(ROOT.parent / name for name in ("tests", "benchmarks", "examples"))]
    sizes = {str(path): code_lines(path.read_text()) for folder in folders for path in folder.rglob("*.py")}
    assert {path: size for path, size in sizes.items() if size > 400} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ('"""A module."""\n\n# a comment\nx = 1  # why\n', 1),
        ('def f() -> None:\n    """Do nothing.\n\n    Ever.\n    """\n', 1),
        ("x = (\n    1,\n\n    2,\n)\n", 4),
        ("text = '''a\n\nb'''\n", 3),
    ],
)
def test_code_lines_are_counted_without_blanks_comments_and_docstrings(source: str, count: int) -> None:
    assert code_lines(source) == count


def test_config_imports_no_torch() -> None:
    fields = "from lightning_mm5d.config.features import parts; [*parts('fields')]"
    code = (
        f"import sys, lightning_mm5d.config; {fields}; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
