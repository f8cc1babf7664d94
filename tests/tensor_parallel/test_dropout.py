"""Values that are divided are dropped by masks of each rank's own, replicated ones by the same mask on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lightning import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from features.toys import Layout, Run, assert_same, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.data.random_state import torch_states
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.tensor_parallel.region import Region, drops
from parity.harness import Batches
from tensor_parallel.families import FAMILIES, Family, Root
from tensor_parallel.family_inputs import source_and_target
from tensor_parallel.family_sizes import BART_SIZES
from zoo.case import TinyModule
from zoo.text import LLAMA, padded_batch

WHOLE, ATTENTION, INNER = 0.1, 0.2, 0.3  # rates of replicated values, attention weights, and inside a MLP
SHARDS = Layout({"language": Modality(tp_size=2, tensor={"sequence_parallel": True})}, 2)
WHOLES = Layout({"language": Modality(tp_size=2)}, 2)
Drawn = list[tuple[float, Tensor]]


@contextmanager
def recorded(drawn: Drawn) -> Iterator[None]:
    """Note the rate and the mask, of this rank's part, of every dropout."""
    original = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0 or not torch.is_grad_enabled():  # in the comparison of the first batch
            return x
        with patch.object(F, "dropout", original):  # which tells a `Sharded` its own name
            mask = original(x.detach() * 0 + 1, p)
        drawn.append((p, (mask.local if isinstance(mask, Sharded) else mask) != 0))
        return x * mask

    with patch.object(F, "dropout", dropout):
        yield


class Noted(TinyModule):
    """Notes the state of the generator at the end of each microbatch."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__(model, use_cache=False, **fixed)
        self.states: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.states.append(torch.get_rng_state())
        return loss


def bart() -> Noted:
    """Drops everywhere; 49 values inside a MLP, so that ranks draw different numbers of them."""
    rates = {"dropout": WHOLE, "attention_dropout": ATTENTION, "activation_dropout": INNER}
    sizes: dict[str, Any] = BART_SIZES | {"encoder_ffn_dim": 49, "decoder_ffn_dim": 49} | rates
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = hf.BartConfig(**sizes, attn_implementation="eager")
        return Noted(hf.BartForConditionalGeneration(config))


def llama() -> Noted:
    """The last thing that a layer keeps for its backward is the input of its row layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = hf.LlamaConfig(**LLAMA, attention_dropout=ATTENTION, attn_implementation="eager")
        return Noted(hf.LlamaForCausalLM(config))


