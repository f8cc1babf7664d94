"""The examples of a user's own module, of Hugging Face and of a notebook run as their pages say.

vision: rank 0; language: rank 1; BERT: ranks 0-1, tensor parallel. Hugging Face without adapters is `exhaustive`;
tests/export has its files.
"""

import importlib
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from peft import PeftModel
from transformers import LlavaForConditionalGeneration

from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition import partition

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds for one command


def run(*arguments: str) -> str:
    """Standard output of a command at the root, one thread per process; its error where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_here(script: str, *arguments: str) -> str:
    """The same of a script that starts no other process, in this one."""
    path = ROOT / script
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), redirect_stdout(StringIO()) as output:
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        before = set(sys.modules)
        runpy.run_path(str(path), run_name="__main__")
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == path.parent:
                del sys.modules[name]
    return output.getvalue()


def loss_of(output: str) -> float:
    """The loss in a line such as "ranks 2: loss 1.25 after 20 steps"."""
    return float(output.split("loss ")[1].split()[0].rstrip(";"))


def test_the_quickstart_gives_one_loss_on_one_rank_and_on_two(tmp_path: Path) -> None:
    script = ["examples/quickstart/train.py", "--steps", "4"]
    one = run_here(*script)
    two = run(*script, "--devices", "2", "--timeline", str(tmp_path / "two.png"))
    assert "ranks 2:" in two
    assert loss_of(two) == pytest.approx(loss_of(one), rel=1e-5)
    assert (tmp_path / "two.png").stat().st_size > 10_000


def test_readme_and_quickstart_show_the_layouts_that_the_example_runs() -> None:
    script = (ROOT / "examples/quickstart/train.py").read_text()
    layouts = script[script.index("LAYOUTS = {") : script.index("}\n\n\ndef main")]
    assert layouts in (ROOT / "docs/quickstart.md").read_text()
    two_ranks = layouts.splitlines()[1].split(": ", 1)[1].rstrip(",")
    assert two_ranks in (ROOT / "README.md").read_text()


def test_the_quickstart_quotes_the_error_of_a_modality_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/quickstart"))
    monkeypatch.delitem(sys.modules, "module", raising=False)
    captioner = importlib.import_module("module").Captioner()
    monkeypatch.delitem(sys.modules, "module")
    with pytest.raises(ConfigError) as caught:
        partition(captioner, {"vision": Modality(), "language": Modality()})
    assert f"`{caught.value}`" in " ".join((ROOT / "docs/quickstart.md").read_text().split())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", [pytest.param([], marks=pytest.mark.exhaustive), ["--lora"]])
def test_a_model_trained_on_two_ranks_is_saved_as_one_process_saves_it(tmp_path: Path, kind: list[str]) -> None:
    two = run("examples/hugging_face/train.py", str(tmp_path / "two"), *kind)
    one = run_here("examples/hugging_face/train.py", str(tmp_path / "one"), "--devices", "1", *kind)
    assert loss_of(two) == pytest.approx(loss_of(one), rel=1e-5)
    weights = []
    for name in ("one", "two"):
        model = LlavaForConditionalGeneration.from_pretrained(tmp_path / name / ("base" if kind else "tuned"))
        if kind:
            model = PeftModel.from_pretrained(model, tmp_path / name / "tuned")
        weights.append(model.state_dict())
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "one" / "base").state_dict()
    trained = [name for name in weights[0] if name not in base or not torch.equal(weights[0][name], base[name])]
    assert len(trained) > 10
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute()
    printed = [output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any("two ranks: loss" in text for text in printed)


def test_a_mixture_of_experts_learns_on_two_ranks_that_share_its_experts() -> None:
    fork = "--trainer.strategy.init_args.start_method=fork"  # without imports in each rank
    output = run("examples/mixture/train.py", "fit", "--config", "examples/mixture/config.yaml", fork)
    assert "ranks 2:" in output
    assert loss_of(output) < 3.0  # log(32) = 3.47 at the start


def test_clips_of_which_sixteen_frames_are_encoded_at_a_time_are_told_apart(tmp_path: Path) -> None:
    output = run("examples/video/train.py", str(tmp_path))
    assert "ranks 2:" in output
    assert float(output.split("ranks 2: ")[1].split("%")[0]) > 90


def test_bert_learns_on_two_ranks_to_tell_praise_from_blame() -> None:
    fork = "--trainer.strategy.init_args.start_method=fork"  # without imports in each rank
    output = run("examples/bert/train.py", "fit", "--config", "examples/bert/config.yaml", fork)
    assert "ranks 2:" in output
    assert float(output.split("F1 ")[1].split()[0]) >= 0.9  # 0.5 by chance


def test_a_talker_on_a_rank_of_its_own_says_digits() -> None:
    output = run("examples/talker/train.py")
    assert "ranks 2:" in output
    assert float(output.split("ranks 2: ")[1].split("%")[0]) > 90  # 10 by chance
