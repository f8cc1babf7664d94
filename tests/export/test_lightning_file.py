"""Full checkpoints written tensor by tensor are those of `torch.save`, and plain Lightning goes on from them."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_mm5d.checkpoint.full_file import load_full
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.export.lightning_file import PlainTensors, open_plain, write_lightning
from lightning_mm5d.sharded.remote_value import tensors_of
from lightning_mm5d.tools.cli.main import main


def content() -> dict[str, Any]:
    weight = torch.randn(300, 200)
    state = OrderedDict(weight=weight, tied=weight, half=torch.randn(5, dtype=torch.bfloat16), empty=torch.empty(0, 3))
    state |= {"number": torch.tensor(3.0), "turned": torch.randn(4, 6).t(), "bits": torch.ones(3, dtype=torch.bool)}
    state |= {"small": torch.randn(3).to(torch.float8_e4m3fn), "part": torch.arange(10)[2:5]}
    states = {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(300, 200)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0], "betas": (0.9, 0.95)}]}
    more = AttributeDict(text="a", tensor=torch.arange(3))
    return {"state_dict": state, "optimizer_states": [optimizer], "epoch": 1, "hyper_parameters": more}


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    path, expected = tmp_path / "one.ckpt", content()
    write_lightning(path, expected)
    for found in (load_full(path), *(torch.load(path, mmap=mmap, weights_only=False) for mmap in (False, True))):
        assert (found["epoch"], found["hyper_parameters"]["text"]) == (1, "a")
        assert found["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
        assert found["state_dict"]["tied"] is found["state_dict"]["weight"]
        for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
    assert [each.name for each in tmp_path.iterdir()] == ["one.ckpt"]


def test_tensors_are_read_from_their_places_in_a_file(tmp_path: Path) -> None:
    expected = content()
    torch.save(expected, tmp_path / "one.ckpt")
    opened = open_plain(tmp_path / "one.ckpt")
    source = PlainTensors(tmp_path / "one.ckpt", opened, opened["state_dict"])
    for name, value in expected["state_dict"].items():
        found = source.read(name)
        assert not value.numel() or found.data_ptr() != opened["state_dict"][name].data_ptr()
        assert torch.equal(found.float(), value.float()), name
    assert torch.equal(source.read("weight", [(3, 8), (0, 7)]), expected["state_dict"]["weight"][3:8, :7])


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content(), tmp_path / "one.ckpt")
    command = ["export", str(tmp_path / "one.ckpt"), str(tmp_path / "new" / "two.ckpt"), "--format", "lightning"]
    assert main(command) == 0
    assert "two.ckpt" in capsys.readouterr().out
    assert load_full(tmp_path / "new" / "two.ckpt")["epoch"] == 1
    (tmp_path / "new" / "ordinary").touch()
    assert (tmp_path / "new" / "two.ckpt").stat().st_mode == (tmp_path / "new" / "ordinary").stat().st_mode
    assert main(command) == 2
    assert main([*command[:2], str(tmp_path / "three"), *command[3:], "--dtype=float16"]) == 2
    assert "holds the whole checkpoint as it is" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new", "one.ckpt"]


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(3)


def test_tensors_inside_of_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensors inside of objects"):
        write_lightning(tmp_path / "one.ckpt", content() | {"callback": Holder()})
    assert list(tmp_path.iterdir()) == []
