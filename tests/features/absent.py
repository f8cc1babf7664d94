"""Trains the toy on two ranks while packages of features cannot be imported; run as a program, in a new interpreter.

Prints for each package that is missing, ``all`` first, whether the weights equal those of one process. The module is
built before the run, or in `configure_model`: in turn, and in both ways where all are missing or with ``--both``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_mm5d.config.features import FEATURES, parts
from lightning_mm5d.config.groups import path_of, with_fields

ALL = "all"
NAMES = [feature.name for feature in FEATURES]


def block(names: list[str]) -> None:
    """Let imports of these features fail, as where their folders are deleted, and of no others."""
    parts.cache_clear()
    for module in [name for name in sys.modules if name.startswith("lightning_mm5d.features")]:
        del sys.modules[module]
    for name in names:
        sys.modules[f"lightning_mm5d.features.{name}"] = None  # type: ignore[assignment]
    if names is NAMES:
        sys.modules["lightning_mm5d.features"] = None  # type: ignore[assignment]


def absences() -> dict[str, list[str]]:
    return {ALL: NAMES, **{name: [name] for name in NAMES}}


def train(rank: int) -> Any:
    """Weights by what is missing, and the error of each option whose feature is missing."""
    from features.toys import PAIR, Run

    found, errors = {}, {}
    for name, names in absences().items():
        block(names)
        found[name] = fitted(Run(PAIR), ways(name))
        loaded = [one for one in sys.modules if one.startswith("lightning_mm5d.features.") and sys.modules[one]]
        assert not any(one.split(".")[2] in names for one in loaded)
        errors[name] = _refusals(names)
    return found, errors


def ways(name: str) -> list[int]:
    """Which of two modules are trained while a package is missing."""
    return [0, 1] if name == ALL or "--both" in sys.argv else [NAMES.index(name) % 2]


def fitted(run: Any, chosen: list[int]) -> list[dict[str, Any]]:
    """The weights of a module that is built before the run, and of one that the run builds."""
    from features.built_in_parts import Late
    from features.toys import Toy, weights

    modules = [(Toy, Late)[way]() for way in chosen]
    for module in modules:
        torch.manual_seed(7)
        run.trainer().fit(module, run.training())
    return [weights(module) for module in modules]


def refused_without_values() -> str:
    """The error of a module on the meta device, of a run whose features are all missing."""
    from features.toys import Layout, Run, Toy
    from lightning_mm5d import ConfigError, Modality

    with torch.device("meta"):
        module = Toy()
    run = Run(Layout({"model": Modality()}, 1))
    try:
        run.trainer().fit(module, run.training())
    except ConfigError as error:
        return str(error)
    raise AssertionError("a module without values was trained")


def refused_folder() -> str:
    """The error of a run that is to begin with a folder, where no feature reads it."""
    from features.toys import Layout, Run, Toy
    from lightning_mm5d import ConfigError, Modality

    run = Run(Layout({"model": Modality()}, 1))
    try:
        run.trainer().fit(Toy(), run.training(), ckpt_path=str(Path(__file__).parent))
    except ConfigError as error:
        return str(error)
    raise AssertionError("a folder was loaded")


def _in_group(option: str, value: object) -> dict[str, Any]:
    group, _, name = path_of(option).rpartition(".")
    return {group: {name: value}} if group else {option: value}


def _refusals(names: list[str]) -> dict[str, str]:
    from features.toys import PAIR, Run
    from lightning_mm5d import ConfigError

    found = {}
    for feature in FEATURES:
        if feature.name not in names:
            continue
        layouts = {option: (PAIR, _in_group(option, "set")) for option in feature.options}
        for field in feature.modality:
            vision = with_fields(PAIR.modalities["vision"], **{field: "set"})
            layouts[field] = replace(PAIR, modalities={**PAIR.modalities, "vision": vision}), {}
        for field, (layout, options) in layouts.items():
            try:
                Run(layout, options).trainer()
            except ConfigError as error:
                found[field] = str(error)
    return found


def main() -> None:
    block(NAMES)
    import lightning_mm5d.strategy  # noqa: F401 - the core alone
    from features.toys import Run, assert_same
    from ranks import run_ranks

    expected = fitted(Run(), ways(ALL))
    trained, errors = run_ranks(2, train)[0]  # two fits for each feature
    for name, names in absences().items():
        assert_same(trained[name], [expected[way] for way in ways(name)])
        absent = [feature for feature in FEATURES if feature.name in names]
        options = [field for feature in absent for field in (*feature.options, *feature.modality)]
        assert [*errors[name]] == options, errors
        assert all("comes without the feature" in error for error in errors[name].values()), errors
        print(f"{name}: equal")
    assert "gets its value from the feature 'deferred_init'" in refused_without_values()
    assert "A folder is read by the feature 'sharded_checkpoints'" in refused_folder()


if __name__ == "__main__":
    main()
