"""How a setting describes itself, where it is defined: ``Annotated[float, Setting("...")] = 0.2``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Resume: TypeAlias = Literal["safe", "breaks exactness", "refused"]


@dataclass(frozen=True)
class Setting:
    """A setting of a function, a record or the config. All that is said of it anywhere is read from here."""

    effect: str = ""
    """What it does, in a sentence; empty where a user's own function says nothing."""
    usual: str = ""
    """Values in papers and recipes; a start, not a limit."""
    source: str = ""
    """Where the usual values come from."""
    trl: str | tuple[str, ...] = ()
    """TRL's names for it. In the config they mean exactly the same and are translated."""
    resume: Resume | None = None
    """What a change of it does to a run that is resumed; None: as its section, or "breaks exactness"."""
    read_by: Collection[str] | None = None
    """The methods that read it; None: as its section, or all that have a model."""

    @property
    def trl_names(self) -> tuple[str, ...]:
        """``trl`` as a tuple."""
        return (self.trl,) if isinstance(self.trl, str) else self.trl


NOTHING_SAID = Setting()


def setting_of(metadata: Iterable[object]) -> Setting:
    """The Setting among the metadata of a type; one that says nothing where there is none."""
    return next((m for m in metadata if isinstance(m, Setting)), NOTHING_SAID)