def adapted() -> Noted:
    """Only its adapters drop; 47 values inside a MLP."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA | {"intermediate_size": 47}))
        names = ["q_proj", "o_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=2, target_modules=names, lora_dropout=WHOLE, init_lora_weights=False)
        return Noted(peft.get_peft_model(model, config))


def run_once(run: Run, module: Noted, batches: list[Any], seed: int = 1) -> dict[str, Any]:
    seed_everything(seed, verbose=False)
    drawn: Drawn = []
    with recorded(drawn):
        trainer = run.trainer(use_distributed_sampler=False)
        trainer.fit(module, DataLoader(Batches(batches), batch_size=None))
    return {"drawn": drawn, "states": module.states, "weights": weights(module)}


def sources() -> list[Any]:
    torch.manual_seed(0)
    return [source_and_target() for _ in range(2)]


def texts() -> list[Any]:
    torch.manual_seed(0)
    return [padded_batch([0] * 4) for _ in range(2)]


def checkpointed(module: Noted) -> Noted:
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return module


def of_models(run: Run) -> dict[str, Any]:
    return {
        "first": run_once(run, bart(), sources()),
        "again": run_once(run, bart(), sources()),
        "other": run_once(run, bart(), sources(), seed=2),
        "checkpointed": run_once(run, checkpointed(bart()), sources()),
        "llama": run_once(run, llama(), texts()),
        "checkpointed llama": run_once(run, checkpointed(llama()), texts()),
    }


def of_adapters(run: Run) -> dict[str, Any]:
    return run_once(run, adapted(), texts())


def everything(run: Run) -> dict[str, Any]:
    shards = Run(SHARDS, run.options)
    return {
        "wholes": of_models(run),
        "shards": of_models(shards),
        "adapters": {"wholes": of_adapters(run), "shards": of_adapters(shards)},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """language: ranks 0-1, tensor parallel, with whole sequences and with shards of them."""
    torch.set_default_dtype(torch.float64)
    try:
        return together(WHOLES, everything)
    finally:
        torch.set_default_dtype(torch.float32)


def masks(result: dict[str, Any], rate: float) -> list[Tensor]:
    return [mask for p, mask in result["drawn"] if p == rate]


def differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_ranks_draw_for_what_they_have_and_alike_for_what_all_have(kind: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[kind]["first"] for rank in ranks)
    assert [p for p, _ in first["drawn"]] == [p for p, _ in second["drawn"]]
    for rate in (ATTENTION, INNER):
        pairs = list(zip(masks(first, rate), masks(second, rate), strict=True))
        assert len(pairs) >= 4
        assert all(differ(*pair) for pair in pairs)
    pairs = list(zip(masks(first, WHOLE), masks(second, WHOLE), strict=True))
    shared = [pair for pair in pairs if pair[0].shape == pair[1].shape and torch.equal(*pair)]
    if kind == "wholes":
        assert len(shared) == len(pairs) >= 8
    else:
        assert 0 < len(shared) < len(pairs), "embeddings are whole, the hidden states of layers are not"
    for rate in (WHOLE, ATTENTION, INNER):
        kept = torch.cat([mask.flatten() for rank in (first, second) for mask in masks(rank, rate)]).double().mean()
        assert float(kept) == pytest.approx(1 - rate, abs=0.02)


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_generators_agree_at_the_end_of_every_microbatch(kind: str, ranks: list[dict[str, Any]]) -> None:
    for results in (*zip(*(rank[kind].values() for rank in ranks), strict=True),):
        first, second = (result["states"] for result in results)
        assert len(first) == 4
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_masks_differ_between_layers_and_microbatches(kind: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = [mask for mask in masks(rank[kind]["first"], INNER)]
        assert len(found) == 16  # four layers, four microbatches
        assert all(differ(one, other) for i, one in enumerate(found) for other in found[:i])


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_a_seed_repeats_a_run_and_another_does_not(kind: str, ranks: list[dict[str, Any]]) -> None:
    results = ranks[0][kind]
    assert_same(results["again"]["weights"], results["first"]["weights"], 0.0)
    with pytest.raises(AssertionError):
        assert_same(results["other"]["weights"], results["first"]["weights"], 1e-6)


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_recomputed_layers_drop_the_same_values(kind: str, ranks: list[dict[str, Any]]) -> None:
    results = ranks[0][kind]
    for first in ("first", "llama"):
        again = results["checkpointed" if first == "first" else "checkpointed llama"]
        assert len(again["drawn"]) > len(results[first]["drawn"])
        assert_same(again["weights"], results[first]["weights"], 1e-12)


@pytest.mark.parametrize("kind", ["wholes", "shards"])
def test_adapters_of_column_layers_drop_alike_and_those_of_row_layers_apart(
    kind: str, ranks: list[dict[str, Any]]
) -> None:
    first, second = (rank["adapters"][kind] for rank in ranks)
    pairs = list(zip(masks(first, WHOLE), masks(second, WHOLE), strict=True))
    at_columns = [pair for pair in pairs if pair[0].shape[-1] == LLAMA["hidden_size"]]
    at_rows = [pair for pair in pairs if pair[0].shape[-1] != LLAMA["hidden_size"]]
    assert len(at_columns) == len(at_rows) == 2 * 4 * 4  # projections, layers, microbatches
    assert all(differ(*pair) for pair in at_rows)
    assert all(differ(*pair) == (kind == "shards") for pair in at_columns)
    assert len(first["states"]) == 4
    assert all(torch.equal(*pair) for pair in zip(first["states"], second["states"], strict=True))


# --- streams ---


class Alone(SimpleNamespace):
    """A group of one rank out of two, which adds nothing."""

    size = 2

    def sum(self, tensor: Tensor, *, in_place: bool = False) -> Tensor:
        return tensor.clone()


def region(index: int = 0, *, drops: bool = True) -> Region:
    return Region(Alone(index=index), drops=drops, device=torch.device("cpu"))  # type: ignore[arg-type]


def test_without_dropout_no_stream_is_switched() -> None:
    one, x = region(drops=False), torch.ones(2, 3)
    before = torch.get_rng_state()
    with patch("lightning_mm5d.tensor_parallel.region.torch_states", side_effect=AssertionError):
        one.enter(x, training=True)
        one.leave(x)
        with one.inside(), one.outside():
            pass
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_leaves_the_generator_alone() -> None:
    one, x = region(), torch.ones(2, 3)
    before = torch.get_rng_state()
    one.enter(x, training=False)
    one.leave(x)
    assert torch.equal(torch.get_rng_state(), before)


def draws(index: int, numbers: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank that draws `numbers` numbers for itself draws inside a region, and outside of it."""
    torch.manual_seed(0)
    one, x = region(index), torch.ones(2, 3)
    inside, outside = [], []
    for _ in range(2):
        one.enter(x, training=True)
        inside.append(torch.rand(numbers))
        with one.outside():
            outside.append(torch.rand(3))
        inside.append(torch.rand(numbers))
        one.enter(x, training=True)
        one.leave(x)
        with one.inside():
            inside.append(torch.rand(numbers))
        outside.append(torch.rand(3))
    return inside, outside


