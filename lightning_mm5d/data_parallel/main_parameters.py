"""Main parameters: what optimizers step on in full precision, while layers compute in a lower one.

A parameter with a main parameter is one object with two faces, as a shared parameter is. Its *main* face has the full
precision, and everybody sees it between steps: optimizers, clipping, checkpoints, averages. Its *computing* face is the
main parameter rounded to the precision of the layers, and exists while a step runs. Gradients have the full precision
throughout: each microbatch's is cast before it is added to those before it.

Every parameter that is trained has one, from the start or from the step on in which it was unfrozen. The faces of
parameters that ranks share are those of `SharedParameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.data_parallel.shared_parameters import SharedParameters
from lightning_mm5d.sharded.remote_value import is_remote, plain

_ATTRIBUTE = "_mm5d_main_params"  # of a module: the dtypes that its layers compute in, by name of the parameter


def computing_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype that layers compute in, by name of each parameter of `root` that has a main parameter."""
    return vars(root).setdefault(_ATTRIBUTE, {})


def convert(root: nn.Module, conversion: Callable[[], Any], dtype: torch.dtype | None) -> None:
    """Convert `root`, and give what is trained main parameters of `dtype`, or leave it without any.

    Main parameters that it has from an earlier run keep their values.

    Args:
        root: the LightningModule, full or as this rank holds it.
        conversion: converts its parameters to the dtype that layers compute in.
        dtype: of main parameters; None for none.
    """
    computes = computing_dtypes(root)
    before = dict(computes)
    mains = [(name, p, p.data) for name, p in root.named_parameters() if name in computes and p.dtype == dtype]
    conversion()
    computes.clear()
    for name, parameter, main in mains:
        computes[name] = before[name] if parameter.dtype == dtype else parameter.dtype
        parameter.data = main
    if dtype is not None:
        give_main(root, dtype)


def give_main(root: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of `root` that are trained and have memory main parameters of `dtype`, where these are wider.

    They begin as exact copies.
    """
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and not parameter.is_meta and _is_narrower(parameter, dtype):
            computing_dtypes(root)[name] = parameter.dtype
            widen(parameter, dtype)


class _Faces:
    """A parameter that this rank does not share, and its two faces."""

    def __init__(self, parameter: nn.Parameter, computes: torch.dtype) -> None:
        self.parameter, self.computes = parameter, computes
        self.main: Tensor = parameter.data
        self.version = 0


class MainParameters:
    """The main parameters of one rank.

    Args:
        root: the LightningModule as it is on this rank.
        dtype: of main parameters; None where there are none.
        shared: the parameters of which this rank owns rows.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype | None, shared: SharedParameters) -> None:
        self._root, self._dtype, self._shared = root, dtype, shared
        self._faces: list[_Faces] = []
        self._others = [] if dtype is None else list(root.named_parameters())
        self._computes = False

    def adopt(self) -> bool:
        """Give main parameters to what is trained by now; return whether ranks share any of these."""
        if self._dtype is None:
            return False
        computes, left, is_shared = computing_dtypes(self._root), list[tuple[str, nn.Parameter]](), False
        for name, parameter in self._others:
            shared = self._shared.get(parameter)
            if name not in computes and not (parameter.requires_grad and _is_narrower(parameter, self._dtype)):
                left.append((name, parameter))
            elif shared is None:
                if name not in computes:
                    computes[name] = parameter.dtype
                    widen(parameter, self._dtype)
                self._faces.append(_Faces(parameter, computes[name]))
            elif name not in computes:
                computes[name] = parameter.dtype
                shared.widen(self._dtype)
                is_shared = True
        self._others = left
        return is_shared

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let parameters show what layers compute with; not only in here where `show_computing` was called before."""
        if self._computes:
            yield
            return
        self.show_computing()
        try:
            yield
        finally:
            self.show_main()

    def show_computing(self) -> None:
        """Let parameters show what layers compute with, until `show_main`."""
        self._computes = True
        with torch.inference_mode(False), torch.no_grad():
            local = [face for face in self._faces if not is_remote(face.parameter)]
            for face in self._faces:
                face.main, face.version = face.parameter.data, face.parameter._version
            rounded = [torch.empty_like(face.main, dtype=face.computes) for face in local]
            if rounded:
                torch._foreach_copy_(rounded, [face.main for face in local])
            for face, value in zip(local, rounded, strict=True):
                face.parameter.data = value
                face.parameter.grad_dtype = self._dtype
            for face in self._faces:
                if is_remote(face.parameter):
                    face.parameter.data = face.parameter.to(face.computes)

    def show_main(self) -> None:
        """Let parameters show their main parameters, with what a step has written to them in place."""
        if not self._computes:
            return
        self._computes = False
        for face in self._faces:
            parameter = face.parameter
            if not is_remote(parameter):
                if parameter._version != face.version:
                    with torch.inference_mode(False), torch.no_grad():
                        written, before = parameter.data, face.main.to(face.computes)
                        face.main.copy_(torch.where(written == before, face.main, written))
                parameter.grad_dtype = None
            parameter.data = face.main


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, also of one without values."""
    with plain():
        return parameter.grad_dtype or parameter.dtype


def _is_narrower(parameter: Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.element_size() < dtype.itemsize


def widen(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter and its gradient another dtype; one of another rank stays without memory."""
    if parameter.dtype == dtype:
        return
    with torch.no_grad():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.to(dtype)
        parameter.grad = None if gradient is None else gradient.to(dtype)
