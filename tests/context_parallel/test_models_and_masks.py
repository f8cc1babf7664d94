"""Models whose masks are no plain triangle, and layers that call torch's attention, train as on one process.

Unless a test says otherwise, its ranks 0-1 share each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from context_parallel.runs import Stream, same_steps, shared, steps
from features.toys import Layout, Outcome, Run, outcomes
from lightning_mm5d import Modality
from sweeps import every, swept
from zoo import CASES
from zoo.case import FIRST_TEXT_ID, VOCABULARY, Batch, TinyModule
from zoo.handwritten import Layer, OwnLayers
from zoo.text import LLAMA

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
@pytest.mark.parametrize(("name", "how"), every(2, ["llama", "qwen2_vl"], ["makespan_min", "uniform"]))
def test_packed_documents_are_those_of_one_process(name: str, how: str) -> None:
    def scenario(run: Run) -> Any:
        module = Packed(CASES[name].build().model, use_cache=False)
        batches = [documents(5, 9, 4, samples=2, seed=0), documents(12, 1, 3, 8, samples=2, seed=1)]
        return steps(run, module, batches)

    modalities = {"language": Modality(cp_size=2, context={"cp_distribution": how})}
    if name == "qwen2_vl":
        modalities = {"vision": Modality(colocate_with="language"), **modalities}
    same_steps(outcomes(Layout(modalities, 2), scenario, num_microbatches=1)["scenario"])


@pytest.mark.usefixtures("float64")
def test_attention_that_says_it_is_not_causal_sees_what_it_sees_on_one_process() -> None:
    """Where nothing is padded, one process makes no mask and asks the layer; so the second batch sees all keys."""

    def scenario(run: Run) -> Any:
        module = Packed(CASES["llama"].build().model, use_cache=False)
        for layer in module.model.model.layers:
            layer.self_attn.is_causal = False
        return steps(run, module, [documents(5, 9, samples=2, seed=0), documents(14, samples=2, seed=1)])

    same_steps(outcomes(Layout({"language": Modality(cp_size=2)}, 2), scenario, num_microbatches=1)["scenario"])


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
@pytest.mark.parametrize("name", swept(MODELS, "windows", "experts"))
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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layer", [Inherited, ByMethod, ByFunction], ids=lambda layer: layer.__name__)
def test_torchs_attention_is_found_wherever_a_layer_calls_it(layer: type[nn.Module]) -> None:
    layout = Layout({"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}, 2)

    def scenario(run: Run) -> Any:
        return steps(run, OwnLayers(partial(layer, causal=True)), Stream((16, 11)))

    same_steps(outcomes(layout, scenario, num_microbatches=1)["scenario"], 1e-9)


class Recomputing(OwnLayers):
    """Computes each of its layers, which call torch's attention by themselves, again for the backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__(partial(Layer, causal=True))
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
