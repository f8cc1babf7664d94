"""Calls of an encoder that run in chunks of items, each again in its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from features.toys import (
    LANGUAGE,
    PAIR,
    PIXELS,
    SHARED,
    TWINS,
    VISION,
    WIDTH,
    Layout,
    Run,
    Toy,
    alone,
    assert_same,
    together,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.features.recomputation.chunks import Chunks
from lightning_mm5d.sharded.torch_internals import in_backward
from parity.harness import fit as fit_zoo
from parity.harness import strategy
from ranks import run_ranks
from zoo import CASES

CUT = Layout({"vision": Modality(pp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""vision: ranks 0-1 as stages; language: rank 2"""
ITEMS = {"activation_checkpointing": {"items": 2}}
SEEN: list[Any] = []


class Watched(Toy):
    """Notes how many images the encoder's own layers compute at a time."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.encoder.requires_grad_(not frozen)
        for name, layer in enumerate(self.encoder.layers):
            layer.up.register_forward_pre_hook(partial(self._note, name))

    def _note(self, name: int, _: Any, args: Any) -> None:
        SEEN.append((name, len(args[0]), in_backward()))


def with_items(run: Run, **fields: Any) -> Run:
    assert run.layout is not None
    modalities = run.layout.modalities
    vision = with_fields(modalities["vision"], **ITEMS, **fields)
    return replace(run, layout=replace(run.layout, modalities={**modalities, "vision": vision}))


def fit(run: Run, made: Callable[[], Any] = Watched) -> tuple[dict[str, Tensor], Counter[Any]]:
    torch.manual_seed(5)
    module = made()
    SEEN.clear()
    run.trainer(max_epochs=1).fit(module, run.training())
    return weights(module), Counter(SEEN)


def chunked(run: Run) -> Any:
    return fit(with_items(run))


@pytest.mark.parametrize("layout", [PAIR, SHARED, TWINS], ids=["pair", "replicas", "twins"])
def test_weights_are_those_of_one_process_and_no_layer_sees_more_than_a_chunk(layout: Layout) -> None:
    """ranks as the layout says; each step has two microbatches of four samples, or of two"""
    expected, _ = alone(fit)
    found = together(layout, chunked)
    assert_same(found[0][0], expected)
    counts = sum((counts for _, counts in found), Counter[Any]())
    assert {size for _, size, _ in counts} == {1, 2}, "one is that of the proof"
    assert {key: count for key, count in counts.items() if key[2]} == {(0, 2, True): 8, (1, 2, True): 8}


def test_layers_of_an_encoder_over_stages_run_in_chunks_by_themselves() -> None:
    """vision: ranks 0-1 as stages; language: rank 2"""
    expected, _ = alone(fit)
    found = together(CUT, chunked)
    assert_same(found[0][0], expected)
    for rank in (0, 1):
        assert found[rank][1][rank, 2, True] == 8


def frozen(run: Run) -> Any:
    return fit(with_items(run) if run.layout is not None else run, partial(Watched, frozen=True))


def test_chunks_of_a_frozen_encoder_run_once() -> None:
    """vision: rank 0; language: rank 1"""
    expected, _ = alone(frozen)
    found = together(PAIR, frozen)
    assert_same(found[0][0], expected)
    assert found[0][1][0, 2, False] >= 8
    assert not any(is_again for _, _, is_again in found[0][1])


class Noisy(Toy):
    """Notes the random numbers that its encoder draws."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.encoder.layers:
            layer.dropout = Noise()


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        drawn = torch.rand_like(hidden)
        SEEN.append((in_backward(), tuple(drawn.flatten().tolist())))
        return hidden * drawn


def noisy(run: Run) -> Any:
    return fit(with_items(run), Noisy)[1]


@pytest.mark.parametrize("layout", [PAIR, SHARED, CUT], ids=["pair", "replicas", "stages"])
def test_a_chunk_that_runs_again_draws_the_same_random_numbers(layout: Layout) -> None:
    """ranks as the layout says"""
    for counts in together(layout, noisy):
        again = {drawn for is_again, drawn in counts if is_again}
        before = {drawn for is_again, drawn in counts if not is_again}
        assert again <= before
        assert len(again) == sum(count for (is_again, _), count in counts.items() if is_again), "each draws its own"
    assert again or layout is not SHARED


def sharing(run: Run) -> Any:
    kinds = [{"zero_stage": stage} for stage in (1, 2, 3)]
    return [fit(with_items(run, **kind))[0] for kind in (*kinds, {"zero_stage": 3, "reshard_after_forward": True})]


def test_replicas_that_share_parameters_compute_chunks_with_them() -> None:
    """two replicas of everything: ranks 0-1"""
    expected, _ = alone(fit)
    for got in together(SHARED, sharing)[0]:
        assert_same(got, expected)


