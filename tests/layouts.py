"""Layouts that several test files build."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout


def build(world_size: int, /, per_node: int | None = None, **modalities: Modality) -> Layout:
    return Layout.build(modalities, world_size=world_size, loss_modality="language", ranks_per_node=per_node)


def refusal(world_size: int, /, **modalities: Modality) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(world_size, **modalities)
    return caught.value


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def random_modalities(rng: random.Random) -> dict[str, Modality]:
    """One owner or more, some with replicas left unset, and sometimes colocated modalities; may be impossible."""

    def sizes() -> dict[str, int]:
        return {"tp_size": rng.choice([1, 2, 3, 4]), "cp_size": rng.choice([1, 2]), "pp_size": rng.choice([1, 2, 3])}

    owners = [f"owner{index}" for index in range(rng.randrange(1, 4))]
    made = {name: Modality(dp_size=rng.choice([None, None, 1, 2, 4]), **sizes()) for name in owners}
    if rng.random() < 0.5:
        made["colocated"] = Modality(colocate_with=rng.choice(owners), **sizes())
    if rng.random() < 0.5:
        owner = rng.choice(owners)
        shared = f"{owner}.{rng.randrange(made[owner].stages)}"
        made["neighbour"] = replace(made[owner], pp_size=rng.choice([1, 2, 3]), colocate_with=shared)
    names = rng.sample(list(made), len(made))
    loss_modality = rng.choice(names)
    return {
        "language" if name == loss_modality else name: replace(
            made[name], colocate_with=(made[name].colocate_with or "").replace(loss_modality, "language") or None
        )
        for name in names
    }
