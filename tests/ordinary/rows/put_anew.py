"""Attributes that steps put anew for each batch, or go on with, and hooks read."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ordinary.rows.projects import OWN, SECTION
from ordinary.uses import Ordinary, row


class Shown(Ordinary):
    """Shows in hooks what `keep` has put into attributes in validation, and in training."""

    def keep(self, batch: Any, logits: Tensor) -> None:
        raise NotImplementedError

    def shown(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        self.keep(batch, logits.detach())
        return F.cross_entropy(logits, batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.keep(batch, self(batch))

    def on_validation_batch_end(self, *args: Any) -> None:
        self.seen.append(plain(self.shown()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(plain(self.shown()))


def plain(value: Any) -> Any:
    """Tensors, arrays and sets as lists."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | deque | set):
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def kept(title: str, keep: Any, shown: str, first: Any = None, **differs: str) -> None:
    """A row whose step calls `keep(self, batch, logits)`; `shown` names the attribute."""

    def begin(self: Any) -> None:
        Shown.__init__(self)
        if first is not None:
            setattr(self, shown, copy.copy(first))

    body = {"__init__": begin, "keep": keep, "shown": lambda self: getattr(self, shown)}
    row(SECTION, title, over="first", differs=OWN | differs)(type("Keeping", (Shown,), body))


def last_dict(self: Any, batch: Any, logits: Tensor) -> None:
    self.last = {"logits": logits, "top": logits.argmax(-1).numpy(), "said": [str(int(i)) for i in batch["label"]]}


def last_tuple(self: Any, batch: Any, logits: Tensor) -> None:
    self.last = (logits, batch["label"])


def last_array(self: Any, batch: Any, logits: Tensor) -> None:
    self.last = logits.argmax(-1).cpu().numpy()


def last_list(self: Any, batch: Any, logits: Tensor) -> None:
    self.last = logits.argmax(-1).tolist()


def last_batch(self: Any, batch: Any, logits: Tensor) -> None:
    self.last = batch


def in_cache(self: Any, batch: Any, logits: Tensor) -> None:
    self.cache["logits"] = logits
    self.cache["shape"] = list(logits.shape[1:])


def cut_off(self: Any, batch: Any, logits: Tensor) -> None:
    self.history = [*self.history, logits.mean().item()][-3:]


def cleared(self: Any, batch: Any, logits: Tensor) -> None:
    self.now.clear()
    self.now.append(logits)


def popped(self: Any, batch: Any, logits: Tensor) -> None:
    self.history.append(logits.mean())
    if len(self.history) > 3:
        self.history.pop(0)


def text_of(self: Any, batch: Any, logits: Tensor) -> None:
    self.texts = ["-".join(map(str, row)) for row in batch["tokens"].tolist()]


def smoothed(self: Any, batch: Any, logits: Tensor) -> None:
    value = logits.mean().item()
    self.smooth = value if not hasattr(self, "smooth") else 0.9 * self.smooth + 0.1 * value


kept("`self.last = {...}` with tensors and strings, read in a hook", last_dict, "last")
kept("`self.last = (logits, labels)`, read in a hook", last_tuple, "last")
kept("`self.last = logits.argmax(-1).cpu().numpy()`, read in a hook", last_array, "last")
kept("`self.last = logits.argmax(-1).tolist()`, read in a hook", last_list, "last")
kept("`self.last = batch`, read in a hook", last_batch, "last")
kept("`self.cache[name] = logits`, read in a hook", in_cache, "cache", {})
kept("the last three means of logits: `[*self.history, mean][-3:]`", cut_off, "history", [])
kept("`self.now.clear()` and `self.now.append(logits)`, read in a hook", cleared, "now", [])
kept("the last three means of logits: `append` and `pop(0)`", popped, "history", [])
kept("`self.texts = [...]`, a text a sample, read in a hook", text_of, "texts")
MICROBATCHES = {name: "the step runs once for each microbatch" for name in ("split", "pp")}
kept("`self.smooth = 0.9 * self.smooth + 0.1 * value`", smoothed, "smooth", **MICROBATCHES)


def in_set(self: Any, batch: Any, logits: Tensor) -> None:
    self.ids.update(batch["label"].tolist())


kept("labels in a set: `self.ids.update(...)`, read in a hook", in_set, "ids", set())


@row(
    SECTION, "samples are counted in a buffer of the encoder after the layers: `self.encoder.count += ...`", differs=OWN
)
class Counted(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.encoder.count += len(batch["label"])
        return loss
