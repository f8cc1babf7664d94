"""Runs on the pretended device equal one process on the CPU; `pretended_cuda` says what they would show.

ranks 0-1, or 0-2 where an encoder stands before two stages; each has a device of its own.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import pretended_cuda
from data_parallel.test_shared_states import ROWS, born
from data_parallel.test_shared_steps import bypassing
from data_parallel.test_sharing import shared
from features.shared_experts import composed_training
from features.shared_experts.composed_training import Composition
from features.toys import CLASSES, PAIR, PIPE, SHARED, Layout, Run, Toy, alone, assert_same, figures
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.checkpoint.rank_reports import RankReports
from lightning_mm5d.context_parallel.kernels.kernel import attend, attend_backward
from lightning_mm5d.context_parallel.masks.mask import Mask, Scoring
from lightning_mm5d.data.joining import Sizes, merge
from lightning_mm5d.data.microbatch import split
from lightning_mm5d.features.cached_features.feature import FeatureFiles
from lightning_mm5d.features.sharded_checkpoints import in_memory
from lightning_mm5d.features.sharded_checkpoints.own_shards import Item, PieceCopies
from lightning_mm5d.sharded.sequence import TokenSplit
from lightning_mm5d.trainer.steps import Steps
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES, apply_freeze

pytestmark = pytest.mark.exhaustive
STEPS = 2
SPLIT = {"num_microbatches": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Modality], dict[str, Any]]] = {
    "vision | language": ("llava", {"vision": Modality(), "language": Modality()}, SPLIT),
    "vision on language dp 2": (
        "llava",
        {"vision": Modality(colocate_with="language"), "language": Modality(dp_size=2)},
        SPLIT,
    ),
    **{
        name: ("llama", {"language": Modality(**fields)}, options)
        for name, fields, options in (
            ("pp 2", {"pp_size": 2}, SPLIT),
            ("zbv", {"pp_size": 2}, {"num_microbatches": 4, "schedule": "zbv"}),
            ("tp 2", {"tp_size": 2}, {}),
            ("tp 2 in a ring", {"tp_size": 2, "tensor": {"sequence_parallel": "ring"}}, SPLIT),
            ("dp 2", {"dp_size": 2}, SPLIT),
            ("zero 1", {"dp_size": 2, "sharding": {"zero_stage": 1}}, SPLIT),
            ("zero 3", {"dp_size": 2, "sharding": {"zero_stage": 3}}, SPLIT),
            ("cp 2", {"cp_size": 2}, SPLIT),
            ("cp 2, ulysses", {"cp_size": 2, "context": {"cp_mode": "ulysses"}}, SPLIT),
            ("recomputed", {"pp_size": 2, "memory": {"activation_checkpointing": "full"}}, SPLIT),
            ("offloaded", {"pp_size": 2, "memory": {"offload": "activations"}}, SPLIT),
            (
                "zero 3, offloaded",
                {
                    "dp_size": 2,
                    "sharding": {"zero_stage": 3},
                    "memory": {"offload": ["activations", "optimizer"]},
                },
                SPLIT,
            ),
        )
    },
}


def trained(rank: int, name: str) -> Any:
    case, modalities, options = LAYOUTS[name]
    pretended_cuda.enter()
    batches = [CASES[case].batch(4, seed=step) for step in range(STEPS)]
    recorder = fit(CASES[case].build(), batches, strategy(modalities, **options), 2, "gpu")
    return recorder.losses, recorder.gradients


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradients_equal_one_process(name: str) -> None:
    case = CASES[LAYOUTS[name][0]]
    one = fit(case.build(), [case.batch(4, seed=step) for step in range(STEPS)], max_steps=STEPS)
    for losses, gradients in run_ranks(2, trained, name):
        torch.testing.assert_close(losses, one.losses, rtol=1e-6, atol=1e-7)
        for found, expected in zip(gradients, one.gradients, strict=True):
            assert found
            for parameter, gradient in found.items():
                torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7)


EXPERTS = {
    "ep 2": Composition(microbatches=2),
    "ep 2, zero 3, recomputed": Composition(
        fields={"ep_size": 2, "sharding": {"zero_stage": 3}, "memory": {"activation_checkpointing": "full"}},
        microbatches=2,
    ),
    "ep 2, adapters": Composition(module={"adapters": composed_training.TENSORS}),
    "ep 2 of cp 2": Composition(replicas=1, fields={"ep_size": 2, "cp_size": 2}),
}


def trained_experts(rank: int, composition: Composition) -> Any:
    pretended_cuda.enter()
    return composed_training.trained(rank, replace(composition, trainer={"accelerator": "gpu"}))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_ranks_share_equal_one_process(name: str) -> None:
    (expected,) = run_ranks(1, composed_training.trained, EXPERTS[name].alone)
    found, _ = run_ranks(2, trained_experts, EXPERTS[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


MADE = {
    "states that a hook has seen": (shared(3, reshards=True), bypassing),
    "weights that each rank makes": (ROWS, born),
}


def trains_on_gpus(rank: int, run: Run, scenario: Any) -> Any:
    warnings.simplefilter("ignore")
    pretended_cuda.enter_with_trainers()
    return scenario(run)


@pytest.mark.parametrize("name", MADE)
def test_what_ranks_tell_each_other_is_put_on_their_own_devices(name: str, tmp_path: Path) -> None:
    layout, scenario = MADE[name]
    one = alone(scenario, tmp_path / "one")
    ranks = run_ranks(layout.world, trains_on_gpus, Run(layout, {}, tmp_path), scenario)
    assert_same(ranks[0]["weights"], one["weights"])


def clipped(rank: int) -> Any:
    pretended_cuda.enter()
    return _clipped({"vision": Modality(memory={"offload": ["parameters"]}), "language": Modality()}, "gpu")


def _clipped(modalities: dict[str, Modality] | None, accelerator: str = "cpu") -> Any:
    case = CASES["llava"]
    module, batches = case.build(), [case.batch(4, seed=step) for step in range(STEPS)]
    apply_freeze(module, case, "encoder")
    chosen = "auto" if modalities is None else strategy(modalities, **SPLIT)
    return fit(module, batches, chosen, len(modalities or [0]), accelerator, gradient_clip_val=0.05).losses


@pytest.mark.usefixtures("float64")
def test_gradients_are_clipped_where_a_rank_has_none_on_its_device() -> None:
    """vision: rank 0, frozen, in host memory between its uses; language: rank 1."""
    expected = _clipped(None)
    for losses in run_ranks(2, clipped):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)


def weighed(rank: int) -> list[str]:
    """Where the numbers are that ranks add up to weigh their microbatches by label tokens."""
    pretended_cuda.enter()
    found, reduce, weights = list[str](), dist.all_reduce, Steps._weights

    def noted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.append(x.device.type)
        return reduce(x, *args, **options)

    def watched(self: Steps, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", noted)
            return weights(self, *args)

    Steps._weights = watched  # type: ignore[method-assign]
    case, options = CASES["llama"], {"num_microbatches": 2, "loss_weight": "tokens"}
    fit(case.build(), [case.batch(4)] * STEPS, strategy({"language": Modality(dp_size=2)}, **options), 2, "gpu")
    return found


def test_no_step_waits_for_a_device_to_know_what_its_microbatches_weigh() -> None:
    assert run_ranks(2, weighed) == [["cpu"] * STEPS] * 2


class Ordinary(Toy):
    """Does what users do on a GPU: it reads, moves, logs and gathers numbers of the device and of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.correct = MeanMetric(), MulticlassAccuracy(num_classes=CLASSES, average="micro")
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        loss = self.loss(batch)
        self.log("on the device", loss, prog_bar=True)
        self.log("on the host", loss.detach().cpu(), on_step=False, on_epoch=True, sync_dist=True)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        self.count += 1
        return {"loss": loss, "copy": loss.detach().cpu()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.correct(logits, batch["label"])
        self.log("correct", self.correct, on_epoch=True)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.kept.append(loss.cpu())
        return {"logits": logits.cpu()}

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.kept).mean()
        self.kept.clear()
        self.log("mean of the host", mean, sync_dist=True)
        self.log("gathered", self.all_gather(mean).mean())
        assert self.trainer.strategy.reduce_boolean_decision(True)


