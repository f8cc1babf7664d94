"""Every family of experts trains on ranks that share them as on one process.

language: ranks 0 to `world`, data parallel, of which `ep` in turn share the experts; encoders are on the same ranks.
"""

from __future__ import annotations

import pytest

from .expert_forms import FORMS
from .expert_parity import Shared, compare
from .families import FAMILIES
from .test_expert_families import ROUTER_LOSSES

# each form of experts, router and combination once
QUICK = ("gpt_oss", "deepseek_v3", "llama4_text", "dbrx", "ernie4_5_vl_moe", "handwritten_gated_experts")
LISTS = ("handwritten_expert_list",)
MANY = [name for name, case in FAMILIES.items() if case.count >= 4]
IMAGES = (0, 1, 2, 0, 1, 1)


pytestmark = pytest.mark.usefixtures("float64")


def images_of(name: str) -> tuple[int, ...]:
    """Unlike numbers of images, where their packing is known."""
    return IMAGES if len(FAMILIES[name].image_counts) > 1 and not name.startswith("handwritten") else (1,)


def all_of(names: tuple[str, ...] | list[str], ep: int, **options: object) -> list[Shared]:
    return [Shared(name=name, ep=ep, images=images_of(name), **options) for name in names]  # type: ignore[arg-type]


def test_two_ranks_share_experts_of_every_form() -> None:
    again = Shared(name="deepseek_v3", ep=2, microbatches=2, fields={"activation_checkpointing": "full"})
    compare(2, *all_of(QUICK, 2), again, Shared(name="handwritten_expert_list", ep=2, microbatches=2))


def test_three_ranks_share_five_experts_and_lists() -> None:
    compare(3, *all_of(("mixtral", "handwritten_expert_list"), 3))


def test_layers_of_ones_own_are_shared_by_rules_and_plans() -> None:
    compare(2, *(Shared(name=name, ep=2, microbatches=2) for name in FORMS))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_every_family_trains_as_on_one_process(world: int, ep: int) -> None:
    compare(world, *all_of(MANY, ep), limit=600)


@pytest.mark.exhaustive
def test_every_family_trains_in_microbatches() -> None:
    compare(2, *all_of(MANY, 2, microbatches=2, samples=3), limit=600)


@pytest.mark.exhaustive
def test_losses_of_routers_are_those_of_one_process() -> None:
    compare(2, *all_of(ROUTER_LOSSES, 2, microbatches=2, router_loss=True), limit=600)


@pytest.mark.exhaustive
def test_experts_of_every_form_are_computed_again() -> None:
    fields = {"activation_checkpointing": "full"}
    compare(2, *(Shared(name=name, ep=2, microbatches=2, fields=fields) for name in (*FORMS, *QUICK, *LISTS)))


@pytest.mark.exhaustive
def test_experts_of_every_form_are_in_stages_with_a_split_backward() -> None:
    fields, names = {"pp_size": 2}, (*FORMS, *LISTS, "llama4_text", "dbrx")
    compare(4, *(Shared(name=name, ep=2, microbatches=2, fields=fields, schedule="zero_bubble") for name in names))


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_hold_equal_experts_of_every_form() -> None:
    """language: ranks 0 to 3; ranks 0 and 2 share experts, and so do ranks 1 and 3."""
    fields, names = {"tp_size": 2}, (*FORMS, *LISTS)
    compare(4, *(Shared(name=name, ep=2, microbatches=2, fields=fields) for name in names))
