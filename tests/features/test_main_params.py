"""Optimizers step on main parameters of full precision, while layers compute with rounded ones.

The reference trains by hand: a module in low precision, copies of its parameters in full precision, and a sum of the
gradients of all microbatches in full precision.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from features.toys import LANGUAGE, PAIR, PIPE, SHARED, TWINS, VISION, WIDTH, Layout, Run, Samples, Toy, assert_same
from lightning_mm5d import ConfigError, Modality, TensorParallelPlan, register_tensor_parallel_plan
from ranks import run_ranks
from sweeps import swept

BRAIN = {"precision": "bf16-true", "main_params": "float32"}
SINGLE = {"precision": "32-true", "main_params": "float64"}
ONE = Layout({"model": Modality()}, 1)
"""the whole model: rank 0"""


def replicas(**options: Any) -> Layout:
    """vision and language: ranks 0-1, two replicas"""
    vision = Modality(colocate_with="language", **VISION, **options)
    return Layout({"vision": vision, "language": Modality(**LANGUAGE, **options)}, 2, 2)


TENSOR = Layout(
    {"vision": Modality(tp_size=2, colocate_with="language", **VISION), "language": Modality(tp_size=2, **LANGUAGE)}, 2
)
"""vision and language: ranks 0-1, which share each layer"""


class Singles(Samples):
    def __init__(self, count: int = 16) -> None:
        super().__init__(count)
        self.images = self.images.float()


class Trained(Toy):
    """Notes what it computes in; some parts may be frozen."""

    def __init__(self, frozen: str = "", tied: bool = False) -> None:
        super().__init__()
        if tied:
            self.decoder.head = nn.Linear(WIDTH, 16)
            self.decoder.head.weight = self.decoder.embedding.weight
        self.float()
        self.dtypes: set[torch.dtype] = set()
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        self.dtypes.update((logits.dtype, self.decoder.head.weight.dtype, next(self.parameters()).dtype))
        return F.cross_entropy(logits.float(), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch).float(), batch["label"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
            {"params": [p for name, p in named if "bias" not in name]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def by_hand(module: Trained, low: torch.dtype, full: torch.dtype, parts: Any, accumulate: int) -> dict[str, Tensor]:
    """Train for two epochs; `parts` cuts a batch into microbatches."""
    module = module.to(low)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    mains = {name: nn.Parameter(p.detach().to(full)) for name, p in named.items()}
    (optimizer,), (scheduler,) = module.configure_optimizers()
    for group in optimizer.param_groups:
        names = [name for p in group["params"] for name, other in named.items() if other is p]
        group["params"] = [mains[name] for name in names]
    sampler = DistributedSampler(Singles(), num_replicas=1, rank=0)
    loader = DataLoader(Singles(), batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            found = [{k: v.to(low) if v.is_floating_point() else v for k, v in part.items()} for part in parts(batch)]
            for part in found:
                module.zero_grad()
                (module.training_step(part, index) / len(found) / accumulate).backward()
                for name, main in mains.items():
                    gradient = named[name].grad.to(full)
                    main.grad = gradient if main.grad is None else main.grad + gradient
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for name, main in mains.items():
                        named[name].copy_(main)
        scheduler.step()
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return state | {name: main.detach() for name, main in mains.items()}


def halves(batch: Any) -> list[Any]:
    return [{key: value[:4] for key, value in batch.items()}, {key: value[4:] for key, value in batch.items()}]


def alternating(batch: Any) -> list[Any]:
    """What two replicas get."""
    return [{key: value[place::2] for key, value in batch.items()} for place in range(2)]


def fit(run: Run, kind: dict[str, str], module: Trained | None = None, **options: Any) -> dict[str, Any]:
    """Train; return the weights and the last validation's loss."""
    module = Trained() if module is None else module
    path = options.pop("ckpt_path", None)
    run = Run(run.layout, {**run.options, "main_params": kind["main_params"]}, run.folder)
    trainer = run.trainer(**{"max_epochs": 2, "gradient_clip_val": 0.5, "precision": kind["precision"], **options})
    trainer.fit(module, run.training(Singles()), run.loader(Singles(8)), ckpt_path=path)
    return {
        "weights": {key: value.clone() for key, value in trainer.strategy.full_state_dict().items()},
        "losses": float(trainer.callback_metrics["val_loss"]),
    }


HAND = {
    "pair": (PAIR, {}, halves),
    "pipe": (PIPE, {}, halves),
    "split backward": (PIPE, {"schedule": "zero_bubble"}, halves),
    "one": (ONE, {}, halves),
    "twins": (TWINS, {"num_microbatches": 1}, alternating),
    "replicas": (SHARED, {"num_microbatches": 1}, alternating),
    **{f"stage {stage}": (replicas(zero_stage=stage), {"num_microbatches": 1}, alternating) for stage in (1, 2, 3)},
    "resharded": (replicas(zero_stage=3, reshard_after_forward=True), {"num_microbatches": 1}, alternating),
}


@pytest.mark.parametrize(
    "name",
    swept(HAND, "pair", "replicas", "stage 1", "stage 2"),
)
def test_bf16_layers_train_float32_parameters_bit_for_bit(name: str) -> None:
    """Each layout as in its own docstring."""
    layout, options, parts = HAND[name]
    expected = by_hand(Trained("encoder.patch"), torch.bfloat16, torch.float32, parts, 1)

    def ours(rank: int) -> Any:
        module = Trained("encoder.patch")
        found = fit(Run(layout, options), BRAIN, module, gradient_clip_val=None)
        return {**found, "dtypes": module.dtypes}

    found = run_ranks(layout.world, ours)
    got = found[0]["weights"]
    assert {dtype for one in found for dtype in one["dtypes"]} <= {torch.bfloat16}
    assert got["encoder.patch.weight"].dtype == torch.bfloat16
    assert {got[key].dtype for key in got if "patch" not in key and "accuracy" not in key} == {torch.float32}
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


