"""What a LightningModule and a trainer do around shared sequences is what they do on one process.

Optimization, metrics, precision, generation, checkpoints, dropout, data of any shape, and models whose masks are no
plain triangle. Unless a test says otherwise, its ranks 0-1 share each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning import seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from context_parallel.runs import PAIR, PIPE, Stream, same_steps, shared, steps, text
from features.toys import Layout, Outcome, Run, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import Modality
from parity.harness import Batches
from tensor_parallel import test_training_features as usual
from tensor_parallel.layouts import Compared, check_all
from zoo import CASES
from zoo.case import FIRST_TEXT_ID, VOCABULARY, Batch, TinyModule
from zoo.handwritten import Layer
from zoo.text import LLAMA, PAD

# --- what a trainer does ---

USUAL = {
    usual.plain: 1e-6,
    usual.clipped_by_norm: 1e-6,
    usual.clipped_by_value: 1e-6,
    usual.accumulated: 1e-6,
    usual.checkpointed: 1e-6,
    usual.single: 1e-5,
    usual.brain_mixed: 0.01,
    usual.half_mixed: 2e-3,
    usual.evaluated: 1e-6,
}


@pytest.fixture(scope="module", params=["one stage", "two stages"])
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """Ranks 0-1; or ranks 0-1 and 2-3 as stages. Two microbatches, AdamW, a loss over all logits, metrics."""
    torch.set_default_dtype(torch.float64)
    try:
        yield outcomes({"one stage": PAIR, "two stages": PIPE}[request.param], *USUAL)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "tolerance"), [(scenario.__name__, off) for scenario, off in USUAL.items()])
def test_a_feature_gives_what_it_gives_on_one_process(found: dict[str, Outcome], name: str, tolerance: float) -> None:
    one = {key: value for key, value in found[name].one.items() if key != "weights"}
    for rank in found[name].ranks:
        assert_same({key: value for key, value in rank.items() if key != "weights"}, one, tolerance)
    if "weights" in found[name].one:
        assert_same(found[name].ranks[0]["weights"], found[name].one["weights"], tolerance)


def test_clipping_and_mixed_precision_make_a_difference(found: dict[str, Outcome]) -> None:
    for name, plain in (("clipped_by_norm", "plain"), ("clipped_by_value", "plain"), ("brain_mixed", "single")):
        with pytest.raises(AssertionError):
            assert_same(found[name].ranks[0]["weights"], found[plain].one["weights"], 1e-6)


def test_metrics_count_every_sample_once(found: dict[str, Outcome]) -> None:
    for rank in found["evaluated"].ranks:
        assert rank["validated"][0]["val_count"] == 12
        assert rank["tested"][0]["test_count"] == 8


class Grouped(TinyModule):
    """Half of it frozen, two groups of parameters, and a scheduler."""

    def __init__(self) -> None:
        super().__init__(CASES["llama_tied"].build().model, use_cache=False)
        for layer in self.model.model.layers[:2]:  # type: ignore[index, union-attr]
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() == 1], "lr": 0.2},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def in_groups(run: Run) -> Any:
    return steps(run, Grouped(), text(4), accumulate_grad_batches=2, gradient_clip_val=0.3)


@pytest.mark.usefixtures("float64")
def test_groups_of_parameters_beside_frozen_layers_train_as_on_one_process() -> None:
    for layout in (shared(cp_mode="ulysses"), shared(4, tp_size=2, sequence_parallel=True)):
        outcome = outcomes(layout, in_groups)["in_groups"]
        assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)
        for rank in outcome.ranks:
            assert_same(rank["losses"], outcome.one["losses"], 1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_train_as_on_one_process() -> None:
    pytest.importorskip("peft")
    from tensor_parallel.test_adapters import adapt, at_both_ends, beside_a_trained_norm

    fields = {"language": {"cp_size": 2}}
    check_all(
        2,
        Compared(name="llama", fields=fields, prepare=adapt),
        Compared(name="bert", fields=fields, prepare=adapt, exact=True),
        Compared(name="gpt2", fields=fields, prepare=at_both_ends),
        Compared(name="llama", fields=fields, prepare=beside_a_trained_norm),
    )


@pytest.mark.usefixtures("float64")
def test_frozen_halves_train_as_on_one_process() -> None:
    """Ranks 0-1 and 2-3 as stages."""
    fields: dict[str, dict[str, Any]] = {"language": {"cp_size": 2, "pp_size": 2}}
    check_all(
        4,
        Compared(name="gpt2", fields=fields, variant="lower", options={"schedule": "zero_bubble"}),
        Compared(name="bert", fields=fields, variant="lower", exact=True),
    )


# --- generation ---


class Writer(TinyModule):
    """Writes text while it is validated, between steps of training."""

    def __init__(self) -> None:
        super().__init__(CASES["llama"].build().model)
        self.written: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        prompt = batch["input_ids"][:, :7]
        left = F.pad(prompt[:2], (2, 0), value=PAD)  # prompts of unlike lengths
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        written = [
            self.model.generate(prompt, **options, use_cache=cached)  # type: ignore[operator]
            for cached in (True, False)
        ]
        written += [self.model.generate(left, attention_mask=(left != PAD).long(), **options)]  # type: ignore[operator]
        written += [self.model.generate(prompt[:1], **options, num_beams=2)]  # type: ignore[operator]
        self.written += written
        self.log("val_loss", self.model(**batch, use_cache=False).loss)


def written_between_steps(run: Run) -> Any:
    module = Writer()
    trainer = run.trainer(use_distributed_sampler=False, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(module, DataLoader(Batches(text(2)), batch_size=None), DataLoader(Batches(text(1)), batch_size=None))
    return {"weights": weights(module), "metrics": figures(trainer), "written": module.written}


@pytest.mark.usefixtures("float64")
def test_text_that_is_written_in_a_validation_step_is_that_of_one_process() -> None:
    outcome = outcomes(PAIR, written_between_steps, num_microbatches=1)["written_between_steps"]
    assert len(outcome.one["written"]) == 12
    for rank in outcome.ranks:
        for got, expected in zip(rank["written"], outcome.one["written"], strict=True):
            assert torch.equal(got, expected)
        assert_same(rank["metrics"], outcome.one["metrics"], 1e-6)
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)


# --- checkpoints ---


class Continued(usual.Descending):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def half(run: Run) -> Any:
    module = Continued()
    trainer = run.trainer(use_distributed_sampler=False, max_steps=2, max_epochs=-1)
    trainer.fit(module, usual.loader(4))
    trainer.save_checkpoint(run.folder / "half.ckpt")
    return weights(module)


def rest(run: Run) -> Any:
    module = Continued()
    trainer = run.trainer(use_distributed_sampler=False, max_steps=4, max_epochs=-1)
    trainer.fit(module, usual.loader(4), ckpt_path=run.folder / "half.ckpt")
    return weights(module)


def test_any_layout_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Written with ranks 0-1 of one sequence; read by one process, by tensor parallel ranks 0-1 and by ranks 0-2."""
    together(PAIR, half, tmp_path)
    (tmp_path / "one").mkdir()
    alone(half, tmp_path / "one")
    written = [torch.load(folder / "half.ckpt", weights_only=True) for folder in (tmp_path, tmp_path / "one")]
    assert list(written[0]["state_dict"]) == list(written[1]["state_dict"])
    assert_same(written[0]["state_dict"], written[1]["state_dict"], 1e-5)
    expected = alone(rest, tmp_path / "one")
    assert_same(alone(rest, tmp_path), expected, 1e-5)
    for layout in (Layout({"language": Modality(tp_size=2)}, 2), shared(3, cp_size=3), PAIR):
        assert_same(together(layout, rest, tmp_path)[0], expected, 1e-5)


