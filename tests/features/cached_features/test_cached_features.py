"""Features of a frozen encoder that are kept on disk change no number, and are never those of something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from features.toys import PAIR, PIXELS, SHARED, TWINS, WIDTH, Layout, Run, Samples, Toy, assert_same, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import with_fields
from parity import test_parity
from parity.harness import fit, strategy
from ranks import call_ranks
from zoo import CASES

EPOCHS = 3


class Frozen(Toy):
    """Counts the epochs in which its encoder computes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        self.decoder.epochs = []  # of this rank alone; what a step keeps in the root goes to all ranks of a replica
        self.losses: list[Tensor] = []
        self.encoder.layers[0].register_forward_pre_hook(lambda *_: self.decoder.epochs.append(self.current_epoch))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def cached(layout: Layout, folder: Path | None, **fields: Any) -> Layout:
    said = None if folder is None else str(folder)
    vision = with_fields(layout.modalities["vision"], cache_features=said, **fields)
    return replace(layout, modalities={**layout.modalities, "vision": vision})


def trained(run: Run, layout: Layout, module: Toy | None = None, samples: Samples | int = 8, **options: Any) -> Any:
    """Train; return the weights, the losses of this rank's microbatches and how often the encoder ran in each epoch."""
    torch.manual_seed(0)  # one order of shuffled samples for all runs of one process
    module = Frozen() if module is None else module
    run = replace(run, layout=layout)
    trainer = run.trainer(max_epochs=EPOCHS)
    trainer.fit(module, run.training(samples, **options), run.loader(4))
    epochs = getattr(module.decoder, "epochs", [])
    return weights(module), getattr(module, "losses", []), [epochs.count(epoch) for epoch in range(EPOCHS)]


@pytest.mark.parametrize(
    "layout", [PAIR, pytest.param(TWINS, marks=pytest.mark.exhaustive), SHARED], ids=["pair", "twins", "shared"]
)
def test_later_epochs_encode_nothing_and_change_no_bit(layout: Layout, tmp_path: Path) -> None:
    def scenario(run: Run) -> Any:
        found = [trained(run, cached(layout, folder), batch_size=4) for folder in (None, tmp_path, tmp_path)]
        shuffled = [
            trained(run, cached(layout, folder), batch_size=4, shuffle=True)[::2] for folder in (None, tmp_path)
        ]
        return found, shuffled if layout is PAIR else None

    for rank, (found, shuffled) in enumerate(together(layout, scenario)):
        (plain, losses, _), *others = found
        for state, own, _ in others:
            assert [float(one) for one in own] == pytest.approx([float(one) for one in losses], abs=0, nan_ok=True)
            assert all(torch.equal(state[name], plain[name]) for name in plain) or rank > 0
        if rank == 0:
            assert min(found[0][2]) > 0
            assert found[1][2][0] > 0
            assert found[1][2][1:] == [0, 0]
            assert found[2][2] == [0, 0, 0]  # another run finds them too
        if rank == 0 and shuffled is not None:
            assert_same(shuffled[1][0], shuffled[0][0])
            assert shuffled[1][1] == [0, 0, 0]


class Others(Samples):
    def __init__(self, image: int) -> None:
        super().__init__(8)
        self.images[image] += 1e-9


