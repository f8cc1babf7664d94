"""The command before it plans: help, versions, early refusals, interrupts, and what it finds of the machine."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mm5d import ConfigError, MultimodalStrategy
from lightning_mm5d.config.groups import OF_MODALITY, OF_STRATEGY, names_of, path_of
from lightning_mm5d.config.tables import Table
from lightning_mm5d.tools.cli import doctor, terminal
from lightning_mm5d.tools.cli.configuration import FIELDS, check_early, one_line
from lightning_mm5d.tools.cli.main import main

NO_TORCH = (
    "import sys; from lightning_mm5d.tools.cli.main import main; code = 1\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as stopped: code = stopped.code\n"
    "found = [name for name in ('torch', 'lightning') if name in sys.modules]\n"
    "sys.exit(f'imported {found}' if found else code)"
)
STRATEGY = """
trainer:
  devices: 4
  strategy:
    class_path: lightning_mm5d.MultimodalStrategy
    init_args:
      modalities: {vision: {VISION}, language: {pp_size: 3}}
      schedule: SCHEDULE
      num_microbatches: COUNT
model: {class_path: nothing.Here}
"""


def without_torch(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["simulate", "--help"]])
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    code, text = without_torch(*arguments)
    assert code == 0, text
    assert "mm5d" in text


@pytest.mark.parametrize(
    ("vision", "schedule", "count", "words"),
    [
        ("tp: 2", "1f1b", "4", "modalities.vision.tp: got 2. There is no such field. Did you mean 'tp_size'?"),
        ("tp_size: 0", "1f1b", "4", "modalities.vision.tp_size: got 0"),
        ("ep_size: two", "1f1b", "4", "modalities.vision.ep_size: got 'two'"),
        ("", "2f2b", "4", "schedule: got '2f2b'"),
        ("", "1f1b", "0", "num_microbatches: got 0"),
        ("colocate_with: langage", "1f1b", "4", "modalities.vision.colocate_with: got 'langage'"),
    ],
)
def test_refuses_a_wrong_strategy_before_torch_is_imported(
    vision: str, schedule: str, count: str, words: str, tmp_path: Path
) -> None:
    text = STRATEGY.replace("VISION", vision).replace("SCHEDULE", schedule).replace("COUNT", count)
    (tmp_path / "config.yaml").write_text(text)
    code, printed = without_torch("inspect", str(tmp_path / "config.yaml"))
    assert (code, words in printed) == (2, True), printed


@pytest.mark.parametrize("field", ["feeds_from", "pp_size", "tp_size", "zero_stage"])
def test_a_field_of_a_modality_that_stands_beside_modalities_is_told_its_place(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STRATEGY.replace("{VISION}", "{}").replace("SCHEDULE", f"1f1b\n      {field}: 2").replace("COUNT", "4")
    (tmp_path / "config.yaml").write_text(text)
    assert main(["inspect", str(tmp_path / "config.yaml")]) == 2
    said = (
        f"{field}: got 2. The strategy has no such field. It is a field of a modality: write modalities.<name>."
        f"{path_of(field)}"
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("balance=true", "balance: got 'true'. The strategy has no such field. Write batching.balance"),
        ("schedul=gpipe", "schedul: got 'gpipe'. The strategy has no such field. Did you mean 'schedule'?"),
        (
            "modalitys.vision.tp_size=2",
            "got '2'. The strategy has no such field. Did you mean 'modalities'?",
        ),
        ("zero_stage=1", "zero_stage: got '1'. The strategy has no such field. It is a field of a modality"),
    ],
)
def test_an_option_for_a_field_that_the_strategy_has_not_is_told_the_nearest(
    option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(STRATEGY.replace("VISION", "").replace("SCHEDULE", "1f1b").replace("COUNT", "4"))
    for arguments in (["inspect", str(config)], ["fit", "--config", str(config)]):
        assert main([*arguments, f"--trainer.strategy.init_args.{option}"]) == 2
        assert said in capsys.readouterr().err


_IN_GROUPS = [
    *((group, name) for group, kind in OF_STRATEGY.items() for name in ("", *names_of(kind))),
    *((f"modalities.language.{group}", name) for group, kind in OF_MODALITY.items() for name in ("", *names_of(kind))),
]


@pytest.mark.parametrize(("group", "name"), _IN_GROUPS, ids=lambda part: part or "all")
def test_a_group_and_a_field_of_another_type_are_refused_by_their_path(group: str, name: str) -> None:
    for wrong in (3.7, [None], float("nan")):
        said: Any = {name: wrong} if name else wrong
        for key in reversed(group.split(".")):
            said = {key: said}
        said = {"modalities": {"language": {}}} | said
        trainer = {"devices": 1, "strategy": {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": said}}
        start = rf"^{group}\.{name}" if name else f"^{group}"
        with pytest.raises(ConfigError, match=start):
            MultimodalStrategy(**said)
        with pytest.raises(ConfigError, match=start):
            check_early([{"trainer": trainer, "model": {}}], [])


def test_a_configuration_that_a_parser_has_written_is_read_again() -> None:
    written = {name: None for name in signature(MultimodalStrategy).parameters if name != "ungrouped"}
    said = {**written, "modalities": {"language": {"pp_size": 2}}, "schedule": "1f1b", "checkpoint": "full"}
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": said}
    check_early([{"trainer": {"devices": 2, "strategy": strategy}, "model": {}}], [])
    with pytest.raises(ConfigError, match="multiple of 2 ranks"):
        check_early([{"trainer": {"devices": 3, "strategy": strategy}, "model": {}}], [])


@pytest.mark.parametrize("name", ["init_args", "modalities", "batching", "launch", "schedule"])
def test_a_setting_of_the_strategy_beside_it_is_refused_though_it_holds_nothing_but_empty_mappings(name: str) -> None:
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy"}
    modalities = {"vision": {}, "language": {}}
    fix = rf"Move it to trainer\.strategy\.(init_args\.)?{name}"
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}: .* {fix}"):
        check_early([{"trainer": {"devices": 2, "strategy": strategy, name: modalities}, "model": {}}], [])
    outside = [{"trainer": {"devices": 2, "strategy": strategy}, "model": {}, name: modalities}]
    with pytest.raises(ConfigError, match=f"^{name}: .* {fix}"):
        check_early(outside, [])
    check_early(outside, [], has_script=True)  # whose LightningCLI may have such an option
    if name != "init_args":
        beside = strategy | {"init_args": {}, name: modalities}
        with pytest.raises(ConfigError, match=rf"^trainer\.strategy\.{name}: .* {fix}"):
            check_early([{"trainer": {"devices": 2, "strategy": beside}, "model": {}}], [])


def test_a_modality_inside_of_another_is_refused_though_the_parser_passes_over_an_empty_mapping() -> None:
    said = {"modalities": {"language": {"tensor": {}, "vision": {}}}}
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": said}
    with pytest.raises(ConfigError, match=r"^modalities\.language\.vision: got {}. There is no such field"):
        check_early([{"trainer": {"devices": 1, "strategy": strategy}, "model": {}}], [])


@pytest.mark.parametrize(
    ("option", "full"),
    [
        ("schedule", "schedule"),
        ("num_microbatches", "batching.num_microbatches"),
        ("modalities.language.pp_size", "modalities.language.pp_size"),
    ],
)
def test_an_option_of_the_strategy_without_its_path_is_told_it(option: str, full: str) -> None:
    said = one_line(f"unrecognized arguments: --{option}=zbv")
    assert said.endswith(f"Write --trainer.strategy.init_args.{full}")


def test_a_configuration_without_its_option_is_told_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config := tmp_path / "config.yaml").write_text("trainer: {devices: 2}\n")
    assert main(["fit", str(config)]) == 2
    assert f"Write --config {config}" in capsys.readouterr().err


def test_settings_of_a_strategy_without_its_class_are_refused_beside_a_model() -> None:
    settings: Any = {"init_args": {"modalities": {"language": {}}}}
    trainer = {"devices": 1, "strategy": settings}
    with pytest.raises(
        ConfigError, match=r"^trainer\.strategy: .* Write class_path: lightning_mm5d.MultimodalStrategy"
    ):
        check_early([{"trainer": trainer, "model": {}}], [])
    check_early([{"trainer": trainer, "model": {}}], [], has_script=True)  # whose default may be a class
    check_early([{"trainer": trainer}], [])  # sizes alone
    check_early([{"trainer": trainer, "model": {}}], ["--trainer.strategy.class_path", "MultimodalStrategy"])
    whole = settings | {"class_path": "lightning_mm5d.MultimodalStrategy"}
    check_early([{"trainer": {"strategy": whole}, "model": {}}, {"trainer": trainer}], [])  # the latter lies over it


def test_options_that_mend_a_configuration_are_checked_with_it(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("modalities: {language: {pp_size: 2}}\nschedule: 2f2b")
    assert main(["simulate", str(config), "--schedule", "gpipe", "--json"]) == 0
    assert main(["simulate", str(config), "--json"]) == 2


def test_a_script_in_place_of_a_configuration_is_told_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "train.py"]) == 2
    assert "add --script train.py" in capsys.readouterr().err


def test_an_interrupt_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "mm5d: interrupted\n"


def test_doctor_shows_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("python", "torch", "lightning", "transformers", "numpy", "cpu", "gloo", "nccl", "mpi"):
        assert words in out
    assert out.endswith("Training can work here.\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "links.yaml"), "--out: got 'links.yaml'. It is the file of the links. Add --links"),
        (("--links", "--out", "missing/links.yaml"), "--out: got 'missing/links.yaml'. There is no such folder"),
    ],
)
def test_doctor_refuses_a_file_that_it_would_not_write_before_it_measures(options: tuple[str, ...], words: str) -> None:
    code, text = without_torch("doctor", *options)
    assert (code, words in text) == (2, True), text


def test_doctor_says_what_ranks_on_gpus_should_find_in_their_environment() -> None:
    first, second = doctor.gpu_settings({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert first.startswith("set CUDA_DEVICE_MAX_CONNECTIONS=32 (it is 8)")
    assert second.startswith("set PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True:")
    (found,) = doctor.gpu_settings(
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )
    assert "(it is 1)" in found
    assert (
        doctor.gpu_settings(
            {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        )
        == []
    )


@pytest.mark.parametrize(
    ("package", "found", "words", "code"),
    [
        ("lightning", "2.6.2", "error: lightning 2.6.2 was a malicious upload", 1),
        ("torchmetrics", None, "error: torchmetrics is missing", 1),
        ("matplotlib", None, "warning: matplotlib is missing, so no pictures are drawn", 0),
        ("transformers", "4.0", "warning: transformers 4.0 was not tested", 0),
    ],
)
def test_doctor_says_what_would_not_work(
    package: str,
    found: str | None,
    words: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: found if name == package else version(name))
    assert doctor.doctor() == code
    assert words in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_fold_to_the_terminal_and_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.of(("rank", "layers"), [(number, "word" * 20) for number in range(2)])
    narrow, plain = Terminal(), io.StringIO()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", narrow)
    terminal.show([table, "x" * 60])
    monkeypatch.setattr(sys, "stdout", plain)
    terminal.show([table])
    lines = re.sub(r"\x1b\[\d*m", "", narrow.getvalue()).splitlines()
    assert max(map(len, lines[:-1])) <= 40
    assert "".join(line[4:].strip() for line in lines[1:-1]) == "word" * 40
    assert lines[-1] == "x" * 60
    assert plain.getvalue() == f"rank  layers\n   0  {'word' * 20}\n   1  {'word' * 20}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modalitys: {language: {}}", "Did you mean 'modalities'"),
        (
            "trainer: {strategy: {class_path: lightning_mm5d.MultimodalStrategy, init_args: {modalites: {}}}}",
            "modalities",
        ),
        ("trainer:", "trainer: got None"),
        ("schedule:", "schedule: got None"),
        ("modalities: {language: {tp_size: 99999999999999999999}}", "at most"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sizes.yaml").write_text(text)
    assert main(["simulate", str(tmp_path / "sizes.yaml")]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_an_option_that_is_no_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sizes.yaml").write_text("modalities: {language: {pp_size: 2}}")
    assert main(["simulate", str(tmp_path / "sizes.yaml"), "--modalities=["]) == 2
    assert "It is no YAML" in capsys.readouterr().err


def test_the_fields_are_those_of_the_strategy() -> None:
    """The trainer sets the others."""
    parameters = list(signature(MultimodalStrategy).parameters)
    assert parameters[: len(FIELDS)] == list(FIELDS)
    assert parameters[len(FIELDS)] == "accelerator"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("export", "--help"), 0, "Write a checkpoint"),
        (("checkpoint", "show", "--help"), 0, "--verify"),
        (("export", "gone.ckpt", "out"), 2, "There is no such file or folder"),
        (("checkpoint", "show", "gone.ckpt"), 2, "There is no such file or folder"),
    ],
)
def test_commands_on_checkpoints_begin_without_torch(arguments: tuple[str, ...], code: int, words: str) -> None:
    found, text = without_torch(*arguments)
    assert found == code
    assert words in " ".join(text.split())


def test_converts_a_configuration_without_torch_and_lists_its_knobs(tmp_path: Path) -> None:
    file, out = tmp_path / "config.py", tmp_path / "ours.yaml"
    file.write_text("parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\nraise SystemExit(3)")
    code, printed = without_torch("convert", str(file), "--out", str(out))
    assert (code, "parallel.tensor.size=2 -> modalities.model.tp_size: 2" in printed) == (0, True), printed
    assert yaml.safe_load(out.read_text())["trainer"]["strategy"]["init_args"]["modalities"] == {
        "model": {"pp_size": 2, "tp_size": 2}
    }
    file.write_text("parallel = dict(pipelin=2)")
    code, printed = without_torch("convert", str(file))
    assert (code, "parallel" in printed) == (2, True), printed


def test_refuses_an_option_over_a_number_of_stages(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("modalities: {vision: 1, language: 3}")
    code, printed = without_torch("simulate", str(tmp_path / "config.yaml"), "--modalities.language.tp_size=2")
    assert (code, "Write language: {pp_size: 3} there" in printed) == (2, True), printed


def test_names_the_modality_that_an_option_misspells(tmp_path: Path) -> None:
    init_args = {"modalities": {"vision": {}, "language": {"pp_size": 3}}}
    strategy = {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": init_args}
    file, sizes = tmp_path / "config.yaml", tmp_path / "sizes.yaml"
    file.write_text(json.dumps({"trainer": {"devices": 4, "strategy": strategy}}))
    code, printed = without_torch("simulate", str(file), "--trainer.strategy.init_args.modalities.vidio.pp_size=2")
    assert (code, "modalities.vidio.pp_size" in printed, "Did you mean 'vision'?" in printed) == (2, True, True), (
        printed
    )
    # one more modality that fits the ranks may have such a name, and other settings of a file are no modalities
    for devices, name in ((6, "vision2"), (5, "precisions")):
        sizes.write_text(json.dumps({"trainer": {"devices": devices, "precision": "32-true"}}))
        option = f"--trainer.strategy.init_args.modalities.{name}.pp_size={devices - 4}"
        code, printed = without_torch("simulate", str(file), str(sizes), option)
        assert (code == 2, "Did you mean" in printed) == (False, False), printed


def test_says_what_was_given_where_the_parser_tells_what_it_expected() -> None:
    found = one_line(
        'Parser key "trainer.max_epochs":\n  Does not validate against any of the Union subtypes\n  Errors:\n'
        "    - Expected a <class 'int'>\n  Given value type: <class 'str'>\n  Given value: many"
    )
    assert found == "Parser key \"trainer.max_epochs\": Expected a <class 'int'>. Given: many"


@pytest.mark.parametrize(("option", "advice"), [("--jsn", "Did you mean 'json'?"), ("--xyz", "arguments: --xyz\n")])
def test_suggests_an_option_that_is_near_to_an_unknown_one_and_none_else(
    option: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("modalities: {vision: {}, language: {pp_size: 3}}")
    assert main(["simulate", str(tmp_path / "config.yaml"), option]) == 2
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(("text", "words"), [(None, "It cannot be read"), ("trainer: {devices: [", "It is no YAML")])
def test_training_from_a_file_that_cannot_be_read_is_refused_in_one_line(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text)
    assert main(["fit", "--config", str(config)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mm5d: error: CONFIG: got '{config}'. {words}")
    assert printed.count("\n") == 1


def test_training_with_the_class_named_as_a_text_is_told_how_to_write_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {devices: 2, strategy: lightning_mm5d.MultimodalStrategy}\n")
    assert main(["fit", "--config", str(config)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mm5d: error: trainer.strategy: got 'lightning_mm5d.MultimodalStrategy'.")
    assert "class_path: lightning_mm5d.MultimodalStrategy" in printed


@pytest.mark.filterwarnings("ignore")
def test_training_finds_classes_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lies_beside.py").write_text("from lightning.pytorch.demos.boring_classes import BoringModel as Mine\n")
    config, before = tmp_path / "config.yaml", [*sys.path]
    quiet = "logger: false, enable_checkpointing: false, enable_progress_bar: false, enable_model_summary: false"
    config.write_text(
        f"trainer: {{accelerator: cpu, devices: 1, fast_dev_run: true, {quiet}}}\n"
        "model: {class_path: lies_beside.Mine}\n"
    )
    monkeypatch.chdir(tmp_path.parent)
    try:
        assert main(["fit", "--config", str(config)]) == 0, capsys.readouterr().err
    finally:
        sys.modules.pop("lies_beside", None)
    assert sys.path == before


def test_what_the_parser_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan", "--ranks", "many"], ["plan", "--memory"], ["export"], ["planning"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        text = capsys.readouterr().err
        assert stopped.value.code == 2
        assert text.startswith("mm5d: error: ")
        assert text.count("\n") == 1
