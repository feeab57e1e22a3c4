"""`covey explain SETTING`: what settings do, their defaults, ranges, usual values and TRL's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from covey.cli.words import all_words, words
from covey.config import trl
from covey.config.algorithm import algorithm_keys, algorithm_settings, names_on, parameters_of
from covey.config.effects import AXES_IN_WORDS, LOSS_EFFECTS, USUAL, USUAL_SOURCES, effect
from covey.config.schema import Config
from covey.config.sources import fields_of, key_paths
from covey.config.unknown import explained
from covey.objective.preference import LOSSES
from covey_verify.errors import ConfigError

ALIKE: Mapping[str, str] = {ours: theirs for theirs, ours in trl.SAME.items() if theirs != ours} | {
    "algorithm.surrogate.clip_low": "epsilon",
    "algorithm.surrogate.clip_high": "epsilon_high",
    "algorithm.surrogate.dual_clip": "delta",
    "algorithm.kl.coef": "beta",
    "algorithm.kl.refresh_every": "ref_model_sync_steps",
    "algorithm.kl.refresh_mix": "ref_model_mixup_alpha",
    "algorithm.entropy.coef": "entropy_coef",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.whiten": "scale_rewards",
    "algorithm.reduce": "loss_type",
}
"""Setting -> TRL's name for it."""
INERT = (
    "With train.updates_per_batch 1 and inner_epochs 1 every ratio is 1: no setting of ratio or surrogate "
    "(clip_low, clip_high, dual_clip, cap, tau, ...) can act, and presets that differ only so are the same"
)


def settings(prefix: str = "") -> list[dict[str, object]]:
    """Every setting whose name is ``prefix``, or below it, or ends so, and what else goes by that name.

    Without a name, the settings of the schema.

    Raises ConfigError with the nearest name.
    """
    if prefix == "":
        return list(_of_schema())
    everything = [*_of_schema(), *_of_algorithm(), *_of_losses()]
    found = [s for s in everything if f"{s['setting']}.".startswith(f"{prefix}.")]
    if not found and prefix in trl.NAMES:
        return _of_trl(prefix, everything)
    found = [*(found or [s for s in everything if f".{prefix}." in f".{s['setting']}."]), *words(prefix)]
    if not found and prefix != prefix.lower():
        return settings(prefix.lower())
    if not found:
        kinds = "setting, run folder, metric, function, preset, reward or finding"
        said = explained(prefix, None, [*key_paths(), *algorithm_keys(), *all_words()], kinds)
        raise ConfigError(f"{said} (`covey explain` lists the settings)")
    return found


def _of_schema() -> Iterator[dict[str, object]]:
    for path, field in fields_of(Config):
        says = f"{field.description} {INERT}." if path == "algorithm" else field.description
        yield _row(path, "", field.default, _range(field.metadata), says)


def _of_algorithm() -> Iterator[dict[str, object]]:
    for axis, says in AXES_IN_WORDS.items():
        yield _row(f"algorithm.{axis}", "", "the preset's", ", ".join(names_on(axis)), says)
    for path, function, p in algorithm_settings():
        default = "k3" if p.name == "estimator" else p.default
        yield _row(path, function, default, _values(p.annotation), effect(function, p.name))


def _of_losses() -> Iterator[dict[str, object]]:
    for method, function in LOSSES.items():
        for p in parameters_of(function).values():
            yield _row(
                f"loss.{p.name}", method, p.default, _values(p.annotation), LOSS_EFFECTS.get(p.name, "")
            )


def _row(path: str, of: str, default: object, values: str, says: str | None) -> dict[str, object]:
    facts = {"setting": path, "of": of, "default": default, "range": values, "effect": says}
    usual, source = USUAL.get(path, ""), USUAL_SOURCES.get(path, "")
    return facts | {"usual": usual, "trl": ALIKE.get(path, ""), "source": source}


def _of_trl(name: str, everything: list[dict[str, object]]) -> list[dict[str, object]]:
    """A name of TRL's: what to write here, and what that does."""
    ours = [key for key, theirs in ALIKE.items() if theirs == name] + [trl.SAME.get(name, "")]
    found = [s for s in everything if s["setting"] in ours]
    if name in trl.LOSS or not found:
        found = [_row(name, "TRL", trl.LOSS.get(name), "", f"{trl.told(name)}."), *found]
    return found


def _values(annotation: object) -> str:
    """The words or bounds a type allows."""
    if metadata := getattr(annotation, "__metadata__", ()):
        return _range(metadata)
    inner = [a for a in get_args(annotation) if a is not type(None)]
    if inner and all(isinstance(a, str | int) for a in inner):
        return ", ".join(map(str, inner))
    return _values(inner[0]) if inner else ""


def _range(bounds_of: Iterable[object]) -> str:
    signs: Mapping[str, str] = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [(sign, getattr(m, name, None)) for m in bounds_of for name, sign in signs.items()]
    return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def show(found: list[dict[str, object]]) -> Iterator[str]:
    """Lines for people."""
    for s in found:
        whose = f"of {s['of']}" if s["of"] else ""
        usual = f"usual {s['usual']}" if s["usual"] else ""
        alike = f"TRL {s['trl']}" if s["trl"] else ""
        default = "" if s["default"] == "" else f"default {s['default']}"
        source = f"from {s['source']}" if s["source"] else ""
        facts = ", ".join(x for x in (whose, default, str(s["range"]), usual, alike, source) if x)
        yield f"{s['setting']} ({facts}): {s['effect'] or 'nothing is said of it yet'}"