def test_other_inputs_weights_or_modes_and_damaged_files_give_computed_features(tmp_path: Path) -> None:
    one = cached(replace(SHARED, world=1, replicas=1), tmp_path)

    def counts(run: Run, module: Toy | None = None, samples: Any = 8) -> tuple[list[int], int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain = trained(run, cached(one, None), module and type(module)(), samples)[0]
            state, _, epochs = trained(run, one, module, samples)
        assert_same(state, plain)
        return epochs, sum("are computed again" in str(warning.message) for warning in caught)

    class Scaled(Frozen):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.encoder.projector.weight[0, 0] += 1e-12

    class Named(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.scale = 2.0

    def scenario(run: Run) -> Any:
        found = {"first": counts(run), "again": counts(run)}
        found["other image"] = counts(run, samples=Others(3))
        found["weights"], found["attribute"] = counts(run, Scaled()), counts(run, Named())
        files = sorted(tmp_path.rglob("*.safetensors"))
        whole = {file: file.read_bytes() for file in files}
        assert len({*whole.values()}) == len(files) > 8
        for name, damage in DAMAGES.items():
            for file, data in whole.items():
                file.write_bytes(damage(data, whole[files[0]]))
            found[name] = counts(run)
            assert not list(tmp_path.rglob(".*")), "a file that was not finished"
        return found

    (found,) = together(one, scenario)
    first, one_image = found["first"][0], [2, 0, 0]  # its microbatch, and one image alone
    assert first[1:] == [0, 0] != first[:2]
    assert found["again"] == ([0, 0, 0], 0)
    assert found["other image"] == (one_image, 0)
    assert found["weights"][0] == found["attribute"][0] == first
    for name in DAMAGES:
        epochs, warned = found[name]
        assert (epochs[0] > 0, epochs[1:], warned > 0) == (True, [0, 0], True), name


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "shortened": lambda data, other: data[: len(data) // 2],
    "empty": lambda data, other: b"",
    "a bit of a number": lambda data, other: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
    "a key of the header": lambda data, other: data.replace(b'"t', b'"u', 1),
    "another image's": lambda data, other: other if other != data else b"",
}


class Noisy(nn.Module):
    """Encoders whose features may not be kept, by what is wrong with them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.patch = kind, nn.Linear(PIXELS, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.layers, self.note = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), 0

    def forward(self, images: Tensor, extra: Any = None) -> Any:
        hidden = self.layers[0](self.patch(images))
        if self.kind == "random":
            return nn.functional.dropout(hidden, 0.1)
        if self.kind == "buffer":
            self.count += 1
        if self.kind == "attribute":
            self.note += 1
        if self.kind == "result":
            return {"features": hidden, "other": object()}
        if self.kind == "mixes":
            hidden = hidden - hidden.mean(dim=0)
        return hidden


class Refused(Toy):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.encoder = kind, Noisy(kind).double()
        self.encoder.requires_grad_(False)
        self.calls = 0
        self.encoder.patch.register_forward_pre_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        images = batch["images"]
        if self.kind == "input":
            images = images * self.decoder.norm.weight[:PIXELS]
        return self.decode(batch["tokens"], self.encoder(images, object() if self.kind == "object" else None))

    def decode(self, tokens: Tensor, features: Any) -> Tensor:
        return self.decoder(tokens, features["features"] if self.kind == "result" else features)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_call_whose_features_cannot_be_kept_is_refused_by_name(tmp_path: Path, mixed: bool) -> None:
    expected = {
        "random": "draws random numbers",
        "buffer": "writes the buffer encoder.count",
        "attribute": "writes the attribute encoder.note",
        "input": "An input of the encoder needs a gradient",
        "object": "a value of type object",
        "result": "it has encoder().other, of type object",
    }
    one = cached(replace(SHARED, world=1, replicas=1), tmp_path)

    def scenario(run: Run) -> Any:
        found = {}
        for kind in ["mixes"] if mixed else expected:
            try:
                module = Refused(kind)
                found[kind] = trained(run, one, module)[0], module.calls
            except ConfigError as error:
                found[kind] = str(error)
        return found

    (found,) = together(one, scenario)
    if mixed:  # features that depend on the images beside it are found by batches that are equal
        assert found["mixes"][1] == (EPOCHS * 2 + 1) + (2 + 1), "shuffled training, evaluation; each one image alone"
        return
    for kind, message in expected.items():
        assert "modalities.vision.memory.cache_features" in found[kind]
        assert message in found[kind]


def test_an_encoder_that_is_trained_or_random_is_refused_before_the_run(tmp_path: Path) -> None:
    def validate(module: Toy, **fields: Any) -> None:
        run = Run(cached(PAIR, tmp_path, **fields))
        run.trainer().strategy.validate(module)  # type: ignore[attr-defined]

    with pytest.raises(
        ConfigError, match=r"modalities.vision.memory.cache_features: .* 16 of the 16 parameters .* trained"
    ):
        validate(Toy())
    module = Frozen()
    module.encoder.layers[1].dropout.p = 0.1
    with pytest.raises(ConfigError, match=r"encoder.layers.1.dropout \(Dropout\) is in training mode"):
        validate(module)
    module.encoder.eval()
    validate(module)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 2}, "tp_size has 2 ranks"),
        ({"cp_size": 2}, "cp_size has 2 ranks"),
        ({"pp_size": 2}, "pp_size has 2 ranks"),
        ({"dp_size": 2, "zero_stage": 3}, "zero_stage=3"),
        ({"cache_features": " "}, "It is the folder"),
    ],
)
def test_ranks_that_compute_features_together_are_refused(fields: dict[str, Any], message: str) -> None:
    vision = Modality(**{"cache_features": "features", **fields})
    with pytest.raises(ConfigError, match=f"modalities.vision.memory.cache_features: .*{message}"):
        strategy({"vision": vision, "language": Modality()})
    with pytest.raises(ConfigError, match="this modality is no such encoder"):
        strategy({"vision": Modality(), "language": Modality(memory={"cache_features": "features"})})


def zoo_run(rank: int, name: str, which: str, folder: str | None) -> Any:
    """Two epochs of a model with a frozen encoder."""
    fields, world, _ = test_parity.layout(name, which)
    *encoders, _ = CASES[name].modalities
    module, calls = CASES[name].build(), list[int]()
    chosen = strategy({key: Modality(**value) for key, value in fields.items()})
    L.Trainer(accelerator="cpu", devices=world, strategy=chosen, logger=False, enable_checkpointing=False)
    plan = chosen.plan(module)
    for full, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(not any(key.modality in encoders for key in plan.partition.owners[full]))
    module.eval()
    for encoder in encoders:
        fields[encoder]["cache_features"] = folder
        layers = module.get_submodule(plan.partition.layers[encoder] or "")
        next(layers.children()).register_forward_pre_hook(lambda *_: calls.append(module.current_epoch))
    chosen = strategy({key: Modality(**value) for key, value in fields.items()}, num_microbatches=2)
    batches = [CASES[name].batch(8, seed=step) for step in range(2)]
    recorder = fit(module, batches, chosen, world, max_epochs=2)
    return recorder.losses, recorder.gradients, module.state_dict(), [calls.count(0), calls.count(1)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("llava", "{e} with language pp 2"),
        pytest.param("qwen2_vl", "{e} | language", marks=pytest.mark.exhaustive),
        ("qwen2_audio", "{e} | language"),
    ],
)
def test_cached_features_train_models_of_transformers_to_equal_bits(name: str, which: str, tmp_path: Path) -> None:
    world = test_parity.layout(name, which)[1]
    plain, kept = (call_ranks(world, zoo_run, name, which, folder) for folder in (None, str(tmp_path)))
    for one, other in zip(plain, kept, strict=True):
        assert one[0] == other[0]
        assert_same(other[1], one[1], tolerance=0)
    assert_same(kept[0][2], plain[0][2], tolerance=0)
    assert plain[0][3][1] > 0
    assert kept[0][3][0] > 0 == kept[0][3][1]
