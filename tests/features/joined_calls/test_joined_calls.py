"""One call of an encoder for several microbatches gives the numbers of one process, and is one call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel

from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    SHARED,
    TWINS,
    VISION,
    WIDTH,
    Encoder,
    Layout,
    Run,
    Samples,
    Toy,
    alone,
    assert_same,
    together,
    weights,
)
from lightning_mm5d import ConfigError, Modality, MultimodalStrategy
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.sharded.torch_internals import in_backward
from lightning_mm5d.trainer.kept_values import KeptState

ONE = Layout({"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2)
"""vision and the first stage of language: rank 0; the second: rank 1"""
SHARDED = Layout({"vision": Modality(tp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""vision: ranks 0-1; language: rank 2"""
EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)
"""two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""


SEEN = Counter[Any]()


class Watched(Toy):
    """Notes how many images the encoder computes at a time, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.patch.register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, hidden: Tensor) -> None:
        if hidden.requires_grad and not in_backward():
            SEEN["forward", len(hidden)] += 1
            hidden.register_hook(lambda gradient: SEEN.update([("backward", len(gradient))]))


class Frozen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


class Adapted(Watched):
    """Its encoder is frozen but for an adapter beside its first layer, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        up = self.encoder.layers[0].up
        up.adapter = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2), torch.nn.Linear(2, 2 * WIDTH)).double()
        up.register_forward_hook(lambda layer, inputs, out: out + layer.adapter(*inputs))


class Dropping(Watched):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.encoder.layers:
            layer.dropout.p = 0.5


class Single(Toy):
    """Of float32, which autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch | {"images": batch["images"].float()})


class WithTable(Encoder):
    def forward(self, images: Tensor, table: Tensor | None = None) -> Tensor:
        assert table is not None
        return super().forward(images) * table.sum(0)


class Tabled(Toy):
    """Its encoder takes a table of one row, which has as many rows as items where a microbatch has one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.__class__ = WithTable

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        table = torch.full((1, WIDTH), 0.5, dtype=torch.float64)
        return self.decoder(batch["tokens"], self.encoder(batch["images"], table))


class Dependent(Toy):
    """Its encoder computes with all images of a call, so that calls are not joined."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector.register_forward_hook(lambda _, __, out: out - out.mean(0))


class SomeImages(Samples):
    """None in samples 2 to 5 and 10, two in 8; of microbatches of two samples, three of eight have no image."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        count = 0 if index in (2, 3, 4, 5, 10, 11) else 2 if index == 8 else 1
        item = super().__getitem__(index)
        return item | {"images": item["images"].expand(count, -1), "num_images": torch.tensor(count)}


def collected(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    found = {name: torch.stack([one[name] for one in samples]) for name in ("tokens", "label", "num_images")}
    return found | {"images": torch.cat([one["images"] for one in samples])}


def some_images(run: Run) -> Any:
    return run.loader(SomeImages(16), sampler=range(16), collate_fn=collected)


class Textual(Watched):
    """Its step calls the encoder where there are images."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        counts, images = batch["num_images"], batch["images"]
        features = torch.zeros(len(counts), WIDTH, dtype=torch.float64)
        if images is not None and len(images):
            owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
            features = features.index_add(0, owners, self.encoder(images))
        return self.decoder(batch["tokens"], features)


class Drawing(Watched):
    """Mixes images and losses by a number that it draws from a generator of its own, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("seen", torch.zeros(()))
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        self.seen += 1
        images, labels = batch["images"], batch["label"]
        logits = self({**batch, "images": share * images + (1 - share) * images.flip(0)})
        loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels.flip(0))
        self.log("train_loss", loss)
        return loss


class Tracking(Encoder):
    """Keeps a mean of what it gives in training, beside dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        found = F.dropout(super().forward(images), 0.1, self.training)
        if self.training:
            self.mean.lerp_(found.detach().mean(0), 0.5)
        return found


