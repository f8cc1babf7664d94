"""A tiny mixture of experts, trained on one process and on ranks that share its experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
import transformers as hf
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mm5d import Modality
from parity.harness import fit, strategy

STEPS, SAMPLES, LENGTH, VOCABULARY = 2, 4, 6, 64
TENSORS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a package that warns of names that another package is about to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(*args)


class Mixture(L.LightningModule):
    """A causal model whose layers have experts.

    Args:
        layers: how many.
        experts: of each of them.
        implementation: of the experts.
        router_loss: whether the loss has that of the routers.
        frozen: parts of the names of frozen parameters.
        adapters: names of tensors with low-rank adapters; None has no adapters at all.
        checkpoints: the kind of transformers' own gradient checkpointing: ``reentrant`` or ``non-reentrant``.
    """

    def __init__(
        self,
        *,
        layers: int = 2,
        experts: int = 5,
        implementation: str = "eager",
        router_loss: bool = True,
        frozen: str = "",
        adapters: tuple[str, ...] | None = None,
        checkpoints: str = "",
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = hf.Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=experts,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            output_router_logits=router_loss,
            router_aux_loss_coef=0.1,
        )
        config._experts_implementation = implementation
        self.model: Any = hf.Qwen3MoeForCausalLM(config)
        if adapters is not None:
            import peft

            low_rank = peft.LoraConfig(
                r=2, target_modules=["q_proj"], target_parameters=list(adapters) or None, init_lora_weights=False
            )
            self.model = quiet(peft.get_peft_model, self.model, low_rank)
        if checkpoints:
            options = {"use_reentrant": checkpoints == "reentrant"}
            quiet(self.model.gradient_checkpointing_enable, options)
        for name, parameter in self.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # far from the sign of a gradient, whose last digits depend on the order of sums
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-2)


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A layout, and what is trained in it.

    Attributes:
        ranks: of the layout.
        replicas: that have batches of their own.
        fields: of the modality.
        module: arguments of the module.
        options: of the strategy.
        trainer: options of the trainer.
        microbatches: of each replica.
        cls: of the module.
    """

    ranks: int = 2
    replicas: int = 2
    fields: dict[str, Any] = field(default_factory=lambda: {"ep_size": 2})
    module: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    cls: type[Mixture] = Mixture

    @property
    def alone(self) -> Composition:
        """The same training in one process, which sees the same microbatches."""
        options = {key: value for key, value in self.options.items() if key != "schedule"}
        count = self.replicas * self.microbatches
        return replace(self, ranks=1, replicas=1, fields={}, options=options, microbatches=count)

    def batches(self) -> list[dict[str, Tensor]]:
        """One for each step and replica."""
        found = []
        for seed in range(STEPS * self.trainer.get("accumulate_grad_batches", 1)):
            drawn = torch.Generator().manual_seed(seed)
            ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=drawn)
            found += [{"input_ids": part, "labels": part.clone()} for part in ids.chunk(self.replicas)]
        return found


def build(composition: Composition) -> Mixture:
    torch.set_default_dtype(torch.float64)
    return composition.cls(**composition.module)


def run(module: Mixture, composition: Composition, *callbacks: Callback) -> None:
    """Train a module on this rank."""
    chosen = strategy(
        {"language": Modality(**composition.fields)}, num_microbatches=composition.microbatches, **composition.options
    )
    fit(
        module,
        composition.batches(),
        chosen,
        composition.ranks,
        in_order=True,
        callbacks=list(callbacks),
        **composition.trainer,
    )


def trained(rank: int, composition: Composition) -> dict[str, Tensor] | None:
    """Parameters after a training; None on ranks but the first."""
    module = build(composition)
    run(module, composition)
    return dict(module.state_dict()) if rank == 0 else None
