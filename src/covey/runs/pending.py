"""The finished completions of a run that samples ahead, on disk until a checkpoint is past their step.

`pending/NNNNNNNN.jsonl`: one file per problem in the order of the data, one line per completion. A line is
written when its completion ends. Its name is a hash of everything that determined the completion. A damaged
line is ignored, so its completion is sampled again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from covey.runs.atomic import append_whole, discard, make_folder
from covey.runs.folder import checkpoints, step_of
from covey.sampling.base import Request, SampledCompletion, SamplingParams
from covey.types import ALL_DRAWN, Completion, Provenance, SamplingMask, Transcript

PENDING = "pending"
FILE = re.compile(r"(\d{8,})\.jsonl")
ARRAYS = {
    "tokens": "int64",
    "logprobs": "float32",
    "versions": "int64",
    "ids": "int32",
    "ends": "int64",
    "sampled": "bool",
}
"""Arrays of a line, stored as base64, and their types."""


class PendingCompletions:
    """A ``covey.rollouts.store.CompletionStore`` in a run's folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / PENDING
        make_folder(self.folder)
        # Step -> first ticket not yet taken when it began; ticket -> lines by name, read once from disk.
        self._cursors: dict[int, int] = {}
        self._records: dict[int, dict[str, dict[str, str]]] = {}

    def find(self, ticket: int, request: Request, sample: int, params: SamplingParams) -> Completion | None:
        """Return the completion that an earlier process sampled for this request, or None."""
        if ticket not in self._records:
            path = self._path(ticket)
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            records = (_parse_line(line) for line in lines)
            self._records[ticket] = {str(r.pop("name")): r for r in records if r}
        record = self._records[ticket].get(_name(request, sample, params))
        return None if record is None else _completion(record)

    def add(self, ticket: int, request: Request, params: SamplingParams, sampled: SampledCompletion) -> None:
        """Append a completion. A newline comes first, so a line torn by a kill does not spoil this one."""
        c = sampled.completion
        arrays = {"tokens": c.tokens, "logprobs": c.logprobs, "versions": c.token_versions}
        if c.sampling_mask is not None:
            arrays |= {"ids": c.sampling_mask.ids, "ends": c.sampling_mask.ends}
        if not c.drawn_mask.all():
            arrays["sampled"] = c.drawn_mask
        transcript = c.transcript
        packed = {n: base64.b64encode(a.astype(ARRAYS[n]).tobytes()).decode() for n, a in arrays.items()}
        name = _name(request, sampled.sample, params)
        texts = {
            "name": name,
            "text": c.text,
            "finish": c.finish,
            "turns": json.dumps(list(map(dict, transcript.turns))),
            "environment": json.dumps(transcript.environment),
            "fault": transcript.fault,
        }
        record = json.dumps({**texts, **packed}).encode()
        append_whole(self._path(ticket), b"\n" + _check(record) + b" " + record + b"\n")

    def begin_step(self, step: int, cursor: int) -> None:
        """Forget completions that no resume needs, now that ``step`` begins with the ticket ``cursor``."""
        self._cursors[step] = cursor
        saved = checkpoints(self.run)
        # A resume starts at the newest checkpoint and asks again for everything from that step's cursor on.
        # If this process did not see that step begin, the cursor is unknown and nothing is removed.
        newest = step_of(saved[-1]) if saved else 0
        first_needed = self._cursors.get(newest, 0)
        for path in self.folder.iterdir() if first_needed else ():
            match = FILE.fullmatch(path.name)
            if match is not None and int(match[1]) < first_needed:
                path.unlink(missing_ok=True)  # another process of the run may have done so
        self._records = {ticket: r for ticket, r in self._records.items() if ticket >= first_needed}

    def _path(self, ticket: int) -> Path:
        return self.folder / f"{ticket:08d}.jsonl"


def forget_completions(run: Path) -> None:
    """Remove the kept completions: the run has ended, or continues with other settings."""
    if (run / PENDING).is_dir():
        discard(run / PENDING)


def _name(request: Request, sample: int, params: SamplingParams) -> str:
    """Hash everything that determines a completion except the weights."""
    what = (request.prompt.tolist(), request.streams[sample], request.greedy, params)
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _check(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=8).hexdigest().encode()


def _parse_line(line: bytes) -> dict[str, str] | None:
    check, _, record = line.partition(b" ")
    return json.loads(record) if record and _check(record) == check else None


def _completion(record: Mapping[str, str]) -> Completion:
    arrays = {
        n: np.frombuffer(base64.b64decode(record[n]), dtype) for n, dtype in ARRAYS.items() if n in record
    }
    mask = SamplingMask(arrays["ids"], arrays["ends"]) if "ids" in arrays else None
    finish: Literal["stop", "length"] = "stop" if record["finish"] == "stop" else "length"
    # frombuffer gives read-only views of the bytes; the trainer needs arrays that it can write to.
    tokens, logprobs, versions = (arrays[n].copy() for n in ("tokens", "logprobs", "versions"))
    version = int(versions[0]) if len(versions) else 0
    turns = tuple(json.loads(record["turns"]))
    return Completion(
        tokens,
        logprobs,
        record["text"],
        finish,
        Provenance(version, versions),
        arrays.get("sampled", ALL_DRAWN),
        mask,
        Transcript(turns, json.loads(record["environment"]), record["fault"]),
    )