class Tracked(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tracking().double()


class Gated(Encoder):
    """Mixes rows behind a gate that begins closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        found = super().forward(images)
        return found + torch.tanh(self.gate) * found.mean(0)


class Closed(Watched):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = Gated().double()


class Switching(Watched):
    """Trains its encoder on some microbatches."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.set_grad_enabled(bool(batch["label"].sum() % 2)):
            features = self.encoder(batch["images"])
        return self.decoder(batch["tokens"], features)


class Adapter(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self._active = ["0"]

    def forward(self, images: Tensor) -> Tensor:
        return self.adapters[int(self._active[0])](super().forward(images))


class Choosing(Watched):
    """Chooses an adapter of its encoder for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = Adapter().double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.encoder._active = [str(int(batch["label"].sum() % 2))]
        return super().forward(batch)


class Keeping(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[0].register_forward_hook(lambda _, __, out: setattr(self, "kept", out.detach()))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.kept.mean()


class Leaning(Single):
    """Each row of its encoder's result holds less of the row before it than rounding may hide."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector.register_forward_hook(lambda _, __, out: out + 1e-5 * out.detach().roll(1, 0))


def fit(
    run: Run,
    made: Callable[[], Any] = Watched,
    options: dict[str, Any] = {},  # noqa: B006
    samples: int = 16,
    data: Callable[[Run], Any] | None = None,
    **fields: Any,
) -> tuple[dict[str, Tensor], list[str], Counter[Any]]:
    if run.layout is not None:
        modalities = run.layout.modalities
        vision = with_fields(modalities["vision"], **{"microbatches_per_call": 2, **fields})
        run = replace(run, layout=replace(run.layout, modalities={**modalities, "vision": vision}))
        run = replace(run, options={"num_microbatches": 4, **run.options})
    torch.manual_seed(5)
    SEEN.clear()
    module = made()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.trainer(max_epochs=2, **options).fit(module, run.training(samples) if data is None else data(run))
    texts = [str(one.message) for one in told if "microbatches_per_call" in str(one.message)]
    return weights(module), texts, Counter(SEEN)


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pair": (PAIR, {}),
    "pipe": (PIPE, {}),
    "zero bubble": (PIPE, {"schedule": "zero_bubble"}),
    "twins": (TWINS, {"num_microbatches": 2}),
    "replicas": (SHARED, {"num_microbatches": 2}),
    "colocated": (ONE, {}),
    "colocated zbv": (ONE, {"schedule": "zbv"}),
    "sharded": (SHARDED, {}),
    "turns": (EYES, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str) -> None:
    """ranks as the layout says; each step has four microbatches of two images, or of fewer with replicas"""
    layout, options = CASES[name]
    expected, *_ = alone(fit)
    found = together(layout, fit, **options)
    assert_same(found[0][0], expected)
    seen = found[0][2]
    assert not [text for _, texts, _ in found for text in texts]
    calls = 4 if name in ("replicas", "turns") else 8
    # hooks in an encoder also see stand-ins of it, in another stage of its rank
    found_calls = {key: count for key, count in seen.items() if key != ("forward", 2)}
    assert found_calls == {("forward", 4): calls, ("backward", 4): calls}


def several(run: Run) -> Any:
    found = []
    for fields in (
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": {"items": 2}},
        {"zero_stage": 1},
        {"microbatches_per_call": 4},
    ):
        found.append(fit(run, **fields)[0])
    found += [fit(run, made)[0] for made in (Frozen, Adapted)]
    found.append(fit(run, options={"accumulate_grad_batches": 2})[0])
    for size in (2, 4):
        found += [fit(run, samples=8 + rest, microbatches_per_call=size)[0] for rest in (3, 5)]
    return found


def dropped(run: Run) -> Any:
    return [fit(run, Dropping, microbatches_per_call=size) for size in (1, 2, 2)]


def tabled(run: Run) -> Any:
    return [fit(run, Tabled, samples=12, microbatches_per_call=size)[:2] for size in (1, 2)]


def cast(run: Run) -> Any:
    return [fit(run, Single, {"precision": "bf16-mixed"}, microbatches_per_call=size) for size in (1, 4)]


def dependent(run: Run) -> Any:
    return fit(run, Dependent), fit(run, Dependent, microbatches_per_call=1)


def leaning(run: Run) -> Any:
    return [fit(run, Leaning, {"precision": "bf16-mixed"}, microbatches_per_call=size)[:2] for size in (1, 4)]


AS_SINGLE: dict[str, tuple[Callable[[], Any], Callable[[Run], Any] | None, str | None]] = {
    "microbatches without images": (Textual, some_images, None),
    "a generator of its own": (Drawing, None, "gets other inputs"),
    "a mean of training steps": (Tracked, None, "writes encoder.mean"),
    "a closed gate": (Closed, None, "rows depend on each other"),
    "adapters by microbatch": (Choosing, None, "with other attributes"),
    "gradients by microbatch": (Switching, None, "in another mode"),
}


def as_single(run: Run) -> Any:
    found = {}
    for name, (made, data, _) in AS_SINGLE.items():
        found[name] = [fit(run, made, data=data, microbatches_per_call=size)[:2] for size in (1, 2)]
    return found


def kept_by_hooks(run: Run) -> Any:
    return [fit(run, Keeping, microbatches_per_call=size)[:2] for size in (1, 2)]


class Images(Callback):
    """Counts the images of a run by a forward hook."""

    def __init__(self) -> None:
        self.count = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.encoder.patch.register_forward_hook(self.add)

    def add(self, layer: Any, args: Any, output: Tensor) -> None:
        self.count += len(output)


def counted(run: Run) -> Any:
    images = Images()
    fit(run, Toy, {"callbacks": [images]})
    return images.count


def several_dp(run: Run) -> Any:
    return [fit(run, zero_stage=stage)[0] for stage in (1, 2, 3)]


def test_other_fields_of_the_encoder_adapters_accumulation_and_last_groups_of_any_size() -> None:
    """vision: rank 0; language: rank 1; the last batch has three or five samples for four microbatches"""
    expected = alone(several)
    assert_same(together(PAIR, several)[0], expected)


def test_a_callback_counts_what_forward_hooks_see_once() -> None:
    """vision: rank 0; language: rank 1"""
    assert together(PAIR, counted)[0] == alone(counted)


def test_shared_states() -> None:
    """two replicas of everything: ranks 0-1"""
    expected = alone(several_dp)
    assert_same(together(SHARED, several_dp, num_microbatches=2)[0], expected)


def test_calls_whose_rows_depend_on_each_other_are_made_one_by_one_with_a_warning() -> None:
    """vision: rank 0; language: rank 1"""
    (joined, told, _), (single, *_) = together(PAIR, dependent)[0]
    assert_same(joined, single)
    assert any("together" in text for text in told)


def test_rows_that_depend_on_each_other_by_less_than_rounding_are_seen_under_autocast() -> None:
    """vision: rank 0; language: rank 1"""
    (single, _), (joined, told) = together(PAIR, leaning)[0]
    assert_same(joined, single)
    assert any("with those of another" in text for text in told)


def test_what_cannot_be_joined_is_as_with_single_calls_and_nothing_is_done_twice() -> None:
    """vision: rank 0; language: rank 1"""
    for name, ((single, _), (joined, told)) in together(PAIR, as_single)[0].items():
        assert_same(joined, single)
        why = AS_SINGLE[name][2]
        assert any(why in text for text in told) if why is not None else not told, (name, told)


def test_hooks_that_keep_what_an_encoder_gives_are_told() -> None:
    """two replicas of everything: ranks 0-1"""
    (single, _), (joined, told) = together(SHARED, kept_by_hooks, num_microbatches=2)[0]
    assert_same(joined, single)
    assert any("writes kept" in text for text in told)


def test_dropout_draws_once_for_a_group_and_the_same_in_each_run() -> None:
    """vision: rank 0; language: rank 1"""
    (single, *_), (joined, told, seen), (again, *_) = together(PAIR, dropped)[0]
    assert_same(joined, again)
    assert not told
    assert seen["forward", 4] == seen["backward", 4] == 8
    assert not all(torch.equal(joined[name], single[name]) for name in joined)


def test_a_table_that_has_as_many_rows_as_items_by_chance_is_not_joined() -> None:
    """vision: rank 0; language: rank 1; microbatches of two samples, then of one"""
    (single, _), (joined, told) = together(PAIR, tabled)[0]
    assert_same(joined, single)
    assert len(told) == 1
    assert "encoder is called alone" in told[0]


def test_autocast_gives_what_single_calls_give_to_rounding() -> None:
    """vision: rank 0; language: rank 1"""
    (single, *_), (joined, told, _) = together(PAIR, cast)[0]
    assert not told
    for name, value in single.items():
        torch.testing.assert_close(joined[name], value, rtol=2e-2, atol=2e-3)


def test_hooks_that_transformers_installs_in_a_run_of_which_nothing_is_kept_are_installed_once() -> None:
    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, image_size=8, patch_size=8
    )
    model, images = CLIPVisionModel(config), torch.zeros(1, 3, 8, 8)
    kept = KeptState(model)
    kept.begin()
    model(images, output_hidden_states=True)
    kept.restore()
    assert len(model(images, output_hidden_states=True).hidden_states) == 3


def test_a_number_that_does_not_divide_that_of_microbatches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"It divides num_microbatches=1\. Use 1"):
        MultimodalStrategy({"vision": with_fields(Modality(), microbatches_per_call=2), "language": Modality()})
    for size, rule in (
        (3, "It divides num_microbatches=4. Use 2 or 4"),
        (0, "It must be a whole number of at least 1"),
    ):
        vision = with_fields(Modality(), microbatches_per_call=size)
        with pytest.raises(ConfigError, match=rf"^modalities\.vision\.pipeline\.microbatches_per_call: .*{rule}"):
            MultimodalStrategy({"vision": vision, "language": Modality()}, batching={"num_microbatches": 4})
