"""The layers of a config (file, Python, command line), of which later ones win, and its stages.

A setting on the command line holds in every stage, even if the file's stage sets it; one like
`--stages.2.train.steps` holds in that stage. Overridden settings of stages are noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from covey.config import trl
from covey.objective.axes import AXES
from covey_verify.errors import ConfigError

SHORT_FORM_KEYS: Mapping[str, str] = {
    "algorithm": "name",
    "kl": "coef",
    "entropy": "coef",
    "critic": "trunk",
    "tools": "functions",
    **dict.fromkeys(AXES, "name"),
}
"""Key whose value may be short for a mapping -> the key in it that the short form sets."""


class Assignment(NamedTuple):
    """A setting with its value and the place where it was given."""

    key: str
    value: object
    origin: str


@dataclass
class Layers:
    """The layers of a config before it is checked."""

    raw: dict[str, object]
    """The file's values, over which the other layers are put."""
    origins: dict[str, str]
    """The place where each key was set; a stage's keys begin with `stages.<index>.`, counted from 0."""
    notes: list[str] = field(default_factory=list)
    per_update: dict[tuple[str, str], str] = field(default_factory=dict)
    """Settings given by a TRL name that counts optimizer steps: (key, origin) -> that name."""
    everywhere: list[Assignment] = field(default_factory=list)
    """Settings that hold in every stage."""
    of_stages: list[Assignment] = field(default_factory=list)
    """Settings of one stage, for example `stages.2.train.steps`."""
    of_trl: bool = False
    """Whether any name was TRL's."""
    names: list[str] = field(default_factory=list)
    """Names of the stages, which are also their folders: 1-sft, 2-rl."""

    def __post_init__(self) -> None:
        self.raw = self._resolve_names(self.raw, "")
        self._rename_stages()

    def _rename_stages(self) -> None:
        stages = self.raw.get("stages")
        if isinstance(stages, list | tuple):
            named = (
                self._resolve_names(s, f"stages.{i}.") if isinstance(s, Mapping) else s
                for i, s in enumerate(stages)
            )
            self.raw["stages"] = list(named)

    def _resolve_names(self, raw: Mapping[str, object], prefix: str) -> dict[str, object]:
        """Return a file's mapping with covey's names and with dotted keys resolved."""
        # Renamed and dotted keys are put in last, to find values that are set twice.
        moved = [k for k in raw if k in trl.SAME_MEANING or "." in k]
        result: dict[str, object] = {k: v for k, v in raw.items() if k not in moved}
        for old in moved:
            origin = self.origins.pop(f"{prefix}{old}", old)
            new, value = self._name(old, raw[old], origin)
            if (new != old or "." in old) and get(result, new) is not None:
                earlier = self.origins.get(f"{prefix}{new}", new)
                meaning = f"{old} means {new}, which" if new != old else old
                raise ConfigError(f"{origin}: {meaning} is already set ({earlier}); keep one")
            result = with_value(result, new, value)
            self.origins[f"{prefix}{new}"] = origin
        return result

    def _name(self, name: str, value: object, origin: str) -> tuple[str, object]:
        """Return covey's name and value of a setting that may have TRL's name."""
        new = trl.SAME_MEANING.get(name, name)
        if new == name:
            return name, value
        if origin != name:  # from Python, TRL's names are used on purpose
            self.notes.append(f"{origin}: {name} is read as {new}")
        self.of_trl = True
        if name in trl.PER_UPDATE:
            self.per_update[new, origin] = name
        try:
            return new, trl.covey_value(name, value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None

    def add(self, settings: Iterable[Assignment], over_stages: bool = True) -> None:
        """Put settings over the present ones; with ``over_stages`` also over the settings of stages."""
        for key, value, origin in settings:
            if key.startswith("stages."):
                self.of_stages.append(Assignment(key, value, origin))
                continue
            new, translated = self._name(key, value, origin)
            self.raw = with_value(self.raw, new, translated)
            self.origins[new] = origin
            if new == "stages":
                self._rename_stages()
            elif over_stages:
                self.everywhere.append(Assignment(new, translated, origin))

    def stages(self) -> list[tuple[str, dict[str, object], dict[str, str]]]:
        """Return (name, values, origins) of each stage; [] if there are no stages."""
        listed = self.raw.get("stages")
        if not isinstance(listed, list | tuple):
            listed = ()
        base = {k: v for k, v in self.raw.items() if k != "stages"}
        self.names = [f"{n}-{self._method(base, s)}" for n, s in enumerate(listed, start=1)]
        overrides = [self._choose(s) for s in self.of_stages]
        stages = []
        for index, (name, values) in enumerate(zip(self.names, listed, strict=True)):
            of_stage = [setting for number, setting in overrides if number == index]
            stages.append((name, *self._stage(name, f"stages.{index}.", base, values, of_stage)))
        return stages

    def _method(self, base: Mapping[str, object], values: Mapping[str, object]) -> object:
        """Return the method of a stage with these values; one set everywhere wins."""
        for setting in self.everywhere:
            if setting.key == "method":
                return setting.value
        return {**base, **values}.get("method", "rl")

    def _stage(
        self,
        name: str,
        prefix: str,
        base: dict[str, object],
        values: Mapping[str, object],
        overrides: Sequence[Assignment],
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Return the values and origins of a stage; ``overrides`` are the options that name it."""
        # The run's settings of the reinforcement loss do not apply to stages with another loss.
        if self._method(base, values) != "rl":
            base = {k: v for k, v in base.items() if k not in trl.LOSS}
        merged = merge(base, values)
        # The stage's own origins win over the run's.
        of_stage = {k.removeprefix(prefix): v for k, v in self.origins.items() if k.startswith(prefix)}
        origins = {**self.origins, **{k: f"{v} (stage {name})" for k, v in of_stage.items()}}
        for key, value, origin in (*self.everywhere, *overrides):
            old = get(merged, key)
            # A note is due only if the stage itself had set another value.
            from_stage = get(values, key) is not None or (key, value, origin) in overrides
            if from_stage and old is not None and old != value:
                self.notes.append(f"{origin} {value} overrides {old} in stage {name}")
            merged = with_value(merged, key, value)
            origins[key] = origin
        return merged, origins

    def _choose(self, setting: Assignment) -> tuple[int, Assignment]:
        """Return the stage's index and the setting of a key like `stages.2.train.steps`."""
        _, stage, *rest = setting.key.split(".")
        # A stage may be named by its folder (2-rl, or 2_rl as options write it) or its number.
        indices = dict[str, int]()
        for index, name in enumerate(self.names):
            indices |= dict.fromkeys((name, name.replace("-", "_"), str(index + 1)), index)
        if stage not in indices or not rest:
            names = f"name a stage by its number or folder, {', '.join(self.names)}: --stages.1.train.steps 5"
            raise ConfigError(f"{setting.origin}: {names if self.names else 'this config has no stages'}")
        key, value = self._name(".".join(rest), setting.value, setting.origin)
        return indices[stage], Assignment(key, value, setting.origin)


def get(raw: object, key: str) -> object:
    """Return the value at a dotted key; None if there is none."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def with_value(raw: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    """Return the mapping with another value at a dotted key.

    >>> with_value({"algorithm": "grpo"}, "algorithm.kl.coef", 0.1)
    {'algorithm': {'name': 'grpo', 'kl': {'coef': 0.1}}}
    """
    head, _, rest = key.partition(".")
    if not rest:
        return {**raw, head: value}
    below = raw.get(head)
    if head in SHORT_FORM_KEYS and isinstance(below, str | float | int | list):
        # `algorithm: grpo` becomes a mapping, so that a setting can be put into it.
        below = {SHORT_FORM_KEYS[head]: below}
    return {**raw, head: with_value(below if isinstance(below, Mapping) else {}, rest, value)}


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Return ``base`` with ``over`` put over it, mapping by mapping."""
    merged = dict(base)
    for key, new in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(new, Mapping):
            merged[key] = merge(below, new)
        else:
            merged[key] = new
    return merged
