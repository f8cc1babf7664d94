"""A dry run of a rank counts what the rank sends, and what it keeps, in a run on processes."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from features.toys import LANGUAGE, VISION, WIDTH, Layout, Samples, Toy
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.cli.commands import sent_over
from lightning_mm5d.tools.cli.estimates import step_of
from lightning_mm5d.tools.cli.job import Job, settle
from lightning_mm5d.tools.cli.main import main
from lightning_mm5d.tools.dryrun.dry_rank import DryRun, DryRuns
from lightning_mm5d.tools.planner.hollow_tensors import HollowTensors
from lightning_mm5d.tools.planner.rank_memory import memory_of
from parity.harness import strategy
from ranks import run_ranks

M = 4
LAYOUTS = {
    "vision, rank 0; language, ranks 1 and 2 as stages": Layout(
        {"vision": Modality(**VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 3
    ),
    "vision, rank 0, one image at a time; language, ranks 1 and 2 as stages": Layout(
        {
            "vision": Modality(memory={"activation_checkpointing": {"items": 1}}, **VISION),
            "language": Modality(pp_size=2, **LANGUAGE),
        },
        3,
    ),
    "vision, rank 0; language, ranks 1 and 2 as replicas that share states": Layout(
        {
            "vision": Modality(dp_size=1, **VISION),
            "language": Modality(sharding={"zero_stage": 1}, dp_size=2, **LANGUAGE),
        },
        3,
        2,
    ),
    "both modalities on ranks 0-3: stages of 2 replicas, two chunks each": Layout(
        {
            "vision": Modality(colocate_with="language", **VISION),
            "language": Modality(
                pp_size=2, pipeline={"pp_chunks": 2}, dp_size=2, sharding={"zero_stage": 3}, **LANGUAGE
            ),
        },
        4,
        2,
    ),
}


class Adam(Toy):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(16 * M), batch_size=2 * M, shuffle=False)


class Counted(Callback):
    """Counts the messages of the last step; the first two are compared with others before."""

    def __init__(self) -> None:
        self.found: Counter[Any] = Counter()
        self.bytes: Counter[Any] = Counter()
        self.last: Any = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.found.clear()
        self.bytes.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.last = Counter(self.found), Counter(self.bytes)

    # callbacks of the package see what this rank holds, for which nobody sends anything
    on_train_batch_start.__module__ = on_train_batch_end.__module__ = "lightning_mm5d.tests"

    def counting(self, name: str) -> Any:
        original = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            # gloo's groups pass what they gather or scatter as their second argument
            sent = args[1] if name.startswith(("all_gather", "reduce_scatter", "all_to_all")) else args[0]
            given = args[2] if len(args) > 2 and isinstance(args[2], dist.ProcessGroup) else None
            group = kwargs.get("group") or given or dist.group.WORLD
            is_payload = name == "isend" and len(args) > 1  # and no message of a ring
            key = args[1] if is_payload else (group.group_desc, tuple(dist.get_process_group_ranks(group)))
            self.found[key] += 1
            self.bytes[key] += sent.nbytes
            return original(*args, **kwargs)

        return patch.object(dist, name, count)


_NAMES = ("isend", "all_reduce", "broadcast", "all_to_all_single")


def planned(layout: Layout, **options: Any) -> Any:
    schedule = "interleaved" if layout.modalities["language"].pipeline.pp_chunks > 1 else "1f1b"
    return strategy(layout.modalities, num_microbatches=M, schedule=schedule, **options)


def counted(rank: int, layout: Layout, kind: type[L.LightningModule], data: type[L.LightningDataModule]) -> Any:
    warnings.simplefilter("ignore")
    counts = Counted()
    gathers = [
        name
        for name in vars(dist)
        if name in ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    ]
    patches = [counts.counting(name) for name in (*_NAMES, *gathers)]
    for one in patches:
        one.start()
    patches.append(patch.object(distributed_c10d, "isend", dist.isend))  # which checks that it is its own
    patches[-1].start()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world,
        strategy=planned(layout),
        max_steps=3,
        logger=False,
        precision="64-true",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counts],
    )
    trainer.fit(kind(), data())
    for one in patches:
        one.stop()
    return counts.last


def dry(layout: Layout, module: Any = None, data: Any = None) -> DryRuns:
    made = planned(layout)
    settle(made, layout.world, 1)
    module, data = module or Adam(), data or Data()
    return DryRuns(Job(made, module, made.modalities, data, "64-true", plan=made.validate(module, data)))


def messages_of(run: DryRun) -> tuple[Counter[Any], Counter[Any]]:
    found, size = Counter[Any](), Counter[Any]()
    for (group, ranks, what), (count, sent) in run.messages.items():
        if what != "barrier":
            key = ranks if group == "payloads" else (group, ranks)
            found[key] += count
            size[key] += sent
    return found, size


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_counts_the_messages_and_bytes_of_a_real_step(layout: Layout) -> None:
    runs = dry(layout)
    for rank, real in enumerate(run_ranks(layout.world, counted, layout, Adam, Data)):
        assert messages_of(runs.of(rank)) == real, rank


def test_microbatches_of_unlike_sizes_meet_payloads_of_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 samples 3, 3, 2 and 2."""
    monkeypatch.setattr(Data, "train_dataloader", lambda self: DataLoader(Samples(10), batch_size=10))
    runs = dry(next(iter(LAYOUTS.values())))
    for rank in range(3):
        assert len(runs.of(rank).seconds) == 2


