"""Finds the experts of a module that ranks share, and says which rank holds which of them.

It refuses a modality with `ep_size` that has no experts it knows, and fewer experts than ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.expert_parallel.adapters import adapters_around, check_adapters, factors_of
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.partition import Partition
from lightning_mm5d.sharded.shards import Range

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        path: of the module that holds them.
        modality: that it belongs to.
        number: of experts.
        degree: ranks that share them.
        parameters: names of their parameters, each with an entry for every expert along its first dim.
        factors: names of the parameters of adapters on them, which are whole on every rank.
    """

    path: str
    modality: str
    number: int
    degree: int
    parameters: tuple[str, ...]
    factors: tuple[str, ...] = ()

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Which experts each rank holds: ``((0, 3), (3, 5))`` of five on two ranks."""
        return tuple(even_ranges(self.number, self.degree))


def find_experts(root: nn.Module, partition: Partition, modalities: Mapping[str, Modality]) -> dict[str, ExpertLayer]:
    """Return the experts that ranks share, by path, in the order of the module.

    Args:
        root: the LightningModule; the meta device will do.
        partition: which stage uses which parameter.
        modalities: the configuration.

    Raises:
        ConfigError: a modality has nothing that its ranks could share, too few experts, or adapters on these that its
            layout refuses.
    """
    degrees = {name: modality.ep_size for name, modality in modalities.items() if modality.ep_size > 1}
    found: dict[str, ExpertLayer] = {}
    for path, module in root.named_modules() if degrees else ():
        if not holds_experts(module):
            continue
        names = tuple(f"{path}.{name}" for name, _ in module.named_parameters())
        users = {stage.modality for name in names for stage in partition.owners.get(name, ())}
        modality = users.pop() if len(users) == 1 else ""
        if modality in degrees:
            adapters = adapters_around(root, path)
            check_adapters(adapters, modality, modalities[modality])
            factors = tuple(factors_of(adapters))
            found[path] = layer = ExpertLayer(path, modality, module.num_experts, degrees[modality], names, factors)
            _check_number(layer)
    for name, degree in degrees.items():
        if not any(layer.modality == name for layer in found.values()):
            rule = f"{name!r} has no experts that are known, which ranks could share"
            raise ConfigError(f"modalities.{name}.ep_size", degree, rule, "Leave it unset")
    return found


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers' models do: as tensors ``[experts, ...]``.

    It is called with tokens ``[T, H]``, the numbers of their experts ``[T, K]`` and the weights of these ``[T, K]``.
    """
    number = getattr(module, "num_experts", None)
    if not isinstance(number, int) or isinstance(number, bool):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters)[1:4]
    shapes = [parameter.shape for parameter in module.parameters()]
    return arguments == _ARGUMENTS and bool(shapes) and all(shape[:1] == (number,) for shape in shapes)


def has_shared_expert(root: nn.Module, path: str) -> bool:
    """Whether the block around some experts has an expert that all tokens go to."""
    block = root.get_submodule(path.rpartition(".")[0])
    return any(getattr(block, name, None) is not None for name in ("shared_expert", "shared_experts"))


def parameters_of(layers: Mapping[str, ExpertLayer]) -> Iterator[tuple[str, ExpertLayer]]:
    """Yield the name of each parameter of some experts, with these."""
    for layer in layers.values():
        for name in layer.parameters:
            yield name, layer


def _check_number(layer: ExpertLayer) -> None:
    if layer.number < layer.degree:
        fits = nearest(layer.degree, lambda n: n <= layer.number)
        rule = f"{layer.path} has {layer.number} experts, and each rank holds one or more"
        raise ConfigError(f"modalities.{layer.modality}.ep_size", layer.degree, rule, f"Use {one_of(fits)}")
