"""What is written out by hand around training: clipping, averages, freezing, checkpoints, resuming."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from torch import Tensor, nn

from features.toys import weights
from ordinary.uses import Ordinary, Run, fitted, observed, row

HAND = "Written by hand"
SINGLE = {"replicas": "a hook sees the gradients after they are averaged over replicas"}


@row(HAND, "clipping by hand: `torch.nn.utils.clip_grad_norm_(self.parameters(), ...)`")
class ClipsNorm(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)


@row(HAND, "clipping by hand: `torch.nn.utils.clip_grad_value_`")
class ClipsValue(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


@row(HAND, "clipping written out: the sum of squares over `p.grad`")
class ClipsWrittenOut(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = sum(float((p.grad**2).sum()) for p in self.parameters() if p.grad is not None) ** 0.5
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.3 / total))


@row(HAND, "clipping of each parameter by its own norm")
class ClipsEach(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                torch.nn.utils.clip_grad_norm_([p], 0.05)


@row(HAND, "the norm of all gradients is logged: `grad_norm(self, 2)`")
class LogsNorms(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self, norm_type=2))


@row(HAND, "the norm of gradients is logged by hand: `torch.stack([p.grad.norm() ...])`")
class LogsNorm(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


@row(HAND, "the norm of the weights is logged: `sum(p.norm() ...)`")
class LogsWeights(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("weights", sum(p.detach().norm() for p in self.parameters()))


@row(HAND, "a step is skipped if the largest gradient is above a limit")
class SkipsLarge(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        largest = max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None)
        if largest > 0.12:
            optimizer.zero_grad()


@row(HAND, "gradients are centralised: `p.grad -= p.grad.mean(...)`")
class Centralises(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@row(HAND, "gradients that are not finite are set to zero")
class MendsGradients(Ordinary):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                torch.nan_to_num_(p.grad)


@row(HAND, "weights are clamped in place after each step")
class ClampsWeights(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.decoder.head.parameters():
                p.clamp_(-0.2, 0.2)


@row(HAND, "rows of a weight are renormalised after each step")
class Renormalises(Ordinary):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            weight = self.decoder.head.weight
            weight.div_(weight.norm(dim=1, keepdim=True))


@row(HAND, "a moving average of the parameters in a dict (EMA), saved by `on_save_checkpoint`")
def ema(run: Run) -> dict[str, Any]:
    class Averaged(Ordinary):
        def on_fit_start(self) -> None:
            self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for name, p in self.named_parameters():
                self.average[name].mul_(0.9).add_(p.detach(), alpha=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average

    module, trainer = Averaged(), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "ema.ckpt")
    saved = torch.load(run.folder / "ema.ckpt", weights_only=False)["average"] if trainer.is_global_zero else {}
    return observed(trainer, module) | {"files": saved}


@row(HAND, "a copy of the encoder as teacher, updated in `on_train_batch_end` (mean teacher)")
class MeanTeacher(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch["images"])
        features = self.encoder(batch["images"])
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"]) + F.mse_loss(features, target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


@row(HAND, "`torch.optim.swa_utils.AveragedModel` in a hook")
class Swa(Ordinary):
    def on_fit_start(self) -> None:
        self.averaged = [torch.optim.swa_utils.AveragedModel(self.decoder.head)]

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.averaged[0].update_parameters(self.decoder.head)


@row(HAND, "the number of parameters: `sum(p.numel() for p in self.parameters())`")
class CountsParameters(Ordinary):
    def on_fit_start(self) -> None:
        self.seen.append(sum(p.numel() for p in self.parameters() if p.requires_grad))


@row(HAND, "shapes, dtypes and devices of all parameters are read in a hook")
class ReadsShapes(Ordinary):
    def on_train_start(self) -> None:
        self.seen += [[name, tuple(p.shape), str(p.dtype), str(p.device)] for name, p in self.named_parameters()]


@row(HAND, "the encoder is frozen in `__init__`", slots=["freeze"])
class Frozen(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


@row(HAND, "the encoder is frozen in `on_fit_start`", slots=["freeze"])
class FrozenLater(Ordinary):
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.encoder.requires_grad_(False)


@row(HAND, "the encoder is frozen in `on_train_epoch_start` of the second epoch", slots=["freeze"])
def frozen_epoch(run: Run) -> dict[str, Any]:
    class Freezing(Ordinary):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.encoder.requires_grad_(self.current_epoch == 0)

    return fitted(run, Freezing(), max_epochs=3)


@row(HAND, "layers are unfrozen one by one by epoch")
def unfrozen(run: Run) -> dict[str, Any]:
    class Unfreezing(Ordinary):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            for index, layer in enumerate(self.decoder.layers):
                layer.requires_grad_(index >= 3 - self.current_epoch)

    return fitted(run, Unfreezing(), max_epochs=3)


@row(HAND, "`self.freeze()` and `self.unfreeze()`")
class FreezesAll(Ordinary):
    def on_fit_start(self) -> None:
        self.freeze()
        self.unfreeze()


@row(HAND, "`self.encoder.eval()` in `on_train_epoch_start`")
class EvaluatesEncoder(Ordinary):
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.encoder.eval()
        self.seen.append([self.encoder.training, self.decoder.training])


@row(HAND, "a hook on gradients of a parameter: `p.register_hook`")
class HooksGradients(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        for p in self.decoder.layers[2].parameters():
            p.register_hook(lambda gradient: gradient * 0.5)


@row(HAND, "a forward hook keeps the shape of activations")
class HooksForward(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.layers[1].register_forward_hook(lambda module, args, out: out * 0.9)


@row(HAND, "a layer is initialised in `on_fit_start`: `nn.init.zeros_`")
class Initialises(Ordinary):
    def on_fit_start(self) -> None:
        nn.init.zeros_(self.decoder.head.weight)


@row(HAND, "`self.apply(init)` in `__init__`", slots=["build"])
class Applies(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.apply(lambda m: nn.init.constant_(m.bias, 0.01) if isinstance(m, nn.Linear) else None)


@row(HAND, "`self.load_state_dict` in `on_fit_start`")
def loads(run: Run) -> dict[str, Any]:
    state = {name: value * 0.5 for name, value in weights(Ordinary()).items()}

    class Loading(Ordinary):
        def on_fit_start(self) -> None:
            self.load_state_dict(state)

    return fitted(run, Loading())


@row(HAND, "a submodule's `load_state_dict` in `__init__`", slots=["build"])
class LoadsPart(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.load_state_dict({name: value * 0.5 for name, value in self.encoder.state_dict().items()})


@row(HAND, "`self.state_dict()` is read in a hook")
class ReadsState(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.seen.append(sorted(self.state_dict()))


@row(HAND, "a weight is read in a hook: `float(self.decoder.head.weight[0, 0])`")
class ReadsWeight(Ordinary):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.seen.append(float(self.decoder.head.weight[0, 0]))


@row(
    HAND,
    "random numbers in the step: noise on images",
    slots=["step", "random"],
    differs=dict.fromkeys(
        ("one", "replicas", "split", "pp", "tp"), "draws other numbers than one process, the same on all ranks"
    ),
)
class Noisy(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss({**batch, "images": batch["images"] + 0.1 * torch.randn_like(batch["images"])})


@row(HAND, "gradient checkpointing: `torch.utils.checkpoint` in `forward`", slots=["build"])
class Recomputes(Ordinary):
    def forward(self, batch: Any) -> Tensor:
        features = torch.utils.checkpoint.checkpoint(self.encoder, batch["images"], use_reentrant=False)
        return self.decoder(batch["tokens"], features)


@row(HAND, "sharpness-aware steps (SAM): two backwards in `optimizer_step`")
class Sam(Ordinary):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        moved = {}
        with torch.no_grad():
            for p in self.parameters():
                if p.grad is not None:
                    moved[p] = 0.01 * p.grad
                    p.add_(moved[p])
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            for p, shift in moved.items():
                p.sub_(shift)


@row(HAND, "spectral norm of the head: `parametrizations.spectral_norm`", slots=["build"])
class Spectral(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            nn.utils.parametrizations.weight_norm(self.decoder.head)


# --- checkpoints ---

FILES = "Checkpoints and resuming"


def resumed(title: str, first: Any, second: Any, **options: Any) -> None:
    """A row that trains by flags `first`, saves, and goes on by flags `second`."""

    def scenario(run: Run) -> dict[str, Any]:
        start = run.trainer(**first)
        start.fit(Adam(), run.training(), run.loader(16))
        start.save_checkpoint(run.folder / "first.ckpt")
        return fitted(run, Adam(), ckpt_path=run.folder / "first.ckpt", **second)

    row(FILES, title, **options)(scenario)


class Adam(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


resumed("`trainer.fit(ckpt_path=...)` after an epoch", {}, {"max_epochs": 2})
resumed("`trainer.fit(ckpt_path=...)` in the midst of an epoch", {"max_steps": 2}, {"max_epochs": 2})
resumed("resuming under accumulation", {"accumulate_grad_batches": 2}, {"max_epochs": 2, "accumulate_grad_batches": 2})


@row(FILES, "`trainer.save_checkpoint`: what the file holds")
def held(run: Run) -> dict[str, Any]:
    module, trainer = Adam(), run.trainer()
    trainer.fit(module, run.training(), run.loader(16))
    trainer.save_checkpoint(run.folder / "held.ckpt")
    if not trainer.is_global_zero:
        return {}
    saved = torch.load(run.folder / "held.ckpt", weights_only=False)
    state = saved["optimizer_states"][0]
    return {
        "files": [
            saved["state_dict"],
            state["param_groups"],
            state["state"],
            saved["lr_schedulers"],
            saved["hyper_parameters"],
            saved["global_step"],
        ]
    }


@row(FILES, "`trainer.save_checkpoint(weights_only=True)`")
def weights_only(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "weights.ckpt", weights_only=True)
    saved = torch.load(run.folder / "weights.ckpt", weights_only=False) if trainer.is_global_zero else {}
    return {"files": [sorted(set(saved) - {"pytorch-lightning_version"}), saved.get("state_dict")]}


@row(FILES, "`Module.load_from_checkpoint` after fit")
def from_checkpoint(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "after.ckpt")
    loaded = Ordinary.load_from_checkpoint(run.folder / "after.ckpt", weights_only=False)
    return {"seen": [weights(loaded), dict(loaded.hparams)]}


@row(FILES, "`trainer.test(ckpt_path=...)` with an untrained module")
def tested(run: Run) -> dict[str, Any]:
    class Testing(Ordinary):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    trainer = run.trainer()
    trainer.fit(Testing(), run.training())
    trainer.save_checkpoint(run.folder / "t.ckpt")
    return {"seen": run.trainer().test(Testing(), run.loader(16), ckpt_path=run.folder / "t.ckpt", verbose=False)}


@row(FILES, '`ckpt_path="last"`')
def last(run: Run) -> dict[str, Any]:
    def made() -> list[Any]:
        return [ModelCheckpoint(run.folder / "l", save_last=True)]

    run.trainer(enable_checkpointing=True, callbacks=made()).fit(Ordinary(), run.training())
    return fitted(run, Ordinary(), enable_checkpointing=True, callbacks=made(), max_epochs=2, ckpt_path="last")


@row(FILES, "`save_hyperparameters()` with values of many types")
def hyperparameters(run: Run) -> dict[str, Any]:
    class Configured(Ordinary):
        def __init__(self, names: Any = ("a", "b"), sizes: Any = None, rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["sizes"])

    module, trainer = Configured(["x"], {"y": 1}), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "h.ckpt")
    saved = torch.load(run.folder / "h.ckpt", weights_only=False) if trainer.is_global_zero else {}
    return {"seen": [dict(module.hparams)], "files": saved.get("hyper_parameters")}


@row(FILES, "`strict_loading = False` with a checkpoint that lacks a part")
def lenient(run: Run) -> dict[str, Any]:
    class Lenient(Ordinary):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "head" not in k}

    module, trainer = Lenient(), run.trainer()
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "part.ckpt")
    second = Ordinary()
    second.strict_loading = False
    return fitted(run, second, max_epochs=2, ckpt_path=run.folder / "part.ckpt")


# --- precision, profilers, seeds ---

OTHER = "Precision, profilers, seeds"


class Single(Ordinary):
    """In float32, whose rounding depends on the order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, batch: Any) -> Tensor:
        return self.decoder(batch["tokens"], self.encoder(batch["images"].to(self.decoder.head.weight.dtype)))


