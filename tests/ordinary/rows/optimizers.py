"""Optimizers, schedulers and the forms of `configure_optimizers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from ordinary.uses import Ordinary, Run, fitted, row

SECTION = "Optimizers and schedulers"


def configured(title: str, configure: Callable[[Any], Any], section: str = SECTION, flags: Any = None, **options: Any):
    """A row with this `configure_optimizers`."""

    def scenario(run: Run) -> dict[str, Any]:
        return fitted(run, type("Configured", (Ordinary,), {"configure_optimizers": configure})(), **flags)

    if flags is not None:
        row(section, title, **options)(scenario)
    else:
        row(section, title, slots=["optimizer"], **options)(
            type("Configured", (Ordinary,), {"configure_optimizers": configure})
        )


def optimizer(title: str, make: Callable[[Any], Any], **options: Any) -> None:
    configured(title, lambda self: make(self.parameters()), **options)


O = torch.optim  # noqa: E741
optimizer(
    "`SGD(momentum=0.9, weight_decay=0.01, nesterov=True)`",
    lambda p: O.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
)
optimizer("`SGD(maximize=True)`", lambda p: O.SGD(p, lr=0.01, maximize=True))
optimizer("`SGD(foreach=True)`", lambda p: O.SGD(p, lr=0.1, foreach=True))
optimizer("`Adam`", lambda p: O.Adam(p, lr=0.01, eps=1e-3))
optimizer("`Adam(amsgrad=True)`", lambda p: O.Adam(p, lr=0.01, amsgrad=True, eps=1e-3))
optimizer("`AdamW`", lambda p: O.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-3))
optimizer("`AdamW(fused=True)`", lambda p: O.AdamW(p, lr=0.01, fused=True, eps=1e-3))
optimizer("`NAdam`", lambda p: O.NAdam(p, lr=0.01, eps=1e-3))
optimizer("`RAdam`", lambda p: O.RAdam(p, lr=0.01, eps=1e-3))
optimizer("`Adamax`", lambda p: O.Adamax(p, lr=0.01, eps=1e-3))
optimizer("`Adagrad`", lambda p: O.Adagrad(p, lr=0.01, eps=1e-3))
optimizer("`Adadelta`", lambda p: O.Adadelta(p, lr=0.5, eps=1e-3))
optimizer("`RMSprop`", lambda p: O.RMSprop(p, lr=0.01, eps=1e-3))
optimizer("`ASGD`", lambda p: O.ASGD(p, lr=0.01))
optimizer("`Rprop`", lambda p: O.Rprop(p, lr=0.001))
optimizer("`LBFGS`", lambda p: O.LBFGS(p, lr=0.1, max_iter=3))
optimizer("`Adafactor` of torch", lambda p: O.Adafactor(p, lr=0.01))


class Lion(O.Optimizer):
    """An optimizer of one's own, element by element."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(torch.tanh(1e2 * (0.9 * mean + 0.1 * p.grad)), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class Lars(Lion):
    """An optimizer of one's own that takes the norm of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = (p.norm() / (p.grad.norm() + 1e-3)).clamp(max=10.0)
                    p.add_(p.grad * trust, alpha=-group["lr"])
        return loss


optimizer("an optimizer of one's own (Lion)", lambda p: Lion(p))
optimizer("an optimizer of one's own with norms of parameters (LARS)", lambda p: Lars(p))


def decayed(self: Any) -> Any:
    plain = [p for p in self.parameters() if p.dim() < 2]
    decay = [p for p in self.parameters() if p.dim() >= 2]
    return O.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01, eps=1e-3)


def by_part(self: Any) -> Any:
    return O.SGD([{"params": self.encoder.parameters(), "lr": 0.02}, {"params": self.decoder.parameters()}], lr=0.1)


def layer_wise(self: Any) -> Any:
    groups = [{"params": layer.parameters(), "lr": 0.1 * 0.5**i} for i, layer in enumerate(self.decoder.layers)]
    rest = [p for name, p in self.named_parameters() if "decoder.layers" not in name]
    return O.SGD([*groups, {"params": rest}], lr=0.05)


def by_name(self: Any) -> Any:
    return O.SGD([(name, p) for name, p in self.named_parameters()], lr=0.1)


def head_alone(self: Any) -> Any:
    return O.SGD(self.decoder.head.parameters(), lr=0.1)


def trainable(self: Any) -> Any:
    return O.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


configured("weight decay for matrices alone, by `p.dim()`", decayed)
configured("param groups of encoder and decoder with learning rates of their own", by_part)
configured("learning rates that fall with the depth of layers", layer_wise)
configured("named parameters", by_name)
configured("the head alone is optimized", head_alone)
configured("`filter(lambda p: p.requires_grad, ...)`", trainable)
configured("`configure_optimizers` returns None", lambda self: None)
configured("returns a list with one optimizer", lambda self: [O.SGD(self.parameters(), lr=0.1)])
configured("returns a dict with `optimizer`", lambda self: {"optimizer": O.SGD(self.parameters(), lr=0.1)})


def scheduled(title: str, make: Callable[[Any], Any], flags: Any = None, **how: Any) -> None:
    """A row with a scheduler that `make` makes of an optimizer, configured by `how`."""

    def configure(self: Any) -> Any:
        optimizer = O.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how} if how else scheduler}

    configured(title, configure, flags={"max_epochs": 3} if flags is None else flags)


S = schedulers
scheduled("`StepLR`", lambda o: S.StepLR(o, 1, 0.5))
scheduled("`MultiStepLR`", lambda o: S.MultiStepLR(o, [1, 2], 0.5))
scheduled("`ExponentialLR`", lambda o: S.ExponentialLR(o, 0.7))
scheduled("`CosineAnnealingLR` each step", lambda o: S.CosineAnnealingLR(o, 12), interval="step")
scheduled("`CosineAnnealingWarmRestarts`", lambda o: S.CosineAnnealingWarmRestarts(o, 2), interval="step")
scheduled("`LambdaLR` warm-up each step", lambda o: S.LambdaLR(o, lambda i: min(1, (i + 1) / 4)), interval="step")
scheduled("`LinearLR`", lambda o: S.LinearLR(o, 0.3, total_iters=4), interval="step")
scheduled("`PolynomialLR`", lambda o: S.PolynomialLR(o, 12), interval="step")
scheduled("`CyclicLR`", lambda o: S.CyclicLR(o, 0.01, 0.1, 2), interval="step")
scheduled("`OneCycleLR(total_steps=12)`", lambda o: S.OneCycleLR(o, 0.1, total_steps=12), interval="step")
scheduled("`ReduceLROnPlateau` of `val_loss`", lambda o: S.ReduceLROnPlateau(o, patience=0), monitor="val_loss")
scheduled("`ReduceLROnPlateau` of `train_loss`", lambda o: S.ReduceLROnPlateau(o, patience=0), monitor="train_loss")
scheduled(
    "`ReduceLROnPlateau` that monitors what is not logged, `strict=False`",
    lambda o: S.ReduceLROnPlateau(o),
    monitor="nothing",
    strict=False,
)
scheduled("a scheduler with `frequency=2`", lambda o: S.ExponentialLR(o, 0.7), interval="step", frequency=2)
scheduled("a scheduler with `name`", lambda o: S.ExponentialLR(o, 0.7), name="rate")
scheduled(
    "`SequentialLR` of warm-up and cosine",
    lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=3), S.CosineAnnealingLR(o, 9)], [3]),
    interval="step",
)
scheduled(
    "`ChainedScheduler`", lambda o: S.ChainedScheduler([S.LinearLR(o, 0.5, total_iters=3), S.ExponentialLR(o, 0.9)])
)
scheduled(
    "a scheduler under `accumulate_grad_batches=2`",
    lambda o: S.ExponentialLR(o, 0.7),
    flags={"max_epochs": 2, "accumulate_grad_batches": 2},
    interval="step",
)


def two_lists(self: Any) -> Any:
    optimizer = O.SGD(self.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": S.ExponentialLR(optimizer, 0.5), "interval": "step"}]


def two_tuples(self: Any) -> Any:
    optimizer = O.SGD(self.parameters(), lr=0.1)
    return ([optimizer], [S.ExponentialLR(optimizer, 0.5)])


def estimated(self: Any) -> Any:
    optimizer = O.SGD(self.parameters(), lr=0.1)
    steps = int(self.trainer.estimated_stepping_batches)
    self.seen.append(steps)
    return [optimizer], [{"scheduler": S.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}]


configured("returns two lists, the second of dicts", two_lists)
configured("returns a tuple of two lists", two_tuples)
configured("`OneCycleLR(total_steps=self.trainer.estimated_stepping_batches)`", estimated)


@row(SECTION, "`self.lr_schedulers().step()` and `self.optimizers()` in a hook", slots=["optimizer"])
class StepsInHook(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = O.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": S.ExponentialLR(optimizer, 0.5), "interval": "epoch", "frequency": 100}]

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.lr_schedulers().step()
        self.seen.append(self.optimizers().param_groups[0]["lr"])


# --- manual optimization ---

MANUAL = "Manual optimization"


class Manual(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def manual(title: str, **options: Any) -> Callable[[type], type]:
    """A row that is not put together with others: it takes optimization over."""

    def register(kind: type[Ordinary]) -> type[Ordinary]:
        def scenario(run: Run) -> dict[str, Any]:
            return fitted(run, kind(), max_epochs=2)

        row(MANUAL, title, **options)(scenario)
        return kind

    return register


@manual("one optimizer")
class OneByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@manual("two optimizers that take turns, with `toggle_optimizer`")
class TwoByHand(Manual):
    def configure_optimizers(self) -> Any:
        return [O.SGD(self.encoder.parameters(), lr=0.1), O.SGD(self.decoder.parameters(), lr=0.05)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@manual("two optimizers step after one backward")
class BothByHand(TwoByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss


@manual("accumulation by hand")
class AccumulatesByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


@manual("clipping by hand with `self.clip_gradients`")
class ClipsByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()


@manual("a scheduler by hand")
class SchedulesByHand(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = O.SGD(self.parameters(), lr=0.1)
        return [optimizer], [S.ExponentialLR(optimizer, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


@manual("a closure: `optimizer.step(closure)`")
class ClosesByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@manual("a generator and a discriminator (GAN)")
class Adversarial(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(8, 1).double()
        nn.init.constant_(self.critic.weight, 0.1)
        nn.init.zeros_(self.critic.bias)

    def configure_optimizers(self) -> Any:
        own = [*self.encoder.parameters(), *self.decoder.parameters()]
        return [O.SGD(own, lr=0.1), O.SGD(self.critic.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        features = self.encoder(batch["images"])
        first.zero_grad()
        self.manual_backward(self.loss(batch) - self.critic(features).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.critic(features.detach()).pow(2).mean())
        second.step()


@manual("`loss.backward()` in place of `self.manual_backward(loss)`")
class PlainBackwardByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


@manual("clipping by hand with `torch.nn.utils.clip_grad_norm_` in the step")
class ClipsByTorch(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        optimizer.step()


@manual(
    "`torch.autograd.grad(loss, features)` weighs the loss, before `manual_backward`",
    differs={"replicas": "each replica has the gradients of its own samples, as under DDP"},
)
class WeighsByGradients(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        features = self.encoder(batch["images"])
        loss = torch.nn.functional.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        (gradient,) = torch.autograd.grad(loss, features, retain_graph=True)
        self.manual_backward(loss * (1.0 + gradient.norm().detach()))
        optimizer.step()


@manual("`self.manual_backward(loss, inputs=...)`")
class BackwardToInputs(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), inputs=[*self.encoder.parameters()])
        optimizer.step()


@row(MANUAL, "`loss.backward()` in a step of automatic optimization, which Lightning zeroes after it")
class BackwardInTheStep(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        return loss


@row(MANUAL, "`backward` is overridden by `loss.backward(inputs=...)`")
class BackwardIsToInputs(Ordinary):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=[*self.decoder.parameters()])


@manual("logs of a manual step", differs={"replicas": "without `sync_dist` each replica logs its own, as under DDP"})
class LogsByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("manual_loss", loss, prog_bar=True)
