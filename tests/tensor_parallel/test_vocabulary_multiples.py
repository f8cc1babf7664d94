"""Vocabularies in multiples (`make_vocab_size_divisible_by`) give the results of one process in every layout.

Of 70 rows in multiples of 20 two ranks hold 40 and 30, three 40, 20 and 10; the last one pads its products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compare import tolerance
from features.toys import Run, alone, assert_same, figures, together, weights
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.layout.layout import Layout, even_blocks
from parity.harness import Batches, fit, strategy
from ranks import call_ranks, run_ranks
from tensor_parallel.layouts import Compared, batches_of, build, check_all
from tensor_parallel.layouts import alone as alone_in_layout
from tensor_parallel.test_own_losses import by_preference, by_shards
from tensor_parallel.test_whole_checkpoints import Language
from tensor_parallel.test_whole_checkpoints import language as whole
from zoo import CASES
from zoo.case import TinyModule

ROWS, MULTIPLE = 70, 20
TP: dict[str, Any] = {"tp_size": 2, "make_vocab_size_divisible_by": MULTIPLE}
THREE = {**TP, "tp_size": 3}
FUSED: dict[str, Any] = {"fused_linear_cross_entropy": True}


def grown(module: L.LightningModule) -> None:
    """Give the model a vocabulary of `ROWS`, equal on every process."""
    model: Any = module.model
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    generator = torch.Generator().manual_seed(3)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        nn.init.normal_(table.weight, std=0.3, generator=generator)


def biased(module: L.LightningModule) -> None:
    """So does this, with a bias of the head."""
    grown(module)
    model: Any = module.model
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.linspace(-1, 1, ROWS, dtype=head.weight.dtype))


def frozen(module: L.LightningModule) -> None:
    """A head without gradients, but for its bias, and a frozen input embedding."""
    biased(module)
    model: Any = module.model
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight.requires_grad_(False)


def preferring(module: L.LightningModule) -> None:
    biased(module)
    by_preference(module)


def over_shards(module: L.LightningModule) -> None:
    biased(module)
    by_shards(module)


def case(name: str, fields: dict[str, Any], prepare: Any = grown, **options: Any) -> Compared:
    return Compared(name=name, fields={"language": fields}, prepare=prepare, **options)


def test_blocks_of_rows_start_at_multiples_and_are_shared_evenly() -> None:
    assert even_blocks(50, 2, 16) == [(0, 32), (32, 50)]
    assert even_blocks(50, 3, 16) == [(0, 32), (32, 48), (48, 50)]
    assert [stop - start for start, stop in even_blocks(50257, 4, 64)] == [12608, 12608, 12544, 12497]
    assert even_blocks(17, 3, 1) == [(0, 6), (6, 12), (12, 17)]


@pytest.mark.usefixtures("float64")
def test_two_shards_in_multiples_equal_one_process() -> None:
    """language: ranks 0-1."""
    check_all(2, case("llama", {**TP, "sequence_parallel": True}, over_shards), case("llama_tied", {**TP, **FUSED}))


@pytest.mark.usefixtures("float64")
def test_three_shards_in_multiples_equal_one_process() -> None:
    """language: ranks 0-2."""
    check_all(3, case("gpt2", THREE))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_shards_in_multiples_equal_one_process_in_every_layout() -> None:
    """language: ranks 0-3, as stages, replicas, with tokens in halves, or on a grid."""
    check_all(
        2,
        case("llama", TP, biased),
        case("gpt2", TP),
        case("llama", {**TP, "shard_embedding": False}, biased),
        case("llama", {**TP, **FUSED}, preferring),
        case("bert", TP, exact=True),
        case("llama", TP, frozen, options={"gradient_clip_val": 0.01}),
    )
    check_all(3, case("llama_tied", THREE), case("llama", {**THREE, **FUSED}, biased))
    check_all(
        4,
        case("llama_tied", {**TP, "pp_size": 2}, options={"gradient_clip_val": 0.01}),
        case("llama", {**TP, "pp_size": 2}, biased, options={"schedule": "zero_bubble"}),
        case("llama", {**TP, **FUSED, "pp_size": 2, "sequence_parallel": True}, biased),
        case("llama", {**TP, "cp_size": 2}, biased),
        case("llama", {**TP, "cp_size": 2, **FUSED}, biased),
        case("gpt2", {**TP, "interleaved_microbatches": 2, "dp_size": 2}, replicas=2),
        case("llama", {"tp_size": 4, "tp_mode": "2d", "make_vocab_size_divisible_by": 16}, biased),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_shards_in_multiples_beside_rings_equal_one_process() -> None:
    """language: ranks 0-1, whose shards of sequences travel around a ring."""
    ring = {**TP, "sequence_parallel": "ring"}
    check_all(2, case("llama", ring, biased), case("llama", ring, frozen), case("llama_tied", {**ring, **FUSED}))


SHARED = (("llama", biased, 3), ("llama_tied", grown, 2))


def shared(rank: int) -> list[dict[str, Tensor]]:
    """The parameters that rank 0 has after two clipped steps of each case."""
    found = []
    for name, prepare, zero_stage in SHARED:
        module: Any = build(name, "none", prepare)
        chosen = strategy(
            {"language": Modality(**TP, **FUSED, sharding={"zero_stage": zero_stage})}, num_microbatches=2
        )
        parts = [part for batch in batches_of(name) for part in CASES[name].split(batch, 2)]
        fit(module, parts, chosen, 4, use_distributed_sampler=True, gradient_clip_val=0.01)
        found.append(module.state_dict())
    return found


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_shards_in_multiples_whose_states_or_parameters_replicas_share_equal_one_process() -> None:
    """language: ranks 0-3, two replicas of two."""
    expected = [
        alone_in_layout(Compared(name=name, fields={}, prepare=prepare, options={"gradient_clip_val": 0.01}))[1]
        for name, prepare, _ in SHARED
    ]
    near: Any = tolerance(exact=False)
    torch.testing.assert_close(call_ranks(4, shared)[0], expected, **near)


class Products(TorchDispatchMode):
    """Notes the sizes of products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.sizes.add((*left.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))