def precise(precision: str, digits: int) -> None:
    """A row whose losses and metrics are compared to so many digits."""

    @row(OTHER, f'`Trainer(precision="{precision}")`, to {digits} digits')
    def scenario(run: Run) -> dict[str, Any]:
        found = fitted(run, Single(), precision=precision)
        metrics = {name: round(value, digits) for name, value in found["metrics"].items()}
        return {"metrics": metrics, "seen": [str(p.dtype) for p in Single().parameters()][:1]}


@row(
    OTHER,
    "two fits after one `seed_everything(...)`, with `shuffle=True`",
    differs={"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"},
)
def two_fits(run: Run) -> dict[str, Any]:
    L.seed_everything(3)
    first = fitted(run, Ordinary(), data={"train_dataloaders": run.loader(32, shuffle=True)})
    second = fitted(run, Ordinary(), data={"train_dataloaders": run.loader(32, shuffle=True)})
    return {**second, "seen": first["losses"]}


precise("32-true", 4)
precise("bf16-mixed", 1)
precise("bf16-true", 1)
precise("16-mixed", 1)


def profiled(title: str, make: Any) -> None:
    @row(OTHER, title)
    def scenario(run: Run) -> dict[str, Any]:
        return fitted(run, Ordinary(), profiler=make(run))


