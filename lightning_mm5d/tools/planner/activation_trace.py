"""Finds how many bytes the forward of one microbatch keeps for its backward, layer by layer.

The user's own step runs once, whole, on tensors without memory. Each layer's saved tensors are noted as storages, so
that one which several layers save counts once in each stage that has any of them. Stages of any layout are then sums.

Tensors that tensor, context or sequence parallel ranks share count with one rank's part. Shards of a sequence are
gathered for a moment in front of sharded weights, and again in the backward; layers that take the same input cast it
once. After the last layer hidden states stay shards up to a sharded head. Where a feature shares layers out in another
way, what its ranks share are all tensors that the layers make; what reads a hidden state between layers of different
stages, or after the last, gathers it. A rank's own experts get as many rows as it sends to all experts, on average; the
rows that came and their results are kept besides.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.features.throughput.flop_count import allowed
from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.parts import at, hidden_place
from lightning_mm5d.sharded.shards import Shard
from lightning_mm5d.tensor_parallel.entrance import fits
from lightning_mm5d.tensor_parallel.resolve import Division
from lightning_mm5d.tools.planner.hollow_tensors import GROUPED, LARGE, HollowTensors
from lightning_mm5d.tools.planner.profile import Work, step_arguments, watched
from lightning_mm5d.trainer.construction import copy_without_memory

Storages = dict[int, int]
"""bytes of storages by their numbers"""

_SHARDED = {"column": True, "head": True, "row": False, "experts": False}
"""roles of layers with sharded weights, and whether their results are sharded"""


class Product(NamedTuple):
    """A linear layer that ran, or a norm on the full width; sizes in bytes of full tensors.

    Attributes:
        kind: ``column`` for a way into an attention or a MLP, ``row`` for the way out, ``norm`` for such a norm,
            ``adapter`` for the first matrix of a low-rank adapter on a grid.
        source: number of the storage that it takes.
        input: size of what it takes.
        output: size of its result.
        weight: size of its weight, in the type of its result.
        passes: whether what it takes gets a gradient.
        trains: whether its weight gets one.
    """

    kind: str
    source: int
    input: int
    output: int
    weight: int
    passes: bool
    trains: bool


@dataclass
class UnitUse:
    """What one unit (a layer, or all before or after the layers) keeps of a microbatch.

    Attributes:
        saved: for its backward, without parameters.
        inputs: the tensors that its call takes.
        hidden: of these, the hidden state.
        results: of its operations, by the operation's name: ``aten.mm``.
        working: bytes that its forward or its backward needs for a moment beside what is kept.
        products: its linear layers that tensor parallel ranks share, as they ran.
        work: what its forward computes.
        put_off: what its weight gradients are made of, where they are put off: inputs of products, and gradients.
        casts: copies of trained weights that autocast makes, of which all microbatches of a step use the same.
    """

    saved: Storages = field(default_factory=dict)
    inputs: Storages = field(default_factory=dict)
    hidden: Storages = field(default_factory=dict)
    results: dict[str, Storages] = field(default_factory=dict)
    working: int = 0
    products: list[Product] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    put_off: Storages = field(default_factory=dict)
    casts: Storages = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """One microbatch.

    Attributes:
        units: of each modality: before its layers, each layer, after them.
        exits: the results of encoders, by name.
        reached: names of the parameters that get a gradient.
    """

    units: Mapping[str, Sequence[UnitUse]]
    exits: Mapping[str, Storages]
    reached: frozenset[str]


def trace(
    module: LightningModule,
    batch: Any,
    partition: Partition,
    modalities: Mapping[str, Modality],
    division: Division,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    experts: Collection[str] = (),
) -> Trace:
    """Run one training step on tensors without memory, and return what it keeps.

    Args:
        module: full; the meta device will do.
        batch: one microbatch, on the CPU.
        partition: what is cut where.
        modalities: the configuration.
        division: what tensor parallelism shards.
        context: entered around the step.
        experts: paths of the modules to whose experts tokens travel.

    Raises:
        Exception: of the user's code, which may read values that depend on parameters.
    """
    tracer = _Tracer(partition, modalities, division, experts)
    copy = copy_without_memory(module)
    tracer.fill(copy, module)
    copy.train(module.training)
    with kept_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `self.log` warns without a trainer
        with tracer.tracing(copy), context():
            result = copy.training_step(*step_arguments(copy, batch))
        loss = result["loss"] if isinstance(result, Mapping) else result
        if isinstance(loss, Tensor) and loss.requires_grad:
            tracer.backward(loss)
    named = copy.named_parameters(remove_duplicate=False)
    reached = frozenset(name for name, parameter in named if id(parameter) in tracer.reached)
    return Trace(tracer.units, tracer.exits, reached)


class _Tracer:
    """Notes the storages of one step, and which unit runs."""

    def __init__(
        self, partition: Partition, modalities: Mapping[str, Modality], division: Division, experts: Collection[str]
    ) -> None:
        self._partition, self._modalities, self._division, self._experts = partition, modalities, division, experts
        self.units = {name: [UnitUse() for _ in range(len(parts.paths) + 2)] for name, parts in partition.parts.items()}
        self.exits: dict[str, Storages] = {name: {} for name in partition.encoders}
        self.blocks = {name: block.costs.trace(self._number, self._note) for name, block in division.in_blocks.items()}
        self._fake = HollowTensors(self._watch)
        self._within = [partition.loss_modality]  # modalities, the inner one last
        self._done = dict.fromkeys(partition.parts, 0)  # the unit of a modality that runs between its layers
        self._inside: tuple[str, int] | None = None
        self._backward_of: tuple[str, int] | None = None
        self._numbers: dict[int, int] = {}  # of the storages that are alive, by their addresses
        self._bytes: dict[int, int] = {}  # of all storages on one rank
        self._degrees: dict[int, int] = {}  # of the tensor parallel ranks that share a storage
        self._parameters: set[int] = set()
        self._locals: dict[int, float] = {}  # how much of a sharded parameter a rank holds
        self._weights: dict[int, tuple[float, bool]] = {}  # of parameters and their casts, and whether they are trained
        self.reached: set[int] = set()
        self._tokens: dict[int, int] = {}  # length of the sequence of storages outside of layers that are shards of it
        self._entered: dict[int, int] = {}  # bytes of the full inputs of column layers that are kept as shards
        self._gathered: dict[int, int] = {}  # of these, the ones that are there now
        self._casts: dict[int, Any] = {}  # what was cast for a column layer, by the numbers of the copies
        self._shared: dict[Any, int] = {}  # the copy that all column layers keep
        self._repeated: dict[int, int] = {}  # how often storages have each of their heads
        self._casting = False
        self._passing: set[int] = set()  # alive, and not kept
        self._beside = 0  # bytes of these, and of what is gathered now

    # --- the step ---

    def fill(self, copy: nn.Module, module: nn.Module) -> None:
        """Give the copy parameters without memory, copies of the module's small buffers, and attributes on the CPU."""
        known: dict[int, Any] = {}
        shards = {id(p): self._division.shards.get(name) for name, p in copy.named_parameters()}
        for copied, original in zip(copy.modules(), module.modules(), strict=True):
            for name, parameter in copied._parameters.items():
                if parameter is not None:
                    if id(parameter) not in known:
                        known[id(parameter)] = self._parameter(parameter, shards[id(parameter)])
                    copied._parameters[name] = known[id(parameter)]
            for name, buffer in original._buffers.items():
                if buffer is not None:
                    large = buffer.is_meta or (buffer.is_floating_point() and buffer.numel() > LARGE)
                    copied._buffers[name] = self._fake.of(buffer) if large else buffer.detach().cpu().clone()
            for name in vars(copied).keys() - {"_parameters", "_buffers", "_modules"}:
                vars(copied)[name] = self._fake.on_cpu(vars(copied)[name])

    def _parameter(self, parameter: nn.Parameter, shard: Shard | None) -> nn.Parameter:
        hollow = nn.Parameter(self._fake.of(parameter.detach()), parameter.requires_grad)
        if hollow.requires_grad:
            hollow.register_post_accumulate_grad_hook(self._drop_gradient)
        self._parameters.add(number := self._number(hollow))
        if shard is not None:
            self._locals[number] = torch.Size(shard.local_shape(parameter.shape, 0)).numel() / max(parameter.numel(), 1)
        self._weights[number] = self._locals.get(number, 1.0), hollow.requires_grad
        return hollow

    @contextmanager
    def tracing(self, copy: nn.Module) -> Generator[None, None, None]:
        """Note all calls until the end of the context."""
        undo = [remove for block in self.blocks.values() for remove in block.attach(copy)]
        for path, role in self._division.roles.items():
            block, layer = self.blocks.get(group := self._division.groups[path]), copy.get_submodule(path)
            if role in _SHARDED and not (block is not None and block.is_adapter(path)):
                degree = self._division.degrees[group]
                undo.append(layer.register_forward_pre_hook(partial(self._enters_shards, role)).remove)
                undo.append(layer.register_forward_hook(partial(self._leaves_shards, role, degree)).remove)
        undo += [copy.get_submodule(path).register_forward_pre_hook(self._exchanges).remove for path in self._experts]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        partition = self._partition
        try:
            with watched(copy, partition.encoders, partition.parts, self._call), self._fake, hooks:
                yield
        finally:
            for remove in undo:
                remove()

    def backward(self, loss: Tensor) -> None:
        """Run the backward, for the memory that it needs for a moment."""
        self._backward_of = self._unit
        with self._fake:
            loss.backward()

    # --- which unit runs ---

    @property
    def _unit(self) -> tuple[str, int]:
        if self._backward_of is not None:
            return self._backward_of
        name = self._within[-1]
        return self._inside or (name, self._done[name])

    @property
    def _use(self) -> UnitUse:
        name, index = self._unit
        return self.units[name][index]

    def _call(self, key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._backward_of is not None or self._inside is not None or key in self._within:
            return function(*args, **kwargs)
        if isinstance(key, str):
            self._within.append(key)
            self._done[key] = 0
            try:
                result = function(*args, **kwargs)
            finally:
                self._within.pop()
            self.exits[key] |= self._noted(result)
            return result
        name, index = key
        use, block = self.units[name][index + 1], self.blocks.get(name)
        is_last = index + 3 == len(self.units[name])
        layer: Any = getattr(function, "__self__", None)
        place = hidden_place(args, kwargs) if block is None else None
        state = None if place is None else at(place, args, kwargs)
        if isinstance(state, Tensor) and self._token_ranks(name) > 1:  # it is sharded where it enters a layer
            number, shard = self._number(state), state.untyped_storage().nbytes() // self._token_ranks(name)
            self._resize(number, min(self._bytes[number], shard))
        use.inputs |= self._noted((args, kwargs))
        self._inside = name, index + 1
        try:
            if block is not None:
                args, kwargs, size = block.entered(layer, args, kwargs)
                use.hidden[self._beyond(size)] = size
            use.hidden |= self._noted(state)
            result = function(*args, **kwargs)
            if block is not None:
                block.left(layer, result)
            elif self._token_ranks(name) > 1:
                states = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() > 1]
                self._tokens |= {self._number(leaf): leaf.shape[-2] for leaf in states}
        finally:
            self._let_go()
            self._inside = None
            self._done[name] = index + 1 + is_last
        return block.full(result) if block is not None and is_last else result

    # --- storages ---

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._numbers[address] = number = len(self._bytes)
            self._bytes[number] = storage.nbytes()
            weakref.finalize(storage, self._free, address)
        return self._numbers[address]

    def _free(self, address: int) -> None:
        self._passes(self._numbers.pop(address), False)

    def _passes(self, number: int, passes: bool) -> None:
        """Note that a storage takes memory only for a moment, or no longer."""
        if passes != (number in self._passing):
            self._beside += self._bytes[number] * (1 if passes else -1)
            (self._passing.add if passes else self._passing.remove)(number)

    def _beyond(self, size: int) -> int:
        """The number of a storage that ranks have and this step has not."""
        number = len(self._bytes)
        self._bytes[number] = size
        return number

    def _resize(self, number: int, size: int) -> None:
        if number in self._passing:
            self._beside += size - self._bytes[number]
        self._bytes[number] = size

    def _noted(self, tree: Any) -> Storages:
        """The storages of the tensors in a tree, but parameters."""
        numbers = [self._number(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        return {number: self._bytes[number] for number in numbers if number not in self._parameters}

    def _pack(self, tensor: Tensor) -> tuple[Tensor, tuple[str, int]]:
        number = self._number(tensor)
        if number not in self._parameters:
            self._passes(number, False)
            if self._weights.get(number, (1.0, False))[1]:
                self._use.casts[number] = self._bytes[number]
            elif not (self._casting and number in self._weights):  # a column layer casts a frozen weight again
                if (key := self._casts.get(number)) is not None and self._shared.setdefault(key, number) != number:
                    self._resize(number, 0)
                self._use.saved[number] = self._bytes[number]
        return tensor, self._unit

    def _unpack(self, packed: tuple[Tensor, tuple[str, int]]) -> Tensor:
        tensor, self._backward_of = packed
        return tensor

    def _watch(self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any]) -> None:
        input_numbers = {self._number(tensor) for tensor in inputs}
        degree = max((self._degrees.get(number, 1) for number in input_numbers), default=1)
        length = next((self._tokens[number] for number in input_numbers if number in self._tokens), None)
        use, results = self._use, {}
        fresh = any(output.untyped_storage()._cdata not in self._numbers for output in outputs)
        for output in outputs:
            is_new = output.untyped_storage()._cdata not in self._numbers
            number = self._number(output)
            if is_new:
                if degree > 1:
                    self._degrees[number] = degree
                size = output.untyped_storage().nbytes()
                is_copy = len(input_numbers) == 1 and input_numbers <= self._locals.keys()  # in another dtype
                if is_copy:
                    size = int(size * self._locals[min(input_numbers)])
                elif self._inside is not None and (block := self._block) is not None:
                    size = block.part(number, output, input_numbers)
                else:
                    size = self._on_one_rank(size, degree)
                    if self._inside is None and degree == 1 and output.shape[-2:-1] == (length,):
                        self._tokens[number] = output.shape[-2]
                        size //= self._token_ranks(self._unit[0])
                self._resize(number, size)
                self._passes(number, True)
            if self._casting and func is torch.ops.aten._to_copy.default:
                (source,), taken = inputs, self._number(inputs[0])
                self._casts[number] = taken, source.storage_offset(), source.shape, source._version, output.dtype
                self._entered[number] = self._entered.get(taken, 0) * output.itemsize // source.itemsize
            if number not in self._parameters:
                results[number] = self._bytes[number]
        if self._backward_of is None and outputs:
            self._count(func, inputs, outputs, args, degree, fresh=fresh)
        if self._backward_of is None and self._inside is not None:
            use.results.setdefault(func._schema.name.replace("::", "."), {}).update(results)
        # autograd adds up two gradients in the memory of the first one, which it does not do for tensors of a subclass
        in_place = self._backward_of is not None and func is torch.ops.aten.add.Tensor and len(inputs) == 2
        # a weight gradient gathers its operand again
        again = self._backward_of and max((self._entered.get(number, 0) for number in input_numbers), default=0)
        beside = self._beside - (outputs[0].untyped_storage().nbytes() if in_place else 0)
        use.working = max(use.working, beside + (again or 0))

    def _count(
        self,
        func: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        args: Sequence[Any],
        degree: int,
        *,
        fresh: bool,
    ) -> None:
        """Add what an operation of a forward computes, of full sequences; views compute nothing."""
        work, packet = self._use.work, func._overloadpacket
        weight = next((self._weights[number] for t in inputs if (number := self._number(t)) in self._weights), None)
        share, trains = weight or (1 / degree, False)
        if weight is not None and packet is torch.ops.aten._to_copy:  # of autocast
            self._weights[self._number(outputs[0])] = weight
        if packet._qualified_op_name.startswith("aten::_scaled_dot_product"):
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            seen = 0.5 if named.get("is_causal") else 1.0
            if len(inputs) > 3 and not self._fake.is_hollow(inputs[3]):  # a large mask of numbers has no values
                seen = allowed(inputs[3])
            query, key, value = inputs[:3]
            work.attend(query, key, value, share, seen, self._repeated.get(self._number(key), 1))
        elif packet in flop_registry or func is GROUPED:
            if func is GROUPED:
                flops = 2 * inputs[0].numel() * outputs[0].shape[-1] * share
            else:
                flops = flop_registry[packet](*args, out_val=outputs[0] if len(outputs) == 1 else outputs) * share
            work.flops += flops
            work.trained += flops * trains
            if trains and packet is not torch.ops.aten.convolution:
                self._put_off(inputs, outputs[0])
        elif fresh:
            self._note_repeated(packet, inputs, outputs)
            parts = ((t, max(t.untyped_storage().nbytes(), 1)) for t in (*inputs, *outputs))
            work.moved += sum(self._bytes[self._number(t)] * min(t.nbytes / whole, 1.0) for t, whole in parts)

    def _note_repeated(self, packet: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note copies of expanded tensors: key heads that attentions repeat for their queries do not travel so."""
        if packet in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            times = math.prod(
                size for size, stride in zip(inputs[0].shape, inputs[0].stride(), strict=True) if not stride
            )
            self._repeated[self._number(outputs[0])] = times * self._repeated.get(self._number(inputs[0]), 1)

    def _put_off(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Note what the weight gradient of a product is made of: its input, and the gradient of its result."""
        numbers = [number for tensor in inputs if (number := self._number(tensor)) not in self._weights]
        size = self._bytes[self._number(output)]
        self._use.put_off |= {number: self._bytes[number] for number in numbers} | {self._beyond(size): size}

    def _token_ranks(self, name: str) -> int:
        """How many tensor parallel ranks share each hidden state of a modality between its layers."""
        modality = self._modalities[name]
        return modality.tp_size if modality.tensor.sequence_parallel else 1

    def _on_one_rank(self, size: int, degree: int) -> int:
        """Bytes on one rank of a storage that the unit makes which runs now."""
        name, index = self._unit
        is_layer = 0 < index < len(self.units[name]) - 1
        if is_layer and (block := self._block) is not None:
            return block.share(size)
        if degree > 1:
            return size // degree
        if not is_layer:
            return size
        return size // self._modalities[name].cp_size // self._token_ranks(name)

    @property
    def _block(self) -> Any:
        """That of the layer that runs."""
        is_inside = self._inside is not None or self._backward_of is not None
        return self.blocks.get(self._unit[0]) if is_inside else None

    def _enters_shards(self, role: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """What a sharded layer takes is gathered in front of it, where it is a shard of the sequence."""
        self._casting = role in ("column", "head") and self._block is None and fits(module)
        for argument in args if self._block is None else ():
            if isinstance(argument, Tensor) and (number := self._number(argument)) not in self._degrees:
                full = argument.untyped_storage().nbytes() // self._modalities[self._unit[0]].cp_size
                if self._bytes[number] >= full or not self._casting:
                    self._resize(number, full)  # the module keeps all of it
                elif number not in self._gathered:
                    self._gathered[number] = self._entered[number] = full
                    self._beside += full

    def _let_go(self) -> None:
        """Gathered inputs are there up to the row layer that ends their stretch."""
        while self._gathered:
            self._beside -= self._gathered.popitem()[1]

    def _leaves_shards(self, role: str, degree: int, module: nn.Module, args: Any, result: Any) -> None:
        self._casting = False
        if role in ("column", "row") and self._inside is not None and args:
            self._note_product(role, module, args[0], result)
        if self._block is not None:
            return
        if role != "column":
            self._let_go()
        out_is_sharded = _SHARDED[role]
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                number, size = self._number(leaf), leaf.untyped_storage().nbytes()
                self._degrees.pop(number, None)
                if out_is_sharded:
                    self._degrees[number] = degree
                self._resize(number, self._on_one_rank(size, degree if out_is_sharded else 1))

    def _note_product(self, role: str, module: Any, operand: Tensor, output: Tensor) -> None:
        use, width, block = self._use, output.element_size(), self._block
        sizes = operand.numel() * width, output.numel() * width, module.weight.numel() * width
        number = self._number(operand)
        product = Product(role, number, *sizes, operand.requires_grad, module.weight.requires_grad)
        use.products.append(product)
        if block is not None:
            if output.requires_grad:  # products of blocks keep their input, also where their weight is frozen
                use.saved[number] = self._bytes[number]
            use.working = max(use.working, self._beside + block.moment(product))

    def _note(self, kind: str, operand: Tensor, output: Tensor) -> None:
        sizes = operand.numel() * operand.element_size(), output.numel() * output.element_size()
        self._use.products.append(Product(kind, self._number(operand), *sizes, 0, output.requires_grad, False))
        if kind == "adapter" and self._block is not None:  # a rank has all columns of its rows
            self._resize(self._number(output), self._block.of_rows(sizes[1]))

    def _exchanges(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Count the rows of an exchange: two are kept, of those that came, and as many are sent for a moment."""
        tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        index = next((tensor for tensor in tensors if not tensor.is_floating_point()), None)
        if index is None:
            return
        name, use = self._unit[0], self._use
        modality = self._modalities[name]
        copies = modality.tp_size if modality.tensor.expert_tp_size == 1 else 1
        rows = index.numel() * tensors[0].shape[-1] * tensors[0].element_size() // modality.cp_size // copies
        use.saved[self._beyond(2 * rows)] = 2 * rows
        use.work.routed += rows
        use.working = max(use.working, self._beside + 2 * rows)

    def _drop_gradient(self, parameter: Tensor) -> None:
        self.reached.add(id(parameter))
        parameter.grad = None
