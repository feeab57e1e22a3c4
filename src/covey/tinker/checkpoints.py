"""Adapters on disk: `tinker://MODEL/weights/NAME` is MODEL/weights/NAME in the server's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
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
"""Folder of a training client -> Tinker's name for the checkpoints in it."""
PATH = re.compile(r"tinker://([A-Za-z0-9][\w.:-]*)/(weights|sampler_weights)/([A-Za-z0-9][\w.-]*)", re.ASCII)
RECORD = "checkpoint.json"


class CheckpointRecord(BaseModel):
    """The description of a checkpoint, in its folder."""

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
        """Address of the checkpoint for clients."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def as_listed(self) -> dict[str, object]:
        """Return the checkpoint as Tinker lists it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": self.time.isoformat(),
            "tinker_path": self.path,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at and self.expires_at.isoformat(),
        }


class CheckpointStore:
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
        record: CheckpointRecord,
        overwrite: bool = False,
    ) -> str:
        """Write a checkpoint atomically and return its address. Raises DataError if it exists."""
        target = self._folder_of(record.path)
        if target.exists() and not overwrite:
            raise DataError(f"{record.path} exists; choose another name, or save with overwrite=True")
        make_folder(target.parent)
        with committed_folder(target) as folder:
            base.save(folder, weights, moments)
            (folder / RECORD).write_text(record.model_dump_json(indent=1))
        return record.path

    def find(self, path: str) -> CheckpointRecord:
        """Read the record of a checkpoint. Raises DataError if there is none."""
        folder = self._folder_of(path)
        if not folder.is_dir():
            raise DataError(f"{path}: there is no such checkpoint in {self.folder}")
        try:
            return CheckpointRecord.model_validate_json((folder / RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: {folder / RECORD} is missing or damaged: {error}") from None

    def load(self, base: Base, path: str) -> tuple[CheckpointRecord, AdapterWeights, dict[str, Tensor]]:
        """Read a checkpoint and AdamW's state. Raises DataError if it is damaged or of another base model."""
        record = self.find(path)
        folder = self._folder_of(path)
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

    def records(self, model_id: str | None = None) -> list[CheckpointRecord]:
        """Return the records of all checkpoints or of one client's, newest first, without damaged ones."""
        readable = (r for r in map(_read_record, self.folder.glob(f"*/*/*/{RECORD}")) if r is not None)
        selected = [r for r in readable if model_id in (None, r.model_id)]
        return sorted(selected, key=lambda r: r.time, reverse=True)

    def delete(self, path: str) -> None:
        """Remove a checkpoint. Raises DataError if there is none."""
        self.find(path)
        discard(self._folder_of(path))

    def _folder_of(self, path: str) -> Path:
        parts = PATH.fullmatch(path)
        if parts is None:
            raise DataError(f"{path!r} is no path of a checkpoint: tinker://MODEL/weights/NAME")
        return self.folder.joinpath(*parts.groups())


def _read_record(file: Path) -> CheckpointRecord | None:
    """Return the record in a file; None if it is damaged or has been removed."""
    try:
        return CheckpointRecord.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
