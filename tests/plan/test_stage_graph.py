"""What the graph of stages says about how long each takes, and whether it has a backward at all."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from cuts import HEAD, LAYER, by_offsets, llama, llava, train_only
from lightning_mm5d.config.modality import Modality, loss_modality_of
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Graph


def names_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)


def plan(module: nn.Module, world: int, **modalities: Modality) -> Plan:
    layout = Layout.build(modalities, world_size=world, loss_modality=loss_modality_of(modalities))
    counts = {name: p.numel() for name, p in module.named_parameters(remove_duplicate=False)}
    return Plan(layout, partition(module, modalities), modalities, counts)


def graph(module: nn.Module, world: int, **modalities: Modality) -> Graph:
    made = plan(module, world, **modalities)
    return made.graphs.graph(range(made.layout.num_replicas), 2, names_of(module))


def costs(found: Graph) -> dict[str, tuple[float, float, float | None]]:
    return {node.stage: (node.forward_cost, node.backward_cost, node.weight_cost) for node in found.nodes}


def test_the_graph_takes_its_durations_from_the_units() -> None:
    found = costs(graph(llama(), 2, language=Modality(pp_size=2)))
    first, last = 2 * LAYER, 2 * LAYER + 32 + HEAD
    assert found == {"language.0": (first, 2 * first, 2 * first), "language.1": (last, 2 * last, last)}


def test_only_the_first_stage_of_all_runs_no_backward_where_only_the_last_is_trained() -> None:
    module = llama()
    train_only(module, "layers.3.", "lm_head")
    found = costs(graph(module, 2, language=by_offsets(0, 0)))
    assert found["language.0"] == (2 * LAYER, 0.0, 0.0)
    forward, backward, weight = found["language.1"]
    assert backward == weight == 2 * (forward - LAYER) - 32  # of the last norm input gradients only


def test_nothing_trainable_means_no_backward_anywhere() -> None:
    module = llava()
    train_only(module)
    found = graph(module, 3, vision=Modality(), language=Modality(pp_size=2))
    assert not any(found.has_backward(stage) for stage in found.stages)
    assert {node.weight_cost for node in found.nodes} == {0.0}


def test_a_trained_embedding_alone_has_a_backward_though_it_is_free() -> None:
    class Late(L.LightningModule):
        """Adds a trained table to what frozen layers computed."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
            self.places = nn.Embedding(4, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return (batch + self.places(torch.arange(4))).sum()

    module = Late()
    train_only(module, "places")
    found = graph(module, 2, language=Modality(pp_size=2))
    assert [found.has_backward(stage) for stage in found.stages] == [False, True]


def test_an_encoder_that_shares_a_stage_with_the_language_model_runs_before_it() -> None:
    module = llava()
    train_only(module, "multi_modal_projector")
    shared = {"language": Modality(), "vision": Modality(colocate_with="language")}
    apart = {"language": Modality(), "vision": Modality()}
    ((forward, backward, weight),) = costs(graph(module, 1, **shared)).values()
    alone = costs(graph(module, 2, **apart))
    assert forward == alone["vision.0"][0] + alone["language.0"][0]
    assert backward == weight == alone["vision.0"][1] + alone["language.0"][1]


def test_a_duration_that_was_given_scales_the_estimate() -> None:
    estimated = costs(graph(llama(), 2, language=Modality(pp_size=2, pipeline={"pp_chunks": 2})))
    assert costs(graph(llama(), 2, language=Modality(pp_size=2, pipeline={"pp_chunks": 2}, cost=6.0))) == {
        stage: pytest.approx((3.0, 3.0 * backward / forward, 3.0 * weight / forward))
        for stage, (forward, backward, weight) in estimated.items()
    }
    by_rank = costs(graph(llama(), 2, language=Modality(pp_size=2, pipeline={"pp_chunks": 2}, cost=[2.0, 4.0])))
    assert [forward for forward, _, _ in by_rank.values()] == pytest.approx([1.0, 2.0, 1.0, 2.0])
