"""`covey explain SETTING`: list settings with effects, defaults, ranges, usual values and TRL's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from covey.cli.names import all_names, entries_of, name_entry
from covey.config import trl
from covey.config.algorithm import algorithm_keys, algorithm_rows, rows_of
from covey.config.methods import METHODS
from covey.config.rows import SettingRow, key_paths, schema_rows
from covey.config.unknown import explain_unknown
from covey_verify.errors import ConfigError
from covey_verify.usercode import load_function

Entry = dict[str, object]
"""A row as `--json` prints it."""


def find_entries(name: str = "") -> list[Entry]:
    """Return the entries for a name: settings with this name, below it, or ending with it, then other kinds.

    Without a name, return the settings of the schema. The name of a user's function is ``file.py:function``.
    Raises ConfigError with the nearest name.
    """
    if name == "":
        return list(map(_setting_entry, schema_rows()))
    if ":" in name:
        return list(_function_entries(name))
    rows = [*schema_rows(), *algorithm_rows(), *loss_rows()]
    # The added dot makes whole parts match: train.lr is not below train.l.
    entries = [_setting_entry(row) for row in rows if f"{row.key}.".startswith(f"{name}.")]
    if not entries and name in trl.NAMES:
        return list(_trl_entries(name, rows))
    if not entries:
        entries = [_setting_entry(row) for row in rows if f".{name}." in f".{row.key}."]
    entries += entries_of(name)
    if not entries and name != name.lower():
        return find_entries(name.lower())
    if not entries:
        kinds = "setting, run folder, metric, function, preset, reward, finding or check"
        reason = explain_unknown(name, None, [*key_paths(), *algorithm_keys(), *all_names()], kinds)
        raise ConfigError(f"{reason} (`covey explain` lists the settings)")
    return entries


def loss_rows() -> Iterator[SettingRow]:
    """Yield the settings of `loss` of each method that has any."""
    for name, method in METHODS.items():
        if method.loss is not None:
            yield from (row._replace(owner=name) for row in rows_of(method.loss, "loss"))


def _setting_entry(row: SettingRow) -> Entry:
    setting = row.setting
    return {
        "setting": row.key,
        "of": row.owner,
        "default": row.default,
        "range": row.values,
        "effect": setting.effect,
        "usual": setting.usual,
        "trl": ", ".join(setting.trl_names),
        "source": setting.source,
    }


def _function_entries(spec: str) -> Iterator[Entry]:
    """Yield the entry of a user's function, and those of its settings, which may lack descriptions."""
    function = load_function(spec, Path())
    try:
        rows = list(rows_of(function, spec))
    except NameError as error:
        raise ConfigError(f"{spec}: its annotations use {error.name!r}, which is not defined") from None
    except ValueError:  # it is written in C and has no signature
        rows = []
    yield name_entry(spec, "function", " ".join((function.__doc__ or "").split()))
    yield from map(_setting_entry, rows)


def _trl_entries(name: str, rows: list[SettingRow]) -> Iterator[Entry]:
    """Yield the entries for a name of TRL: what to write instead, and settings of the same meaning."""
    same = [row for row in rows if name in row.setting.trl_names]
    if name in trl.LOSS or not same:
        yield name_entry(name, "TRL", f"{trl.advice_on(name)}.", default=trl.LOSS.get(name, ""))
    yield from map(_setting_entry, same)


KIND_NAMES = {
    "metric": "a metric",
    "finding": "a finding",
    "audit": "a check of covey audit",
    "rewards": "a reward",
    "algorithm": "a preset",
    "function": "your function",
    "TRL": "a setting of TRL",
}
"""The field `of` of an entry that is not a setting -> its kind in words."""


def entry_lines(entries: list[Entry]) -> Iterator[str]:
    """Yield a line for each entry: its name, facts in parentheses, and effect."""
    for entry in entries:
        default = "" if entry["default"] == "" else f"default: {entry['default']}"
        labels = {"usual": "usual", "trl": "in TRL", "source": "source"}
        labelled = [f"{label}: {entry[key]}" for key, label in labels.items() if entry[key]]
        facts = "; ".join(
            fact for fact in (_kind_name(entry), default, str(entry["range"]), *labelled) if fact
        )
        yield f"{entry['setting']} ({facts.rstrip('.')})" + (
            f": {entry['effect']}" if entry["effect"] else ""
        )


def _kind_name(entry: Entry) -> str:
    owner = str(entry["of"])
    if owner in KIND_NAMES or not owner:
        return KIND_NAMES.get(owner, "")
    # The owner of a function is its axis; the owner of a setting is a function or a record.
    return f"a function of {owner}" if owner.startswith("algorithm.") else f"a setting of {owner}"
