"""Measures the cells of a family: each is a run on ranks that is compared with one process, or a reason."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import call_ranks

from .cells import STEPS, Run, Trained, alone, apart, encoders_of, has_experts, joined, together, trained
from .family import Family, families
from .feeds import Batch

Cell = dict[str, Any]
LIMIT_S = 90
MOST = 4_000_000
"""parameters of a family that is measured"""
EXACT, DROPPED, NEAR = 1e-9, 1e-6, 1e-5
"""largest relative difference in float64 throughout, in models that drop to float32, and what is near to that"""


class _SeesFloat32(TorchDispatchMode):
    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        few = (torch.float32, torch.bfloat16, torch.float16)
        self.seen |= any(isinstance(leaf, Tensor) and leaf.dtype in few for leaf in tree_leaves(result))
        return result


class NotApplicableError(Exception):
    """The family has nothing that the column measures."""


class Measured:
    """One family: its batches, and what one process finds, made once."""

    def __init__(self, name: str, *, limit: float = LIMIT_S) -> None:
        self.family: Family = families()[name]
        self.name, self.limit = name, limit
        self._alone: dict[tuple[str, ...], Trained] = {}

    @cached_property
    def parts(self) -> list[Batch]:
        return self.family.batches(2 * STEPS, 4)

    @cached_property
    def batches(self) -> list[list[Batch]]:
        """One batch for each step."""
        return [[batch] for batch in self.parts[:STEPS]]

    @cached_property
    def halves(self) -> list[list[Batch]]:
        """Two batches for each step, one for each replica."""
        return [self.parts[:2], self.parts[2:]]

    @cached_property
    def encoders(self) -> dict[str, Any]:
        return encoders_of(self.name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.encoders)

    @cached_property
    def tolerance(self) -> float:
        model = self.family.module()
        with _SeesFloat32() as mode:
            model.training_step(self.parts[0], 0).backward()
        return DROPPED if mode.seen else EXACT

    @cached_property
    def is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of its halves; contrastive losses are not."""
        module = self.family.module()
        with torch.no_grad():
            first, second, whole = (module.training_step(b, 0) for b in (*self.parts[:2], joined(self.parts[:2])))
        return bool((whole - (first + second) / 2).abs() <= 1e-6 * whole.abs())

    def check_draws_nothing(self) -> None:
        """Raise where two forwards of one batch have other losses."""
        module = self.family.module()
        with torch.no_grad():
            if not torch.equal(module.training_step(self.parts[0], 0), module.training_step(self.parts[0], 0)):
                raise ValueError("it draws random numbers in training")

    def one(self, frozen: tuple[str, ...] = ()) -> Trained:
        if frozen not in self._alone:
            self._alone[frozen] = alone(self.family, self.batches, frozen)
        return self._alone[frozen]

    def cell(self, column: str) -> Cell:
        """Measure one column; what cannot be measured has its reason in `note`."""
        start = time.monotonic()
        try:
            found: Cell = getattr(self, column)()
        except NotApplicableError as reason:
            found = {"status": "n/a", "note": str(reason)}
        except AssertionError as error:
            found = {"status": "no", "note": reason_of(str(error))}
        except Exception as error:
            found = {"status": "no", "note": reason_of(f"{type(error).__name__}: {error}")}
        return found | {"seconds": round(time.monotonic() - start, 1)}

    # --- columns ---

    def found(self) -> Cell:
        if not self.names:
            if self.family.kind == "of one modality":
                raise NotApplicableError("one modality")
            return {"status": "no", "note": "no encoder is found"}
        return {"status": "ok", "note": ", ".join(self.names)}

    def modality(self) -> Cell:
        if not self.names:
            if self.family.kind == "of one modality":
                raise NotApplicableError("one modality")
            return {"status": "no", "note": "no encoder is found"}
        return self.parity(apart(self.names, {}))

    def pp(self) -> Cell:
        return self.all_or_language({"pp_size": 2})

    def tp(self) -> Cell:
        return self.all_or_language({"tp_size": 2})

    def cp(self) -> Cell:
        return self.all_or_language({"cp_size": 2})

    def ep(self) -> Cell:
        if not has_experts(self.name):
            raise NotApplicableError("no experts")
        if not self.is_mean:
            raise NotApplicableError("the loss of two replicas is another loss")
        run = replace(together(self.names, {}), world=2, replicas=2)
        run.modalities["language"] = {"ep_size": 2}
        return self.parity(run, self.halves, alone(self.family, self.halves))

    def frozen(self) -> Cell:
        return worst([self.parity(replace(self.layout(), frozen=one), one=self.one(one)) for one in self.freezes()])

    def generate(self) -> Cell:
        if not (hasattr(self.family.model_class, "can_generate") and self.family.model_class.can_generate()):
            raise NotApplicableError("generates nothing")
        try:
            wanted = alone(self.family, self.batches, speaks=True)
        except Exception as error:
            raise NotApplicableError(f"one process cannot: {reason_of(f'{type(error).__name__}: {error}')}") from None
        run = replace(apart(self.names, {"pp_size": 2}), speaks=True)
        ranks = self.on_ranks(run)
        if all(said == wanted for said in ranks):
            return {"status": "ok"}
        return {"status": "wrong", "note": f"{ranks[0]} instead of {wanted}"}

    def checkpoint(self) -> Cell:
        """Two layouts on as many ranks: what the first saves after a step, the second goes on from."""
        first = self.layout()
        if first.world == 2:
            return self.resumed(first, together(self.names, {"pp_size": 2} if self.names else {"dp_size": 2}))
        return self.resumed(first, replace(first, modalities=dict(reversed(first.modalities.items()))))

    def recompute(self) -> Cell:
        full = {"activation_checkpointing": "full"}
        return self.parity(apart(self.names, full, full) if self.names else together((), full | {"pp_size": 2}))

    # --- parity ---

    def layout(self) -> Run:
        """Encoders apart, or two stages where there are none."""
        return apart(self.names, {}) if self.names else together((), {"pp_size": 2})

    def freezes(self) -> Iterator[tuple[str, ...]]:
        """What is frozen: the encoders, and all but a projector; half of everything where there is no encoder."""
        names = [name for name, _ in self.family.module().named_parameters()]
        owned = [path for encoder in self.encoders.values() for path in encoder.owns]
        inside = [name for name in names if any(name == path or name.startswith(path + ".") for path in owned)]
        if not inside:
            yield tuple(names[: len(names) // 2])
            return
        yield tuple(inside)
        projector = tuple(n for n in inside if re.search(r"project|connector|merger|adapter|align|bridge|qformer", n))
        yield tuple(name for name in names if name not in (projector or inside))

    def all_or_language(self, fields: dict[str, Any]) -> Cell:
        """All modalities on the same ranks; where that is refused, the language model alone, which is half a cell."""
        try:
            return self.parity(together(self.names, fields))
        except AssertionError as error:
            if not self.names:
                raise
            whole = reason_of(str(error))
        try:
            cell = self.parity(apart(self.names, fields))
        except AssertionError as error:
            return {"status": "no", "note": reason_of(str(error))}
        if cell["status"] == "ok":
            cell |= {"status": "language", "note": whole}
        return cell

    def parity(self, run: Run, batches: Any = None, one: Trained | None = None) -> Cell:
        expected = one or self.one(run.frozen)
        ranks = self.on_ranks(run, batches)
        return compared(expected, ranks, self.tolerance, replicas=run.replicas)

    def on_ranks(self, run: Run, batches: Any = None) -> list[Any]:
        run = replace(run, microbatches=2 if self.is_mean and run.replicas == 1 else 1)
        return call_ranks(run.world, trained, self.family, run, batches or self.batches, limit=self.limit)

    def resumed(self, first: Run, second: Run) -> Cell:
        run = replace(first, resumed=second.modalities)
        return compared(replace_steps(self.one()), self.on_ranks(run), self.tolerance)


def replace_steps(one: Trained) -> Trained:
    """Only the last step, which the run after the checkpoint takes."""
    return Trained(one.losses[-1:], one.gradients[-1:], one.state)


def compared(one: Trained, ranks: list[Trained], tolerance: float, *, replicas: int = 1) -> Cell:
    """How far losses, gradients and parameters are from those of one process, relative to the largest of a tensor."""
    pairs: list[tuple[str, Tensor, Tensor]] = []
    if replicas == 1:
        pairs += [("losses", torch.tensor(rank.losses), torch.tensor(one.losses)) for rank in ranks]
    else:
        mean = torch.tensor([rank.losses for rank in ranks]).mean(0)
        pairs.append(("losses", mean, torch.tensor(one.losses)))
    for step, wanted in enumerate(one.gradients):
        seen: set[str] = set()
        for rank in ranks:
            for key, gradient in rank.gradients[step].items():
                seen.add(key)
                full = wanted.get(key, torch.zeros_like(gradient))
                if key in rank.shards and gradient.shape != full.shape:
                    full = rank.shards[key][0].cut(full, rank.shards[key][1])
                if gradient.shape == full.shape:  # experts are rows of a rank's own: their parameters are compared
                    pairs.append((f"gradient of {key}", gradient, full))
        if missing := {key for key, value in wanted.items() if value.abs().max() > 0} - seen:
            return {"status": "wrong", "note": f"no rank has a gradient of {sorted(missing)[0]}"}
    if list(ranks[0].state) != list(one.state):
        return {"status": "wrong", "note": "other names of parameters"}
    pairs += [(key, ranks[0].state[key], value) for key, value in one.state.items()]
    floor = scale_of(pairs, tolerance)
    off, where = max((difference(got, wanted, floor), key) for key, got, wanted in pairs)
    other = "near" if tolerance == DROPPED and off <= NEAR else "wrong"
    cell: Cell = {"status": "ok" if off <= tolerance else other, "off": float(f"{off:.1e}")}
    return cell if off <= tolerance else cell | {"note": f"{where} differs by {off:.1e}"}


def scale_of(pairs: list[tuple[str, Tensor, Tensor]], tolerance: float) -> float:
    """The largest gradient, or a thousandth of it in float64: smaller tensors are compared as if they were as large."""
    largest = [float(wanted.abs().max()) for key, _, wanted in pairs if key.startswith("gradient") and wanted.numel()]
    return max(largest, default=1.0) * (1e-3 if tolerance == EXACT else 1)


def difference(got: Tensor, wanted: Tensor, floor: float) -> float:
    if not wanted.numel() or not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else float("inf")
    found = float((got.double() - wanted.double()).abs().max()) / max(float(wanted.abs().max()), floor)
    return found if found == found else float("inf")


def worst(cells: list[Cell]) -> Cell:
    """The cell that stands for several: one that is not green, else the one that is furthest off."""
    return max(cells, key=lambda cell: (cell["status"] != "ok", cell.get("off", 0.0)))


def reason_of(text: str) -> str:
    """The shortest line that says why: an error's own, without paths, of the rank that failed first."""
    if "requires the " in text and " library " in text:
        return re.sub(r"(?s).*requires the (\S+) library.*", r"needs \1, which is not installed", text)
    if "did not end within" in text:
        return "the ranks did not end within the limit"
    text = re.sub(r"(\w+(?:Error|Exception): ?)\n", r"\1", text)
    lines = [line for line in text.splitlines() if re.match(r"^[\w.]*(Error|Exception|Interrupt)\b", line)]
    own = [line for line in lines if "RankLost" not in line and "RankMismatch" not in line]
    line = (own or lines or [text.strip().splitlines()[0] if text.strip() else "no message"])[0]
    line = re.sub(r"^[\w.]*\.(\w+(?:Error|Exception))", r"\1", line)
    line = re.sub(r"0x[0-9a-f]+|/[\w./+-]+/", "", line)
    return line[:297] + "..." if len(line) > 300 else line


def measured(
    name: str, columns: tuple[str, ...], report: Callable[[str, Cell], None], *, limit: float = LIMIT_S
) -> None:
    """Measure columns of a family; a family that cannot be built or fed has one reason in all of them."""
    torch.set_default_dtype(torch.float64)
    one = Measured(name, limit=limit)
    try:
        one.family.check_size(MOST)
        one.parts  # noqa: B018 - builds and feeds the model
        one.check_draws_nothing()
        one.one()
        one.names  # noqa: B018
    except Exception as error:
        for column in columns:
            report(column, {"status": "not built", "note": reason_of(f"{type(error).__name__}: {error}")})
        return
    for column in columns:
        report(column, one.cell(column) | ({"tolerance": one.tolerance} if column == "modality" else {}))