def test_ranks_draw_apart_inside_a_region_and_alike_outside() -> None:
    (own, common), (others, same) = draws(0, 5), draws(1, 7)
    assert all(torch.equal(*pair) for pair in zip(common, same, strict=True))
    everything = [tuple(numbers[:3].tolist()) for numbers in (*own, *others, *common)]
    assert len(set(everything)) == len(everything)


def test_an_error_in_a_row_layer_ends_the_region() -> None:
    """As where checkpointing stops a recomputation behind the last tensor that is needed."""
    one, x = region(), torch.ones(2, 3)
    torch.manual_seed(0)
    one.enter(x, training=True)
    with pytest.raises(KeyboardInterrupt), one.closing():
        raise KeyboardInterrupt
    after = torch.rand(3)
    torch.manual_seed(0)
    torch.randint(0, 2**62, ())
    assert torch.equal(after, torch.rand(3))
    with patch("lightning_mm5d.tensor_parallel.region.torch_states", wraps=torch_states) as states:
        one.enter(x, training=True)
        assert states.called, "the next region draws from the rank's own stream again"
    one.leave(x)


# --- what drops ---


class ByConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class MyDropout(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.keep_out = rate

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) >= self.keep_out)


class ByConfig(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(attn_pdrop=rate, summary_first_dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.attn_pdrop, self.training)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout(1), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (ByConstant(), True),
        (MyDropout(0.2), True),
        (MyDropout(0.0), False),
        (ByConfig(0.1), True),
        (ByConfig(0.0), False),
        (nn.Linear(2, 2), False),
    ],
    ids=lambda value: str(value).splitlines()[0],
)
def test_a_rate_counts_wherever_it_is_kept(module: nn.Module, expected: bool) -> None:
    assert drops(nn.Sequential(nn.Linear(2, 2), module)) is expected


def rates(config: Any) -> list[tuple[Any, str]]:
    """The rates of a configuration and of those in it, each with its holder."""
    found = []
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            found.append((config, name))
        elif hasattr(value, "to_dict"):
            found += rates(value)
    return found


NAMES = (
    *("bart", "bert", "bloom", "deberta", "falcon_heads", "gpt2", "gpt_neo", "gptj", "phi3", "t5", "wav2vec2", "swin"),
)


@pytest.mark.parametrize("name", NAMES)
def test_each_rate_of_a_family_that_drops_something_is_found(name: str) -> None:
    family: Family = FAMILIES[name]
    model: Any = family.build().model
    assert not drops(Root(model)), "all rates of the tests' families are 0"
    found = 0
    for holder, rate in rates(model.config):
        setattr(holder, rate, 0.5)
        root = Root(type(model)(model.config), family.fixed).train()
        dropped: list[float] = []

        def dropout(x: Tensor, p: float = 0.5, *_: Any, dropped: list[float] = dropped, **__: Any) -> Tensor:
            dropped.append(p)
            return x

        with (
            patch.object(F, "dropout", dropout),
            patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention,
        ):
            root(family.feed())
        dropped += [call.kwargs.get("dropout_p", 0.0) for call in attention.call_args_list]
        if any(p > 0 for p in dropped):
            found += 1
            assert drops(root), rate
        setattr(holder, rate, 0.0)
    assert found