profiled("`SimpleProfiler(dirpath, filename)`", lambda run: SimpleProfiler(run.folder, "profile"))
profiled("`AdvancedProfiler`", lambda run: AdvancedProfiler(run.folder, "profile"))
profiled("`PassThroughProfiler`", lambda run: PassThroughProfiler())


@row(OTHER, "`self.trainer.profiler.profile(...)` in the step")
class Profiles(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("mine"):
            return self.loss(batch)


@row(
    OTHER,
    "`seed_everything(...)` before the run, with `shuffle=True`",
    differs={"replicas": "Lightning's distributed sampler takes the place of the order of one process, as under DDP"},
)
def seeded(run: Run) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    return fitted(run, Ordinary(), data={"train_dataloaders": run.training(shuffle=True)}, max_epochs=2)


@row(OTHER, "`self.device`, `self.dtype` and `self.on_gpu` in a hook")
class ReadsDevice(Ordinary):
    def on_train_start(self) -> None:
        self.seen += [str(self.device), str(self.dtype), self.on_gpu]


@row(OTHER, "`self.example_input_array`")
class Example(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = {
            "batch": {"images": torch.zeros(2, 6, dtype=torch.float64), "tokens": torch.zeros(2, 5, dtype=torch.long)}
        }


@row(
    OTHER,
    "`self.trainer.world_size` and `self.global_rank` are read",
    differs=dict.fromkeys(("replicas", "split", "pp", "tp"), "ranks are counted, with their stages and shards"),
)
class ReadsRanks(Ordinary):
    def on_train_start(self) -> None:
        self.seen += [self.trainer.world_size, self.trainer.num_devices, self.trainer.num_nodes]


@row(OTHER, '`Trainer(strategy=..., accelerator="auto")`')
def auto(run: Run) -> dict[str, Any]:
    return fitted(run, Ordinary(), accelerator="auto")


@row(OTHER, "`torch.autograd.set_detect_anomaly` by hand, and `register_full_backward_hook` on the head")
class BackwardHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.head.register_full_backward_hook(lambda module, inputs, outputs: None)
