"""What hooks read and write by less usual code: states of optimizers, vectors of parameters, files, autograd."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from features.toys import CLASSES, WIDTH
from ordinary.uses import Ordinary, Run, fitted, row

SECTION = "Written by hand in hooks"


class Momentum(Ordinary):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@row(SECTION, "`optimizer.state` is read: the sum of `exp_avg`")
class ReadsStates(Ordinary):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *args: Any) -> None:
        states = self.optimizers().optimizer.state.values()
        self.seen.append([float(sum(state["exp_avg"].abs().sum() for state in states)), len(states)])


@row(SECTION, "`optimizer.state_dict()` is read")
class ReadsStateDict(Momentum):
    def on_train_epoch_end(self) -> None:
        state = self.trainer.optimizers[0].state_dict()["state"]
        self.seen.append({key: value["momentum_buffer"].clone() for key, value in state.items()})


@row(SECTION, "momentum buffers are scaled in place")
class ScalesStates(Momentum):
    def on_train_batch_end(self, *args: Any) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["momentum_buffer"].mul_(0.5)


@row(SECTION, "rows of momentum buffers are normalised")
class NormalisesStates(Momentum):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter, state in self.trainer.optimizers[0].state.items():
            if parameter.dim() == 2:
                state["momentum_buffer"] = F.normalize(state["momentum_buffer"], dim=0)


@row(SECTION, "`optimizer.state.clear()` between epochs")
def cleared(run: Run) -> dict[str, Any]:
    class Clears(Momentum):
        def on_train_epoch_start(self) -> None:
            self.trainer.optimizers[0].state.clear()

    return fitted(run, Clears(), max_epochs=2)


@row(SECTION, "states are copied and loaded again: `optimizer.load_state_dict`")
def reloaded(run: Run) -> dict[str, Any]:
    class Reloads(Momentum):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.saved = copy.deepcopy(self.trainer.optimizers[0].state_dict())
            else:
                self.trainer.optimizers[0].load_state_dict(self.saved)

    return fitted(run, Reloads(), max_epochs=3)


@row(SECTION, "a penalty's `backward()` in `on_after_backward`")
class PenaltyBackward(Ordinary):
    def on_after_backward(self) -> None:
        (0.01 * sum((p**2).sum() for p in self.parameters())).backward()


@row(
    SECTION,
    "a penalty's `backward()` in `on_after_backward`, while activations are kept with their graph",
    slots=["build"],
)
class PenaltyBesideGraph(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        kept: list[Any] = [None]
        self.decoder.layers[3].up.register_forward_hook(lambda _, args, result: kept.__setitem__(0, result))

    def on_after_backward(self) -> None:
        (0.01 * sum((p**2).sum() for p in self.parameters())).backward()


@row(SECTION, "`torch.autograd.grad` of a weight, added to its gradient")
class PenaltyGrad(Ordinary):
    def on_after_backward(self) -> None:
        weight = self.decoder.head.weight
        (gradient,) = torch.autograd.grad((weight**2).sum(), weight)
        weight.grad.add_(gradient, alpha=0.01)


@row(SECTION, "the head is replaced in `on_train_epoch_start`, and joins by `add_param_group`")
def replaced(run: Run) -> dict[str, Any]:
    class Replaces(Ordinary):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                torch.manual_seed(5)
                self.decoder.head = nn.Linear(WIDTH, CLASSES).double()
                self.optimizers().optimizer.add_param_group({"params": [*self.decoder.head.parameters()]})

    return fitted(run, Replaces(), max_epochs=2)


@row(SECTION, "the encoder trains in every second batch: `requires_grad_` in `on_train_batch_start`")
class TurnsInHook(Ordinary):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.requires_grad_(batch_idx % 2 == 0)


@row(SECTION, "the encoder trains in every second batch: `requires_grad_` in `training_step`")
class TurnsInStep(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.encoder.requires_grad_(batch_idx % 2 == 0)
        return self.loss(batch)


@row(SECTION, "`parameters_to_vector` and `vector_to_parameters`")
class Vectors(Ordinary):
    def on_train_epoch_end(self) -> None:
        vector = parameters_to_vector(self.parameters()).detach()
        self.seen.append(float(vector.norm()))
        vector_to_parameters(vector * 0.9, self.parameters())


@row(SECTION, "`torch._foreach_norm` of gradients in `optimizer.param_groups`")
class ForeachNorms(Ordinary):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append(float(torch.stack(torch._foreach_norm(gradients)).norm()))
        torch._foreach_mul_(gradients, 0.5)


# before the last batch of an accumulation a hook sees the mean of its replica, as under DDP, whose sign may be another
@row(SECTION, "gradients are replaced by their signs: `p.grad.data = ...`", slots=["accumulate_grad_batches"])
class Signs(Ordinary):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.data = p.grad.data.sign() * 0.01


@row(SECTION, "a hash of `state_dict()` on all ranks")
class Hashes(Ordinary):
    def on_train_start(self) -> None:
        digest = hashlib.sha256()
        for name, value in sorted(self.state_dict().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        self.seen.append(digest.hexdigest())


@row(SECTION, "`torch.save(self.state_dict())` under `is_global_zero`")
def saved(run: Run) -> dict[str, Any]:
    class Saves(Ordinary):
        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                torch.save(self.state_dict(), run.folder / "weights.pt")

    found = fitted(run, Saves())
    return found | {"files": torch.load(run.folder / "weights.pt")}


@row(SECTION, "weights are pruned below a global quantile")
class Prunes(Ordinary):
    def on_train_epoch_end(self) -> None:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        limit = torch.quantile(torch.cat([p.detach().abs().flatten() for p in matrices]), 0.2)
        for p in matrices:
            p.data[p.data.abs() < limit] = 0.0


@row(SECTION, "weights of two layers are exchanged, and averaged at the end")
class Exchanges(Ordinary):
    def on_train_epoch_start(self) -> None:
        first, other = self.decoder.layers[0].up, self.decoder.layers[2].up
        first.weight.data, other.weight.data = other.weight.data.clone(), first.weight.data.clone()

    def on_train_end(self) -> None:
        with torch.no_grad():
            mean = torch.stack([layer.down.weight for layer in self.decoder.layers]).mean(0)
            for layer in self.decoder.layers:
                layer.down.weight.copy_(mean)


@row(SECTION, "a callback validates with averaged weights and puts the others back")
class SwapsAverage(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.2) if value.is_floating_point() else None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.before)


@row(SECTION, "layers are initialised anew after `torch.manual_seed`: `nn.init.orthogonal_`, `reset_parameters()`")
class Anew(Ordinary):
    def on_fit_start(self) -> None:
        torch.manual_seed(11)
        nn.init.orthogonal_(self.decoder.head.weight)
        self.encoder.projector.reset_parameters()


@row(SECTION, "the head is called by a hook")
class CallsHead(Ordinary):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.seen.append(self.decoder.head(torch.ones(1, WIDTH, dtype=torch.float64)).tolist())


@row(SECTION, "`BaseFinetuning` that unfreezes the encoder after an epoch")
def finetuned(run: Run) -> dict[str, Any]:
    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.encoder)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.05)

    class Filtered(Ordinary):
        def configure_optimizers(self) -> Any:
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    return fitted(run, Filtered(), callbacks=[Unfreezes()], max_epochs=3)


# --- what steps keep and write ---

KEPT = "Kept and written by steps"
SHARES = {"replicas": "each replica keeps what its own samples give, as under DDP"}


@row(KEPT, "a deque of the last losses: `deque(maxlen=4)`", over="mean")
class RecentLosses(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.recent: Any = deque(maxlen=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.recent.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += [sum(self.recent) / len(self.recent), float(len(self.recent))]


@row(KEPT, "losses of an epoch: `torch.stack(self.outputs)`, and how many there are", over="mean")
class StackedLosses(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append({"loss": loss.detach()})
        return loss

    def on_train_epoch_end(self) -> None:
        losses = torch.stack([output["loss"] for output in self.outputs])
        self.seen += [float(losses.mean()), float(len(losses))]
        self.outputs.clear()


@row(KEPT, "logits of the last batch in an attribute", over="joined", differs=SHARES)
class LastLogits(Ordinary):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.last = self(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(self.last.tolist())


@row(KEPT, "rows in a dict of lists: `self.store[name].append(logits)`", differs=SHARES)
class Stored(Ordinary):
    def on_validation_epoch_start(self) -> None:
        self.store: Any = {"logits": [], "label": []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.store["logits"].append(self(batch))
        self.store["label"].append(batch["label"])

    def on_validation_epoch_end(self) -> None:
        self.seen += [tuple(logits.shape) for logits in self.store["logits"]]
        self.seen.append(float(F.cross_entropy(torch.cat(self.store["logits"]), torch.cat(self.store["label"]))))


@row(KEPT, "one entry a sample: `self.answers.extend(...)`", differs=SHARES)
class Extended(Ordinary):
    def on_validation_epoch_start(self) -> None:
        self.answers: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.answers.extend(self(batch).sum(1).tolist())

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.answers)


@row(KEPT, "`self.logger.log_metrics` in `training_step`", differs=SHARES)
class LogsDirectly(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.log_metrics({"direct": loss.item(), "twice": 2 * loss}, step=self.global_step)
        return loss


@row(KEPT, "files of logits under `is_global_zero` in `validation_step`")
def written(run: Run) -> dict[str, Any]:
    class Writes(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch)
            if self.trainer.is_global_zero:
                torch.save(logits, run.folder / f"{batch_idx}.pt")

    found = fitted(run, Writes())
    return found | {"files": sorted(path.name for path in run.folder.glob("*.pt"))}


@row(KEPT, "a line of JSON with `callback_metrics` after each fit")
def lines(run: Run) -> dict[str, Any]:
    class Writes(Ordinary):
        def on_fit_end(self) -> None:
            found = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            if self.trainer.is_global_zero:
                (run.folder / "metrics.json").write_text(json.dumps(found))

    found = fitted(run, Writes())
    path = run.folder / "metrics.json"  # another rank may be done before rank 0 writes it; rank 0's is compared
    return found | {"files": json.loads(path.read_text()) if path.exists() and path.stat().st_size else {}}


class Keeps(nn.Module):
    """A linear layer that keeps what it has computed."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        self.around, self.last = around, torch.zeros(1)
        self.means: list[Any] = []

    def forward(self, hidden: Any) -> Any:
        result = self.around(hidden)
        self.last = result.detach()
        self.means.append(self.last.mean())
        return result


