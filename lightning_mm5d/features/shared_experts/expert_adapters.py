"""Low-rank adapters of PEFT on experts that ranks share (`target_parameters` of its `LoraConfig`).

PEFT wraps the experts and adds the product of two factors to a tensor of all experts while their forward runs. In a
step a rank has its own experts alone, so the product is made of their parts of the factors. The factors themselves are
small and whole on every rank: their gradients are those of a rank's experts, and are summed over ranks as others are.

It refuses adapters where each expert is divided as well, and where parameters are gathered layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.imported import imported
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.shards import Range

_BASE = "base_layer"


def adapters_around(root: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the wrappers of the experts at `path` by their paths, the inner one first.

    Experts at ``experts.base_layer.base_layer`` with two wrapped tensors have the wrappers ``experts.base_layer`` and
    ``experts``.
    """
    kind, found = imported("peft.tuners.lora.layer", "ParamWrapper"), dict[str, nn.Module]()
    while kind is not None and path.endswith(f".{_BASE}"):
        path = path.removesuffix(f".{_BASE}")
        wrapper = root.get_submodule(path)
        if not isinstance(wrapper, kind):
            break
        found[path] = wrapper
    return found


def factors_of(adapters: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the parameters of some wrappers, without those of what they wrap."""
    for path, wrapper in adapters.items():
        for name, _ in wrapper.named_parameters():
            if not name.startswith(f"{_BASE}."):
                yield f"{path}.{name}"


def check_adapters(adapters: Mapping[str, nn.Module], name: str, modality: Modality) -> None:
    """Refuse adapters of experts in layouts that would compute something else.

    Raises:
        ConfigError: each expert is divided over tensor parallel ranks, or parameters are gathered layer by layer.
    """
    for path in adapters:
        if modality.expert_tp_size > 1:
            rule = f"An adapter of PEFT is on the tensors of {path}, and their parts have none"
            raise ConfigError(f"modalities.{name}.expert_tp_size", modality.expert_tp_size, rule, "Use 1")
        if modality.reshard_after_forward:
            rule = f"The factors of the adapter on {path} are used where the layer does not run, for tokens of others"
            raise ConfigError(f"modalities.{name}.reshard_after_forward", True, rule, "Use False, or no adapter there")


class Adapters:
    """The adapters of the experts of one layer.

    Args:
        wrappers: of the experts, the inner one first.
        number: of experts.
        own: those of this rank.
        is_own: whether the experts have the rows of this rank alone at the moment.
    """

    def __init__(self, wrappers: Sequence[nn.Module], number: int, own: Range, is_own: Callable[[], bool]) -> None:
        self._wrappers: Sequence[Any] = wrappers
        self._number, self._own, self._is_own = number, own, is_own

    def patch(self) -> Iterator[Callable[[], object]]:
        """Let wrappers leave the experts as they are where these have own rows; yield what undoes it."""
        for wrapper in self._wrappers:

            def forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self._is_own() or (module.disable_adapters and module.merged) or kwargs.get("adapter_names"):
                    return type(module).forward(module, x, *args, **kwargs)
                return module.base_layer(x, *args, **kwargs)

            yield put(wrapper, "forward", MethodType(forward, wrapper))

    def adapted(self, experts: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of this rank's experts that have adapters, with these added, by their names."""
        found = dict[str, Tensor]()
        for wrapper in self._wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    name = wrapper.parameter_name
                    before = found.get(name, getattr(experts, name))
                    found[name] = before + self._delta(wrapper, adapter)
        return found

    def _delta(self, wrapper: Any, adapter: str) -> Tensor:
        """What an adapter adds to the tensor of this rank's experts."""
        start, stop = self._own
        first = min(start, self._number - 2)  # PEFT takes a tensor of one expert for that of a linear layer
        last = max(stop, first + 2)
        delta: Tensor = type(wrapper).get_delta_weight(_Cut(wrapper, adapter, self._number, first, last), adapter)
        return delta[start - first : stop - first]


class _Cut:
    """A wrapper with the factors of some of its experts."""

    def __init__(self, wrapper: Any, adapter: str, number: int, first: int, last: int) -> None:
        self._wrapper, self.num_experts = wrapper, last - first
        down, up = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        # PEFT has the experts first among the rows of one factor, and last among the columns of the other
        down = down.unflatten(0, (number, -1))[first:last].flatten(0, 1)
        up = up.unflatten(1, (-1, number))[..., first:last].flatten(1)
        self.lora_A, self.lora_B = ({adapter: SimpleNamespace(weight=one)} for one in (down, up))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)