class Looked(TinyModule):
    """Notes the logits of its last step, and whether gradients have the shapes of their parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch, **self.fixed)
        self.told = tuple(output.logits.shape), tuple(output.logits.detach().softmax(-1).sum(-1).shape)
        return output.loss


def products(rank: int, fields: dict[str, Any]) -> Any:
    model: Any = build("llama", "none", biased).model
    module = Looked(model, use_cache=False)
    with Products() as seen:
        fit(module, batches_of("llama", 1), strategy({"language": Modality(**fields)}, num_microbatches=1), 2)
    return seen.sizes, module.told, tuple(model.lm_head.weight.shape)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("more", [{}, FUSED], ids=["plain", "fused"])
def test_every_product_of_the_head_has_a_multiple_of_rows_and_nobody_sees_them(more: dict[str, Any]) -> None:
    """language: ranks 0-1, with 40 and 30 rows."""
    for sizes, told, weight in call_ranks(2, products, {**TP, **more}):
        assert not [one for one in sizes if 30 in one and 0 not in one]  # of no rows: what tells the dtype
        assert {one.index(40) for one in sizes if 40 in one} == {0, 1, 2}, "forward, and both gradients"
        assert told[0][-1] == ROWS
        assert weight == (ROWS, 32)


class Speaks(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        model: Any = self.model
        return model.generate(batch["input_ids"][:, :4], max_new_tokens=6, do_sample=False)


def spoken(rank: int | None, fields: dict[str, Any]) -> Any:
    model: Any = build("llama_tied", "none", grown).model
    module = Speaks(model)
    options: dict[str, Any] = {} if rank is None else {"strategy": strategy({"language": Modality(**fields)})}
    trainer = L.Trainer(accelerator="cpu", devices=1 if rank is None else 2, logger=False, **options)
    loader = torch.utils.data.DataLoader(Batches(batches_of("llama_tied", 1)), batch_size=None)
    return trainer.predict(module, loader)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
def test_generated_text_is_that_of_one_process() -> None:
    """language: ranks 0-1."""
    expected = spoken(None, {})
    for found in run_ranks(2, spoken, TP):
        assert_same(found, expected)


def stage(run: Run, epochs: int, folder: Path, before: str = "", is_last: bool = False) -> dict[str, Any]:
    """Train to the end of an epoch, from the file of one before."""
    saver = ModelCheckpoint(folder / str(epochs), save_last=True)
    trainer = run.trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saver], gradient_clip_val=0.5)
    module = Language()
    trainer.fit(module, run.training(), run.loader(8), ckpt_path=folder / before / "last.ckpt" if before else None)
    return {"metrics": figures(trainer), "weights": weights(module) if is_last else {}, "steps": trainer.global_step}


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.exhaustive)])
def test_checkpoints_move_between_multiples_and_layouts(kind: str, tmp_path: Path) -> None:
    """Of 17 tied rows ranks 0-1 hold 12 and 5; then ranks 0-2 hold 8, 8 and 1; then ranks 0-1 all, as stages."""

    def uninterrupted(run: Run) -> Any:
        return stage(run, 3, tmp_path / "one", is_last=True)

    def first(run: Run) -> Any:
        return stage(run, 1, tmp_path)

    def second(run: Run) -> Any:
        return stage(run, 2, tmp_path, "1")

    def third(run: Run) -> Any:
        return stage(run, 3, tmp_path, "2", is_last=True)

    expected = alone(uninterrupted)
    together(whole(2, tp_size=2, make_vocab_size_divisible_by=4), first, checkpoint=kind)
    together(whole(3, tp_size=3, make_vocab_size_divisible_by=4), second, checkpoint=kind)
    found = alone(third) if kind == "full" else together(whole(2, pp_size=2), third)[0]
    assert found["steps"] == 6
    assert_same(found, expected)


def planned(name: str, **modalities: Modality) -> Any:
    chosen = strategy(dict(modalities))
    world = sum(one.tp_size for one in modalities.values())
    chosen.__dict__["layout"] = Layout.build(modalities, world_size=world, loss_modality="language")
    return chosen.plan(build(name))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp_size": 1, "make_vocab_size_divisible_by": 8}, "got 8.* tp_size is 1"),
        ({"tp_size": 2, "make_vocab_size_divisible_by": 0}, "got 0. It is a whole number of at least 1"),
        ({"tp_size": 2, "make_vocab_size_divisible_by": True}, "got True"),
        ({"tp_size": 2, "make_vocab_size_divisible_by": 8.0}, "got 8.0.* nearest is 8"),
        ({"tp_size": 2, "make_vocab_size_divisible_by": "64"}, "got '64'"),
    ],
)
def test_wrong_multiples_are_refused_by_the_configuration(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        strategy({"language": Modality(**fields)})
    assert caught.value.field == "modalities.language.tensor.make_vocab_size_divisible_by"


def test_multiples_that_leave_a_rank_without_rows_are_refused_with_those_that_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"has 64 rows, fewer than .* 3 ranks some in multiples of 32.* Use 31 or less"
    ):
        planned("llama", language=Modality(tp_size=3, tensor={"make_vocab_size_divisible_by": 32}))
    plan = planned("llama", language=Modality(tp_size=3, tensor={"make_vocab_size_divisible_by": 31}))
    assert plan.division.shards["model.lm_head.weight"].lengths == (31, 31, 2)


def test_multiples_of_no_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor parallel ranks share, and those of 'vision' share none"):
        planned("llava", vision=Modality(tp_size=2, tensor={"make_vocab_size_divisible_by": 8}), language=Modality())
