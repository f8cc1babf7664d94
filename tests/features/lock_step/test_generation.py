"""Generation in evaluation steps gives the tokens of one process, whatever the layout; training goes on after it.

The default run holds each kind of model and each parallelism once; two more layouts are `exhaustive`.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import CompileConfig

from features.toys import PIPE, TWINS, Encoder, Layout, Run, Toy, assert_same, figures, outcomes, together, weights
from lightning_mm5d import Modality
from parity.harness import Batches, Recorder, strategy
from ranks import call_ranks, run_ranks
from sweeps import swept
from zoo import CASES

PLACEHOLDERS = [1, 2, 3, 4, 5, 8, 9]  # tokens that stand for images and sound
PAD, EOS = 0, 7


class Speaker(L.LightningModule):
    """Trains a model; its validation reads the loss and then lets it speak, by `generate` and by a loop of its own."""

    def __init__(self, model: torch.nn.Module, end: int = EOS) -> None:
        super().__init__()
        self.model, self.end = model, end
        self.spoken: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, batch_size=len(batch["labels"]), sync_dist=True)
        self.spoken.append(self.speak(batch))
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.speak(batch)

    def speak(self, batch: Any) -> dict[str, Any]:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        ends = {"eos_token_id": self.end, "pad_token_id": PAD, "max_new_tokens": 5, "suppress_tokens": PLACEHOLDERS}
        said = {
            "greedy": self.model.generate(**inputs, do_sample=False, **ends),  # type: ignore[operator]
            "static": self.model.generate(**inputs, do_sample=False, cache_implementation="static", **ends),  # type: ignore[operator]
            "beams": self.model.generate(**inputs, do_sample=False, num_beams=3, **ends),  # type: ignore[operator]
        }
        torch.manual_seed(3)
        said["sampled"] = self.model.generate(**inputs, do_sample=True, temperature=4.0, **ends)  # type: ignore[operator]
        return {
            name: [[token for token in row if token != PAD] for row in rows.tolist()] for name, rows in said.items()
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Narrator(Callback):
    """Generates in hooks, where Lightning's users look at their model."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.heard.append(continued(module, batch))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.heard.append(continued(module, batch))
        self.last = batch

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.heard.append(continued(module, self.last))
        # all ranks draw what the last stage draws, and rank 0 is in the first
        torch.manual_seed(int(trainer.world_size > 1 and trainer.global_rank == 0))
        self.drawn = continued(module, self.last, do_sample=True, temperature=5.0)


def continued(module: Any, batch: Any, **options: Any) -> list[list[int]]:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    tokens: list[list[int]] = module.model.generate(
        **inputs, **{"do_sample": False, "max_new_tokens": 2, "suppress_tokens": PLACEHOLDERS, **options}
    ).tolist()
    return tokens


def run(case_name: str, modalities: Any, devices: int) -> dict[str, Any]:
    """Two steps of training with validation on a batch after each, then predictions of one."""
    case = CASES[case_name]
    model = case.build().model
    if case_name == "t5":
        model.config.num_layers = 4  # of the decoder, which transformers asks when it makes a cache
    module, recorder, narrator = Speaker(model), Recorder(), Narrator()
    batches = [case.batch(2, seed=seed) for seed in range(2)]
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": 1,
        "val_check_interval": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1,
        "limit_predict_batches": 1,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = "auto" if modalities is None else strategy(modalities)
        trainer = L.Trainer(strategy=chosen, callbacks=[recorder, narrator], **options)
        loader = DataLoader(Batches(batches), batch_size=None)
        trainer.fit(module, loader, loader)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, loader)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "metrics": metrics,
        "spoken": module.spoken,
        "heard": narrator.heard,
        "drawn": narrator.drawn,
        "predicted": predicted,
    }


def on_rank(rank: int, *args: Any) -> dict[str, Any]:
    return run(*args)


def m(**sizes: Any) -> Modality:
    return Modality(**sizes)