def zoo(rank: int, name: str, fields: Any, world: int) -> Any:
    case = CASES[name]
    language = case.modalities[-1]
    chosen = {"vision": Modality(memory=ITEMS, **fields), language: Modality()}
    return fit_zoo(case.build(), [case.batch(4, seed) for seed in (1, 2)], strategy(chosen), world).gradients


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2_vl", "qwen3_vl"])
def test_images_and_packed_patches_of_known_models_run_in_chunks(name: str) -> None:
    """vision and language: rank 0"""
    expected = fit_zoo(CASES[name].build(), [CASES[name].batch(4, seed) for seed in (1, 2)]).gradients
    assert_same(run_ranks(1, zoo, name, {"colocate_with": "language"}, 1)[0], expected)


@pytest.mark.usefixtures("float64")
def test_tensor_parallel_ranks_compute_the_same_chunks() -> None:
    """vision: ranks 0-1; language: rank 2"""
    expected = fit_zoo(CASES["llava"].build(), [CASES["llava"].batch(4, seed) for seed in (1, 2)]).gradients
    for got, wanted in zip(run_ranks(3, zoo, "llava", {"tp_size": 2}, 3)[0], expected, strict=True):
        assert_same({name: got[name] for name in got}, {name: wanted[name] for name in got})


# --- what cannot be computed apart ---


class Encoder(nn.Module):
    """Images [N, PIXELS] -> [N, WIDTH], with what a test adds."""

    def __init__(self, change: Callable[[Any, Tensor], Any], *parts: nn.Module) -> None:
        super().__init__()
        self.linear, self.change, self.parts = nn.Linear(PIXELS, WIDTH), change, nn.ModuleList(parts)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, images: Tensor) -> Any:
        hidden = self.linear(images)
        for part in self.parts:
            hidden = part(hidden)
        return self.change(self, hidden)


def called(module: nn.Module, images: Tensor, size: int = 2) -> Any:
    runtime: Any = SimpleNamespace(active=None, root=nn.ModuleDict({"encoder": module}))
    chunks = Chunks(runtime, "memory", size, "encoder", {"encoder": module}, torch.device("cpu"), "Use 'full'")
    return chunks(module, module, (images,), {})


def wrote(module: Any, hidden: Tensor) -> Tensor:
    module.last = hidden.detach()
    return hidden


def padded(*lengths: int) -> Callable[[Any, Tensor], Tensor]:
    """As long as the longest item of each call: three for the proof, then one for each chunk."""
    left = iter(lengths)
    return lambda _, hidden: hidden[:, None].expand(-1, next(left), -1)


def counted(module: Any, hidden: Tensor) -> Tensor:
    module.count += 1
    return hidden


def measured(module: Any, hidden: Tensor) -> Tensor:
    module.parts[0].update(hidden)
    return hidden


class Centered(nn.Module):
    """A statistic of the batch in training mode alone, beside a dropout."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        return nn.functional.dropout(hidden - hidden.mean(dim=0), 0.5)


class Metric(MeanMetric):
    """One that lets features through."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Encoder(lambda _, hidden: hidden, nn.BatchNorm1d(WIDTH)), "parts.0 (BatchNorm1d) in training mode"),
        (lambda: Encoder(lambda _, hidden: hidden - hidden.mean(dim=0)), "depend on each other"),
        (lambda: Encoder(lambda _, hidden: hidden / len(hidden)), "depend on each other"),
        (lambda: Encoder(lambda _, hidden: hidden.t()), "not along dim 0"),
        (lambda: Encoder(lambda _, hidden: hidden.sum()), "one number for all items"),
        (lambda: Encoder(lambda _, hidden: hidden[:, None].expand(-1, len(hidden), -1)), "not along dim 0"),
        (lambda: Encoder(padded(3, 3, 3, 3, 4, 3)), "unlike shapes"),
        (lambda: Encoder(lambda _, hidden: hidden.unflatten(0, (2, -1))), "without the others"),
        (lambda: Encoder(lambda _, hidden: hidden, Centered()), "in training mode the result of one item depends"),
        (lambda: Encoder(wrote), "it writes encoder.last"),
        (lambda: Encoder(counted), "it writes encoder.count"),
        (lambda: Encoder(measured, Metric()), "it writes encoder.parts.0"),
    ],
)
def test_what_is_no_matter_of_single_items_is_refused(module: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        called(module(), torch.randn(5, PIXELS))
    assert why in str(caught.value)


def test_items_of_any_number_join_with_lists_and_fields_in_their_places() -> None:
    def several(_: Any, hidden: Tensor) -> Any:
        return {"rows": hidden.repeat_interleave(3, dim=0), "each": list(hidden.split(1)), "both": (hidden, -hidden)}

    module, images = Encoder(several), torch.randn(5, PIXELS)
    for size in (1, 2, 3, 5, 7):
        assert_same(called(module, images, size), module(images), 1e-6)


def test_a_dropout_leaves_the_generators_where_chunks_draw() -> None:
    module, images = Encoder(lambda _, hidden: hidden, nn.Dropout(0.5)), torch.randn(4, PIXELS)
    torch.manual_seed(1)
    found = called(module, images)
    torch.manual_seed(1)
    assert torch.equal(found, torch.cat([module(images[:2]), module(images[2:])]))
    assert all(part.training for part in module.modules())
