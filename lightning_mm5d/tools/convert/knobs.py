"""Tables of another system's knobs, and the draft that collects what becomes of each knob that is given.

A draft ends with exactly one entry for each given knob, so that none is dropped silently. Refuses unknown knobs by the
name of the nearest known one.

Switches of kernels, said in `kernels` and `compile` of a modality.

ColossalAI and Cornstarch have them for a whole plugin, which here is for each of its modalities. A kernel that a
modality refuses beside its other fields is listed by name with the reason. Whether a model has what a kernel computes
is known later, and refused then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_mm5d.config.checks import MOST
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.config.modality import as_modalities

Effect = Literal["mapped", "always", "elsewhere", "costs", "results"]
"""What becomes of a knob.

``mapped``: fields of ours say it. ``always``: it asks for what happens anyway, or does nothing. ``elsewhere``: the
LightningModule, its data or the Trainer says it. ``costs``: it has no equal, which changes time or memory alone.
``results``: it has no equal, and without it the run fails or computes something else.
"""

_LONG = 12  # names; longer lists are not printed
_COUNTS = tuple(f"modality.{axis}_size" for axis in ("dp", "tp", "cp", "pp", "ep"))
MODEL = "model"
"""Name of the only modality of a configuration that knows no modalities."""


@dataclass(frozen=True)
class Knob:
    """One knob of another system.

    Attributes:
        name: as it is written there, with dots between sections.
        ours: fields that say the same, as ``modality.tp_size``, ``strategy.schedule`` or ``trainer.precision``. Several
            where the value decides which; then, and where the value changes on the way, the source has a rule for it.
        effect: what becomes of the knob.
        about: how the value changes, or why there is no equal.
        neutral: values that ask for nothing; with False or 0 among them an empty text or list is as good.
        rule: whether a rule of the source says what becomes of it, instead of a copy of the value.
    """

    name: str
    ours: tuple[str, ...]
    effect: Effect
    about: str
    neutral: tuple[Any, ...] = ()
    rule: bool = False


def same(name: str, ours: str, *, neutral: tuple[Any, ...] = ()) -> Knob:
    """A knob whose value one field of ours takes as it is."""
    return Knob(name, (ours,), "mapped", "", neutral)


def ruled(name: str, ours: str, about: str, *, neutral: tuple[Any, ...] = ()) -> Knob:
    """A knob whose value a rule says in one or several fields of ours, whose names spaces part."""
    return Knob(name, tuple(ours.split()), "mapped", about, neutral, rule=True)


def always(name: str, about: str) -> Knob:
    """A knob that asks for what happens anyway, or that does nothing there either."""
    return Knob(name, (), "always", about)


def elsewhere(name: str, about: str, *, neutral: tuple[Any, ...] = ()) -> Knob:
    """A knob of the model, the data, the loop or the scaler."""
    return Knob(name, (), "elsewhere", about, neutral)


def costs(name: str, about: str, *, neutral: tuple[Any, ...] = ()) -> Knob:
    """A knob without an equal, which changes time or memory alone."""
    return Knob(name, (), "costs", about, neutral)


def results(name: str, about: str, *, neutral: tuple[Any, ...] = ()) -> Knob:
    """A knob without an equal, which changes results or without which the run fails."""
    return Knob(name, (), "results", about, neutral)


@dataclass(frozen=True)
class Entry:
    """What became of one given knob.

    Attributes:
        name: of the knob, as the configuration writes it.
        got: its value there.
        effect: what became of it.
        fields: paths of our fields and their values.
        about: how the value with_fields, or why there is no equal.
    """

    name: str
    got: Any
    effect: Effect
    fields: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


@dataclass(frozen=True)
class Conversion:
    """A configuration of another system, said in ours.

    Attributes:
        source: name of the other system's configuration.
        strategy: arguments of the strategy; modalities as mappings of their fields.
        trainer: arguments of the trainer.
        entries: one for each given knob.
    """

    source: str
    strategy: dict[str, Any]
    trainer: dict[str, Any]
    entries: tuple[Entry, ...]

    def of(self, *effects: Effect) -> tuple[Entry, ...]:
        """Return the entries with one of these effects."""
        return tuple(entry for entry in self.entries if entry.effect in effects)


class Draft:
    """Collects what becomes of the given knobs of one section, in one modality.

    Args:
        table: the knobs that exist.
        given: the configuration, with or without sections.
        prefix: of the names in errors and entries, for instance ``encoder_plugins.vision.``.
        modality: whose fields `put` says.

    Raises:
        ConfigError: a knob is not in the table, or two contradict each other.
    """

    def __init__(
        self, table: Sequence[Knob], given: Mapping[str, Any], *, prefix: str = "", modality: str = MODEL
    ) -> None:
        self._knobs = {knob.name: knob for knob in table}
        self._prefix, self._modality = prefix, modality
        self.strategy: dict[str, Any] = {}
        self.trainer: dict[str, Any] = {}
        self.modality: dict[str, Any] = {}
        self._entries: dict[str, Entry] = {}
        self.given = dict(_flat(given, self._knobs, prefix))
        for name, got in self.given.items():
            if got is None:  # `entries` says so
                continue
            knob = self._knobs[name]
            kinds, is_off = {type(off) for off in knob.neutral}, not got and any(off == 0 for off in knob.neutral)
            if knob.rule and not is_off and kinds & {bool, float} and type(got) not in kinds:
                rule = "It is a number" if float in kinds else "It is true or false"
                raise self.refused(name, rule, f"Write {knob.neutral[0]}, for instance")
            if knob.ours and knob.ours[0] in _COUNTS:
                self.count(name)
            if is_off or any(got is off or (type(got) is type(off) and got == off) for off in knob.neutral):
                self.leave(name, "always", "It asks for nothing")
            elif knob.effect == "mapped" and not knob.rule:
                self._refuse_another(name, knob.ours[0])
                self.put(name, knob.ours[0], got)
            elif not knob.rule:
                self.leave(name, knob.effect, knob.about)

    def _refuse_another(self, name: str, ours: str) -> None:
        """Refuse two knobs that say one field of ours unlike each other."""
        for other in self._entries:
            knob = self._knobs[other]
            if not knob.rule and ours in knob.ours and self.given[other] != self.given[name]:
                rule = f"{self._prefix}{other} says {self.given[other]!r} of the same"
                raise self.refused(name, rule, "Leave one of them out")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a knob, or `default` where it is not given or null."""
        assert name in self._knobs, name
        got = self.given.get(name)
        return default if got is None else got

    def count(self, name: str, default: int = 1) -> int:
        """Return the value of a knob that is a whole number of at least 1."""
        got = self.get(name, default)
        if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= MOST:
            raise self.refused(name, f"It is a whole number of 1 to {MOST}", f"Use {default}")
        return got

    def counts(self, name: str) -> list[int]:
        """Return the value of a knob that lists whole numbers of at least 0."""
        got = self.get(name)
        if not isinstance(got, list | tuple) or not all(type(count) is int and 0 <= count <= MOST for count in got):
            raise self.refused(name, f"It lists whole numbers of 0 to {MOST}", "Use for instance [2, 2]")
        return list(got)

    def choice(self, name: str, known: Sequence[str], default: str | None = None) -> str | None:
        """Return the value of a knob that is one of a few words."""
        got = self.get(name, default)
        if got is not None and (not isinstance(got, str) or got not in known):
            raise self.refused(name, f"It is one of {', '.join(known)}", did_you_mean(got, known))
        return got

    def put(self, name: str, ours: str, value: Any, about: str = "") -> None:
        """Say a knob in a field of ours, ``modality.tp_size``; a knob may be said in several."""
        where, _, path = ours.partition(".")
        target = {"modality": self.modality, "strategy": self.strategy, "trainer": self.trainer}[where]
        *parents, last = path.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        entry = self._entries.get(name)
        shown = {"modality": f"modalities.{self._modality}.{path}", "strategy": path, "trainer": f"trainer.{path}"}
        fields = {**(entry.fields if entry is not None else {}), shown[where]: value}
        about = about or (entry.about if entry is not None else "")
        self._entries[name] = Entry(self._prefix + name, self.given.get(name), "mapped", fields, about)

    def accepts(self, name: str, fields: Mapping[str, Any], **beside: Any) -> bool:
        """Return whether our features let the modality have further fields; `leave` the knob if not.

        Args:
            name: of the knob that asks for the fields.
            fields: what `put` may say of the modality then.
            **beside: fields of the strategy.
        """
        try:
            modality = with_fields(as_modalities({self._modality: self.modality})[self._modality], **fields)
            check_features({"modalities": {self._modality: modality}, **beside})
        except ConfigError as error:
            self.leave(name, "costs", error.rule if self._modality == MODEL else f"{self._modality}: {error.rule}")
            return False
        return True

    def leave(self, name: str, effect: Effect, about: str) -> None:
        """Note that no field of ours says a knob."""
        self._entries[name] = Entry(self._prefix + name, self.given.get(name), effect, {}, about)

    def leave_rest(self, names: Sequence[str], effect: Effect, about: str) -> None:
        """`leave` those of `names` that are given and have no entry yet."""
        for name in names:
            if name in self.given and name not in self._entries:
                self.leave(name, effect, about)

    def refused(self, name: str, rule: str, fix: str) -> ConfigError:
        """Return the error for the value of a knob."""
        return ConfigError(self._prefix + name, self.given.get(name), rule, fix)

    def conversion(self, source: str) -> Conversion:
        """Return the draft of a configuration with one modality."""
        strategy = {"modalities": {MODEL: self.modality}, **self.strategy}
        return Conversion(source, strategy, self.trainer, self.entries())

    def entries(self) -> tuple[Entry, ...]:
        """Return one entry for each given knob, in their order, and those of defaults that matter."""
        self.leave_rest([name for name, got in self.given.items() if got is None], "always", "It asks for nothing")
        missing = self.given.keys() - self._entries.keys()
        assert not missing, missing
        order = [*self.given, *(name for name in self._entries if name not in self.given)]
        return tuple(self._entries[name] for name in order)