@row(
    KEPT,
    "the encoder keeps its last features in its `forward`, and `on_train_batch_end` reads them",
    over="mean",
    differs={"pp": "ranks that share out microbatches keep what their own ones give, with a warning"},
)
class KeptByEncoder(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector = Keeps(self.encoder.projector)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.encoder.projector.last.square().sum(1).mean()))


@row(KEPT, "a list in a layer: `self.means.append(...)` in its `forward`, read after the epoch", over="mean")
class KeptByLayers(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        for index in (0, 3):
            self.decoder.layers[index].dropout = Keeps(self.decoder.layers[index].dropout)

    def on_train_epoch_end(self) -> None:
        for index in (0, 3):
            means = self.decoder.layers[index].dropout.means
            self.seen.append([float(len(means)), float(torch.stack(means).mean())])


@row(KEPT, "a forward hook keeps logits on the head: `module.last = output`", over="mean")
class KeptByHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.decoder.head.register_forward_hook(lambda head, _, output: setattr(head, "last", output.detach()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.decoder.head.last.square().sum(1).mean()))


@row(KEPT, "`trainer.callback_metrics` is read in the step that has just logged it", over="mean")
class ReadsWhatItLogs(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("own_loss", loss)
        self.seen.append(float(self.trainer.callback_metrics["own_loss"]))
        return loss


@row(KEPT, "`trainer.callback_metrics` of the last validation is read in a step that logs something else")
class ReadsEarlier(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        metrics = self.trainer.callback_metrics
        return loss * float(metrics["val_loss"]) if "val_loss" in metrics else loss


@row(KEPT, "a hook of a parameter appends to a list of the module, which `on_train_epoch_end` reads")
class KeptByParameter(Ordinary):
    def on_fit_start(self) -> None:
        self.norms: list[float] = []
        self.decoder.head.weight.register_hook(lambda gradient: self.norms.append(float(gradient.norm())))

    def on_train_epoch_end(self) -> None:
        self.seen.append(len(self.norms))


@row(KEPT, "an error of a hook is caught, and the same module is fitted again")
def fitted_again(run: Run) -> dict[str, Any]:
    class Fails(Ordinary):
        fails = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.fails and batch_idx == 2:
                self.fails = False
                raise ValueError("the third batch")

    module = Fails()
    with suppress(ValueError):
        fitted(run, module)
    return fitted(run, module)


class Scaled(Ordinary):
    """Multiplies logits by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) * self.scale


@row(SECTION, "a buffer is written on all ranks")
class WritesBuffer(Scaled):
    def on_train_batch_end(self, *args: Any) -> None:
        self.scale.mul_(0.9)


@row(SECTION, "a buffer is written under `is_global_zero`")
class WritesBufferOnRank0(Scaled):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            self.scale.mul_(0.9)


@row(SECTION, "a parameter is written under `global_rank == 0`")
class WritesParameterOnRank0(Ordinary):
    def on_train_start(self) -> None:
        if self.global_rank == 0:
            torch.nn.init.zeros_(self.decoder.head.bias)


@row(SECTION, "`lr` is changed under `is_global_zero`")
class SlowsDownOnRank0(Ordinary):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            self.optimizers().param_groups[0]["lr"] *= 0.5


@row(SECTION, "written files are counted under `is_global_zero`")
class CountsFiles(Ordinary):
    files = 0

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.files += 1


@row(
    KEPT,
    "a module that is put into the encoder in `on_train_start` keeps features, which `on_train_batch_end` reads",
    differs={
        "replicas": "each replica sees those of its own samples, as under DDP",
        "pp": "ranks that share out the encoder's microbatches find those of their own; a warning names the attribute",
    },
)
class PutsInATap(Ordinary):
    def on_train_start(self) -> None:
        self.encoder.projector = Tap(self.encoder.projector)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.encoder.projector.features.sum(1).tolist())

    def on_train_end(self) -> None:
        self.encoder.projector = self.encoder.projector.inner


class Tap(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Any) -> Any:
        self.features = self.inner(images)
        return self.features
