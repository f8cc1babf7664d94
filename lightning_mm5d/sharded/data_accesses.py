"""Notices accesses to `data` of parameters, through which a write leaves no trace in a parameter's version.

`nn.Parameter` inherits `data` from torch; a property in front of it is there while somebody wants to know. What
this package does itself with `data` is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import is_remote

_DATA = cast("Any", torch.Tensor.data)


@contextmanager
def accesses(notice: Callable[[Tensor, Tensor, bool], None]) -> Iterator[None]:
    """Call `notice` at each access to `data` of a parameter.

    Args:
        notice: gets the parameter, the data that are read or will be set, and whether they will be set.
    """

    descriptor = vars(nn.Parameter).get("data")
    data = descriptor if isinstance(descriptor, _NoticedData) else _NoticedData()
    data.notices.append(notice)
    nn.Parameter.data = data  # type: ignore[assignment]
    try:
        yield
    finally:
        data.notices.remove(notice)
        if not data.notices:
            del nn.Parameter.data


class _NoticedData(property):
    """The property, for all that notice at a time; they may end in any order."""

    def __init__(self) -> None:
        super().__init__(self._read, self._write)
        self.notices: list[Callable[[Tensor, Tensor, bool], None]] = []

    def _read(self, parameter: Tensor) -> Tensor:
        data: Tensor = _DATA.__get__(parameter)
        if not _is_own(sys._getframe(1).f_globals):
            for notice in self.notices:
                notice(parameter, data, False)
        return data

    def _write(self, parameter: Tensor, data: Tensor) -> None:
        if not _is_own(sys._getframe(1).f_globals):
            for notice in self.notices:
                notice(parameter, data, True)
        _DATA.__set__(parameter, data)


@contextmanager
def refused_writes(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Enter around a step whose parameters show copies, of which writes in place alone are taken over.

    A parameter may show other data for a time.

    Raises:
        ConfigError: at the end, after a write through `data`.
    """
    names = {id(parameter): name for name, parameter in named}
    reads: list[tuple[Tensor, Tensor, int]] = []
    first: dict[int, int] = {}  # addresses by id
    last: dict[int, int] = {}

    def notice(parameter: Tensor, data: Tensor, sets: bool) -> None:
        if id(parameter) in names and not is_remote(parameter):
            first.setdefault(id(parameter), parameter.data_ptr())
            if sets:
                last[id(parameter)] = data.data_ptr()
            else:
                reads.append((parameter, data, data._version))

    with accesses(notice):
        yield
    written = [id(parameter) for parameter, data, version in reads if data._version != version]
    written += [key for key, address in last.items() if address != first[key]]
    if written:
        rule = (
            "With zero_stage=3 and with main_params parameters show copies in a step, to which a write through `data` "
            "leaves no trace"
        )
        fix = "Write to the parameter in place under torch.no_grad(), or to `data` in on_train_batch_start"
        raise ConfigError(f"{names[written[0]]}.data", "a write in training_step", rule, fix)


def _is_own(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "")).partition(".")[0] == "lightning_mm5d"