def _flat(
    given: Mapping[str, Any], known: Mapping[str, Knob], prefix: str, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of a nested configuration by dotted name, down to the names in the table."""
    for part, value in given.items():
        name = f"{path}{part}"
        if name in known:
            yield name, value
        elif any(key.startswith(f"{name}.") for key in known):
            if isinstance(value, Mapping):
                yield from _flat(value, known, prefix, f"{name}.")
            elif value is not None:
                rule = "It is a section that maps names to values"
                fix = (
                    f"Write for instance {{{next(key for key in known if key.startswith(name))[len(name) + 1 :]}: ...}}"
                )
                raise ConfigError(prefix + name, value, rule, fix)
        else:
            near = dict.fromkeys(key[len(path) :].partition(".")[0] for key in known if key.startswith(path))
            fix = did_you_mean(part, near)
            short = fix if len(near) < _LONG else f"{fix.split('? ')[0]}?"
            raise ConfigError(prefix + name, value, "There is no such knob", short)


KERNELS: tuple[Knob, ...] = (
    ruled("enable_fused_normalization", "modality.compute.kernels", "`rms_norm`, for models with norms like Llama's",
          neutral=(False,)),
    ruled("enable_flash_attention", "modality.compute.kernels", "`sdpa`, with a `cp_size` of 1: on GPUs flash "
          "attention where masks allow it. `flash_attention_2` is that of the package", neutral=(False,)),
    ruled("enable_jit_fused", "modality.compute.compile",
          "`true`, without `sequence_parallel`: whole layers are compiled", neutral=(False,)),
)  # fmt: skip
"""In the order of the constructors."""


_ALL = "enable_all_optimization"


def with_all_kernels(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plugin's arguments with the switches of kernels that `enable_all_optimization` turns on."""
    return {**given, **{knob.name: True for knob in KERNELS}} if given.get(_ALL) else given


def convert_kernels(draft: Draft) -> None:
    """Say the switches in ours; call it when the modality has its other fields."""
    if draft.get("enable_flash_attention", False):
        choose_kernel(draft, "enable_flash_attention", "sdpa")
    norms, name = "enable_fused_normalization", "enable_jit_fused"
    if draft.get(norms, False):
        # who asks for all of them does not say that the model has such norms, without which `rms_norm` is refused
        if draft.given.get(_ALL):
            draft.leave(
                norms, "costs", "Compiled layers fuse norms; `kernels: rms_norm` is for norms like Llama's alone"
            )
        else:
            choose_kernel(draft, norms, "rms_norm")
    if draft.get(name, False) and draft.accepts(name, {"compile": True}):
        draft.put(name, "modality.compute.compile", True)
    draft.leave_rest([_ALL], "mapped", "It turns on the switches of kernels, which are listed")


def choose_kernel(draft: Draft, name: str, kernel: str) -> None:
    """Add a kernel to those of the modality, which a knob asks for; or note why the modality refuses it."""
    chosen = [*draft.modality.get("compute", {}).get("kernels", ()), kernel]
    if draft.accepts(name, {"kernels": chosen}):
        draft.put(name, "modality.compute.kernels", chosen)
