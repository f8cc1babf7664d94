"""Keeps the copies that autocast makes of weights over all microbatches of a step.

Autocast can cast a trained weight once and keep the copy until its outermost context ends. Lightning's context has that
switched off, because copies made for an evaluation have no graph; and it ends with its microbatch. So every microbatch
in flight would keep copies of its own for its backward. Here a context around the step lets all microbatches use one.

A copy gives other numbers than a cast for each use in two cases: after a write to the weight, and where one microbatch
uses a weight twice, because the gradient of a copy is summed in half precision. In both no copy is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.data_accesses import accesses
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.trainer.feature import Attached, Feature, Running


class KeptCasts(Feature):
    """Keeps autocast's copies of weights within the training steps of a fit."""

    def attach(self, running: Running) -> Attached | None:
        """Let the microbatches of a step share copies."""
        if running.trainer.state.fn != TrainerFn.FITTING:
            return None
        attached = Attached()
        attached.put_attribute(running.steps, "casting", CastingOnce(running.module, running.device))
        return attached


class CastingOnce:
    """Keeps autocast's copies within training steps, unless these write to trained weights or use one twice.

    The first microbatch of each stage and structure keeps none, and shows both; again where other weights are trained.
    A write to `parameter.data` leaves no trace, so an access to it by a microbatch drops all copies, and none are kept
    from then on.

    Args:
        module: the LightningModule.
        device: where it computes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._named, self._kind = list(module.named_parameters()), device.type
        self._trained: list[tuple[str, nn.Parameter]] = []  # in this step, of this rank
        self._ids: frozenset[int] = frozenset()
        self._versions: list[int] = []
        self._tried: set[Hashable] = set()
        self._keeps, self._inside_of = torch.amp.is_autocast_available(self._kind), 0  # microbatches

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enter around a training step; autocast is on or off in it as it is outside.

        Raises:
            ConfigError: a microbatch wrote to trained weights, and the first one of its stage did not.
        """
        if not self._keeps:
            yield
            return
        with plain():
            self._trained = [(name, p) for name, p in self._named if p.requires_grad and not is_remote(p)]
        ids = frozenset(id(parameter) for _, parameter in self._trained)
        if ids != self._ids:  # of what was frozen before, no microbatch has shown how often it is cast
            self._ids, self._tried = ids, set()
        self._versions = self._counts()
        outermost = torch.autocast(
            self._kind,
            dtype=torch.get_autocast_dtype(self._kind),
            enabled=torch.is_autocast_enabled(self._kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        with outermost, accesses(self._accessed):
            yield
        self._check()

    @contextmanager
    def entered(
        self, context: Callable[[], AbstractContextManager[Any]], way: Callable[[], Hashable]
    ) -> Iterator[None]:
        """Enter what `context` returns around a microbatch of a training step; autocast in it keeps its copies.

        Args:
            context: sets up autocast.
            way: returns the stage that the microbatch passes, and its structure.
        """
        with context():
            if not torch.is_autocast_enabled(self._kind):
                yield
            elif not self._keeps:
                yield
                torch.clear_autocast_cache()  # contexts of the user's own keep copies until the outermost ends
            elif (taken := way()) in self._tried:
                torch.set_autocast_cache_enabled(True)  # until the context ends, which sets it back
                with self._inside():
                    yield
            else:
                self._check()
                with self._inside(), _Uses(self._ids) as uses:
                    yield
                if uses.repeat or self._written():
                    self._stop()
                self._tried.add(taken)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._inside_of += 1  # microbatches side by side end in any order
        try:
            yield
        finally:
            self._inside_of -= 1

    def _accessed(self, parameter: Tensor, data: Tensor, sets: bool) -> None:
        if self._inside_of and id(parameter) in self._ids:
            self._stop()

    def _stop(self) -> None:
        """Keep no copies from here on, neither in this microbatch nor later."""
        self._keeps = False
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()

    def _counts(self) -> list[int]:
        with plain():
            return [parameter._version for _, parameter in self._trained]

    def _written(self) -> str | None:
        """The name of a trained weight that was written to in place since the step began."""
        pairs = zip(self._trained, self._versions, self._counts(), strict=True)
        return next((name for (name, _), before, after in pairs if before != after), None)

    def _check(self) -> None:
        """Refuse writes of microbatches that kept copies."""
        if self._keeps and self._tried and (written := self._written()):
            rule = (
                "Under autocast all microbatches of a step use one copy of each trained weight, and its first "
                "microbatch of the fit wrote to none"
            )
            fix = "Write between steps, as in on_train_batch_start, or use bf16-true with main_params"
            raise ConfigError("training_step", f"a write to {written!r}", rule, fix)


class _Uses(TorchDispatchMode):
    """Notes whether a tensor of `ids` is cast twice for gradients.

    Attributes:
        repeat: whether one was.
    """

    supports_higher_order_operators = True  # such as flex attention, which would refuse to run under this mode

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__()
        self.repeat = False
        self._ids, self._cast = ids, set[int]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._ids and torch.is_grad_enabled():
            self.repeat |= id(args[0]) in self._cast
            self._cast.add(id(args[0]))
        return func(*args, **(kwargs or {}))


FEATURE = KeptCasts
