"""A loss of a user's own over shared sequences, and its gradients, are those of one process, however it is written.

Each step of a run has another loss: of logits, of hidden states behind the layers and between them, with heads of the
LightningModule's own. Unless a test says otherwise, its ranks 0-1 share each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from context_parallel.runs import PIPE, same_steps, shared, steps, text
from features.toys import Layout, Run, assert_same, outcomes
from lightning_mm5d import Modality
from sweeps import swept
from zoo import CASES
from zoo.case import VOCABULARY, Batch, TinyModule
from zoo.text import LLAMA

WIDTH = LLAMA["hidden_size"]


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

    def weigh(self, first: float, last: float, count: int) -> Tensor:
        return torch.linspace(first, last, count, device=self.device)

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
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, weight=module.weigh(1, 2, VOCABULARY), ignore_index=-100)
    criterion.label_smoothing = 0.1
    return criterion(module.logits(batch)[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


def of_tokens_that_weigh_unlike(module: Head, batch: Batch) -> Tensor:
    logits = module.logits(batch)[:, :-1].flatten(0, 1)
    losses = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none")
    weight = module.weigh(0.5, 1.5, losses.numel())
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
    other = F.normalize(
        module.project(module.hidden({**batch, "input_ids": batch["input_ids"].flip(0)})[:, -1]), dim=-1
    )
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def penalized(module: Head, batch: Batch) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return of_the_model(module, batch) + 1e-2 * sum(p.pow(2).sum() for p in parameters)


def beside_middle_layers(module: Head, batch: Batch) -> Tensor:
    output = module.model(**module.inputs(batch), output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == 5
    early = module.model.lm_head(states[2])[:, :-1].flatten(0, 1)  # type: ignore[operator, union-attr]
    loss = F.cross_entropy(early, batch["labels"][:, 1:].flatten()) + states[0].pow(2).mean()
    likeness = F.cosine_similarity(states[1], states[3], dim=-1).mean()
    return (
        loss
        + likeness
        + F.mse_loss(states[4], states[3].detach())
        + F.cross_entropy(module.score(states[1][:, 0]), classes(batch))
    )


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
"""Means over equal samples, so that microbatches' means are those of a batch."""
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


def losses_of_batches(run: Run) -> Any:
    losses = [*OF_SAMPLES, *OF_BATCHES]
    return steps(run, Head(losses), text(len(losses)))


def losses_of_divided_layers(run: Run, half: int) -> Any:
    """Every other one of those that use a layer's weight through its layer."""
    losses = [loss for loss in (*OF_SAMPLES, *OF_BATCHES) if loss not in (penalized, by_the_weight_of_the_head)][
        half::2
    ]
    return steps(run, Head(losses), text(len(losses)))


def even_losses_of_divided_layers(run: Run) -> Any:
    return losses_of_divided_layers(run, 0)


def odd_losses_of_divided_layers(run: Run) -> Any:
    return losses_of_divided_layers(run, 1)


def losses_of_samples(run: Run) -> Any:
    return steps(run, Head([*OF_SAMPLES]), text(len(OF_SAMPLES)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", swept(["ring", "ulysses"], "ulysses"))
def test_losses_of_a_users_own_are_those_of_one_process(mode: str) -> None:
    layout = shared(cp_mode=mode)
    same_steps(outcomes(layout, losses_of_batches, num_microbatches=1)["losses_of_batches"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "losses", [even_losses_of_divided_layers, pytest.param(odd_losses_of_divided_layers, marks=pytest.mark.exhaustive)]
)
def test_losses_of_a_users_own_are_those_of_one_process_with_sequence_shards(losses: Callable[[Run], Any]) -> None:
    """Ranks 0-1 and 2-3 are tensor parallel, and share the tokens of their context parallel rank."""
    layout = shared(4, tp_size=2, sequence_parallel=True)
    outcome = outcomes(layout, losses, num_microbatches=1)[losses.__name__]
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
