"""What this rank keeps in host memory while a step runs, and when it travels.

The actions of a step are known before it begins. So what an action needs is fetched while the action before it runs:
the saved activations of a microbatch before its backward, and the parameters of a frozen encoder before its first
forward. These leave again after its last one, or after its last backward where gradients pass through it.

**Host memory.** Copies tensors of a device to host memory and back, beside what the device computes; says how much is
free there. On CUDA a copy runs on a stream of its own, from and to pinned memory. Elsewhere it is over when the call
returns. A CPU is its own host, and still copies: so what moves there is what would move on a GPU.

What the autograd graph of a microbatch in flight has saved goes there in three phases. (1) Its forward runs under hooks
that note each tensor which autograd saves. (2) After it their storages are copied to the host, each once, and the graph
lets go of them; views share the copy of their storage. (3) While the action before its backward runs they are copied
back, and the backward frees them one by one.

A microbatch stays on the device where its backward follows within two actions: it would be fetched before it has left.
So do parameters, buffers, copies of parameters that autocast keeps for all microbatches, the batch, and what is sent
and received, which others keep on the device anyway; and storages of less than `SMALLEST` bytes.

What an operation in place changes after it was saved fails in the backward, as it does without hooks.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.lazy import Waiting
from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course, Forward
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.stage import Deferred, Run, Runtime
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Attached

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers of our time have it


class HostMemory:
    """The host memory of one rank.

    Args:
        device: where the rank computes.
        ranks: of this host.

    Attributes:
        bytes_out: copied to the host so far.
        bytes_back: copied to the device so far.
        bytes_held: on the host now.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self._ranks = ranks
        self.bytes_out = self.bytes_back = self.bytes_held = 0
        self.device = device
        is_cuda = device.type == "cuda"
        # what comes back is waited for sooner than what leaves
        self._out: Any = torch.cuda.Stream(device) if is_cuda else None
        self._back: Any = torch.cuda.Stream(device, priority=-1) if is_cuda else None

    def check_room(self, field: str, count: int, what: str) -> None:
        """Refuse to begin what the host has no room for.

        Args:
            field: path of the field that asks for it.
            count: bytes that each rank of this host will keep there.
            what: these bytes are.

        Raises:
            ConfigError: the ranks of the host would keep more than it has.
        """
        free, need = free_memory(), count * self._ranks
        if free is not None and need > free:
            demand = f"The {self._ranks} ranks of this host would keep {gib(need)} of {what} there"
            rule = f"{demand}, and it has {gib(free)} free"
            fix = "Use activation_checkpointing, fewer or smaller microbatches, or leave it out"
            raise ConfigError(field, "activations", rule, fix)

    def store(self, tensor: Tensor) -> Stored:
        """Begin to copy a tensor of the device to the host; the caller may let go of it at once."""
        with self._after_computing(self._out):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._out is not None)
            host.copy_(tensor, non_blocking=self._out is not None)
            if self._out is not None:
                tensor.record_stream(self._out)  # its memory is not given away before it is copied
        size = tensor.numel() * tensor.element_size()
        self.bytes_out += size
        self.bytes_held += size
        return Stored(self, host, self._out and self._out.record_event())

    def load(self, stored: Stored) -> tuple[Tensor, Any]:
        """Begin to copy a tensor back; return it with the event that computations with it wait for."""
        # allocated for the stream that computes, in whose order its memory is given away again
        tensor = torch.empty_like(stored.host, device=self.device)
        with self._after_computing(self._back):
            if stored.written is not None:
                self._back.wait_event(stored.written)
            tensor.copy_(stored.host, non_blocking=self._back is not None)
            if self._back is not None:
                tensor.record_stream(self._back)
        self.bytes_back += tensor.numel() * tensor.element_size()
        return tensor, self._back and self._back.record_event()

    def _after_computing(self, stream: Any) -> Any:
        """Enter `stream`, which waits for what the device was told to compute so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)


class Stored:
    """A tensor in host memory, until it is dropped.

    Args:
        memory: that holds it.
        host: its copy.
        written: the event after which the copy is whole; None where it is.
    """

    def __init__(self, memory: HostMemory, host: Tensor, written: Any) -> None:
        self.host, self.written = host, written
        self._memory = memory
        self._loading: tuple[Tensor, Any] | None = None

    def __del__(self) -> None:
        self._memory.bytes_held -= self.host.numel() * self.host.element_size()

    def fetch(self) -> None:
        """Begin to copy it back to the device."""
        if self._loading is None:
            self._loading = self._memory.load(self)

    def take(self) -> Tensor:
        """Return it on the device, for the stream that computes now; the same tensor each time."""
        self.fetch()
        assert self._loading is not None
        tensor, event = self._loading
        if event is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(event)
        return tensor

    def drop(self) -> None:
        """Forget what `fetch` copied, which lives as long as others use it."""
        self._loading = None

    def wait(self) -> Tensor:
        """Return the copy on the host when it is whole."""
        if self.written is not None:
            self.written.synchronize()
            self.written = None
        return self.host


def gib(count: int) -> str:
    """Return a number of bytes as text: ``1.5 GiB``."""
    return f"{count / 2**30:.3g} GiB"


def free_memory() -> int | None:
    """Return the bytes that processes of this host can still take; None where the system does not say.

    It is what the kernel calls available, or what the limit of this container leaves, whichever is less.
    """
    limits = [bytes_ for bytes_ in (_available(), _left_in_container()) if bytes_ is not None]
    return min(limits, default=None)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):  # not every system has these names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_container() -> int | None:
    with suppress(OSError, ValueError):
        most, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        caches = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(int(most) - int(used) + int(caches.get("inactive_file", 0)), 0)  # "max" is no number
    return None


SMALLEST = 1024
"""bytes of a storage that is worth a copy, as in torchtune"""


class Saved:
    """A tensor that autograd saved: as it is, or as a part of a storage on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._stored: Stored | None = None
        self._place: tuple[Any, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether an operation in place has changed it since."""
        return self.tensor is not None and self.tensor._version != self._version

    def leave(self, stored: Stored) -> None:
        """Let go of the tensor, whose storage is on the host."""
        tensor = self.tensor
        assert tensor is not None
        self._place = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        self._stored, self.tensor = stored, None

    def unpack(self) -> Tensor:
        """Return the tensor on the device.

        Raises:
            RuntimeError: an operation in place has changed it.
        """
        if self.tensor is not None:
            if self.is_changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{self.tensor.dtype}{[*self.tensor.shape]}] is at version {self.tensor._version}; expected "
                    f"version {self._version} instead. torch.autograd.set_detect_anomaly(True) shows the operation"
                )
            return self.tensor
        assert self._stored is not None
        flat, (dtype, *place) = self._stored.take(), self._place
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), *place)


class SavedActivations:
    """What the graph of one forward has saved; entered around that forward.

    Args:
        memory: where it goes.
        applies: whether what is saved at the moment belongs to a modality whose activations go there.
    """

    def __init__(self, memory: HostMemory, applies: Callable[[], bool]) -> None:
        self._memory, self._applies = memory, applies
        self._hooks = saved_tensors_hooks(self._pack, Saved.unpack)
        # references that do not keep alive what the graph has freed
        self._saved: list[weakref.ref[Saved]] = []
        self._stored: list[weakref.ref[Stored]] = []

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        # torch keeps `_pack` as long as the graph, which may have parts that no backward frees; what `applies` holds,
        # the run and so its results, would keep these for ever
        self._applies = lambda: False

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if self._applies() and not (torch.is_autocast_cache_enabled() and _is_cast_parameter(tensor)):
            self._saved.append(weakref.ref(saved))
        return saved

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Note a tensor that something else than the graph keeps; return what gives it."""
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved.unpack

    def leave(self, stays: Iterable[Tensor], check: Callable[[int], None]) -> None:
        """Begin to copy storages to the host, but for those of the tensors that stay.

        Args:
            stays: tensors that the device keeps.
            check: called before with the number of bytes; may refuse them.
        """
        parts: dict[int, list[Saved]] = {}
        for saved in [alive for ref in self._saved if (alive := ref()) is not None]:
            address = None if saved.is_changed else _movable(saved.tensor, self._memory.device)
            if address is not None:
                parts.setdefault(address, []).append(saved)
        self._saved.clear()
        for tensor in stays:
            if (address := _address(tensor)) is not None:
                parts.pop(address, None)
        check(sum(_storage(group[0]).nbytes() for group in parts.values()))
        for group in parts.values():
            flat = torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(_storage(group[0]))
            stored = self._memory.store(flat)
            for saved in group:
                saved.leave(stored)
            self._stored.append(weakref.ref(stored))

    def fetch(self) -> None:
        """Begin to copy back what the graph still needs."""
        for stored in [alive for ref in self._stored if (alive := ref()) is not None]:
            stored.fetch()


def _is_cast_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, or a view of that."""
    node = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


_CASTS = frozenset(f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "View"))


def _storage(saved: Saved) -> Any:
    assert saved.tensor is not None
    return saved.tensor.untyped_storage()


def _address(tensor: Tensor) -> int | None:
    """Address of a tensor's storage; None where it has none that can be read."""
    if isinstance(tensor, Waiting) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor that stands for others, as under vmap
        return None


def _movable(tensor: Tensor | None, device: torch.device) -> int | None:
    """Address of a storage that a copy can stand for; None where there is none."""
    if tensor is None or type(tensor) is not Tensor or tensor.device.type != device.type:
        return None
    address = _address(tensor)
    if address is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    return address if tensor.untyped_storage().nbytes() >= SMALLEST else None


Flight = tuple[StageKey, int]  # a stage, and the number of a microbatch


def long_flights(actions: Sequence[Action], begins: Kind = Kind.F) -> frozenset[Flight]:
    """Return the forwards of a rank whose backward comes at least three actions later: what it saves has time to leave.

    Args:
        actions: of one rank in their order.
        begins: ``F``; or ``I``, for input gradients whose weight gradients come at least three actions later.
    """
    ends = (Kind.W,) if begins is Kind.I else (Kind.B, Kind.I)
    flights, starts = set(), dict[Flight, int]()
    for number, action in enumerate(actions):
        key = action.stage, action.microbatch
        if action.kind is begins:
            starts[key] = number
        elif action.kind in ends and key in starts and number - starts[key] >= 3:
            flights.add(key)
    return frozenset(flights)


def most_away(actions: Sequence[Action], flights: Collection[Flight], stage: StageKey) -> int:
    """Return how many microbatches of `stage` among `flights` are between their forward and their backward at once."""
    away, most = 0, 0
    for action in actions:
        if action.stage == stage and (stage, action.microbatch) in flights and action.kind is not Kind.W:
            away += 1 if action.kind is Kind.F else -1
            most = max(most, away)
    return most


class Moves(Attached, AroundSteps):
    """What one rank keeps in host memory between uses.

    Args:
        plan: all stages.
        runtime: the patched module.
        memory: of this rank's host.

    Attributes:
        activations: modalities whose saved activations leave.
        parameters: those of each modality that leave.
        checked: stages of which the host has room for what their forwards save.
    """

    def __init__(self, plan: Plan, runtime: Runtime, memory: HostMemory) -> None:
        self.memory, self.runtime = memory, runtime
        self.checked: set[StageKey] = set()
        offloads = {name: modality.offloads for name, modality in plan.modalities.items()}
        self.activations = frozenset(name for name, kinds in offloads.items() if "activations" in kinds)
        named = dict(runtime.root.named_parameters(remove_duplicate=False))
        held = {name for names in runtime.stages.values() for name in names}
        self.parameters = {
            modality: OffloadedParameters(
                modality,
                [p for name in own_names(plan, modality) if name in held and not (p := named[name]).requires_grad],
                memory,
            )
            for modality, kinds in offloads.items()
            if "parameters" in kinds and any(modality in view.cuts for view in runtime.stages)
        }

    def rest(self) -> None:
        """Leave parameters on the host until a step uses them."""
        for offloaded in self.parameters.values():
            offloaded.leave()

    @contextmanager
    def unscheduled(self) -> Generator[None, None, None]:
        """Have all parameters on the device while modules are used in an order that no schedule knows."""
        self.remove()
        yield
        self.rest()

    def remove(self) -> None:
        """Leave everything on the device."""
        for offloaded in self.parameters.values():
            offloaded.arrive()

    def step(self, course: Course) -> AroundStep:
        """Return what travels during the actions of one step."""
        return StepMoves(self, course.actions)


class StepMoves(AroundStep):
    """What travels during one step.

    Args:
        moves: what this rank keeps in host memory.
        actions: of this rank.
    """

    def __init__(self, moves: Moves, actions: Sequence[Action]) -> None:
        self._moves, self._actions = moves, actions
        self._long = long_flights(actions) if moves.activations else frozenset()
        self._put_off = long_flights(actions, Kind.I) if moves.activations else frozenset()
        self._saved: dict[Flight, SavedActivations] = {}
        self._leaving: dict[Flight, SavedActivations] = {}  # of forwards that have not passed their results on
        self._deferred: dict[Flight, Deferred] = {}
        self._passes_back: set[str] = set()
        self._have_backwards = {action.stage for action in actions if action.kind is not Kind.F}
        self._cuts = cuts = {view.name: view.cuts for view in moves.runtime.stages}
        self._uses: dict[str, list[int]] = {}  # by modality the actions of the stages that hold some of it
        for number, action in enumerate(actions if moves.parameters else ()):
            for modality in moves.parameters.keys() & cuts[action.stage].keys():
                self._uses.setdefault(modality, []).append(number)
        self._last_forwards = {
            modality: max(use for use in uses if actions[use].kind is Kind.F) for modality, uses in self._uses.items()
        }

    def before(self, numbers: range) -> None:
        """Have what actions need on the device, and begin to fetch what the next ones need."""
        for number in numbers:
            for modality, uses in self._uses.items():
                if uses[0] in (number, number + 1):
                    self._moves.parameters[modality].fetch()
                if uses[0] == number:
                    self._moves.parameters[modality].arrive()
            if number + 1 < len(self._actions):
                action = self._actions[number + 1]
                if action.kind is not Kind.F and (saved := self._saved.pop((action.stage, action.microbatch), None)):
                    saved.fetch()

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Enter around a forward: notes the saved activations that leave after it."""
        key, names = (action.stage, action.microbatch), self._moves.activations
        if key not in self._long or names.isdisjoint(run.stage.cuts):
            return nullcontext()
        saved = SavedActivations(self._moves.memory, lambda: run.computes in names)
        self._saved[key] = self._leaving[key] = saved
        return saved

    def ran(self, forward: Forward, passed: Sequence[Tensor]) -> None:
        """Let go of what a forward saved but for what others hold: its batch, and what was received and sent."""
        run, stage = forward.run, forward.action.stage
        key = stage, forward.action.microbatch
        if (saved := self._leaving.pop(key, None)) is not None:
            root = self._moves.runtime.root
            held = tensors_in([forward.part.batch, passed, *(payload.tensors for payload in forward.payloads)])
            stays = [*(tensor for _, tensor in held), *root.parameters(), *root.buffers()]
            saved.leave(stays, partial(self._check_room, stage))
        if run.deferred is not None and key in self._put_off:
            self._deferred[key] = run.deferred
        for modality in self._uses.keys() & run.stage.cuts.keys():
            is_single = len(run.stage.cuts) == 1
            if stage in self._have_backwards if is_single else run.passes_back(modality):
                self._passes_back.add(modality)

    def _check_room(self, stage: StageKey, count: int) -> None:
        """Refuse the first forward of a stage where the host has no room for as many as will be away at once."""
        if stage not in self._moves.checked:
            self._moves.checked.add(stage)
            most = most_away(self._actions, self._long, stage)
            what = f"saved activations of {most} microbatches of {stage}"
            self._moves.memory.check_room(f"modalities.{stage.modality}.memory.offload", count * most, what)

    def after(self, numbers: range) -> None:
        """Let go of parameters that no later action uses, and of what weight gradients that are put off need."""
        for number in numbers:
            action = self._actions[number]
            key, names = (action.stage, action.microbatch), self._moves.activations
            deferred = self._deferred.pop(key, None) if action.kind is Kind.I else None
            if deferred is not None and names.issuperset(self._cuts[action.stage]):
                self._saved[key] = SavedActivations(self._moves.memory, lambda: True)
                deferred.keep(self._saved[key].keep)
                self._saved[key].leave(self._moves.runtime.root.parameters(), lambda count: None)
            for modality, uses in self._uses.items():
                last = uses[-1] if modality in self._passes_back else self._last_forwards[modality]
                if number == last:
                    self._moves.parameters[modality].leave()


class OffloadedParameters:
    """The frozen parameters of one modality on this rank.

    Args:
        modality: its name, for messages.
        parameters: that this modality alone uses, and that nothing trains.
        memory: of the host.
    """

    def __init__(self, modality: str, parameters: Sequence[nn.Parameter], memory: HostMemory) -> None:
        self._modality, self._memory = modality, memory
        self._parameters = parameters
        self._stored: list[tuple[nn.Parameter, Stored, int]] = []
        self._is_away = False
        self._stays = False

    def leave(self) -> None:
        """Show the copies on the host, and free the device's memory."""
        if self._is_away or self._stays or self._is_trained():
            return
        known = {id(parameter): (stored, version) for parameter, stored, version in self._stored}
        self._stored = []
        for parameter in self._parameters:
            stored, version = known.get(id(parameter), (None, 0))
            if stored is None or version != parameter._version:
                stored = self._memory.store(parameter.detach())
            self._stored.append((parameter, stored, parameter._version))
        for parameter, stored, _ in self._stored:
            parameter.data = stored.wait()
        self._is_away = True

    def fetch(self) -> None:
        """Begin to copy them to the device."""
        if self._is_away:
            for _, stored, _ in self._stored:
                stored.fetch()

    def arrive(self) -> None:
        """Show the tensors on the device."""
        self.fetch()
        if self._is_away:
            for parameter, stored, _ in self._stored:
                parameter.data = stored.take()
                stored.drop()
            self._is_away = False

    def _is_trained(self) -> bool:
        """Whether somebody has begun to train them since; they stay on the device from then on."""
        trained = any(parameter.requires_grad for parameter in self._parameters)
        if trained and not self._stays:
            warnings.warn(
                f"modalities.{self._modality}.memory.offload: parameters of {self._modality} require a gradient now, "
                "so all of them stay on the device from here on",
                stacklevel=2,
            )
        self._stays |= trained
        return self._stays


def own_names(plan: Plan, modality: str) -> tuple[str, ...]:
    """Return the names of the parameters that this modality uses and no other."""
    return tuple(name for name in plan.shapes if plan.partition.users(name) == {modality})
