"""Experts that ranks share train as in one process, whatever else happens in a stage."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import path_of
from lightning_mm5d.stage.deferred import Deferred
from ranks import call_ranks

from .composed_training import TENSORS, Composition, Mixture, build, run, trained

SPLIT = {"layers": 4, "router_loss": False}  # over two stages
PIPED = {"ep_size": 2, "pp_size": 2}
LORA = {"adapters": TENSORS}


pytestmark = pytest.mark.usefixtures("float64")


class OnlyExperts(Mixture):
    """Nothing but experts is trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("experts" in name)


class InGroups(Mixture):
    """Experts and the rest are groups of parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[list[nn.Parameter]] = [[], []]
        for name, parameter in self.named_parameters():
            groups["experts" in name].append(parameter)
        chosen = [{"params": groups[0], "lr": 0.003}, {"params": groups[1], "lr": 0.02, "weight_decay": 0.1}]
        return torch.optim.AdamW(chosen, eps=1e-2)


class Penalty(Mixture):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        used = self.model.model.layers[0].mlp.experts
        return super().training_step(batch, batch_idx) + 0.1 * used.down_proj.square().sum()


class Logged(Mixture):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("norm", self.model.model.layers[1].mlp.experts.gate_up_proj.detach().norm())
        return super().training_step(batch, batch_idx)


class Clamped(Mixture):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Saliency(Mixture):
    """Takes a gradient by itself, of a pass that is not part of its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        logits = self.model(inputs_embeds=embedded, use_cache=False).logits
        torch.autograd.grad(logits.sum(), embedded)
        return super().training_step(batch, batch_idx)


class TwoPasses(Mixture):
    """Calls its model twice, and once more without a gradient."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        flipped = {name: tensor.flip(1) for name, tensor in batch.items()}
        with torch.no_grad():
            wanted = self.model(**batch, use_cache=False).logits
        found = self.model(**flipped, use_cache=False)
        return super().training_step(batch, batch_idx) + found.loss + (found.logits - wanted).square().mean()


class CallsLayersTwice(Mixture):
    """Runs each of its layers twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        model = self.model.model
        model.layers = nn.ModuleList([*model.layers, *model.layers])
        model.config.num_hidden_layers = len(model.layers)