LAYOUTS: dict[str, tuple[str, dict[str, Modality], int]] = {
    "vision pp 2 | language pp 2": ("qwen2_5_vl", {"vision": m(pp_size=2), "language": m(pp_size=2)}, 4),
    "vision with language pp 2": ("llava", {"vision": m(colocate_with="language"), "language": m(pp_size=2)}, 2),
    "vision | language tp 2": ("llava", {"vision": m(), "language": m(tp_size=2)}, 3),
    "vision | sliding windows pp 2": ("gemma3", {"vision": m(), "language": m(pp_size=2)}, 3),
    "encoder and decoder pp 2": ("t5", {"language": m(pp_size=2)}, 2),
    "audio | language pp 2": ("whisper", {"audio": m(), "language": m(pp_size=2)}, 3),
    "tp 2 pp 2": ("llama_tied", {"language": m(tp_size=2, pp_size=2)}, 4),
    "cp 2 pp 2": ("llama", {"language": m(cp_size=2, pp_size=2)}, 4),
}
MORE_LAYOUTS = (
    *("vision pp 2 | language pp 2", "vision | language tp 2", "vision | sliding windows pp 2"),
    "audio | language pp 2",
)


@pytest.mark.parametrize("name", swept(LAYOUTS, *MORE_LAYOUTS))
@pytest.mark.usefixtures("float64")
def test_generated_text_is_that_of_one_process(name: str) -> None:
    """Each layout is drawn by its name: ranks in that order."""
    case, modalities, world = LAYOUTS[name]
    one = run(case, None, 1)
    said = one["predicted"][0]
    assert said["sampled"] != said["greedy"]
    for rank in call_ranks(world, on_rank, case, modalities, world):
        for part in ("spoken", "heard", "drawn", "predicted"):
            assert rank[part] == one[part]
        assert_same(rank["losses"], one["losses"], 1e-6)
        assert_same(rank["metrics"], one["metrics"], 1e-6)


def compiled(rank: int) -> list[bool]:
    """Whether `generate` compiles the model, as it does on a GPU with a static cache; here it is told to."""
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True
    seen: list[Any] = []
    torch.compile = lambda call, **_: seen.append(call) or call  # type: ignore[assignment,func-returns-value]

    class Static(Speaker):
        def speak(self, batch: Any) -> Any:
            static = {"cache_implementation": "static", "compile_config": compile_config}
            return continued(self, batch, **static)

    found = []
    for fields in (
        *({"pp_size": 2}, {"tp_size": 2}, {"cp_size": 2}),
        *({"dp_size": 2, "sharding": {"zero_stage": 3, "reshard_after_forward": True}}, {"dp_size": 2}),
    ):
        module, batches = Static(CASES["llama"].build().model), Batches([CASES["llama"].batch(2)] * 2)
        chosen = strategy({"language": Modality(**fields)})
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=chosen, logger=False)
        trainer.predict(module, DataLoader(batches, batch_size=None))
        found.append(bool(seen))
        seen.clear()
    return found


def test_a_model_whose_ranks_meet_in_its_calls_generates_without_being_compiled() -> None:
    """language: ranks 0-1 as stages, tensor or context parallel, replicas that share weights, and plain replicas."""
    assert run_ranks(2, compiled) == [[False, False, False, False, True]] * 2


# --- replicas, microbatches and loops of one's own ---


class Naming(Speaker):
    def speak(self, batch: Any) -> Any:
        return [row[-2:] for row in continued(self, batch)]


def named(rank: int, modalities: Any, world: int) -> Any:
    """Tokens that follow four samples of which the first two have no image."""
    module = Naming(CASES["qwen2_5_vl"].build().model)
    chosen = "auto" if modalities is None else strategy(modalities, num_microbatches=2)
    trainer = L.Trainer(accelerator="cpu", devices=world, strategy=chosen, logger=False, enable_progress_bar=False)
    batch = CASES["qwen2_5_vl"].batch(4, images=[0, 0, 1, 2])
    return trainer.predict(module, DataLoader(Batches([batch]), batch_size=None))[0]  # type: ignore[index]


