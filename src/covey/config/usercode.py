"""A user's own functions in a config: their names there, and files that must not begin a run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from covey_verify.errors import ConfigError
from covey_verify.usercode import IMPORTING


def uncalled(spec: str, settings: Iterable[str]) -> Callable[..., object]:
    """A stand-in for the function ``spec`` names, which is not loaded: it has that name and these settings.

    For whoever reads the record of a run, and must not run its code. Raises ConfigError for settings that no
    function has, and when it is called.
    """

    def stand_in(**_: object) -> object:
        raise ConfigError(f"{spec}: only its name was read; it is loaded where a run is trained or resumed")

    try:
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in settings]
    except ValueError as error:
        raise ConfigError(f"{spec}: {error}") from None
    vars(stand_in).update(__covey_name__=spec, __signature__=inspect.Signature(parameters))
    stand_in.__module__ = spec.partition(":")[0]
    return stand_in


def spec_of(function: object, folder: Path) -> str | None:
    """How a config in ``folder`` names a function; None if none does: a lambda, a closure, an object.

    >>> spec_of(spec_of, Path()), spec_of(lambda: 0, Path())
    ('covey.config.usercode:spec_of', None)
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or getattr(module, name, None) is not function or file.suffix != ".py":
        return None
    if module.__package__:  # its relative imports work under its own name only
        return f"{module.__spec__.name if module.__spec__ else module.__name__}:{name}"
    path = file.resolve()
    here = folder.resolve()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"


def refuse_while_importing() -> None:
    """Raise ConfigError if a run is begun by a file that is only being imported for its functions."""
    if IMPORTING:
        raise ConfigError(
            f"{IMPORTING[-1].name} begins a run when it is imported, but only its functions are wanted: put "
            'what begins the run below `if __name__ == "__main__":`'
        )
