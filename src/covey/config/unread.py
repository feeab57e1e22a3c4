"""Notes on given settings that the method does not read. The schema says which methods read a setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from covey.config.methods import MODEL_METHODS
from covey.config.rows import fact_of
from covey.config.schema import Config


def reads(method: str, key: str) -> bool:
    """Return whether a run of this method reads a setting, such as train.lr."""
    read_by = fact_of(key, "read_by")
    return method in (MODEL_METHODS if read_by is None else read_by)


def unread_settings(stages: Sequence[tuple[str, Config, Mapping[str, str]]]) -> Iterator[str]:
    """Yield notes on given settings without effect, one for each stage and one for the whole run.

    ``stages`` are (name, config, where each key was set); a run without stages is a single one with name "".
    """
    methods = {config.method for _, config, _ in stages}
    shared: dict[str, str] = {}
    for name, config, origins in stages:
        of_stage = dict[str, str]()
        for key, origin in _non_defaults(config, origins):
            by_stage = not name or origin.endswith(f"(stage {name})") or origin.startswith("--stages.")
            # A setting of the whole run is unread only if no stage's method reads it.
            readers = {config.method} if by_stage else methods
            if any(reads(method, key) for method in readers):
                continue
            if by_stage:
                of_stage[key] = origin
            else:
                shared[key] = origin
        if of_stage:
            who = f"stage {name}: method" if name else "method"
            yield f"{who} {config.method} does not read {_format_keys(of_stage)}"
    if shared:
        yield f"no stage reads {_format_keys(shared)}"


def _format_keys(keys: Mapping[str, str]) -> str:
    """Return the keys as a text, with the place where the first was set."""
    origin = next(iter(keys.values()))
    where = ""
    # An option, or a setting from Python, is its own origin.
    if not origin.startswith("--") and origin not in keys:
        where = f" ({origin.partition(' (stage')[0]})"
    changes = "this changes" if len(keys) == 1 else "these change"
    return f"{', '.join(keys)}{where}: {changes} nothing"


def _non_defaults(config: Config, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, origin) of the settings that differ from the default; `algorithm` counts as one."""
    standard = Config()
    keys = set[str]()
    for name, origin in origins.items():
        inner = any(other.startswith(f"{name}.") for other in origins)
        key = "algorithm" if name.startswith("algorithm.") else name
        if not key or key in keys or (inner and key != "algorithm") or key.startswith("stages"):
            continue
        keys.add(key)
        if key == "algorithm" or _value(config, key) != _value(standard, key):
            yield key, origin


def _value(config: object, key: str) -> object:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config