def used(run: Run, **options: Any) -> dict[str, Any]:
    monitors = {"callbacks": [DeviceStatsMonitor(), ModelCheckpoint(run.folder, save_last=True)]}
    trainer = run.trainer(
        logger=CSVLogger(run.folder), log_every_n_steps=1, enable_checkpointing=True, **monitors, **options
    )
    loaders = {"pin_memory": run.layout is not None}
    trainer.fit(Ordinary(), run.training(16, **loaders), run.loader(16, **loaders))
    found = {name: value for name, value in figures(trainer).items() if not name.startswith("DeviceStats")}
    predicted = torch.cat([*trainer.predict(Ordinary(), run.loader(8))])  # type: ignore[list-item]
    again = run.trainer(max_epochs=2, **options)
    again.fit(Ordinary(), run.training(16), run.loader(16), ckpt_path=run.folder / "last.ckpt")
    return {"figures": found, "predicted": predicted, "resumed": figures(again)}


def used_on_gpus(rank: int, run: Run, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    pretended_cuda.enter()
    found = used(run, accelerator="gpu", **options)
    return f"cuda:{torch.cuda.current_device()}", found


USES: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "pair": (PAIR, {}, 1e-6),
    "pipe": (PIPE, {"accumulate_grad_batches": 2}, 1e-6),
    "shared": (SHARED, {"gradient_clip_val": 0.1}, 1e-6),
    "bf16": (PIPE, {"precision": "bf16-mixed"}, 0.03),
    "16": (SHARED, {"precision": "16-mixed"}, 0.01),
}


