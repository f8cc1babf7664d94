"""A module that resizes its embeddings in `on_fit_start` is told where to do it; other uses of the hook run."""

from __future__ import annotations

import torch
from torch import nn

from features.toys import PIPE, WIDTH, Run, Toy, together


class Resizing(Toy):
    def on_fit_start(self) -> None:
        old, new = self.decoder.embedding, nn.Embedding(20, WIDTH).double()
        with torch.no_grad():
            new.weight[:16] = old.weight
        self.decoder.embedding = new


class Adding(Toy):
    def on_fit_start(self) -> None:
        self.decoder.adapter = nn.Linear(WIDTH, WIDTH)


class Noting(Toy):
    def on_fit_start(self) -> None:
        self.noted = True


def attempts(run: Run) -> list[str]:
    found = []
    for module in (Noting(), Adding()):
        try:
            run.trainer().fit(module, run.training(8))
            found.append(f"noted {module.noted}")
        except Exception as error:
            found.append(str(error))
            break
    return found


def test_parameters_that_change_at_the_start_of_fit_are_refused_with_where_to_change_them() -> None:
    for noted, adding in together(PIPE, attempts):
        assert noted == "noted True"
        assert "configure_model" in adding


def test_resized_embeddings_are_refused_with_where_to_resize_them() -> None:
    def attempt(run: Run) -> str:
        try:
            run.trainer().fit(Resizing(), run.training(8))
        except Exception as error:
            return str(error)
        return ""

    assert all("configure_model" in text for text in together(PIPE, attempt))
