"""A check before the first stage of a pipeline: the stages and files that each stage names must exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from covey.config.load import ResolvedConfig
from covey.config.methods import EXAMPLE_METHODS, METHODS, POLICY_METHODS
from covey.tasks.files import missing_file_message
from covey.tasks.source import data_files
from covey_verify.errors import ConfigError, DataError

# The folder of a stage, for example 2-pairs.
STAGE = re.compile(rf"\d+-(?:{'|'.join(METHODS)})")


def refuse_missing(stages: Sequence[ResolvedConfig]) -> None:
    """Raise ConfigError if a stage needs a result of no earlier stage, DataError if a file is missing."""
    earlier: dict[str, str] = {}  # folder of a stage -> its method
    for number, stage in enumerate(stages, start=1):
        folder = f"{number}-{stage.config.method}"
        for key, name, methods in _references(stage):
            if name not in earlier:
                names = ", ".join(earlier) or "none"
                raise ConfigError(
                    f"stage {folder}: {key} {name!r} is not an earlier stage; these are: {names}"
                )
            if earlier[name] not in methods:
                raise ConfigError(
                    f"stage {folder}: {key} {name!r} is a stage of method {earlier[name]}; use a stage of "
                    f"method {', '.join(methods)}"
                )
        # A stage that has begun has read its files, so they may have been removed.
        has_begun = (stage.config.output / folder).exists()
        files = [] if has_begun else data_files(stage)
        for file in files:
            if not STAGE.fullmatch(file.name) and not file.is_file():
                where = f"stage {folder}: " if len(stages) > 1 else ""
                raise DataError(f"{where}{missing_file_message(file, of_config=True)}")
        earlier[folder] = stage.config.method


def _references(stage: ResolvedConfig) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield (setting, name of a stage, methods that such a stage may have)."""
    config = stage.config
    kinds = set(METHODS[config.method].learns_from)
    models = [*POLICY_METHODS, "reward_model"] if config.method == "reward_model" else POLICY_METHODS
    makers = [m for m in EXAMPLE_METHODS if kinds.intersection(METHODS[m].makes)]
    references = [("model", str(config.model), models)]
    references += [("data.examples", str(path), makers) for path in config.data.examples]
    for spec in config.rewards:
        settings = spec.values() if isinstance(spec, Mapping) else ()
        judges = [
            str(judge["model"]) for judge in settings if isinstance(judge, Mapping) and "model" in judge
        ]
        references += [("the model of a reward", name, ["reward_model"]) for name in judges]
    return (entry for entry in references if STAGE.fullmatch(entry[1]))