COMPOSITIONS = {
    "split backward": Composition(
        ranks=4, fields=PIPED, module=SPLIT, microbatches=2, options={"schedule": "zero_bubble"}
    ),
    # rows of experts and of the rest are summed over the same ranks
    "shared states in blocks": Composition(
        ranks=4, replicas=4, fields={"ep_size": 2, "zero_stage": 1, "dp_shard_size": 2}
    ),
    "adapters": Composition(fields={"ep_size": 2, "activation_checkpointing": "full"}, module=LORA, microbatches=2),
    "adapters of one expert a rank": Composition(module={"experts": 2, **LORA}),
}
MORE = {
    "zbv": Composition(ranks=4, fields=PIPED, module=SPLIT, microbatches=2, options={"schedule": "zbv"}),
    "split backward, computed again": Composition(
        ranks=4,
        fields=PIPED | {"activation_checkpointing": "full"},
        module=SPLIT,
        microbatches=2,
        options={"schedule": "zero_bubble"},
    ),
    "split backward, batched products": Composition(
        ranks=4,
        fields=PIPED,
        module=SPLIT | {"implementation": "batched_mm"},
        microbatches=2,
        options={"schedule": "zero_bubble"},
    ),
    "split backward without shared experts": Composition(
        replicas=1, fields={"pp_size": 2}, module=SPLIT, microbatches=2, options={"schedule": "zero_bubble"}
    ),
    "offloaded activations": Composition(
        ranks=4, fields=PIPED | {"offload": "activations"}, module=SPLIT, microbatches=2
    ),
    "every second layer": Composition(fields={"ep_size": 2, "activation_checkpointing": {"every": 2}}),
    "one layer": Composition(fields={"ep_size": 2, "activation_checkpointing": {"layers": [1]}}),
    "per stage": Composition(
        ranks=4,
        fields=PIPED | {"activation_checkpointing": {"per_stage": ["full", "none"]}},
        module=SPLIT,
        microbatches=2,
    ),
    "selective": Composition(fields={"ep_size": 2, "activation_checkpointing": "selective"}, microbatches=2),
    "gathered layer by layer": Composition(
        fields={"ep_size": 2, "zero_stage": 3, "reshard_after_forward": True, "activation_checkpointing": "full"},
        microbatches=2,
    ),
    "frozen experts": Composition(module={"frozen": "experts"}),
    "frozen routers": Composition(module={"frozen": "gate.weight"}),
    "only experts": Composition(cls=OnlyExperts),
    "groups of parameters": Composition(cls=InGroups),
    "two passes": Composition(cls=TwoPasses),
    "two passes, computed again": Composition(
        fields={"ep_size": 2, "activation_checkpointing": "full"}, cls=TwoPasses, microbatches=2
    ),
    "layers twice": Composition(cls=CallsLayersTwice, module={"router_loss": False}),
    "layers twice, computed again": Composition(
        fields={"ep_size": 2, "activation_checkpointing": "full"},
        cls=CallsLayersTwice,
        module={"router_loss": False},
        microbatches=2,
    ),
    "clipping and accumulation": Composition(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
    "clipping by value": Composition(trainer={"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "compiled": Composition(fields={"ep_size": 2, "compile": "aot_eager"}),
    "ulysses": Composition(replicas=1, fields={"ep_size": 2, "cp_size": 2, "cp_mode": "ulysses"}),
    "ring": Composition(replicas=1, fields={"ep_size": 2, "cp_size": 2, "cp_mode": "ring"}),
    "adapters of attention": Composition(module={"adapters": ()}),
    "adapters of routers": Composition(module={"adapters": ("mlp.gate.weight",)}),
    "adapters of one tensor": Composition(module={"adapters": TENSORS[1:]}),
    "adapters in two blocks": Composition(ranks=4, replicas=4, module=LORA),
    "adapters, shared": Composition(fields={"ep_size": 2, "zero_stage": 3}, module=LORA, microbatches=2),
    "adapters, context": Composition(replicas=1, fields={"ep_size": 2, "cp_size": 2}, module=LORA),
    "adapters, transformers' checkpointing": Composition(module=LORA | {"checkpoints": "non-reentrant"}),
    "adapters, split backward": Composition(
        ranks=4, fields=PIPED, module=SPLIT | LORA, microbatches=2, options={"schedule": "zero_bubble"}
    ),
}
TENSOR_PARALLEL = {  # norms and routers of transformers drop to float32
    "tensor parallel": {"ep_size": 2, "tp_size": 2},
    "divided experts": {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2},
    "sequence parallel": {"ep_size": 2, "tp_size": 2, "sequence_parallel": True, "activation_checkpointing": "full"},
}


def assert_parity(composition: Composition, atol: float = 1e-9) -> None:
    (expected,) = call_ranks(1, trained, composition.alone)
    found = call_ranks(composition.ranks, trained, composition)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_trains_as_one_process(name: str) -> None:
    assert_parity(COMPOSITIONS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_everything_else_trains_as_one_process(name: str) -> None:
    assert_parity(MORE[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", [{}, LORA], ids=["plain", "adapters"])
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallel_ranks_train_as_one_process(name: str, module: dict[str, Any]) -> None:
    fields = TENSOR_PARALLEL[name]
    if not module or "expert_tp_size" not in fields:
        assert_parity(Composition(ranks=4, fields=fields, module=module), atol=1e-7)


# --- a split backward ---


class PutOff(Callback):
    """Notes which parameters have weight gradients to come when an action begins to compute them."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        known, compute = {id(p): name for name, p in pl_module.named_parameters()}, Deferred.compute

        def noted(due: Deferred) -> None:
            self.names.append({known[id(weight)] for weight in due.weights if weight.grad is None})
            compute(due)

        Deferred.compute = noted  # type: ignore[method-assign]
        self._restore = compute

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        Deferred.compute = self._restore  # type: ignore[method-assign]


def put_off(rank: int, composition: Composition) -> list[set[str]]:
    seen = PutOff()
    run(build(composition), composition, seen)
    return seen.names


def test_the_input_gradient_pass_computes_no_weight_gradient_of_experts() -> None:
    """Nothing has added to ``.grad`` of any expert when the first weight gradients of a step are computed."""
    split = [names for names in call_ranks(4, put_off, COMPOSITIONS["split backward"]) if names]
    assert len(split) == 2  # the ranks of the last stage; none waits for input gradients of the first one
    for names in split:
        experts = {name for name in names[0] if "experts" in name}
        assert len(experts) == 4  # two tensors in each of the stage's two layers


# --- layers that are computed again ---


class Alive(Mixture):
    """Counts what the experts' activations were given in a forward, and what is left of it at its end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counts: list[tuple[int, int]] = []
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        for name, module in self.named_modules():
            if name.endswith("experts.act_fn"):
                module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.seen.append(weakref.ref(args[0].untyped_storage()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.clear()
        loss = super().training_step(batch, batch_idx)
        gc.collect()
        self.counts.append((len(self.seen), sum(one() is not None for one in self.seen)))
        return loss


def alive(rank: int, compositions: list[Composition]) -> list[list[tuple[int, int]]]:
    found = []
    for composition in compositions:
        module = build(composition)
        assert isinstance(module, Alive)
        run(module, composition)
        found.append(module.counts)
    return found


def test_layers_that_are_computed_again_keep_nothing_of_experts() -> None:
    again = [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}, {}, {}]
    kinds = ["", "", "reentrant", "non-reentrant"]
    cases = [
        Composition(fields={"ep_size": 2} | fields, module={"checkpoints": kind}, cls=Alive)
        for fields, kind in zip(again, kinds, strict=True)
    ]
    for kept, *others in call_ranks(2, alive, [Composition(cls=Alive), *cases]):
        assert all(left == seen > 0 for seen, left in kept)
        for counts in others:
            assert all(left == 0 < seen for seen, left in counts)


# --- what is refused ---


def refusal(rank: int, composition: Composition) -> str:
    with pytest.raises(ConfigError) as found:
        run(build(composition), composition)
    return str(found.value)


@pytest.mark.parametrize("cls", [Penalty, Logged, Clamped, Saliency])
def test_a_step_that_reads_or_differentiates_experts_is_refused(cls: type[Mixture]) -> None:
    for message in call_ranks(2, refusal, Composition(cls=cls)):
        assert "mlp.experts" in message
        assert "ep_size=1" in message


REFUSED = {
    "expert_tp_size": {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2},
    "reshard_after_forward": {"ep_size": 2, "zero_stage": 3, "reshard_after_forward": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_on_experts_are_refused_before_processes_start(name: str) -> None:
    composition = Composition(ranks=2 * REFUSED[name].get("tp_size", 1), fields=REFUSED[name], module=LORA)
    with pytest.raises(ConfigError, match=f"modalities.language.{path_of(name)}: got"):
        run(build(composition), composition)


def test_a_hook_on_the_gradient_of_experts_is_refused() -> None:
    composition = Composition()
    module = build(composition)
    module.model.model.layers[0].mlp.experts.down_proj.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ConfigError, match=r"experts\.down_proj\.register_hook.*ep_size=1"):
        run(module, composition)