class Unfreezing(BaseFinetuning):
    """Trains the encoder from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.1, initial_denom_lr=1.0)


class Clamped(Trained):
    """Writes to its weights in a step, and between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.decoder.head.bias.clamp_(-0.1, 0.1)
            self.decoder.layers[3].up.weight.clamp_(-0.1, 0.1)  # long enough to be shared
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.decoder.head.bias.data.mul_(0.5)


def averaged(run: Run) -> Any:
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.9))
    return fit(run, SINGLE, callbacks=[average])


def tied(run: Run) -> Any:
    return fit(run, SINGLE, Trained(tied=True), accumulate_grad_batches=2)


def unfrozen(run: Run) -> Any:
    return fit(run, SINGLE, callbacks=[Unfreezing()])


def clamped(run: Run) -> Any:
    return fit(run, SINGLE, Clamped())


def resumed(run: Run) -> Any:
    """Stops after an epoch, and goes on in a new module."""
    path = run.folder / "resumed"
    saves = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    whole = fit(run, SINGLE, callbacks=[saves], enable_checkpointing=True)
    again = fit(run, SINGLE, ckpt_path=str(path / "epoch=0.ckpt"))
    return {"whole": whole, "again": again}


def evaluated(run: Run) -> Any:
    """Validates between two fits of one module, which loses no precision by that."""
    module = Trained()
    fit(run, SINGLE, module, max_epochs=1)
    options = {**run.options, "main_params": "float64"}
    trainer = Run(run.layout, options, run.folder).trainer(precision="32-true")
    trainer.validate(module, run.loader(Singles(8)), verbose=False)
    return {"second": fit(run, SINGLE, module, max_epochs=1), "val_loss": float(trainer.callback_metrics["val_loss"])}


SCENARIOS = [averaged, tied, unfrozen, clamped, resumed, evaluated]
LAYOUTS = {
    "pipe": (PIPE, {}),
    "tensor": (TENSOR, {}),
    "stage 1": (replicas(zero_stage=1), {"num_microbatches": 1}),
    "stage 2, sharded checkpoints": (replicas(zero_stage=2), {"num_microbatches": 1, "checkpoint": "sharded"}),
    "stage 3": (replicas(zero_stage=3), {"num_microbatches": 1}),
}


def every(rank: int, run: Run) -> dict[str, Any]:
    register_tensor_parallel_plan("Layer", TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about a callback that a resumed run lacks
        return {scenario.__name__: scenario(run) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, every, Run(ONE, {}, tmp_path_factory.mktemp("one")))[0]


@pytest.mark.parametrize("name", swept(LAYOUTS, "stage 1", "stage 3"))
def test_training_features_see_main_parameters_in_every_layout(
    name: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    layout, options = LAYOUTS[name]
    found = run_ranks(layout.world, every, Run(layout, options, tmp_path))[0]
    for scenario, expected in alone.items():
        assert_same(found[scenario], expected, 1e-6, scenario)
    assert_same(found["resumed"]["again"]["weights"], found["resumed"]["whole"]["weights"], 0.0)


def test_a_rank_holds_the_bytes_of_its_own_main_parameters(tmp_path: Path) -> None:
    """vision and language: ranks 0-1, two replicas.

    Between steps a rank has main parameters alone, of its own rows where they are shared. In a step it has what layers
    compute with too.
    """

    class Counting(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.inside = sum(p.nbytes for p in self.parameters())
            return loss

        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            found[0][0].register_step_post_hook(lambda *_: self.count())  # hooks of the module see full tensors
            return found

        def count(self) -> None:
            self.stepping = [(p.dtype, p.grad.dtype, p.nbytes) for p in self.parameters()]

    def counted(rank: int, layout: Layout) -> Any:
        module = Counting()
        fit(Run(layout, {"num_microbatches": 1}), BRAIN, module, gradient_clip_val=None)
        dtypes = {(one, other) for one, other, _ in module.stepping}
        return dtypes, module.inside, sum(size for *_, size in module.stepping)

    count = sum(p.numel() for p in Trained().parameters())
    full = {(torch.float32, torch.float32)}
    assert run_ranks(2, counted, SHARED) == [(full, 2 * count, 4 * count)] * 2
    layout = replicas(zero_stage=1)
    ranks = run_ranks(2, counted, layout)
    assert [(dtypes, inside) for dtypes, inside, _ in ranks] == [(full, 2 * count)] * 2
    # parameters that are too short to be shared are on both
    assert sum(size for *_, size in ranks) < 1.2 * 4 * count


@pytest.mark.parametrize(
    ("said", "precision", "field", "rule"),
    [
        ("float32", "32-true", "numerics.main_params", "wider than what layers compute in, and the module has float32"),
        ("float32", "bf16-mixed", "numerics.main_params", "wider"),
        ("float64", "64-true", "numerics.main_params", "the module has float64"),
        ("float16", "bf16-true", "numerics.main_params", "one of float32, float64"),
    ],
)
def test_main_parameters_that_are_no_wider_are_refused(said: str, precision: str, field: str, rule: str) -> None:
    def refused() -> None:
        Run(ONE, {"main_params": said}).trainer(precision=precision).fit(Trained(), Run(ONE).training(Singles()))

    with pytest.raises(ConfigError, match=rule) as caught:
        refused()
    assert caught.value.field == field
