"""Configurations that do not fit a model, its data or this machine: refused in the process that would start others."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import torch
from torch.utils.data import DataLoader

from features.toys import LANGUAGE, VISION, Samples, Toy
from lightning_mm5d import Modality, MultimodalStrategy, PipelineTemplate
from lightning_mm5d.schedule import ScheduleError


class Wrong(NamedTuple):
    """What a user gives to the strategy and the trainer, and the field and a word of the fix that the error names."""

    fields: dict[str, Any]
    field: str
    fix: str
    trainer: Any = ()
    environment: Any = ()
    module: type[Toy] = Toy


def _language(**fields: Any) -> dict[str, Any]:
    return {"modalities": {"vision": Modality(**VISION), "language": Modality(**{**LANGUAGE, **fields})}}


def _vision(**fields: Any) -> dict[str, Any]:
    return {"modalities": {"vision": Modality(**{**VISION, **fields}), "language": Modality(**LANGUAGE)}}


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def nothing(graph: Any) -> Any:
    return None


def words(graph: Any) -> Any:
    return {0: ["F0"], 1: ["F0"]}


def empty(graph: Any) -> Any:
    return {}


_WORLD = "Trainer(devices=..., num_nodes=...)"

CASES: dict[str, Wrong] = {
    "more stages than layers": Wrong(_language(pp_size=7), "modalities.language.pp_size", "4", {"devices": 8}),
    "a template of too many layers": Wrong(
        _language(pipeline_template=PipelineTemplate(stages=[4, 4])),
        "modalities.language.pipeline.pipeline_template",
        "",
        {"devices": 3},
    ),
    "a template of layers that are not there": Wrong(
        _language(pipeline_template=PipelineTemplate(stages=[["layers.0"], ["layers.9"]])),
        "modalities.language.pipeline.pipeline_template",
        "",
        {"devices": 3},
    ),
    "an offset below no layers": Wrong(
        _language(pipeline_template=PipelineTemplate(offsets=[3, -3])),
        "modalities.language.pipeline.pipeline_template",
        "",
        {"devices": 3},
    ),
    "a module that is not there": Wrong(_vision(module="encodr"), "modalities.vision.module", "'encoder'"),
    "a boundary that is not there": Wrong(_vision(boundary="encodr"), "modalities.vision.boundary", "'encoder'"),
    "a boundary that is a parameter": Wrong(_vision(boundary="encoder.patch.weight"), "modalities.vision.boundary", ""),
    "a boundary of another modality": Wrong(_vision(boundary="decoder.norm"), "modalities.vision.boundary", ""),
    "a module of two modalities": Wrong(
        {
            "modalities": {
                "vision": Modality(module="encoder"),
                "audio": Modality(module="encoder"),
                "language": Modality(**LANGUAGE),
            }
        },
        "modalities.audio.module",
        "",
        {"devices": 3},
    ),
    "a module inside of another's": Wrong(
        {
            "modalities": {
                "vision": Modality(module="encoder"),
                "audio": Modality(module="encoder.layers"),
                "language": Modality(**LANGUAGE),
            }
        },
        "modalities.audio.module",
        "",
        {"devices": 3},
    ),
    "a modality that is not found": Wrong(
        {"modalities": {"audio": Modality(), "language": Modality()}}, "modalities.audio", "modalities.audio.module"
    ),
    "two modalities that compute the loss": Wrong(
        {"modalities": {"language": Modality(), "text": Modality()}}, "modalities", ""
    ),
    "more microbatches than samples": Wrong(
        {**_language(), "batching": {"num_microbatches": 9}}, "batching.num_microbatches", "8"
    ),
    "ranks that are not filled": Wrong(_language(pp_size=2), _WORLD, "3 ranks", {"devices": 4}),
    "one device": Wrong(_language(), _WORLD, "2 ranks", {"devices": 1}),
    "devices as they come": Wrong(_language(pp_size=4), _WORLD, "5", {"devices": "auto"}),
    "too many nodes": Wrong(
        {"modalities": {"vision": Modality(dp_size=1, **VISION), "language": Modality(dp_size=1, **LANGUAGE)}},
        _WORLD,
        "2 ranks",
        {"devices": 2, "num_nodes": 3},
    ),
    "nccl on CPUs": Wrong(
        {**_language(), "launch": {"process_group_backend": "nccl"}}, "launch.process_group_backend", "gloo"
    ),
    "a timeline of nothing": Wrong(
        {"modalities": {"model": Modality()}, "timeline": f"{tempfile.gettempdir()}/a.json"}, "timeline", "unset"
    ),
    "a cost of one modality": Wrong(_vision(cost=1.0), "modalities.language.cost", "all"),
    "manual optimization": Wrong(
        _language(cp_size=2), "automatic_optimization", "automatic", {"devices": 3}, module=Manual
    ),
    "a schedule that is None": Wrong({**_language(), "schedule": nothing}, "schedule", "build"),
    "a schedule of words": Wrong({**_language(), "schedule": words}, "schedule", "build"),
    "a schedule of no ranks": Wrong({**_language(), "schedule": empty}, "schedule", ""),
    "a table of no rows": Wrong({**_language(), "schedule": "\n"}, "schedule", ""),
    "a table of words": Wrong({**_language(), "schedule": "0, F0, now\n"}, "schedule", "F0"),
    "a table of a rank that is not there": Wrong({**_language(), "schedule": "7, F0\n"}, "schedule", "0, 1"),
    "a table without backwards": Wrong({**_language(), "schedule": "0, F0\n1, F0\n"}, "schedule", "once"),
    "a table that waits for itself": Wrong({**_language(), "schedule": "0, B0, F0\n1, F0, B0\n"}, "schedule", "after"),
    "stages that are fed and not there": Wrong(_vision(feeds=[1]), "modalities.vision.feeds", "0"),
    "a local rank that is a word": Wrong(_language(), "LOCAL_RANK", "unset", environment={"LOCAL_RANK": "zero"}),
    "a port that is a word": Wrong(_language(), "MASTER_PORT", "unset", environment={"MASTER_PORT": "port"}),
    "a world of another size": Wrong(
        _language(), "WORLD_SIZE", "unset", environment={"WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    ),
    "a local rank beyond the devices": Wrong(_language(), "LOCAL_RANK", "unset", environment={"LOCAL_RANK": "2"}),
    "a node rank beyond the nodes": Wrong(_language(), "NODE_RANK", "unset", environment={"NODE_RANK": "3"}),
}


def refused_with_model() -> Iterator[tuple[str, list[str]]]:
    """Yield for each case its name and what is wrong with its refusal."""
    warnings.simplefilter("ignore")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            yield f"model: {name}", _problems(lambda case=case: _fit(case), case, Path(folder))


def _fit(case: Wrong) -> None:
    strategy = MultimodalStrategy(**case.fields)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        **{"devices": 2, **dict(case.trainer)},
    )
    strategy.launcher.__class__._call_children_scripts = _never  # type: ignore[union-attr, method-assign]
    trainer.fit(case.module(), DataLoader(Samples(16), batch_size=8))


def _never(*_: Any) -> None:
    raise AssertionError("processes would start")


def _problems(check: Callable[[], None], case: Wrong, folder: Path) -> list[str]:
    kept = dict(os.environ)
    os.environ.update(dict(case.environment))
    try:
        check()
    except ScheduleError as error:
        text, field = str(error), "schedule"
    except ValueError as error:
        text, field = str(error), getattr(error, "field", "")
    except BaseException as error:
        return [f"raises {type(error).__name__}: {str(error)[:500]}"]
    else:
        return ["is accepted"]
    finally:
        os.environ.clear()
        os.environ.update(kept)
    found = [] if field.startswith(case.field) else [f"names {field!r}, not {case.field!r}: {text[:500]}"]
    found += [] if case.fix in text else [f"has no {case.fix!r}: {text[:500]}"]
    return found + (["made a process group"] if torch.distributed.is_initialized() else [])
