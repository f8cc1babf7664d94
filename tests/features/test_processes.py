"""Several runs in the same processes, and what the launching process has after ranks that it started.

Spawned ranks are in the default run of tests/launching, and here `exhaustive`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from features.toys import PIPE, TWINS, Run, Toy, assert_same, figures, outcomes, weights
from sweeps import swept


def again_and_again(run: Run) -> Any:
    """One trainer fits, tests, and fits on; another goes on with the same module."""
    module = Toy()
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module, run.training(), run.loader(8))
    first = weights(module)
    tested = trainer.validate(module, run.loader(8), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.training(), run.loader(8))
    second = weights(module)
    other = run.trainer(max_epochs=1)
    other.fit(module, run.training(), run.loader(8))
    predicted = other.predict(module, run.loader(8))
    return {"weights": [first, second, weights(module)], "tested": tested, "predicted": predicted}


def in_another_layout(run: Run) -> Any:
    """A module goes from stages to replicas, in the same processes."""
    module = Toy()
    for layout in (PIPE, TWINS, PIPE):
        here = Run(layout, run.options) if run.layout is not None else run
        trainer = here.trainer()
        trainer.fit(module, here.training(), here.loader(8))
    return {"weights": weights(module), "metrics": figures(trainer)}


@pytest.fixture(scope="module")
def found() -> Any:
    return outcomes(PIPE, again_and_again, in_another_layout)


def test_a_module_is_fitted_tested_and_fitted_again(found: Any) -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    one, ranks = found["again_and_again"].one, found["again_and_again"].ranks
    assert_same(ranks[0]["weights"], one["weights"])
    for rank in ranks:
        assert_same(rank["tested"], one["tested"])
        assert_same(rank["predicted"], one["predicted"])


def test_a_module_goes_on_in_another_layout(found: Any) -> None:
    one, ranks = found["in_another_layout"].one, found["in_another_layout"].ranks
    assert_same(ranks[0]["weights"], one["weights"])
    for rank in ranks:
        assert_same(rank["metrics"], one["metrics"])


@pytest.mark.parametrize("start_method", swept(["spawn", "fork"], "spawn"))
def test_the_launching_process_gets_the_weights_of_all_stages(start_method: str) -> None:
    """vision: rank 0; language: rank 1."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(Path(__file__).with_name("spawned.py")), start_method]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert "the weights of all stages came back" in done.stdout, done.stdout + done.stderr
