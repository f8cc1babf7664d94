"""Wrong configurations: each is refused with one error, before any process exists, and most before torch is imported.

``python -m tests.faults.configurations`` checks those that need no torch, in one process that must not have imported
it at the end, and with ``--model`` those that need a model and a trainer. It prints a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from lightning_mm5d import Modality, PipelineTemplate
from lightning_mm5d.config import ConfigError
from lightning_mm5d.config.groups import path_of

INF, NAN = float("inf"), float("nan")
SINK = tempfile.gettempdir()


class Wrong(NamedTuple):
    """What a user writes, the path of the field that the error names, and a word of the fix.

    `said` is the strategy's arguments, or the text of a YAML file (for ``mm5d simulate``).
    """

    said: dict[str, Any] | str
    field: str
    fix: str
    world: int | None = None
    options: tuple[str, ...] = ()


def _vision(field: str, value: Any, fix: str, path: str = "") -> Wrong:
    modalities = {"vision": Modality(module="encoder"), "language": Modality(pp_size=3)}
    modalities["vision"] = Modality(**{"module": "encoder", field: value})
    return Wrong({"modalities": modalities}, f"modalities.vision.{path_of(field)}{path}", fix)


def _stages(value: Any, path: str, fix: str) -> Wrong:
    return _vision("pipeline_template", PipelineTemplate(stages=value), fix, f".stages{path}")


def _offsets(value: Any, path: str, fix: str) -> Wrong:
    return _vision("pipeline_template", PipelineTemplate(offsets=value), fix, f".offsets{path}")


def _option(field: str, value: Any, fix: str, path: str = "") -> Wrong:
    return Wrong({field: value}, f"{path_of(field)}{path}", fix)


def _fit(modalities: dict[str, Modality], world: int, field: str, fix: str, **fields: Any) -> Wrong:
    return Wrong({"modalities": modalities, **fields}, field, fix, world)


def two_arguments(graph: Any, count: int) -> Any:
    """No schedule, since it takes two arguments."""


_WORLD = "Trainer(devices=..., num_nodes=...)"
_SHARED = Modality(colocate_with="language")

PYTHON: dict[str, Wrong] = {
    **{
        f"{size} that is {value!r}": _vision(size, value, "The nearest is")
        for size in ("dp_size", "tp_size", "cp_size", "pp_size", "pp_chunks")
        for value in (0, -2, True, 2.5, "2", [2], NAN, 2**40)
    },
    **{f"{size} without a value": _vision(size, None, "The nearest is 1") for size in ("tp_size", "cp_size")},
    "sequence_parallel by a word": _vision("sequence_parallel", "yes", "true"),
    "sequence_parallel by a number": _vision("sequence_parallel", 1, "true"),
    "an unknown cp_mode": _vision("cp_mode", "rings", "'ring'"),
    "a cp_mode that is a list": _vision("cp_mode", ["ring"], "ring"),
    "an unknown cp_distribution": _vision("cp_distribution", "zigzack", "'zigzag'"),
    "an inner group without a hybrid": _vision("ulysses_size", 2, "hybrid"),
    "a module that is a number": _vision("module", 3, "'model.vision_tower'"),
    "a module that is empty": _vision("module", "", "'model.vision_tower'"),
    "a module that is an empty list": _vision("module", [], "Name one"),
    "a module with two dots": _vision("module", "a..b", "'model.vision_tower'"),
    "a module that is given twice": _vision("module", ["a", "a"], "once"),
    "a module that is a dict": _vision("module", {"a": 1}, "'model.vision_tower'"),
    "a boundary that is a number": _vision("boundary", 3, "'model.vision_tower'"),
    "a boundary with a space": _vision("boundary", "encoder. forward", "'model.vision_tower'"),
    "a boundary that is a function": _vision("boundary", two_arguments, "'model.vision_tower'"),
    "feeds by an unknown word": _vision("feeds", "last", "There are first, all"),
    "feeds of no stage": _vision("feeds", [], "[0]"),
    "feeds of a stage that is not there": _vision("feeds", [3], "2"),
    "feeds of a stage below the first": _vision("feeds", [-1], "0"),
    "feeds of a stage twice": _vision("feeds", [0, 0], "[0]"),
    "feeds by names": _vision("feeds", ["language"], "0"),
    "feeds that is a number": _vision("feeds", 0, "first"),
    "feeds without a value": _vision("feeds", None, "first"),
    "a template that is a list": _vision("pipeline_template", [2, 2], "PipelineTemplate(stages"),
    "a template that is a dict": _vision("pipeline_template", {"stages": [2, 2]}, "PipelineTemplate(stages"),
    "a template without a field": _vision("pipeline_template", PipelineTemplate(), "stages=[2, 2]"),
    "a template with both fields": _vision("pipeline_template", PipelineTemplate(stages=[1], offsets=[0]), "offsets"),
    "a template without stages": _stages([], "", "unset"),
    "a template by a word": _stages("two", "", "unset"),
    "a stage of no layers": _stages([2, 0], "[1]", "The nearest is 1"),
    "a stage of half a layer": _stages([2, 1.5], "[1]", "The nearest is 1"),
    "stages by number and by name": _stages([2, ["layers.0"]], "", "[2, 2]"),
    "a layer in two stages": _stages([["layers.0"], ["layers.0"]], "[1]", "stage 0"),
    "a layer inside of another": _stages([["layers"], ["layers.0"]], "[1]", "stage 0"),
    "offsets that do not sum to 0": _offsets([1, 1], "", "[1, -1]"),
    "an offset that is a word": _offsets(["1", -1], "[0]", "0"),
    "a template of another size": Wrong(
        {
            "modalities": {
                "language": Modality(pp_size=3, pipeline={"pipeline_template": PipelineTemplate(stages=[2, 2])})
            }
        },
        "modalities.language.pp_size",
        "pp_size=2",
    ),
    "chunks that do not divide the template": Wrong(
        {
            "modalities": {
                "language": Modality(pipeline={"pp_chunks": 2, "pipeline_template": PipelineTemplate(stages=[1, 1, 1])})
            }
        },
        "modalities.language.pipeline.pp_chunks",
        "divides",
    ),
    "chunks of one stage": _vision("pp_chunks", 2, "pp_size=2"),
    "a cost of nothing": _vision("cost", 0, "1.0"),
    "a cost below nothing": _vision("cost", -1.0, "1.0"),
    "a cost that is not a number": _vision("cost", NAN, "1.0"),
    "an endless cost": _vision("cost", INF, "1.0"),
    "a cost by a word": _vision("cost", "1", "1.0"),
    "costs of too many ranks": _vision("cost", [1.0, 2.0], "Give 1"),
    "ranks of a modality that is not there": _vision("colocate_with", "langage", "'language'"),
    "ranks of its own": _vision("colocate_with", "vision", "'language'"),
    "ranks by a number": _vision("colocate_with", 3, "'language'"),
    "ranks by a list": _vision("colocate_with", ["language"], "'language'"),
    "a pipeline rank that is not there": _vision("colocate_with", "language.3", "language.2"),
    "a circle of shared ranks": Wrong(
        {"modalities": {"vision": _SHARED, "language": Modality(colocate_with="vision")}},
        "modalities.vision.colocate_with",
        "unset",
    ),
    "shared ranks that are shared already": Wrong(
        {"modalities": {"audio": Modality(colocate_with="vision"), "vision": _SHARED, "language": Modality()}},
        "modalities.audio.colocate_with",
        "'language'",
    ),
    "a modality that is half a number": _option("modalities", {"language": 2.5}, "Modality(pp_size=2)", ".language"),
    "a modality that is a list": _option("modalities", {"language": [2]}, "Modality(pp_size=2)", ".language"),
    "a modality that is true": _option("modalities", {"language": True}, "Modality(pp_size=2)", ".language"),
    "a modality that is None": _option("modalities", {"language": None}, "Modality(", ".language"),
    "a modality that is a class": _option("modalities", {"language": Modality}, "Modality(", ".language"),
    "a dict with a misspelt field": _option("modalities", {"language": {"pp_sise": 2}}, "'pp_size'", ".language"),
    "modalities as a list": _option("modalities", [Modality()], "{'language': Modality()}"),
    "modalities as a set": _option("modalities", {"language"}, "{'language': Modality()}"),
    "modalities as a word": _option("modalities", "language", "{'language': Modality()}"),
    "no modalities": _option("modalities", {}, "Name one"),
    "a name that is a number": _option("modalities", {3: Modality()}, "'3'"),
    "a name with a dot": _option("modalities", {"a.b": Modality()}, "'a_b'"),
    "a name that is empty": _option("modalities", {"": Modality()}, "'vision'"),
    "a name that is None": _option("modalities", {None: Modality()}, "'None'"),
    "a schedule that is not there": _option("schedule", "1f2b", "'1f1b'"),
    "a schedule without a value": _option("schedule", None, "1f1b"),
    "a schedule that is a list": _option("schedule", ["1f1b"], "1f1b"),
    "a schedule that is a number": _option("schedule", 1, "1f1b"),
    "a table that is not there": _option("schedule", f"{SINK}/nowhere.csv", "existing table"),
    "a schedule of two arguments": _option("schedule", two_arguments, "def schedule(graph)"),
    "a schedule without arguments": _option("schedule", lambda: None, "def schedule(graph)"),
    **{
        f"num_microbatches that is {value!r}": _option("num_microbatches", value, "The nearest is")
        for value in (0, -1, True, 1.5, "4", [4], 2**40)
    },
    "an unknown microbatching": _option("microbatching", "both", "'split'"),
    "a microbatching without a value": _option("microbatching", None, "split"),
    "an unknown loss_weight": _option("loss_weight", "token", "'tokens'"),
    "a loss_weight that is a number": _option("loss_weight", 2.0, "samples"),
    "a placement that is a word": _option("placement", "01", "[0, 1]"),
    "a placement of nothing": _option("placement", [], "[0, 1]"),
    "a rank that is placed twice": _option("placement", [0, 0], "[0, 1]"),
    "a rank below 0 that is placed": _option("placement", [0, -1], "[0, 1]", "[1]"),
    "a rank by a word": _option("placement", [0, "1"], "[0, 1]", "[1]"),
    "a rank that is true": _option("placement", [0, True], "[0, 1]", "[1]"),
    "ranks in lists": _option("placement", [[0], [1]], "[0, 1]", "[0]"),
    "an unknown start_method": _option("start_method", "forkserver", "'fork'"),
    "a start_method without a value": _option("start_method", None, "popen"),
    "an unknown backend": _option("process_group_backend", "glu", "'gloo'"),
    "a backend that is a number": _option("process_group_backend", 3, "gloo"),
    "an unknown backend of a device": _option("process_group_backend", "cpu:gloo,cuda:ncl", "'nccl'"),
    "a timeout below nothing": _option("timeout", timedelta(seconds=-5), "timedelta(minutes=30)"),
    "a timeout of nothing": _option("timeout", timedelta(0), "timedelta(minutes=30)"),
    "a timeout that is a number": _option("timeout", 60, "timedelta(seconds=60)"),
    "a timeout by a word": _option("timeout", "30 minutes", "timedelta(seconds=1800)"),
    "a timeout that is a function": _option("timeout", timedelta, "timedelta(seconds=1800)"),
    "a timeout without a value": _option("timeout", None, "timedelta(seconds=1800)"),
    "a timeout of all time": _option("timeout", timedelta.max, "timedelta(minutes=30)"),
    "a timeline of an unknown kind": _option("timeline", "timeline.txt", "'timeline.json'"),
    "a timeline in a folder that is not there": _option("timeline", f"{SINK}/nowhere/a.json", "folder"),
    "a timeline that is true": _option("timeline", True, "'timeline.json'"),
    "a timeline that is empty": _option("timeline", "", "'timeline.json'"),
    "ranks that are not filled": _fit({"language": Modality(pp_size=3)}, 4, _WORLD, "3 or 6"),
    "too few ranks": _fit({"vision": Modality(), "language": Modality(pp_size=3)}, 2, _WORLD, "4 ranks"),
    "too many ranks": _fit({"language": Modality(dp_size=2)}, 4, _WORLD, "2 ranks"),
    "replicas that do not pair up": _fit(
        {"vision": Modality(dp_size=2), "language": Modality(dp_size=3)}, 5, "modalities.vision.dp_size", "dp_size="
    ),
    "sizes that do not divide shared ranks": _fit(
        {"vision": Modality(colocate_with="language", tp_size=3), "language": Modality(tp_size=4)},
        4,
        "modalities.vision",
        "would fit",
    ),
    "a placement of other ranks": _fit({"language": Modality(pp_size=2)}, 2, "placement", "[0, 1]", placement=[0, 2]),
    "a placement that is too long": _fit(
        {"language": Modality(pp_size=2)}, 2, "placement", "[0, 1]", placement=[0, 1, 2]
    ),
    "a placement that descends": _fit({"language": Modality(tp_size=2)}, 2, "placement", "[0, 1]", placement=[1, 0]),
}


def _yaml(text: str) -> str:
    return f"modalities: {{vision: {{module: encoder}}, language: {{pp_size: 2}}}}\n{text}"


def _of_language(text: str) -> str:
    return f"modalities: {{language: {{{text}}}}}"


YAML: dict[str, Wrong] = {
    "a size by a word": Wrong(_of_language("tp_size: two"), "modalities.language.tp_size", "The nearest"),
    "a size that is true": Wrong(_of_language("tp_size: true"), "modalities.language.tp_size", "The nearest"),
    "a size that is broken": Wrong(_of_language("tp_size: 1.5"), "modalities.language.tp_size", "The nearest"),
    "a size that is a list": Wrong(_of_language("pp_size: [2]"), "modalities.language.pp_size", "The nearest"),
    "a size that is a dict": Wrong(_of_language("dp_size: {a: 2}"), "modalities.language.dp_size", "The nearest"),
    "an unknown field": Wrong(_of_language("pp_sise: 2"), "modalities.language.pp_sise", "'pp_size'"),
    "a field of a template": Wrong(
        _of_language("pipeline: {pipeline_template: {stage: [1]}}"),
        "modalities.language.pipeline.pipeline_template.stage",
        "'stages'",
    ),
    "a template that is a list": Wrong(
        _of_language("pipeline: {pipeline_template: [1, 1]}"),
        "modalities.language.pipeline.pipeline_template",
        "PipelineTemplate(",
    ),
    "an unknown cp_mode": Wrong(
        _of_language("context: {cp_mode: rings}"), "modalities.language.context.cp_mode", "'ring'"
    ),
    "feeds by an unknown word": Wrong(
        "modalities: {vision: {feeds: al}, language: {}}", "modalities.vision.feeds", "'all'"
    ),
    "a modality that is a word": Wrong("modalities: {language: two}", "modalities.language", "Modality("),
    "a modality of no stages": Wrong("modalities: {language: 0}", "modalities.language.pp_size", "The nearest is 1"),
    "modalities as a list": Wrong("modalities: [language]", "modalities", "{'language'"),
    "modalities as a number": Wrong("modalities: 3", "modalities", "{'language'"),
    "a misspelt strategy's field": Wrong(_yaml("num_microbatchs: 2"), "num_microbatchs", "'batching.num_microbatches'"),
    "microbatches by a word": Wrong(_yaml("num_microbatches: many"), "batching.num_microbatches", "The nearest"),
    "an unknown schedule": Wrong(_yaml("schedule: gpip"), "schedule", "'gpipe'"),
    "a timeout that is a number": Wrong(_yaml("timeout: 5"), "launch.timeout", "'0:30:00'"),
    "a timeout by a word": Wrong(_yaml("timeout: -5s"), "launch.timeout", "'0:30:00'"),
    "a timeout of nothing": Wrong(_yaml("timeout: '0:00:00'"), "launch.timeout", "minutes=30"),
    "an unknown backend": Wrong(_yaml("process_group_backend: glo"), "launch.process_group_backend", "'gloo'"),
    "an unknown start_method": Wrong(_yaml("start_method: popn"), "launch.start_method", "'popen'"),
    "an unknown loss_weight": Wrong(_yaml("loss_weight: token"), "batching.loss_weight", "'tokens'"),
    "a placement by a word": Wrong(_yaml("placement: zero"), "placement", "[0, 1]"),
    "a rank that is placed twice": Wrong(_yaml("placement: [0, 0]"), "placement", "[0, 1]"),
    "a timeline of an unknown kind": Wrong(_yaml("timeline: a.txt"), "timeline", "'a.json'"),
    "a timeline in a folder that is not there": Wrong(_yaml("timeline: /nowhere/a.json"), "timeline", "folder"),
    "a doubled key": Wrong(_yaml("schedule: gpipe\nschedule: 1f1b"), "schedule", "once"),
    "a doubled modality": Wrong("modalities: {language: {pp_size: 2}, language: {pp_size: 3}}", "language", "once"),
    "a doubled field": Wrong(_of_language("pp_size: 2, pp_size: 3"), "pp_size", "once"),
    "no YAML": Wrong("modalities: {language: {", "CONFIG", "Correct"),
    "a list instead of settings": Wrong("- language", "CONFIG", "configuration"),
    "an option by a word": Wrong(
        _yaml(""), "modalities.vision.tp_size", "The nearest", options=("--modalities.vision.tp_size=x",)
    ),
    "an option that is no YAML": Wrong(_yaml(""), "--modalities", "for instance", options=("--modalities={a: ",)),
    "devices by a word": Wrong(
        "trainer: {devices: four, strategy: {class_path: lightning_mm5d.MultimodalStrategy}}", "trainer.devices", "8"
    ),
    "no devices": Wrong(
        "trainer: {devices: 0, strategy: {class_path: lightning_mm5d.MultimodalStrategy}}", "trainer.devices", "8"
    ),
    "devices that are listed twice": Wrong(
        "trainer: {devices: [0, 0], strategy: {class_path: lightning_mm5d.MultimodalStrategy}}", "trainer.devices", "1"
    ),
    "nodes by a word": Wrong(
        "trainer: {devices: 2, num_nodes: two, strategy: mm5d}", "trainer.num_nodes", "1 for one machine"
    ),
    "no nodes": Wrong("trainer: {devices: 2, num_nodes: 0, strategy: mm5d}", "trainer.num_nodes", "1 for one machine"),
    "ranks that are not filled": Wrong(
        "trainer: {devices: 3, strategy: {class_path: lightning_mm5d.MultimodalStrategy, init_args: {modalities: "
        "{language: {pp_size: 2}}}}}",
        "Trainer(devices=..., num_nodes=...)",
        "2 or 4",
    ),
    "a trainer that is a number": Wrong("trainer: 3", "trainer", "Leave the key out"),
}


def refused_without_torch() -> Iterator[tuple[str, list[str]]]:
    """Yield for each case of `PYTHON` and `YAML` its name and what is wrong with its refusal."""
    from lightning_mm5d.config.modality import for_schedule, loss_modality_of
    from lightning_mm5d.layout.layout import Layout
    from lightning_mm5d.schedule import check_fields

    for name, case in PYTHON.items():
        assert isinstance(case.said, dict)
        said = case.said

        def check(said: dict[str, Any] = said, world: int | None = case.world) -> None:
            check_fields(said)
            if world is not None:
                modalities, placement = said["modalities"], said.get("placement")
                loss = loss_modality_of(modalities)
                modalities = for_schedule(modalities, said.get("schedule"), loss)
                Layout.build(modalities, world_size=world, loss_modality=loss, placement=placement)

        yield f"python: {name}", _problems(check, case)
    for name, case in YAML.items():
        yield f"yaml: {name}", _command_problems(case)


def _problems(check: Callable[[], Any], case: Wrong) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return _compared(str(error), error.field, error.fix, case)
    except Exception as error:
        return [f"raises {type(error).__name__}: {error}"]
    return ["is accepted"]


def _compared(text: str, field: str, fix: str, case: Wrong) -> list[str]:
    found = [] if field == case.field else [f"names {field!r}, not {case.field!r}: {text}"]
    found += [] if case.fix in fix else [f"its fix has no {case.fix!r}: {text}"]
    return found + ([f"has {text.count(chr(10)) + 1} lines"] if "\n" in text else [])


def _command_problems(case: Wrong) -> list[str]:
    from lightning_mm5d.tools.cli.main import main

    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        assert isinstance(case.said, str)
        path.write_text(case.said)
        try:
            with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
                code = main(["simulate", str(path), *case.options])
        except BaseException as error:
            return [f"raises {type(error).__name__}: {error}"]
    text = printed.getvalue().strip()
    if code != 2:
        return [f"is accepted with exit code {code}"]
    field, _, rest = text.removeprefix("mm5d: error: ").partition(": got ")
    return _compared(text, field, rest, case)


def score() -> tuple[tuple[str, ...], list[str]]:
    """Run all cases in processes of their own; return a row of the table, and a line for each failure."""
    start = time.monotonic()
    lines: list[str] = []
    for options in ([], ["--model"]):
        command = [sys.executable, "-m", "tests.faults.configurations", *options]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
        )
        lines += [line for line in done.stdout.splitlines() if line.startswith("[")]
        if done.returncode:
            lines.append(json.dumps(["the process", [done.stderr[-2000:]]]))
    found = [json.loads(line) for line in lines]
    wrong = [f"configurations: {name}: FAILED: {'; '.join(problems)}" for name, problems in found if problems]
    count = len(found)
    row = (
        "configurations",
        f"{count - len(wrong)} / {count}",
        "-",
        str(count),
        "-",
        f"{time.monotonic() - start:.1f}",
        "1",
    )
    return row, wrong


def main(arguments: list[str]) -> int:
    if "--model" in arguments:
        from .refused_models import refused_with_model

        cases = refused_with_model()
    else:
        cases = refused_without_torch()
    for name, problems in cases:
        print(json.dumps([name, problems]), flush=True)
    if "--model" not in arguments and "torch" in sys.modules:
        print(json.dumps(["torch", ["was imported"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