# --- dropout ---


class Dropping(TinyModule):
    """Drops hidden units, and keeps which."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__(CASES["bert"].build().model)
        bert: Any = self.model.bert  # type: ignore[union-attr]
        self.dropped: dict[str, list[Tensor]] = {"embeddings": [], "layer": [], "next layer": []}
        for part in bert.modules():
            if isinstance(part, nn.Dropout) and "attention.self" not in str(part):
                part.p = 0.1
        for layer in bert.encoder.layer:
            layer.attention.self.dropout.p = 0.0
        if recomputes:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        layers = bert.encoder.layer
        watched = (bert.embeddings.dropout, layers[0].output.dropout, layers[1].output.dropout)
        for name, part in zip(self.dropped, watched, strict=True):
            part.register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, part: nn.Module, args: Any, out: Tensor) -> None:
        if part.training:
            self.dropped[name].append(out.detach() == 0)


def dropped(run: Run) -> Any:
    found = []
    for recomputes in (False, True):
        seed_everything(3, verbose=False)
        module = Dropping(recomputes=recomputes)
        result = steps(run, module, [CASES["bert"].batch(4, seed=0)] * 2)
        found.append({**result, "dropped": module.dropped, "after": torch.rand(3)})
    return found


@pytest.mark.usefixtures("float64")
def test_ranks_drop_units_of_their_own_tokens_and_agree_on_the_rest() -> None:
    """Ranks 0-1 with even tokens; a layer that is computed again drops the same units again."""
    layout = shared(cp_distribution="uniform")
    (first, first_again), (second, second_again) = together(layout, dropped, num_microbatches=1)
    for one, other in ((first, second), (first_again, second_again), (first, first_again)):
        assert_same(one["losses"], other["losses"], 1e-9)
        assert_same(one["weights"], other["weights"], 1e-9)
        assert_same(one["gradients"], other["gradients"], 1e-9)
        assert torch.equal(one["after"], other["after"])
    assert first["losses"][0] != first["losses"][1], "the same batch with other units"
    masks = [rank["dropped"] for rank in (first, second)]
    for one, other in zip(*(mask["embeddings"] for mask in masks), strict=True):
        assert torch.equal(one, other), "outside of the layers all ranks have all tokens"
    for name in ("layer", "next layer"):
        one, other = (torch.stack(mask[name]) for mask in masks)
        assert one.shape == (2, 4, 8, 32), "steps, samples, tokens of this rank, width"
        assert not torch.equal(one, other)
        assert not torch.equal(one[0], one[1])
        assert abs(float(torch.cat([one, other]).double().mean()) - 0.1) < 0.03
    assert not torch.equal(masks[0]["layer"][0], masks[0]["next layer"][0])


# --- data ---


LENGTHS = (9, 16, 9, 31, 2, 12)


def trained_on(case: str, lengths: tuple[int, ...], samples: int) -> Callable[[Run], Any]:
    def scenario(run: Run) -> Any:
        return steps(run, CASES[case].build(), Stream(lengths, samples))

    return scenario


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", ["uniform", "zigzag", "makespan_min"])
def test_lengths_that_change_with_every_batch_are_those_of_one_process(how: str) -> None:
    """Of an iterable dataset; ranks 0-2, so that few lengths divide."""
    layout = shared(3, cp_size=3, cp_distribution=how, cp_mode="ring")
    for outcome in outcomes(layout, trained_on("gpt2", LENGTHS, 4), num_microbatches=1).values():
        same_steps(outcome)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["allgather", "ring", "ulysses"])
def test_sequences_shorter_than_the_number_of_ranks_are_those_of_one_process(mode: str) -> None:
    """Ranks 0-3, of which some have no token; one sample."""
    scenario = trained_on("llama_tied", (3, 2, 6), 1)
    for outcome in outcomes(shared(4, cp_size=4, cp_mode=mode), scenario, num_microbatches=1).values():
        same_steps(outcome)


@pytest.mark.usefixtures("float64")
def test_one_sequence_a_batch_is_that_of_one_process() -> None:
    scenario = trained_on("bert", (16, 11), 1)
    for outcome in outcomes(PAIR, scenario, num_microbatches=1).values():
        same_steps(outcome, 1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_microbatches_that_are_padded_unlike_are_those_of_one_process(schedule: str) -> None:
    """Ranks 0-1 and 2-3 as stages; weighed by tokens."""
    options: dict[str, Any] = {"num_microbatches": 4, "loss_weight": "tokens", "schedule": schedule}
    for how in ("zigzag", "makespan_min"):
        layout = shared(4, pp_size=2, cp_distribution=how)
        for outcome in outcomes(layout, trained_on("llama", (12, 17, 12), 4), **options).values():
            same_steps(outcome)


# --- masks and models ---

TINY: dict[str, Any] = LLAMA | {"num_hidden_layers": 2}


class Packed(TinyModule):
    """Documents in a row, told by positions that begin anew."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        positions = batch["positions"]
        if "qwen" in type(self.model).__name__.lower():  # of text, and in three dims
            positions = positions.expand(4, *positions.shape)
        output = self.model(
            input_ids=batch["input_ids"],
            attention_mask=None,
            position_ids=positions,
            labels=batch["labels"],
            **self.fixed,
        )
        self.log("loss", output.loss)
        return output.loss


