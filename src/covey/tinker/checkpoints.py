"""Adapters on disk: `tinker://MODEL/weights/NAME` is the folder MODEL/weights/NAME below the server's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from covey.errors import CheckpointError
from covey.runs.atomic import clear_leftovers, committed_folder, discard, make_folder
from covey.system.integrity import damage
from covey.tinker.adapters import ADAPTER, OPTIMIZER, AdapterShape, AdapterWeights, Base
from covey_verify.errors import DataError

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The two folders of a training client, and what Tinker calls a checkpoint in each."""
PATH = re.compile(r"tinker://([A-Za-z0-9][\w.:-]*)/(weights|sampler_weights)/([A-Za-z0-9][\w.-]*)", re.ASCII)
RECORD = "checkpoint.json"


class Record(BaseModel):
    """The record of a checkpoint."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_id: str
    kind: Kind
    name: str
    base_model: str
    fingerprint: str
    shape: AdapterShape
    time: datetime
    run_metadata: dict[str, object] | None
    user_metadata: dict[str, str] | None
    expires_at: datetime | None

    @property
    def path(self) -> str:
        """The address that clients use."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def as_listed(self) -> dict[str, object]:
        """The checkpoint as Tinker lists it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": self.time.isoformat(),
            "tinker_path": self.path,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at and self.expires_at.isoformat(),
        }


class Store:
    """The checkpoints of all training clients, of this server and of earlier ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        for checkpoints_of_kind in folder.glob("*/*/"):
            clear_leftovers(checkpoints_of_kind)

    def save(
        self,
        base: Base,
        weights: AdapterWeights,
        moments: Mapping[str, Tensor] | None,
        record: Record,
        overwrite: bool = False,
    ) -> str:
        """Write a checkpoint, whole or not at all; return its path. Raises DataError if it exists."""
        target = self._place(record.path)
        if target.exists() and not overwrite:
            raise DataError(f"{record.path} exists; choose another name, or save with overwrite=True")
        make_folder(target.parent)
        with committed_folder(target) as folder:
            base.save(folder, weights, moments)
            (folder / RECORD).write_text(record.model_dump_json(indent=1))
        return record.path

    def find(self, path: str) -> Record:
        """Read the record of a checkpoint. Raises DataError if there is none."""
        folder = self._place(path)
        if not folder.is_dir():
            raise DataError(f"{path}: there is no such checkpoint in {self.folder}")
        try:
            return Record.model_validate_json((folder / RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: {folder / RECORD} is missing or damaged: {error}") from None

    def load(self, base: Base, path: str) -> tuple[Record, AdapterWeights, dict[str, Tensor]]:
        """Read a checkpoint's weights and AdamW's state. Raises DataError for a damaged or foreign one."""
        record = self.find(path)
        folder = self._place(path)
        damaged = damage(folder, (ADAPTER, RECORD))
        if damaged:
            raise DataError(f"{path} cannot be loaded: {damaged}")
        if record.fingerprint != base.fingerprint:
            raise DataError(f"{path} belongs to other weights than {base.name}'s: {record.base_model}")
        try:
            weights = AdapterWeights(record.shape, base.load(folder, record.shape))
        except CheckpointError as error:
            raise DataError(str(error)) from None
        moments = load_file(folder / OPTIMIZER) if (folder / OPTIMIZER).exists() else {}
        return record, weights, moments

    def records(self, model_id: str | None = None) -> list[Record]:
        """The records of all checkpoints, or of one client's, newest first; damaged ones are left out."""
        all_records = [r for file in self.folder.glob(f"*/*/*/{RECORD}") for r in self._readable(file)]
        selected = [r for r in all_records if model_id in (None, r.model_id)]
        return sorted(selected, key=lambda r: r.time, reverse=True)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises DataError if there is none."""
        self.find(path)
        discard(self._place(path))

    def _readable(self, file: Path) -> Iterator[Record]:
        try:
            yield Record.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return

    def _place(self, path: str) -> Path:
        parts = PATH.fullmatch(path)
        if parts is None:
            raise DataError(f"{path!r} is no path of a checkpoint: tinker://MODEL/weights/NAME")
        return self.folder.joinpath(*parts.groups())


def expiry(seconds: int | None) -> tuple[datetime, datetime | None]:
    """The present time, and the time this many seconds later."""
    present = datetime.now(UTC)
    return present, None if seconds is None else present + timedelta(seconds=seconds)
