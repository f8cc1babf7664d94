"""Notices writes to parameters, also those through `data`, which leave no trace in a parameter's version.

`nn.Parameter` inherits `data` from torch; a property in front of it is there for a training step, or several of which
each notices for itself. What this package does itself with `data` is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.remote_value import is_remote, plain
from lightning_mm5d.sharded.torch_internals import version_of


@contextmanager
def accesses(notice: Callable[[Tensor, Tensor, bool], None]) -> Iterator[None]:
    """Call `notice` at each access to `data` of a parameter.

    Args:
        notice: gets the parameter, the data that are read or will be set, and whether they will be set.
    """

    before = nn.Parameter.data

    def read(parameter: Tensor) -> Tensor:
        data: Tensor = before.__get__(parameter)  # type: ignore[attr-defined]
        if not _is_own():
            notice(parameter, data, False)
        return data

    def write(parameter: Tensor, data: Tensor) -> None:
        if not _is_own():
            notice(parameter, data, True)
        before.__set__(parameter, data)  # type: ignore[attr-defined]

    nn.Parameter.data = property(read, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        if isinstance(before, property):
            nn.Parameter.data = before
        else:
            del nn.Parameter.data


@contextmanager
def refused_writes(
    named: Sequence[tuple[str, nn.Parameter]], *, shows_copies: bool, once: Collection[str]
) -> Iterator[None]:
    """Enter around a step in which some writes to parameters would be lost, or be done more than once.

    A parameter may show other data for a time.

    Args:
        named: all parameters of the module.
        shows_copies: whether they show copies, of which writes in place alone are taken over.
        once: names of those that the step must not write to at all, because it runs several times.

    Raises:
        ConfigError: at the end, after such a write.
    """
    names = {id(parameter): name for name, parameter in named}
    versions = [(parameter, name, _version(parameter)) for name, parameter in named if name in once]
    reads: list[tuple[Tensor, Tensor, int]] = []
    first: dict[int, int] = {}  # addresses by id
    last: dict[int, int] = {}

    def notice(parameter: Tensor, data: Tensor, sets: bool) -> None:
        if id(parameter) in names:
            with plain():
                first.setdefault(id(parameter), parameter.data_ptr())
                if sets:
                    last[id(parameter)] = data.data_ptr()
                else:
                    reads.append((parameter, data, data._version))

    def check() -> None:
        through_data = {id(parameter) for parameter, data, version in reads if _version(data) != version}
        through_data |= {one for one, address in last.items() if address != first[one]}
        written = {name for parameter, name, version in versions if _version(parameter) != version}
        written |= {names[one] for one in through_data if names[one] in once}
        if written:
            rule = "The step runs for each microbatch and stage, and would write as often"
            fix = "Write in on_train_batch_start or on_train_batch_end, which run once and see all weights"
            raise ConfigError("training_step", f"a write to {min(written)!r}", rule, fix)
        lost = {names[id(one)] for _, one in named if id(one) in through_data and not is_remote(one)}
        if shows_copies and lost:
            rule = (
                "With zero_stage=3 and with main_params parameters show copies in a step, to which a write through "
                "`data` leaves no trace"
            )
            fix = "Write to the parameter in place under torch.no_grad(), or to `data` in on_train_batch_start"
            raise ConfigError(f"{min(lost)}.data", "a write in training_step", rule, fix)

    try:
        with accesses(notice):
            yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):  # torch's, in the backward of an earlier microbatch
            check()
        raise
    check()


def _version(tensor: Tensor) -> int:
    with plain():
        return version_of(tensor)


def _is_own() -> bool:
    """Whether this package asks for `data`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals is globals():  # one property asks another
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "lightning_mm5d"
