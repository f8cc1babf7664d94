"""What a LightningModule and a trainer do around shared sequences is what they do on one process.

Losses of a user's own, heads on hidden states, metrics, precision, data of any shape, checkpoints, and models whose
masks are no plain triangle. Unless a test says otherwise its ranks 0-1 share each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from features.toys import Layout, Outcome, Run, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import ConfigError, Modality
from parity.harness import Batches, Recorder
from tensor_parallel import test_training_features as usual
from tensor_parallel.layouts import Compared, check_all
from zoo import CASES
from zoo.case import FIRST_TEXT_ID, VOCABULARY, Batch, TinyModule
from zoo.qwen import VISION_END_ID, VISION_START_ID
from zoo.text import LLAMA, PAD

WIDTH = LLAMA["hidden_size"]


def shared(world: int = 2, **fields: Any) -> Layout:
    return Layout({"language": Modality(**{"cp_size": 2, **fields})}, world)


PAIR = shared()
PIPE = shared(4, cp_mode="ring", pp_size=2)
"""ranks 0-1 and 2-3 as stages"""


def steps(run: Run, module: Any, batches: Any, **options: Any) -> Any:
    """Train on batches given whole; losses, gradients of each step and the weights at the end."""
    recorder = Recorder()
    trainer = run.trainer(callbacks=[recorder], use_distributed_sampler=False, **options)
    data = batches if isinstance(batches, IterableDataset) else Batches(batches)
    trainer.fit(module, DataLoader(data, batch_size=None))
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": weights(module)}


def same_steps(outcome: Outcome, tolerance: float = 1e-6) -> None:
    """Losses on all ranks, every gradient where its parameter is, and the weights on rank 0."""
    one = outcome.one
    assert_same(outcome.ranks[0]["weights"], one["weights"], tolerance, "weights")
    for rank in outcome.ranks:
        assert_same(rank["losses"], one["losses"], tolerance, "losses")
    for step, expected in enumerate(one["gradients"]):
        found = [rank["gradients"][step] for rank in outcome.ranks]
        assert {name for gradients in found for name in gradients} == set(expected), f"step {step}"
        for gradients in found:
            here = {name: expected[name] for name in gradients}
            assert_same(gradients, here, tolerance, f"step {step}")


# --- losses of a user's own ---


class Head(TinyModule):
    """A language model with heads of the LightningModule's own, and a loss of its own in each step."""

    def __init__(self, losses: list[Callable[[Head, Batch], Tensor]]) -> None:
        super().__init__(CASES["llama"].build().model, use_cache=False)
        self.losses = losses
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.score = nn.Linear(WIDTH, 3)
            self.project = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))
            self.teacher = nn.Embedding(VOCABULARY, VOCABULARY).requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(1, 3, WIDTH))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.losses[batch_idx](self, batch)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {**self.fixed, "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def logits(self, batch: Batch) -> Tensor:
        return self.model(**self.inputs(batch)).logits

    def hidden(self, batch: Batch) -> Tensor:
        return self.model.model(**self.inputs(batch)).last_hidden_state  # type: ignore[operator, union-attr]


def classes(batch: Batch) -> Tensor:
    return batch["input_ids"][:, 1] % 3


def pooled(hidden: Tensor, batch: Batch) -> Tensor:
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def next_tokens(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of what comes next, its ids, and which of them count."""
    labels = batch["labels"][:, 1:]
    return logits[:, :-1].log_softmax(-1), labels.clamp(min=0), (labels != -100).to(logits.dtype)


def of_the_model(module: Head, batch: Batch) -> Tensor:
    return module.model(**batch, **module.fixed).loss


def with_a_number_of_items(module: Head, batch: Batch) -> Tensor:
    return module.model(**batch, **module.fixed, num_items_in_batch=torch.tensor(10.0)).loss


def shifted_by_slicing(module: Head, batch: Batch) -> Tensor:
    logits = module.logits(batch)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), batch["labels"][..., 1:].contiguous().view(-1))


def of_a_loss_module_with_smoothing(module: Head, batch: Batch) -> Tensor:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.linspace(1, 2, VOCABULARY), ignore_index=-100)
    criterion.label_smoothing = 0.1
    return criterion(module.logits(batch)[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


def of_tokens_that_weigh_unlike(module: Head, batch: Batch) -> Tensor:
    logits = module.logits(batch)[:, :-1].flatten(0, 1)
    losses = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none")
    weight = torch.linspace(0.5, 1.5, losses.numel()).to(losses.dtype)
    return (losses * weight).sum() / weight.sum()


def of_chosen_positions(module: Head, batch: Batch) -> Tensor:
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(module.logits(batch)[:, :-1][labels != -100], labels[labels != -100])


def one_hot(module: Head, batch: Batch) -> Tensor:
    chances, labels, counts = next_tokens(module.logits(batch), batch)
    target = F.one_hot(labels, VOCABULARY).to(chances.dtype)
    return -((target * chances).sum(-1) * counts).sum() / counts.sum()


def divergence_from_a_teacher(module: Head, batch: Batch) -> Tensor:
    with torch.no_grad():
        teacher = module.teacher(batch["input_ids"]).softmax(-1)
    student = (module.logits(batch) / 2).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="none").sum(-1).mul(batch["attention_mask"]).mean() * 4


def focal(module: Head, batch: Batch) -> Tensor:
    chances, labels, counts = next_tokens(module.logits(batch), batch)
    chosen = chances.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (-((1 - chosen.exp()) ** 2) * chosen * counts).sum() / counts.sum()


def normalized_and_sure(module: Head, batch: Batch) -> Tensor:
    logits = module.logits(batch)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    loss = F.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:])
    return loss + 1e-2 * logits.logsumexp(-1).pow(2).mean() + 0.1 * entropy.mean()


def preference(module: Head, batch: Batch) -> Tensor:
    chances, labels, counts = next_tokens(module.logits(batch), batch)
    scores = (chances.gather(2, labels.unsqueeze(2)).squeeze(2) * counts).sum(-1)
    chosen, rejected = scores.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def first_token_classified(module: Head, batch: Batch) -> Tensor:
    return F.cross_entropy(module.score(module.hidden(batch)[:, 0]), classes(batch))


def mean_classified(module: Head, batch: Batch) -> Tensor:
    return F.cross_entropy(module.score(pooled(module.hidden(batch), batch)), classes(batch))


def last_token_scored(module: Head, batch: Batch) -> Tensor:
    last = batch["attention_mask"].sum(1) - 1
    scores = module.score(module.hidden(batch))[torch.arange(len(last)), last]
    return F.softplus(scores[:, 0] - scores[:, 1]).mean()


def every_token_classified(module: Head, batch: Batch) -> Tensor:
    scores = module.score(module.project[0](module.hidden(batch)))
    return F.cross_entropy(scores.view(-1, 3), (batch["input_ids"] % 3).view(-1)) + scores.pow(2).mean()


def contrastive(module: Head, batch: Batch) -> Tensor:
    one = F.normalize(module.project(pooled(module.hidden(batch), batch)), dim=-1)
    other = F.normalize(module.project(module.hidden({**batch, "input_ids": batch["input_ids"].flip(0)})[:, -1]), dim=-1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def penalized(module: Head, batch: Batch) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return of_the_model(module, batch) + 1e-2 * sum(p.pow(2).sum() for p in parameters)


def beside_middle_layers(module: Head, batch: Batch) -> Tensor:
    output = module.model(**module.inputs(batch), output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == 5
    early = module.model.lm_head(states[2])[:, :-1].flatten(0, 1)  # type: ignore[operator, union-attr]
    loss = F.cross_entropy(early, batch["labels"][:, 1:].flatten()) + states[0].pow(2).mean()
    alike = F.cosine_similarity(states[1], states[3], dim=-1).mean()
    return loss + alike + F.mse_loss(states[4], states[3].detach()) + F.cross_entropy(module.score(states[1][:, 0]), classes(batch))


def of_two_passes_of_unlike_lengths(module: Head, batch: Batch) -> Tensor:
    short = {key: value[:, :7] for key, value in batch.items()}
    one, other = module.logits(batch)[:, :7].log_softmax(-1), module.logits(short).log_softmax(-1)
    return of_the_model(module, batch) + F.kl_div(other, one.roll(1, 0).detach(), log_target=True) + other.mean()


def on_disturbed_embeddings(module: Head, batch: Batch) -> Tensor:
    ids = batch["input_ids"]
    embeddings = module.model.get_input_embeddings()(ids)  # type: ignore[operator]
    given = {**module.inputs(batch), "input_ids": None, "labels": batch["labels"]}
    clean = module.model(**{**given, "inputs_embeds": embeddings}).loss
    (gradient,) = torch.autograd.grad(clean, embeddings, retain_graph=True)
    disturbed = embeddings + 0.5 * F.normalize(gradient, dim=-1)
    return clean + module.model(**{**given, "inputs_embeds": disturbed}).loss


def behind_a_soft_prompt(module: Head, batch: Batch) -> Tensor:
    embeddings = module.model.get_input_embeddings()(batch["input_ids"])  # type: ignore[operator]
    embeddings = torch.cat([module.prompt.expand(len(embeddings), -1, -1), embeddings], 1)
    logits = module.model(inputs_embeds=embeddings, use_cache=False).logits[:, 3:]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def by_the_weight_of_the_head(module: Head, batch: Batch) -> Tensor:
    hidden, weight = module.hidden(batch), module.model.lm_head.weight  # type: ignore[union-attr]
    logits = hidden @ weight.T + F.linear(hidden, weight[:5]).sum(-1, keepdim=True)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def in_chunks_that_are_computed_again(module: Head, batch: Batch) -> Tensor:
    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = module.model.lm_head(hidden)  # type: ignore[operator, union-attr]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    hidden, labels = module.hidden(batch)[:, :-1], batch["input_ids"][:, 1:]
    whole = checkpoint(of_chunk, hidden, labels, use_reentrant=False)
    chunks = zip(hidden.split(4, 1), labels.split(4, 1), strict=True)
    return (whole + sum(checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks)) / labels.numel()


def by_the_gradient_of_a_middle_layer(module: Head, batch: Batch) -> Tensor:
    output = module.model(**module.inputs(batch), labels=batch["labels"], output_hidden_states=True)
    (gradient,) = torch.autograd.grad(output.loss, output.hidden_states[2], retain_graph=True)
    assert gradient.shape == output.hidden_states[2].shape
    return output.loss + (output.hidden_states[2] * gradient.detach()).sum() + output.hidden_states[3].norm() / 100


def with_a_cache_that_nobody_reads(module: Head, batch: Batch) -> Tensor:
    return module.model(**batch, use_cache=True).loss


def of_states_that_hooks_keep(module: Head, batch: Batch) -> Tensor:
    kept: list[Tensor] = []
    layer = module.model.model.layers[1]  # type: ignore[index, union-attr]
    handle = layer.register_forward_hook(lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    loss = of_the_model(module, batch)
    handle.remove()
    return loss + kept[-1].pow(2).mean() + F.cross_entropy(module.score(kept[-1].mean(1)), classes(batch))


def of_the_last_logits(module: Head, batch: Batch) -> Tensor:
    logits = module.model(**module.inputs(batch), logits_to_keep=5).logits
    assert logits.shape[1] == 5
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, -5:])


OF_SAMPLES = (
    of_the_model,
    shifted_by_slicing,
    divergence_from_a_teacher,
    focal,
    normalized_and_sure,
    first_token_classified,
    mean_classified,
    every_token_classified,
    of_the_last_logits,
)
"""Means over samples that are alike, so that microbatches' means are those of a batch."""
OF_BATCHES = (
    with_a_number_of_items,
    of_a_loss_module_with_smoothing,
    of_tokens_that_weigh_unlike,
    of_chosen_positions,
    one_hot,
    preference,
    last_token_scored,
    contrastive,
    penalized,
    beside_middle_layers,
    of_two_passes_of_unlike_lengths,
    on_disturbed_embeddings,
    behind_a_soft_prompt,
    by_the_weight_of_the_head,
    in_chunks_that_are_computed_again,
    by_the_gradient_of_a_middle_layer,
    with_a_cache_that_nobody_reads,
    of_states_that_hooks_keep,
)


def text(count: int, **options: Any) -> list[Batch]:
    return [CASES["llama"].batch(4, seed=seed, **options) for seed in range(count)]  # type: ignore[misc]


def losses_of_batches(run: Run) -> Any:
    losses = [*OF_SAMPLES, *OF_BATCHES]
    return steps(run, Head(losses), text(len(losses)))


def losses_of_divided_layers(run: Run) -> Any:
    """Those that use a layer's weight through its layer."""
    losses = [loss for loss in (*OF_SAMPLES, *OF_BATCHES) if loss not in (penalized, by_the_weight_of_the_head)]
    return steps(run, Head(losses), text(len(losses)))


def losses_of_samples(run: Run) -> Any:
    return steps(run, Head([*OF_SAMPLES]), text(len(OF_SAMPLES)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_losses_of_a_users_own_are_those_of_one_process(mode: str) -> None:
    layout = shared(cp_mode=mode)
    same_steps(outcomes(layout, losses_of_batches, num_microbatches=1)["losses_of_batches"])


@pytest.mark.usefixtures("float64")
def test_losses_of_a_users_own_are_those_of_one_process_with_sequence_shards() -> None:
    """Ranks 0-1 and 2-3 are tensor parallel, and share the tokens of their context parallel rank."""
    layout = shared(4, tp_size=2, sequence_parallel=True)
    outcome = outcomes(layout, losses_of_divided_layers, num_microbatches=1)["losses_of_divided_layers"]
    assert_same(outcome.ranks[0]["weights"], outcome.one["weights"], 1e-6)
    for rank in outcome.ranks:
        assert_same(rank["losses"], outcome.one["losses"], 1e-6)


@pytest.mark.usefixtures("float64")
def test_losses_of_a_users_own_are_those_of_one_process_in_pipelines() -> None:
    """ranks 0-1 and 2-3 as stages; two microbatches."""
    same_steps(outcomes(PIPE, losses_of_samples)["losses_of_samples"])


class Taught(TinyModule):
    """Beside a frozen model that reads the same config object."""

    def __init__(self) -> None:
        super().__init__(CASES["llama"].build().model, use_cache=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.teacher = type(self.model)(self.model.config).requires_grad_(False).eval()  # type: ignore[operator]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = {**self.fixed, "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        with torch.no_grad():
            teacher = self.teacher(**inputs).logits.log_softmax(-1)
        return F.kl_div(self.model(**inputs).logits.log_softmax(-1), teacher, log_target=True, reduction="batchmean")


def taught(run: Run) -> Any:
    return steps(run, Taught(), text(2))


@pytest.mark.usefixtures("float64")
def test_another_model_of_the_module_sees_whole_sequences() -> None:
    layout = Layout({"language": Modality(cp_size=2, module="model")}, 2)
    same_steps(outcomes(layout, taught)["taught"])


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
    from tensor_parallel.test_adapters import adapt, at_both_ends, beside_a_trained_norm  # noqa: PLC0415

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


class Stream(IterableDataset):
    """Batches whose sequences are of another length each time."""

    def __init__(self, lengths: tuple[int, ...], samples: int = 4) -> None:
        self.lengths, self.samples = lengths, samples

    def __iter__(self) -> Iterator[Batch]:
        for seed, length in enumerate(self.lengths):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(FIRST_TEXT_ID, VOCABULARY, (self.samples, length), generator=generator)
            mask = torch.ones_like(ids)
            for sample in range(self.samples):  # padded unlike, so that microbatches have unlike masks
                mask[sample, max(2, length - 2 * sample) :] = 0
            yield {
                "input_ids": ids.masked_fill(mask == 0, PAD),
                "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100),
            }


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
            input_ids=batch["input_ids"], attention_mask=None, position_ids=positions, labels=batch["labels"], **self.fixed
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
    from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415

    return MistralForCausalLM(MistralConfig(**TINY, sliding_window=5))


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM  # noqa: PLC0415

    config = Gemma2Config(**TINY, head_dim=8, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=10.0)
    config._attn_implementation = "eager"  # torch's attention knows no caps
    return Gemma2ForCausalLM(config)


def llama4(**options: Any) -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig  # noqa: PLC0415

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
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415

    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, **options)).float()


def balanced() -> nn.Module:
    return mixtral(output_router_logits=True, router_aux_loss_coef=2.0)


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM  # noqa: PLC0415

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
        same_steps(outcomes(layout, of(MODELS[name]), num_microbatches=1)["scenario"], 1e-4 if name.startswith("experts") else 1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [4, 8])
def test_queries_that_are_scaled_by_positions_counted_inside_a_layer_are_right_or_refused(scale: int) -> None:
    """Llama 4 counts positions in its layers without rotary embeddings, which matter behind the first `scale`."""
    scenario = of(lambda: llama4(attn_temperature_tuning=True, floor_scale=scale))
    try:
        outcome = outcomes(PAIR, scenario, num_microbatches=1)["scenario"]
    except AssertionError as error:
        assert "ConfigError" in str(error)
        return
    same_steps(outcome)