def documents(*lengths: int, samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TEXT_ID, VOCABULARY, (samples, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "positions": positions.expand(samples, -1).contiguous(), "labels": labels}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", ["uniform", "makespan_min"])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_packed_documents_are_those_of_one_process(name: str, how: str) -> None:
    def scenario(run: Run) -> Any:
        module = Packed(CASES[name].build().model, use_cache=False)
        batches = [documents(5, 9, 4, samples=2, seed=0), documents(12, 1, 3, 8, samples=2, seed=1)]
        return steps(run, module, batches)

    modalities = {"language": Modality(cp_size=2, cp_distribution=how)}
    if name == "qwen2_vl":
        modalities = {"vision": Modality(colocate_with="language"), **modalities}
    same_steps(outcomes(Layout(modalities, 2), scenario, num_microbatches=1)["scenario"])


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**TINY, sliding_window=5))


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **TINY, head_dim=8, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    )
    config._attn_implementation = "eager"  # torch's attention knows no caps
    return Gemma2ForCausalLM(config)


def llama4(**options: Any) -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **{**TINY, "num_hidden_layers": 4},
        **{"attn_temperature_tuning": False, **options},
        head_dim=8,
        attention_chunk_size=6,
        num_local_experts=3,
        intermediate_size_mlp=48,
    )
    return Llama4ForCausalLM(config)


def mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, **options)).float()


def balanced() -> nn.Module:
    return mixtral(output_router_logits=True, router_aux_loss_coef=2.0)


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**TINY, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # grouped products know no float64
    return GptOssForCausalLM(config)


def of(make: Callable[[], nn.Module], *, length: int = 18) -> Any:
    def scenario(run: Run) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = make()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return steps(run, TinyModule(model, use_cache=False), Stream((length, length + 3)))

    return scenario


MODELS = {
    "windows": mistral,
    "windows in some layers, and capped scores": gemma,
    "chunks in some layers, and experts": llama4,
    "experts": mixtral,
    "experts, with a loss over routers": balanced,
    "windows, sinks and experts": gpt_oss,
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", MODELS)
def test_models_with_other_masks_and_with_experts_are_those_of_one_process(name: str) -> None:
    for layout in (shared(cp_mode="ring"), shared(cp_mode="ulysses", cp_distribution="makespan_min")):
        outcome = outcomes(layout, of(MODELS[name]), num_microbatches=1)["scenario"]
        same_steps(outcome, 1e-4 if name.startswith("experts") else 1e-6)


class Inherited(Layer):
    """Its attention is in what it inherits."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 1.1


class ByMethod(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(dim=2)
        hidden = hidden + self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByFunction(ByMethod):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class Own(L.LightningModule):
    """A language model around layers of one's own."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, LLAMA["hidden_size"])
            self.layers = nn.ModuleList([layer(causal=True) for _ in range(2)])
            self.head = nn.Linear(LLAMA["hidden_size"], VOCABULARY)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layer", [Inherited, ByMethod, ByFunction], ids=lambda layer: layer.__name__)
def test_torchs_attention_is_found_wherever_a_layer_calls_it(layer: type[nn.Module]) -> None:
    layout = Layout({"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}, 2)

    def scenario(run: Run) -> Any:
        return steps(run, Own(layer), Stream((16, 11)))

    same_steps(outcomes(layout, scenario, num_microbatches=1)["scenario"], 1e-9)


class Recomputing(Own):
    """Computes each of its layers, which call torch's attention by themselves, again for the backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__(Layer)
        self.is_reentrant = is_reentrant

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@pytest.mark.usefixtures("float64")
def test_layers_that_call_torchs_attention_may_be_computed_again_as_a_whole() -> None:
    layout = Layout({"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}, 2)

    def scenario(run: Run) -> Any:
        return [steps(run, Recomputing(is_reentrant=is_reentrant), Stream((16, 11))) for is_reentrant in (True, False)]

    outcome = outcomes(layout, scenario, num_microbatches=1)["scenario"]
    for index in range(2):
        same_steps(Outcome(outcome.one[index], [rank[index] for rank in outcome.ranks]), 1e-9)


class DropPath(nn.Module):
    """Drops whole samples, drawn as timm, transformers and torchvision do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.drop_prob = how, 0.5

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        shape = (hidden.shape[0], 1, 1)
        if self.how == "timm":
            kept = hidden.new_empty(shape).bernoulli_(0.5)
        elif self.how == "transformers":
            kept = (0.5 + torch.rand(shape, dtype=hidden.dtype, device=hidden.device)).floor_()
        else:
            kept = torch.rand(hidden.shape[0]).lt(0.5).view(shape).to(hidden)
        return hidden * kept + torch.randn_like(hidden) * 1e-6


class DroppingSamples(Dropping):
    def __init__(self) -> None:
        super().__init__(recomputes=True)
        for layer, how in zip(self.model.bert.encoder.layer, ("timm", "transformers", "flat", "timm"), strict=True):  # type: ignore[union-attr,arg-type]
            drop = layer.output.dropout = DropPath(how)
            drop.register_forward_hook(partial(self._keep_samples, how))

    def _keep_samples(self, how: str, part: nn.Module, args: Any, out: Tensor) -> None:
        if part.training:
            self.dropped.setdefault(how, []).append(out.detach().abs().amax(dim=(1, 2)) < 1e-4)
            self.dropped.setdefault("noise", []).append(out.detach()[:, :2, 0])


def dropped_samples(run: Run) -> Any:
    seed_everything(3, verbose=False)
    module = DroppingSamples()
    return {**steps(run, module, [CASES["bert"].batch(4, seed=0)] * 2), "dropped": module.dropped}


@pytest.mark.usefixtures("float64")
def test_ranks_drop_the_same_samples() -> None:
    """Ranks 0-1 with even tokens, and with layers that are computed again."""
    first, second = together(shared(cp_distribution="uniform"), dropped_samples, num_microbatches=1)
    assert_same(first["losses"], second["losses"], 1e-9)
    assert_same(first["gradients"], second["gradients"], 1e-9)
    for how in ("timm", "transformers", "flat"):
        one, other = (torch.stack(rank["dropped"][how]) for rank in (first, second))
        assert torch.equal(one, other), how
        assert one.any(), how
        assert not one.all(), how
    assert not torch.equal(*(torch.stack(rank["dropped"]["noise"]) for rank in (first, second)))
