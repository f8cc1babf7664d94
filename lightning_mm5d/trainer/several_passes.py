"""Says whether an evaluation step passes several times through the model, from the source code of the step.

It does where it names something with ``generate`` in its name, or calls a module with parameters in a loop: in its own
code, and in methods of the LightningModule and functions of its Python module that it names. A step of which the source
says too little is found out when it runs: the pipeline cannot run it, `Attempt` undoes what it did, and it runs again.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import Source, function_of, method_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_mm5d.trainer.metrics import MetricSync

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def passes_several_times(module: nn.Module, step: str) -> bool:
    """Whether the method `step` of `module` generates, or calls a module with parameters in a loop."""
    source = Source()
    return any(
        any("generate" in name for name in names(source, function) or ())
        or any(_calls_model(module, call) for call in _calls_in_loops(source, function))
        for function in _reached(source, type(module), step)
    )


def _reached(source: Source, cls: type, step: str) -> Iterator[FunctionType]:
    """Yield the code of `step`, and the methods and functions beside it that it names, directly or through others."""
    first = method_of(cls, step)
    waiting, known = [first] if first is not None else [], set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in known:
            continue
        known.add(function)
        yield function
        for name in names(source, function) or ():
            beside = function_of(function.__globals__.get(name))
            own = method_of(cls, name) if not hasattr(nn.Module, name) or name == "forward" else None
            waiting += [
                one
                for one in (own, beside)
                if one is not None and one.__module__.partition(".")[0] not in ("torch", "lightning", "transformers")
            ]


def _calls_in_loops(source: Source, function: FunctionType) -> Iterator[ast.Call]:
    tree = source.tree(function)
    for loop in ast.walk(tree) if tree is not None else ():
        if isinstance(loop, _LOOPS):
            yield from (node for node in ast.walk(loop) if isinstance(node, ast.Call))


def _calls_model(module: nn.Module, call: ast.Call) -> bool:
    """Whether a call is one of `module`, or of a module with parameters inside of it: ``self.model(...)``."""
    path: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id != "self":
        return False
    found: object = module
    for name in path:
        found = getattr(found, name, None)
    return isinstance(found, nn.Module) and any(True for _ in found.parameters())


class Attempt:
    """What an evaluation step may change: the metrics, and the attributes and buffers of the LightningModule itself.

    Args:
        module: the user's module.
        metrics: the module's metrics.
    """

    def __init__(self, module: LightningModule, metrics: MetricSync) -> None:
        self._module, self._metrics = module, metrics.kept()
        self._values = {name: value for name, value in vars(module).items() if not isinstance(value, nn.Module)}
        held = [*self._values.values(), *module.buffers(recurse=False)]
        self._copies = [(value, _copy(value)) for value in held if isinstance(value, (Tensor, *_CONTAINERS))]

    def undo(self) -> None:
        """Put everything back as it was."""
        for kept in self._metrics:
            kept.put_back()
        for name in vars(self._module).keys() - self._values.keys():
            del vars(self._module)[name]
        vars(self._module).update(self._values)
        for value, copy in self._copies:
            _restore(value, copy)


_CONTAINERS = (list, dict, set, deque)


def _copy(value: Any) -> Any:
    return (
        value.detach().clone()
        if isinstance(value, Tensor)
        else list(value.items() if isinstance(value, dict) else value)
    )


def _restore(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        value.detach().copy_(copy)
        return
    value.clear()
    if isinstance(value, (list, deque)):
        value.extend(copy)
    else:
        value.update(copy)
