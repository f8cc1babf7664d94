"""The command: what it shows of a configuration is what a run would do, made without processes or memory.

The configurations are the digits example's, whose classes stand in its script, and ones that name their classes, for
clusters that no test machine is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan import plan
from lightning_mm5d.tools.cli.main import main
from lightning_mm5d.tools.planner.inspect import warnings
from zoo.handwritten import FlatModule

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
SCRIPTED = f"--script={DIGITS / 'train.py'}"
KEYS = ["rank", "node", "modality", "dp", "pp", "cp", "tp", "layers", "parameters", "memory"]
VISION = {"module": "encoder"}

MODULE = """
import lightning as L
import torch

SEEN = []

class Tied(L.LightningModule):
    def __init__(self, width: int = 8, freeze: bool = False, values: bool = False):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, width)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(width, width)) for _ in range(3))
        self.head = torch.nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].requires_grad_(not freeze)
        if values:
            assert float(self.head.weight.detach().square().sum()) > 0
        SEEN.append(self.head.weight.untyped_storage().device.type)

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).square().mean()

class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 2, width: int = 8):
        super().__init__()
        self.batch_size, self.width = batch_size, width
"""
SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from tied_module import Data, Tied

class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.width", "model.width", apply_on="instantiate")

if __name__ == "__main__":
    try:
        Linked(Tied, Data, run=False)
    except Exception:
        pass
    raise SystemError("this line trains")
"""