@pytest.mark.parametrize("name", USES)
def test_what_users_do_on_gpus_gives_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    layout, options, tolerance = USES[name]
    plain = {key: value for key, value in options.items() if key != "precision"}
    one = alone(lambda run: used(run, **plain), tmp_path / "one")
    ranks = run_ranks(layout.world, used_on_gpus, Run(layout, {}, tmp_path / "ranks"), options)
    assert [device for device, _ in ranks] == [f"cuda:{rank}" for rank in range(layout.world)]
    for rank, (_, found) in enumerate(ranks):
        kept = {"on the device", "mean", "gathered"} if layout.replicas > 1 else set()
        for key in ("figures", "resumed"):
            for figure, value in one[key].items():
                if figure not in kept:
                    assert found[key][figure] == pytest.approx(value, rel=tolerance, abs=tolerance), (key, figure)
        expected = one["predicted"][rank :: layout.replicas] if layout.replicas > 1 else one["predicted"]
        torch.testing.assert_close(found["predicted"].cpu(), expected, rtol=tolerance, atol=tolerance)


def copied_beside(rank: int) -> list[bool]:
    """What a checkpoint in memory copies while the device computes, and whether it was there before anybody waited."""
    pretended_cuda.enter()
    weight = torch.nn.Parameter(torch.ones(3, 4, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    step()
    copies, found = PieceCopies(beside=True), list[bool]()
    for _ in range(2):
        states = [Item.whole(key, value) for key, value in optimizer.state[weight].items()]
        items = [Item.whole("weight", weight.detach())]
        values = [one.tensor.cpu().clone() for one in (*items, *states)]
        taken = copies.take(items, states)
        found.append(torch.equal(taken[0].tensor, values[0]))
        copies.await_on_device()
        step()
        copies.ready()
        found.append(all(torch.equal(one.tensor, value) for one, value in zip(taken, values, strict=True)))
        found.append(taken[0].tensor.is_pinned())
    copies.close()
    step()
    return found


def test_states_are_copied_to_pinned_memory_beside_what_the_device_computes_and_before_the_next_step() -> None:
    assert run_ranks(1, copied_beside) == [[False, True, True] * 2]


def cached(rank: int, folder: Path) -> list[Any]:
    """Whether files of features are there after the call, after a look for others, and what a look for them gives."""
    pretended_cuda.enter()
    files, found = FeatureFiles(folder, "memory.cache_features"), list[Any]()
    query, torch.cuda.Event.query = torch.cuda.Event.query, lambda event: False
    value = torch.arange(6.0, device="cuda")
    files.write("ab", ["t", 0], [value[::2]])
    value.zero_()
    found += [files.path("ab").exists(), files.read("cd"), files.path("ab").exists(), files.read("ab")]
    files.write("ef", ["t", 0], [value])
    torch.cuda.Event.query = query
    found += [files.read("cd"), files.path("ef").exists()]
    files.write("01", ["t", 0], [value])
    files.finish()
    with pytest.raises(ValueError, match="cannot hold"):
        files.write("23", ["t", 0], [torch.empty(1, dtype=torch.bits8, device="cuda")])
    return [*found, files.path("01").exists()]


def test_features_leave_without_a_wait_and_are_found_as_they_were(tmp_path: Path) -> None:
    (found,) = run_ranks(1, cached, tmp_path)
    expected = ["t", 0], [torch.tensor([0.0, 2.0, 4.0])]
    torch.testing.assert_close(found.pop(3)[1], expected[1])
    assert found == [False, None, False, None, True, True]


def waited(rank: int) -> dict[str, int]:
    """How often the host waits for the device in what a step does."""
    pretended_cuda.enter()
    waits, found = pretended_cuda.built().waits, dict[str, int]()
    outputs = [{"loss": torch.ones((), device="cuda")} for _ in range(2)]
    q = torch.ones(1, 2, 200, 4, dtype=torch.float64, device="cuda")
    tokens = TokenSplit((((0, 50), (150, 200)), ((50, 150),)), 200)
    mask = Mask(lambda b, h, q, k: q - k < 70, batch=1, q_length=200, k_length=200, device="cuda")
    tiles = mask.tiles(torch.arange(200), torch.arange(200))
    batch = {"x": torch.arange(8.0, device="cuda").view(4, 2), "y": torch.arange(4, device="cuda")}

    def deals() -> None:
        parts = split(batch, 2, dealer=lambda rows, sizes: [[0, 3], [1, 2]])
        joined = merge([part.batch for part in parts], Sizes.of(parts), reads=False)
        on_host = {key: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for key, x in joined.items()}
        for key, x in on_host.items():
            x.copy_(joined[key], non_blocking=True)
        torch.cuda.synchronize()
        assert on_host["x"].flatten().tolist() == [*range(8)]
        assert on_host["y"].tolist() == [*range(4)]

    def attends() -> None:
        out, lse = attend(q, q, q, tiles, Scoring(1.0))
        attend_backward(out, q, q, q, out, lse, tiles, Scoring(1.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_mm5d.context_parallel.masks.mask.MASK_BYTES", 0)
        for name, run in {
            "outputs of microbatches": lambda: merge(outputs, [1, 3]),
            "order of tokens": lambda: tokens.order(q.device),
            "attention of float64": attends,
            "dealt samples": deals,
        }.items():
            before = waits()
            run()
            found[name] = waits() - before
    return found


def test_the_host_does_not_wait_for_the_device_in_what_a_step_does() -> None:
    (found,) = run_ranks(1, waited)
    assert set(found.values()) == {0}, found


class Waits(Callback):
    """Where the host waits for the device in steps after the first two, and what asked for it."""

    def __init__(self) -> None:
        self.found, self._counts = Counter[str](), False

    def note(self) -> None:
        *others, last = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-1]
        if self._counts and not last.filename.endswith("parity/harness.py"):
            self.found["".join(traceback.format_list([*others[-3:], last]))] += 1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._counts = batch_idx > 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._counts = False


def _giving_rows(module: Any, batch: Any, step: Callable[[], Any]) -> Any:
    loss, module.last = step(), batch["input_ids"][:, 1]
    return {"loss": loss, "first": batch["input_ids"][:, 0], "other": loss.detach() * 2}


def _writing(module: Any, batch: Any, step: Callable[[], Any]) -> Any:
    for parameter in module.parameters():
        parameter.data.clamp_(-1.0, 1.0)
    return step()


PIPED = {"pp_size": 2}
WAITING: dict[str, tuple[dict[str, Any], dict[str, Any], Any, int]] = {
    "tp 2": ({"tp_size": 2}, SPLIT, None, 0),
    "cp 2": ({"cp_size": 2}, SPLIT, None, 0),
    "cp 2, ring": ({"cp_size": 2, "context": {"cp_mode": "ring"}}, SPLIT, None, 0),
    "llava, cp 2": ({"cp_size": 2}, SPLIT, None, 3),
    "zero 3": ({"dp_size": 2, "sharding": {"zero_stage": 3}}, SPLIT, None, 0),
    "rows among results": (PIPED, SPLIT, _giving_rows, 0),
    "weights written": (PIPED, SPLIT, _writing, 1),
}


def steps_watched(rank: int, name: str) -> tuple[Counter[str], int]:
    """Where the host waits in three steps, and how often at most in each."""
    pretended_cuda.enter()
    waits, (fields, options, then, most) = Waits(), WAITING[name]
    modalities, case = {"language": Modality(**fields)}, CASES["llama"]
    if name.startswith("llava"):
        modalities, case = {"vision": Modality(colocate_with="language"), **modalities}, CASES["llava"]
    module = case.build()
    if then is not None:
        step = type(module).training_step
        module.__class__ = type(
            "Doing",
            (type(module),),
            {"training_step": lambda self, batch, number: then(self, batch, lambda: step(self, batch, number))},
        )
    batches = [case.batch(4, seed=step) for step in range(5)]
    pretended_cuda.built().tell_of_waits(waits.note)
    layout = strategy(modalities, **options)
    fit(module, batches, layout, 2, "gpu", callbacks=[waits], gradient_clip_val=1.0)
    pretended_cuda.built().tell_of_waits(None)
    return waits.found, 3 * most


@pytest.mark.parametrize("name", WAITING)
def test_no_step_of_known_structure_waits_for_the_device(name: str) -> None:
    """Steps that write to weights wait once, and torch's backward of `masked_scatter` once for each microbatch."""
    for found, most in run_ranks(2, steps_watched, name):
        assert found.total() <= most, "\n".join(f"{count} times\n{where}" for where, count in found.items())


def remembering(rank: int, folder: Path) -> str:
    """The backend of the group over which two nodes of one GPU each exchange what is in their memory."""
    pretended_cuda.enter()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=30), device_id=device)
    os.environ["TORCHELASTIC_RUN_ID"] = "7"
    in_memory.SHARED_MEMORY = folder / str(rank)
    in_memory.SHARED_MEMORY.mkdir()
    store = dist.FileStore(str(folder / "store"), 2)

    def reports(topic: str) -> RankReports:
        return RankReports(store, topic, rank=rank, world_size=2, timeout=timedelta(seconds=30))

    memory = in_memory.HostMemory(1)
    assert memory.newest_checkpoint(in_memory.Nodes(rank, 2, 1), reports) is None
    trainer: Any = SimpleNamespace(callbacks=[], strategy=SimpleNamespace(root_device=device))
    memory.attach(trainer, lambda trainer: None, lambda: None)
    group = memory.next_save(reports("save"), [], {}).group
    memory.close(failed=True)
    return dist.get_backend(group)


def test_nodes_with_gpus_exchange_what_is_in_their_memory_by_the_host(tmp_path: Path) -> None:
    assert run_ranks(2, remembering, tmp_path) == ["gloo"] * 2


def on_cpus_afterwards(rank: int) -> str:
    """What is said of a run on CPUs in a process that has run on GPUs."""
    pretended_cuda.enter()
    case = CASES["llama"]
    fit(case.build(), [case.batch(4)], strategy({"language": Modality(tp_size=2)}), 2, "gpu")
    with pytest.raises(ConfigError) as error:
        fit(case.build(), [case.batch(4)], strategy({"language": Modality(tp_size=2)}), 2, "cpu")
    return str(error.value)


def test_a_run_on_cpus_after_one_on_gpus_in_one_process_is_told_why_it_cannot_begin() -> None:
    for said in run_ranks(2, on_cpus_afterwards):
        assert "carries no tensors of cpu" in said
        assert "destroy_process_group" in said