@pytest.mark.usefixtures("float64")
def test_a_microbatch_without_images_generates_as_a_batch_without_images_does() -> None:
    """vision: rank 0, language: rank 1; both on ranks 0-1 with tp 2"""
    layouts = ({"vision": m(), "language": m()}, {"vision": m(colocate_with="language"), "language": m(tp_size=2)})
    expected = named(0, None, 1)
    for modalities in layouts:
        assert call_ranks(2, named, modalities, 2) == [expected] * 2


def chosen(logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


class Looped(Toy):
    """Feeds its own answers back; its step reads the loss first, and passes again only from its second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        logits = self(batch)
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, batch["label"]), sync_dist=True)
        self.losses.append(float(torch.nn.functional.cross_entropy(logits, batch["label"])))
        return appended(self, batch) if batch_idx else None

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """As many passes as the first sample asks for, so that replicas need different numbers of them."""
        tokens, features = batch["tokens"], self.encoder(batch["images"])
        while len(tokens[0]) < 6 + int(batch["tokens"][0, 0]) % 4:
            tokens = torch.cat([tokens, chosen(self.decoder(tokens, features))], 1)
        return [row.tolist() for row in tokens]


def appended(module: Any, batch: Any) -> list[list[int]]:
    """A loop that the source code of the step does not show."""
    call, tokens = module.decoder, batch["tokens"]
    features = module.encoder(batch["images"])
    for _ in range(3):
        tokens = torch.cat([tokens, chosen(call(tokens, features))], 1)
    rows: list[list[int]] = tokens.tolist()
    return rows


class Heard(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


class Hooked(Callback):
    """Counts the images of a validation by a forward hook."""

    def __init__(self) -> None:
        self.images = 0

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        module.encoder.patch.register_forward_hook(self.count)

    def count(self, layer: Any, args: Any, output: Any) -> None:
        self.images += len(output)


def looped(run: Run) -> dict[str, Any]:
    module, heard, hooked = Looped(), Heard(), Hooked()
    trainer = run.trainer(callbacks=[heard, hooked], num_sanity_val_steps=0)
    trainer.fit(module, run.training(), run.loader(24))
    found = {"metrics": figures(trainer), "outputs": heard.outputs, "losses": module.losses, "count": module.count}
    found["images"] = hooked.images
    return {**found, "predicted": run.trainer().predict(module, run.loader(16, 2)), "weights": weights(module)}


@pytest.mark.parametrize("layout", [PIPE, TWINS], ids=["pipe", "twins"])
def test_a_loop_of_ones_own_gives_the_tokens_of_one_process(layout: Layout) -> None:
    found = outcomes(layout, looped, num_microbatches=1)["looped"]
    first = layout.world - layout.replicas
    for rank, got in enumerate(found.ranks):
        shard = max(rank - first, 0)
        assert_same(got["metrics"], found.one["metrics"])
        for outputs, expected in zip(got["outputs"], found.one["outputs"], strict=True):
            assert outputs == (expected and expected[shard :: layout.replicas])
        if layout is PIPE:
            assert got["predicted"] == found.one["predicted"]
            assert got["count"] == found.one["count"], "an attempt in the pipeline leaves no traces"
            assert rank or got["images"] == found.one["images"], "nor does it in a callback"
    if layout is PIPE:
        assert_same(found.ranks[-1]["losses"], found.one["losses"])
    else:
        one = [rows for batch in found.one["predicted"] for rows in batch]
        assert [len(row) for row in one] != [len(one[0])] * len(one)
    assert_same(found.ranks[0]["weights"], found.one["weights"])


class Marked(Encoder):
    """Keeps a penalty, and a flag that libraries keep of a module's hooks, where a method is called."""

    def encode(self, images: Tensor) -> Tensor:
        features = self(images)
        self.penalty, self._is_hooked = features.abs().mean(), True
        return features


class Marking(Toy):
    def __init__(self) -> None:
        super().__init__()
        weights = self.encoder.state_dict()
        self.encoder: Marked = Marked().double()
        self.encoder.load_state_dict(weights)

    def forward(self, batch: Any) -> Tensor:
        return self.decoder(batch["tokens"], self.encoder.encode(batch["images"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for scale in (0.5, 1.0):
            loss = self.loss({**batch, "images": scale * batch["images"]})
        self.log("val_loss", loss + self.encoder.penalty, sync_dist=True)


def marking(run: Run) -> Any:
    module, trainer = Marking(), run.trainer()
    trainer.validate(module, run.loader(16), verbose=False)
    return figures(trainer), hasattr(module.encoder, "_is_hooked")


def test_what_a_method_of_an_encoder_keeps_is_read_and_flags_of_its_hooks_stay() -> None:
    vision = Modality(module="encoder", boundary="encoder.encode")
    layout = Layout({"vision": vision, "language": Modality(module="decoder")}, 2)
    found = outcomes(layout, marking, num_microbatches=1)["marking"]
    for metrics, _ in found.ranks:
        assert_same(metrics, found.one[0])
    assert [has for _, has in found.ranks] == [True, False]


class Embedding(nn.Embedding):
    """Returns a cache beside its result, as models do in evaluation, which nobody reads."""

    def forward(self, tokens: Tensor) -> Any:
        return {"hidden": super().forward(tokens), "past_key_values": object()}


class WithCache(Toy):
    def __init__(self) -> None:
        super().__init__()
        weight = self.decoder.embedding.weight
        self.decoder.embedding = Embedding(*weight.shape, _weight=weight.detach())

    def forward(self, batch: Any) -> Tensor:
        decoder = self.decoder
        hidden = decoder.embedding(batch["tokens"])["hidden"] + self.encoder(batch["images"]).unsqueeze(1)
        for layer in decoder.layers:
            hidden = layer(hidden)
        return decoder.head(decoder.norm(hidden).mean(dim=1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for scale in (0.5, 1.0):
            loss = self.loss({**batch, "images": scale * batch["images"]})
        self.log("val_loss", loss, sync_dist=True)


def with_cache(run: Run) -> Any:
    module, trainer = WithCache(), run.trainer(num_sanity_val_steps=0)
    trainer.fit(module, run.training(), run.loader(16))
    return figures(trainer)


def test_a_cache_in_a_result_that_nobody_reads_does_not_end_the_run() -> None:
    outcome = outcomes(PIPE, with_cache)["with_cache"]
    for metrics in outcome.ranks:
        assert_same(metrics, outcome.one)


class Rollout(Toy):
    """Generates in its training step."""

    def generate(self, batch: Any) -> Tensor:
        return self(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.generate(batch)
        return self.loss(batch)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.generate(args[1])


def rolled_out(run: Run) -> None:
    run.trainer(limit_val_batches=0).fit(Rollout(), run.training())


def narrated(run: Run) -> None:
    run.trainer().validate(Rollout(), run.loader(8), verbose=False)


class Hurried(Rollout):
    def generate(self, batch: Any, max_time: float | None = None) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.generate(batch, max_time=0.5)


def hurried(run: Run) -> None:
    run.trainer().validate(Hurried(), run.loader(8), verbose=False)


class Borrowing(Rollout):
    """Its encoder computes with the embedding of the language model."""

    def __init__(self) -> None:
        super().__init__()
        borrowed, own = self.decoder.embedding, self.encoder.forward
        self.encoder.forward = lambda images: own(images) * borrowed.weight.mean()  # type: ignore[method-assign]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.generate(batch).argmax(1).double().mean())


def borrowed(run: Run) -> None:
    run.trainer().validate(Borrowing(), run.loader(8), verbose=False)


@pytest.mark.parametrize(
    ("layout", "scenario", "message"),
    [
        (PIPE, hurried, "max_time=0.5, and the clock of each rank"),
        (PIPE, rolled_out, "self.generate is called in training_step"),
        (PIPE, borrowed, "the result of encoder, .* depends on `decoder.embedding.weight`"),
        (TWINS, narrated, "outside of a step, where rank 0 works for the replicas"),
    ],
    ids=[
        "by the clock",
        "in training",
        "by an encoder with a weight of another rank",
        "in a hook of replicas that share ranks",
    ],
)
def test_generation_that_cannot_work_is_refused_by_name(layout: Layout, scenario: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        together(layout, scenario, limit=30)
