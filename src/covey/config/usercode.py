"""A user's own functions in a config: their names, placeholders for them, and a guard of their import."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from covey_verify.errors import ConfigError
from covey_verify.usercode import IMPORTING


def placeholder_function(spec: str, settings: Iterable[str]) -> Callable[..., object]:
    """Return a placeholder for the function that ``spec`` names, with that name and these settings.

    It serves readers of a run's record, who must not run its code. Raises ConfigError for settings that no
    function can have; so does a call of the placeholder.
    """

    def stand_in(**_: object) -> object:
        raise ConfigError(
            f"{spec}: only its name was read; the function is loaded when a run is trained or resumed"
        )

    try:
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in settings]
    except ValueError as error:
        raise ConfigError(f"{spec}: {error}") from None
    vars(stand_in).update(__covey_name__=spec, __signature__=inspect.Signature(parameters))
    stand_in.__module__ = spec.partition(":")[0]
    return stand_in


def spec_of(function: object, folder: Path) -> str | None:
    """Return the name of a function in a config in ``folder``; None for a lambda, a closure or an object.

    >>> spec_of(spec_of, Path()), spec_of(lambda: 0, Path())
    ('covey.config.usercode:spec_of', None)
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or getattr(module, name, None) is not function or file.suffix != ".py":
        return None
    if module.__package__:  # relative imports work under the module's own name only
        return f"{module.__spec__.name if module.__spec__ else module.__name__}:{name}"
    path = file.resolve()
    base = folder.resolve()
    return f"{path.relative_to(base) if path.is_relative_to(base) else path}:{name}"


def refuse_while_importing() -> None:
    """Raise ConfigError if a file that is being imported for its functions starts a run."""
    if IMPORTING:
        raise ConfigError(
            f"{IMPORTING[-1].name} starts a run when it is imported, but it is imported for its functions: "
            'move the start of the run below `if __name__ == "__main__":`'
        )
