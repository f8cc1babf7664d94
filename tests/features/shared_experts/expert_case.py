"""What one tiny mixture of experts is, and how those of transformers are built.

Sizes are multiples of four, so that grouped matrix products work in float32. They know no float64 on the CPU, so
experts run in a loop here (`EAGER`). `BATCHED` is the other form that computes in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
import transformers as hf

from zoo.case import Batch, Case, Items, TinyModule, pad_right, text_batch
from zoo.text import LLAMA, PAD

EAGER, BATCHED, GROUPED = "eager", "batched_mm", "grouped_mm"
TEXT = LLAMA | {"num_hidden_layers": 3}


@dataclass(frozen=True, kw_only=True)
class ExpertCase(Case):
    """One tiny mixture of experts. Paths start at the LightningModule."""

    experts: tuple[str, ...]
    """Modules that hold experts."""
    count: int
    """Experts of each of them, or of the one that has the fewest."""
    exact: bool = False
    """Whether it computes in float64 throughout; norms, routers and losses of transformers drop to float32."""
    interface: bool = True
    """Whether its experts are of transformers' interface, which other implementations may compute."""

    def implemented(self, name: str) -> ExpertCase:
        """The same with another implementation of experts: `EAGER`, `BATCHED`, or `GROUPED` (float32 only)."""

        def make() -> L.LightningModule:
            module = self.make_module()
            module.model.set_experts_implementation(name)  # type: ignore[union-attr,operator]
            return module

        return replace(self, make_module=make)

    def router_loss(self, weight: float = 0.5) -> ExpertCase:
        """The same with the loss of its routers in its loss, for families that have one."""

        def make() -> L.LightningModule:
            module = self.make_module()
            config = module.model.config  # type: ignore[union-attr]
            text = config.get_text_config()
            for one in (config, text):
                one.output_router_logits = True
                one.router_aux_loss_coef = weight
            module.model.router_aux_loss_coef = weight  # type: ignore[union-attr]
            module.fixed = module.fixed | {"output_router_logits": True}  # type: ignore[operator]
            return module

        return replace(self, make_module=make)


def built(model: str, config: str, **options: Any) -> Callable[[], L.LightningModule]:
    """A model of transformers by the names of its class and its configuration's."""

    def make() -> L.LightningModule:
        settings = getattr(hf, config)(**options)
        settings._experts_implementation = EAGER  # passed on to the configurations of its parts
        made = getattr(hf, model)(settings)
        for parameter in made.parameters():  # some are float32 whatever the default dtype is
            parameter.data = parameter.data.to(torch.get_default_dtype())
        for name, tensor in made.state_dict().items():
            if name.endswith("e_score_correction_bias"):  # zero at the start; it shall matter which experts are chosen
                tensor.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
        return TinyModule(made, use_cache=False)

    return make


def padded(counts: list[int]) -> Batch:
    return pad_right(text_batch([0] * len(counts), length=12), PAD)


def written(counts: list[int]) -> Batch:
    """Text without padding, for states that run on over it."""
    return text_batch([0] * len(counts), length=14)


def causal(
    name: str, model: str, config: str, experts: tuple[str, ...], count: int, *, interface: bool = True, **options: Any
) -> ExpertCase:
    return ExpertCase(
        name=name,
        make_module=built(model, config, **(TEXT | options)),
        make_batch=padded,
        modalities=("language",),
        layers={"language": ("model.model.layers",)},
        experts=tuple(f"model.model.layers.{path}" for path in experts),
        count=count,
        interface=interface,
    )


def composed(
    name: str,
    model: str,
    config: str,
    batch: Callable[[list[int]], Batch],
    experts: tuple[str, ...],
    count: int,
    *,
    vision: str,
    items: tuple[Items, ...],
    interface: bool = True,
    audio: str | None = None,
    language: str = "model.model.language_model",
    boundaries: Mapping[str, str] | None = None,
    **parts: Any,
) -> ExpertCase:
    encoders = {"vision": vision} | ({"audio": audio} if audio else {})
    return ExpertCase(
        name=name,
        make_module=built(model, config, **parts),
        make_batch=batch,
        modalities=(*encoders, "language"),
        layers={key: (path,) for key, path in encoders.items()} | {"language": (f"{language}.layers",)},
        boundaries=boundaries or {"vision": "model.model.get_image_features"},
        experts=tuple(f"{language}.layers.{path}" for path in experts),
        count=count,
        interface=interface,
        items=items,
        image_counts=(0, 1, 2),
    )