def test_memory_is_that_of_the_estimate() -> None:
    runs = dry(next(iter(LAYOUTS.values())))
    job = runs.job
    for estimate in memory_of(job.plan, step_of(job, job.plan)[0]):
        found = runs.of(estimate.rank).memory
        kept = ("parameters", "gradients", "optimizer")
        assert [found[kind] for kind in kept] == [getattr(estimate, kind) for kind in kept]
        assert found["activations"] == pytest.approx(estimate.activations, rel=0.25)


class Texting(L.LightningModule):
    """A Llama of eight layers."""

    def __init__(self, layers: int = 8, width: int = 256) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 8}
        config = LlamaConfig(vocab_size=512, num_hidden_layers=layers, use_cache=False, num_key_value_heads=4, **sizes)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Texts(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        tokens = torch.randint(512, (M, 512))
        return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=M)


class Small(Texting):
    def __init__(self) -> None:
        super().__init__(layers=4, width=32)
        self.double()


class Lines(L.LightningDataModule):
    """An epoch of more steps than are counted, for ranks compare more in the first of an epoch."""

    def train_dataloader(self) -> Any:
        tokens = torch.randint(512, (16 * M, 16))
        return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2 * M)


SHARED = {
    "language, ranks 0-1 with one half of the layers, ranks 2-3 with the other": Layout(
        {"language": Modality(tp_size=2, pp_size=2)}, 4
    ),
    "language, ranks 0-1, which share sequences, too": Layout(
        {"language": Modality(tp_size=2, tensor={"sequence_parallel": True})}, 2
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", SHARED.values(), ids=SHARED)
def test_counts_the_messages_and_bytes_of_tensor_parallel_ranks(layout: Layout) -> None:
    runs = dry(layout, Small(), Lines())
    for rank, real in enumerate(run_ranks(layout.world, counted, layout, Small, Lines)):
        assert messages_of(runs.of(rank)) == real, rank


def test_a_stage_of_a_llama_sends_its_hidden_state_once() -> None:
    """language: ranks 0 and 1 as stages."""
    run = dry(Layout({"language": Modality(pp_size=2)}, 2), Small(), Lines()).of(0)
    assert run.transport is not None
    assert {len(sent.forms) for sent in run.transport.sent["language.0", "language.1"]} == {1}


def test_bytes_are_those_of_links_inside_a_node_and_between_nodes() -> None:
    """vision: rank 0, language: ranks 1 and 2; nodes of two ranks."""
    run = dry(next(iter(LAYOUTS.values()))).of(1)
    payloads = {to: sent for (group, to, _), sent in run.messages.items() if group == "payloads"}
    assert payloads.keys() == {0, 2}
    links = sent_over(run, ranks_per_node=2)
    assert links["inside"] == {"messages": payloads[0][0], "bytes": payloads[0][1]}
    assert sum(links.values(), Counter[str]())["bytes"] == sum(size for _, size in run.messages.values())
    assert not sum(sent_over(run, ranks_per_node=3)["between"].values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("sequence_parallel", "precision"), [(True, "bf16-true"), (True, "bf16-mixed"), (False, "bf16-mixed")]
)
def test_activations_of_tensor_parallel_stages_are_those_of_the_estimate(
    sequence_parallel: bool, precision: str
) -> None:
    """language: ranks 0 and 1 share four layers, ranks 2 and 3 four others."""
    module = Texting().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    made = strategy(
        {"language": Modality(tp_size=2, pp_size=2, tensor={"sequence_parallel": sequence_parallel})},
        num_microbatches=M,
    )
    settle(made, 4, 1)
    job = Job(made, module, made.modalities, Texts(), precision, plan=made.validate(module, Texts()))
    runs, estimates = DryRuns(job), memory_of(job.plan, step_of(job, job.plan)[0])
    for rank in (0, 2):
        found = runs.of(rank).memory
        assert found["activations"] == pytest.approx(estimates[rank].activations, rel=0.08), rank
        assert found["peak"] == pytest.approx(estimates[rank].peak, rel=0.08), rank


class Wide(Adam):
    """Its encoder gives one number more than the decoder takes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector = torch.nn.Linear(WIDTH, WIDTH + 1).double()


def test_finds_a_boundary_of_the_wrong_width_where_it_meets_other_tensors() -> None:
    runs = dry(next(iter(LAYOUTS.values())), Wide())
    assert runs.of(0).seconds
    with pytest.raises(RuntimeError, match="dimension of length 9") as found:
        runs.of(1)
    assert found.value.__notes__[-1] == "in the dry run of rank 1: language.0, forward of microbatch 0"


def test_what_is_computed_from_hollow_tensors_is_hollow_and_shares_memory_like_them() -> None:
    with HollowTensors() as hollow:
        weight = hollow.of(torch.empty(100, 50, device="meta", requires_grad=True))
        result = (torch.ones(3, 50) @ weight.t())[:, :40]
        assert hollow.is_hollow(result)
        assert result.untyped_storage().nbytes() == 3 * 100 * 4
        assert float(result.detach().sum()) == 1.0  # of few elements
        assert bool(torch.full((3, 50), float("nan")).isnan().any())
        result.sum().backward()
        assert weight.grad is not None
        assert hollow.is_hollow(weight.grad)
        with pytest.raises(ConfigError, match="values that a dry run does not have"):
            (result > 0).nonzero()
    assert hollow.peak > hollow.alive


def digits(*options: str) -> list[str]:
    folder = Path(__file__).parents[3] / "examples" / "digits"
    return ["dryrun", str(folder / "config.yaml"), "--script", str(folder / "train.py"), *options]


def test_the_command_prints_memory_beside_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(digits("--rank", "3")) == 0
    out = capsys.readouterr().out
    assert "rank 3: language.1; its host took" in out
    inside, between, every = out.partition("links ")[2].splitlines()[1:4]
    assert (between.split(), every.split()[1:]) == (["between", "nodes", "0", "0.0", "B"], inside.split()[3:])
    dry, guess = next(line.split()[1::2] for line in out.splitlines() if line.startswith("peak"))
    assert float(dry) == pytest.approx(float(guess), rel=0.1)


def test_the_command_runs_one_rank_of_each_class_in_lightnings_own_precision(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(digits("--all", "--json", "--world=8", "--trainer.precision=null")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(one["equal_ranks"]) for one in found] == [2, 2, 2, 2]
    assert all(one["links"]["inside"]["bytes"] > 0 for one in found)
    assert {one["rank"] for one in found} == {one["equal_ranks"][0] for one in found}


def test_the_command_refuses_a_model_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    strategy = "{class_path: lightning_mm5d.MultimodalStrategy, init_args: {modalities: {model: 1}}}"
    config.write_text(f"trainer: {{devices: 1, strategy: {strategy}}}\nmodel: {{class_path: features.toys.Toy}}\n")
    assert main(["dryrun", str(config)]) == 2
    assert "data: got None. Tokens and images are counted in the first batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "4"], "--rank: got 4. There are 4 ranks"),
        (["--world", "8", "--rank", "8"], "--rank: got 8. There are 8 ranks"),
        (["--world", "12"], "--world: got 12"),
        (["--world", "6"], "Nearest that fit: 4 or 8 ranks"),
        (
            ["--trainer.strategy.init_args.modalities.language.compute.compile=true"],
            "modalities.language.compute.compile: got True",
        ),
    ],
)
def test_the_command_refuses_by_name_what_it_does_not_cover(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(digits(*options)) == 2
    assert words in capsys.readouterr().err
