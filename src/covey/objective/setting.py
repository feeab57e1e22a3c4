"""Setting: how a setting describes itself at its definition, ``Annotated[float, Setting("...")] = 0.2``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Resume: TypeAlias = Literal["safe", "breaks exactness", "refused"]


@dataclass(frozen=True)
class Setting:
    """A setting of a function, a record or the config. Every description of it is read from here."""

    effect: str = ""
    """The effect in one sentence; empty if a user's own function gives none."""
    usual: str = ""
    """Values in papers and recipes; a start, not a limit."""
    source: str = ""
    """The source of the usual values."""
    trl: str | tuple[str, ...] = ()
    """TRL's names for it. In a config they mean exactly the same and are translated."""
    resume: Resume | None = None
    """The effect of changing it when a run is resumed; None: its section's, or "breaks exactness"."""
    read_by: Collection[str] | None = None
    """The methods that read it. None: the section's methods, or all methods with a model."""

    @property
    def trl_names(self) -> tuple[str, ...]:
        """``trl`` as a tuple."""
        return (self.trl,) if isinstance(self.trl, str) else self.trl


NOTHING_SAID = Setting()


def setting_of(metadata: Iterable[object]) -> Setting:
    """Return the Setting in a type's metadata, or an empty one."""
    return next((m for m in metadata if isinstance(m, Setting)), NOTHING_SAID)