class Inspect:
    """Runs the command on configurations that are written into a folder of the test's own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def write(self, config: object, name: str = "config.yaml") -> Path:
        path = self.folder / name
        path.write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
        return path

    def run(self, command: str, config: object, *options: str) -> tuple[int, str, str]:
        path = config if isinstance(config, Path) else self.write(config)
        code = main([command, str(path), *options])
        out, err = self._capsys.readouterr()
        return code, out, err

    def text(self, config: object, *options: str) -> str:
        code, out, err = self.run("inspect", config, *options)
        assert (code, err) == (0, "")
        return out

    def entries(self, config: object, *options: str) -> list[dict[str, Any]]:
        return json.loads(self.text(config, *options, "--json"))

    def refusal(self, config: object, *options: str) -> str:
        code, out, err = self.run("inspect", config, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("mm5d: error: ")
        return err


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Inspect]:
    """The command, with a module beside its configurations; what it imports is forgotten afterwards."""
    (tmp_path / "tied_module.py").write_text(MODULE)
    local = ("tied_module", *(path.stem for path in DIGITS.glob("*.py")))
    hidden = {name: sys.modules.pop(name) for name in local if name in sys.modules}
    path, argv = list(sys.path), list(sys.argv)
    yield Inspect(tmp_path, capsys)
    assert (sys.path, sys.argv) == (path, argv)
    for name in local:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


def config(
    devices: Any, nodes: int = 1, *, model: str = "zoo.handwritten.FlatModule", **strategy: Any
) -> dict[str, Any]:
    return {
        "trainer": {
            "accelerator": "gpu",
            "devices": devices,
            "num_nodes": nodes,
            "strategy": {"class_path": "lightning_mm5d.MultimodalStrategy", "init_args": strategy},
        },
        "model": {"class_path": model},
    }


def two_nodes(**strategy: Any) -> dict[str, Any]:
    return config(4, 2, modalities={"vision": VISION, "language": {"pp_size": 3}}, **strategy)


def tied(**init: Any) -> dict[str, Any]:
    made = config(2, model="tied_module.Tied", modalities={"language": {"pp_size": 2}})
    made["model"]["init_args"] = init
    return made


def elements(module: torch.nn.Module, *prefixes: str) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if name.startswith(prefixes))


def test_shards_a_model_once_so_that_its_notes_are_printed_once(inspect: Inspect) -> None:
    with patch.object(plan, "divide", wraps=plan.divide) as sharded:
        inspect.text(two_nodes())
    assert sharded.call_count == 1


def test_shows_the_digits_example_with_the_classes_of_its_script(inspect: Inspect) -> None:
    entries = inspect.entries(DIGITS / "config.yaml", SCRIPTED)
    assert all(list(entry) == KEYS for entry in entries)
    assert [(entry["rank"], entry["modality"], entry["pp"]) for entry in entries] == [
        (0, "vision", 0),
        (1, "audio", 0),
        (2, "language", 0),
        (3, "language", 1),
    ]
    llama = "model.language_model.model.layers"
    assert [entry["layers"] for entry in entries[1:]] == [
        ["model.audio_tower.layers.0", "model.audio_tower.layers.1"],
        [f"{llama}.0", f"{llama}.1"],
        [f"{llama}.2", f"{llama}.3"],
    ]
    whole = sys.modules["model"].Digits()
    assert sum(entry["parameters"] for entry in entries) == sum(p.numel() for p in whole.parameters())
    assert entries[0]["parameters"] == elements(whole, "model.vision")


def test_a_script_beside_the_configuration_is_named_but_not_run(inspect: Inspect) -> None:
    message = inspect.refusal(DIGITS / "config.yaml")
    assert f"Add --script {DIGITS / 'train.py'}" in message
    assert "model" not in sys.modules
    found = inspect.text(DIGITS / "config.yaml", "--script", str(DIGITS / "train.py"))
    assert "cut at model.get_image_features, sends to language.0" in found
    assert "1f1b, microbatches: 4 per replica" in found


def test_shows_two_nodes_of_accelerators_that_are_not_here(inspect: Inspect) -> None:
    entries = inspect.entries(two_nodes())
    modalities = {"vision": Modality(module="encoder"), "language": Modality(pp_size=3)}
    layout = Layout.build(modalities, world_size=8, loss_modality="language", ranks_per_node=4)
    assert [tuple(entry[key] for key in KEYS[:7]) for entry in entries] == sorted(layout.places)
    assert [entry["node"] for entry in entries] == [0] * 4 + [1] * 4
    assert entries[2]["layers"] == ["decoder.layers.0", "decoder.layers.1"]
    module = FlatModule()
    counts = {(entry["modality"], entry["pp"]): entry["parameters"] for entry in entries}
    assert counts["vision", 0] == elements(module, "encoder.")
    assert counts["language", 0] == elements(module, "decoder.embedding", "decoder.layers.0", "decoder.layers.1")
    assert counts["language", 2] == elements(module, "decoder.layers.3", "decoder.norm", "decoder.head")


def test_shows_ranks_where_a_placement_puts_them(inspect: Inspect) -> None:
    entries = inspect.entries(two_nodes(placement=[6, 7, 0, 1, 2, 3, 4, 5]))
    assert [entry["rank"] for entry in entries if entry["modality"] == "vision"] == [6, 7]


def test_a_colocated_rank_has_an_entry_for_each_modality(inspect: Inspect) -> None:
    made = config(2, modalities={"vision": {**VISION, "colocate_with": "language"}, "language": {}})
    assert [(entry["rank"], entry["modality"], entry["dp"]) for entry in inspect.entries(made)] == [
        (0, "vision", 0),
        (0, "language", 0),
        (1, "vision", 1),
        (1, "language", 1),
    ]
    assert "runs inside vision.0+language.0, sends nothing" in inspect.text(made)


def test_tied_parameters_are_counted_wherever_they_are_held(inspect: Inspect) -> None:
    first, last = inspect.entries(tied())
    assert (first["parameters"], last["parameters"]) == (80 + 2 * 72, 80 + 72)
    text = inspect.text(tied())
    assert "embedding.weight = head.weight in language.0, language.1, kept equal" in text
    assert "296 parameters" in text


def test_frozen_parameters_are_not_shown_as_trainable(inspect: Inspect) -> None:
    rows = [line.split() for line in inspect.text(tied(freeze=True)).splitlines()]
    assert ["language.0", "0", "224", "152", "language.1"] in rows


def test_the_module_has_no_memory_even_where_its_constructor_needs_values(inspect: Inspect) -> None:
    without = inspect.entries(tied())
    assert sys.modules["tied_module"].SEEN == ["meta"]
    assert inspect.entries(tied(values=True)) == without
    assert sys.modules["tied_module"].SEEN == ["meta", "meta"]
    assert not torch.distributed.is_initialized()


def test_a_constructor_that_fails_is_refused_with_its_settings_and_the_users_line(inspect: Inspect) -> None:
    refused = inspect.refusal(tied(width=-3))
    assert "model: got {" in refused
    assert "negative dimension" in refused
    assert "tied_module.py, line " in refused


@pytest.mark.parametrize(("precision", "size"), [("32-true", 608), ("bf16-true", 304), ("64-true", 1216)])
def test_bytes_are_those_of_the_trainers_precision(inspect: Inspect, precision: str, size: int) -> None:
    made = tied()
    made["trainer"]["precision"] = precision
    last = inspect.text(made).partition("\nrank  parameters")[0].rstrip().splitlines()[-1]
    assert last.split()[-2:] == ([f"{size}.0", "B"] if size < 1024 else [f"{size / 1024:.1f}", "KiB"])


def test_keeps_the_links_of_the_users_own_command(inspect: Inspect) -> None:
    script = inspect.folder / "train.py"
    script.write_text(SCRIPT)
    made = tied() | {"model": {"freeze": True}, "data": {"width": 16}}
    first, last = inspect.entries(made, f"--script={script}")
    assert (first["parameters"], last["parameters"]) == (160 + 2 * 272, 160 + 272)
    # what the script catches does not let it go on
    assert "trainer.devices: got 'auto'" in inspect.refusal(made, f"--script={script}", "--trainer.devices=auto")


def test_options_and_later_files_override_the_configuration(inspect: Inspect) -> None:
    later = inspect.write({"trainer": {"devices": 8}}, "later.yaml")
    assert len(inspect.entries(two_nodes(), str(later))) == 16
    options = ("--trainer.num_nodes", "1", "--trainer.strategy.modalities={vision: {module: encoder}, language: {}}")
    assert len(inspect.entries(two_nodes(), *options)) == 4
    assert "gpipe, microbatches: 7" in inspect.text(
        two_nodes(), "--trainer.strategy.schedule=gpipe", "--trainer.strategy.num_microbatches=7"
    )


@pytest.mark.parametrize(("devices", "ranks"), [("8", 8), ([0, 1, 2, 3], 4), ("4, 5, 6, 7,", 4)])
def test_devices_are_counted_in_every_form_that_lightning_takes(inspect: Inspect, devices: Any, ranks: int) -> None:
    made = config(devices, modalities={"vision": VISION, "language": {"pp_size": 3}})
    assert len(inspect.entries(made)) == ranks


@pytest.mark.parametrize("devices", ["auto", -1])
def test_refuses_devices_that_only_the_training_machine_can_count(inspect: Inspect, devices: Any) -> None:
    made = config(devices, modalities={"vision": VISION, "language": {}})
    assert f"trainer.devices: got {devices!r}" in inspect.refusal(made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--trainer.strategy.scheduel=x"],
            ["scheduel: got 'x'. The strategy has no such field. Did you mean 'schedule'?"],
        ),
        (
            ["--trainer.strategy.modalities.vision.tp=2"],
            ["modalities.vision.tp: got 2. There is no such field. Did you mean 'tp_size'?"],
        ),
        (["--trainer.strategy.schedule=2f2b"], ["schedule: got '2f2b'", "gpipe, 1f1b"]),
        (["--trainer.strategy.modalities.vision.dp_size=0"], ["modalities.vision.dp_size: got 0", "at least 1"]),
        (["--trainer.strategy.modalities.vision.module=encodr"], ["no such module", "'encoder'"]),
        (["--trainer.strategy.modalities.language.pp_size=7"], ["language.pp_size: got 7", "at most 4"]),
        (["--trainer.num_nodes=1", "--trainer.devices=5"], ["devices=", "got 5", "4 or 8"]),
        (["--trainer.strategy=ddp"], ["trainer.strategy: got 'ddp'", "lightning_mm5d.MultimodalStrategy"]),
        (["--trainer.strategy={class_path: DDPStrategy}"], ["trainer.strategy: got 'DDPStrategy'"]),
        (["--model.class_path=nothing.Here"], ["model", "No module named 'nothing'"]),
        (["--model.width=2"], ["model", "Option 'width' is not accepted"]),
        (["--trainer.nonsense=2"], ["--trainer.nonsense=2"]),
        (["--script=nowhere.py"], ["--script: got 'nowhere.py'", "no such file"]),
    ],
)
def test_refuses_in_one_line_what_cannot_work(inspect: Inspect, options: list[str], words: list[str]) -> None:
    message = inspect.refusal(two_nodes(), *options)
    assert [word for word in words if word not in message] == []
    assert "ungrouped" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("trainer: [", "It is no YAML"),
        ("- a list", "maps keys"),
        ("trainer: !!python/object/apply:os.getcwd []", "It is no YAML"),
        ("trainer: {devices: 4}\nmodel: {width: 8}", "Name that script with --script"),
    ],
)
def test_refuses_files_that_are_no_configuration(inspect: Inspect, content: str, words: str) -> None:
    assert words in inspect.refusal(content)


def test_refuses_an_unknown_key_of_the_file(inspect: Inspect) -> None:
    made = two_nodes()
    made["trainer"]["strategy"]["init_args"]["num_microbatch"] = 4
    assert "num_microbatch" in inspect.refusal(made)
    assert "Did you mean 'batching.num_microbatches'?" in inspect.refusal(made)
    assert "traner" in inspect.refusal(two_nodes() | {"traner": {"devices": 1}})


def test_refuses_a_file_that_is_not_there(inspect: Inspect) -> None:
    assert "cannot be read: No such file" in inspect.refusal(inspect.folder / "nowhere.yaml")


def test_refuses_to_choose_between_scripts_and_scripts_without_a_command(inspect: Inspect) -> None:
    made = tied() | {"model": {"width": 8}}
    for name in ("one.py", "two.py"):
        (inspect.folder / name).write_text(SCRIPT)
    message = inspect.refusal(made)
    assert "one.py" in message
    assert "two.py" in message
    (inspect.folder / "one.py").write_text("print")
    assert "makes no LightningCLI" in inspect.refusal(made, f"--script={inspect.folder / 'one.py'}")


def test_refuses_batches_that_are_too_small_for_the_microbatches(inspect: Inspect) -> None:
    made = tied() | {"data": {"class_path": "tied_module.Data", "init_args": {"batch_size": 3}}}
    assert inspect.entries(made, "--trainer.strategy.num_microbatches=3")
    message = inspect.refusal(made, "--trainer.strategy.num_microbatches=4")
    assert "num_microbatches: got 4" in message


def test_warns_of_groups_that_cross_nodes() -> None:
    layout = Layout.build({"language": Modality(tp_size=4)}, world_size=8, loss_modality="language", ranks_per_node=3)
    assert warnings(layout) == [
        f"ranks {ranks}, a tensor parallel group of language, are on the nodes {nodes}: "
        "their traffic crosses the slower link"
        for ranks, nodes in (("0-3", "0-1"), ("4-7", "1-2"))
    ]
    whole = Layout.build({"language": Modality(tp_size=4)}, world_size=8, loss_modality="language", ranks_per_node=4)
    assert warnings(whole) == []


def test_inspect_wants_a_model(inspect: Inspect) -> None:
    sizes = {"modalities": {"language": {"pp_size": 2}}}
    assert "Without model.class_path" in inspect.refusal(sizes)


def test_main_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "--help"])
    assert stopped.value.code == 0
    assert "--trainer.devices=8" in capsys.readouterr().out
