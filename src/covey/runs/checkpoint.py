"""Checkpoints, saved and loaded: a model folder with the trainer's state, complete or absent."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.errors import CheckpointError, OutOfRoom, disk_error, system_error
from covey.learner.learner import Learner
from covey.models.policy import Policy, save_policy
from covey.models.value_head import ValueModel
from covey.objective.controllers import Coefficients
from covey.rollouts.batch import Position
from covey.runs.atomic import discard
from covey.runs.folder import LogState, RunFolder, checkpoint_at, checkpoints, latest_checkpoint
from covey.runs.tensors import folder_of_all, load_tensors, save_tensors
from covey.system.fault_injection import Faults
from covey.system.integrity import read_sealed, sealed
from covey.system.processes import is_joint, on_rank_zero, run_on_all


@dataclass(frozen=True)
class GuardMemory:
    """The counters that guards keep between steps."""

    bad_updates: int = 0
    """Number of updates in a row that were skipped because they were not finite."""
    dead_steps: int = 0
    """Number of steps in a row without any advantage."""
    kl_alarm: int = 0
    """The ``KLAlarm`` of the previous step."""
    bad_critic_steps: int = 0
    """Number of steps in a row in which the critic predicted worse than a constant would."""


@dataclass(frozen=True)
class RunState:
    """The state in a checkpoint besides weights and optimizer; everything else follows from the config."""

    step: int = 0
    """Number of steps done."""
    position: Position = field(default_factory=Position)
    """Position in the data of the last rollout batch."""
    updates: int = 0
    """Number of optimizer steps that were applied."""
    coefficients: Coefficients = field(default_factory=Coefficients)
    guards: GuardMemory = field(default_factory=GuardMemory)
    micro_tokens: int | None = None
    """Tokens per micro-batch since memory ran out; None if it never did."""
    seconds: float = 0.0
    """Seconds of the whole run, before and after resumes."""


@dataclass(frozen=True)
class CheckpointRecord:
    """The content of `trainer.json` in a checkpoint."""

    state: RunState
    logs: LogState


def save_checkpoint(
    folder: RunFolder,
    learner: Learner[Policy],
    critic: Learner[ValueModel] | None,
    state: RunState,
    keep: int,
    faults: Faults,
) -> None:
    """Commit a checkpoint of ``state`` unless it exists. Keep the newest ``keep`` and the best one.

    Raises GuardStop if a weight is not finite, OutOfRoom if it cannot be written. Earlier checkpoints stay;
    in the worst case only the newest one and that of the best evaluation.
    """
    target = checkpoint_at(folder.path, state.step)
    # `on_rank_zero` runs its function on rank 0 and gives all ranks the result, `run_on_all` runs it on every
    # rank. Both re-raise an error of one rank on all, so no rank waits for one that has failed.
    if on_rank_zero(target.exists):
        return
    for part in (learner, critic):
        if part is not None:
            part.check_finite(str(target))
    try:
        _write(target, folder, learner, critic, state, faults)
    except OutOfRoom:
        if on_rank_zero(lambda: len(checkpoints(folder.path))) < 2:
            raise
        # Every checkpoint but the newest makes room; then one more attempt, whose failure is final.
        on_rank_zero(lambda: folder.rotate(1))
        _write(target, folder, learner, critic, state, faults)
    on_rank_zero(lambda: folder.rotate(keep))


def _write(
    target: Path,
    folder: RunFolder,
    learner: Learner[Policy],
    critic: Learner[ValueModel] | None,
    state: RunState,
    faults: Faults,
) -> None:
    fake_full_disk = faults.hit("save.full")
    on_rank_zero(lambda: _check_free(folder, 0 if fake_full_disk else shutil.disk_usage(target.parent).free))
    try:
        # Collective operations in the same order on all ranks: rank 0 writes the model, every rank its part
        # of the optimizer, and rank 0 the state last, when the streams it describes have been synced.
        with folder_of_all(target) as new:
            on_rank_zero(lambda: save_policy(learner.network.unsharded, new, merged=False))
            run_on_all(lambda: save_tensors(learner.state(), new / "optimizer"))
            run_on_all(faults.in_save)
            reference = learner.reference
            if reference is not None and reference.moves:
                run_on_all(lambda: save_tensors(reference.state(), new / "reference"))
            if critic is not None:
                run_on_all(lambda: save_tensors(critic.state(), new / "critic"))
            on_rank_zero(
                lambda: (new / "trainer.json").write_text(
                    sealed(asdict(CheckpointRecord(state, folder.sync())))
                )
            )
    except Exception as error:
        cause = system_error(error)
        if cause is None:
            raise
        disk_failure = disk_error(cause, f"{target} could not be written")
        # Whether all ranks have this error already, so that it is not exchanged once more.
        disk_failure.joint = is_joint(error)
        raise disk_failure from None


def _check_free(folder: RunFolder, free: int) -> None:
    """Raise OutOfRoom before a save that cannot fit, judged by the newest checkpoint."""
    newest = checkpoints(folder.path)[-1:]
    needed = sum(p.stat().st_size for path in newest for p in path.rglob("*"))
    if free < needed:
        raise OutOfRoom(
            f"{folder.path}: a checkpoint needs {needed:,} bytes, but only {free:,} are free. Free some "
            "space and repeat the command"
        )


def load_checkpoint(
    path: Path, learner: Learner[Policy], critic: Learner[ValueModel] | None
) -> CheckpointRecord:
    """Restore the learners from a checkpoint. Raises CheckpointError if a record is damaged."""
    remedy = "Remove this checkpoint to resume from the one before"
    saved = read_sealed(path / "trainer.json", CheckpointRecord, remedy)
    learner.network.load_weights(path)
    learner.load(load_tensors(path / "optimizer", learner.split_as), saved.state.updates)
    reference = learner.reference
    if reference is not None and reference.moves:
        reference.load(load_tensors(path / "reference", reference.state().__getitem__))
    if critic is not None:
        critic.load(load_tensors(path / "critic", critic.split_as), saved.state.updates)
    # Memory ran out at the larger size before; a resume would run into that again.
    micro_tokens = saved.state.micro_tokens
    for part in (learner, critic):
        if part is not None and micro_tokens is not None:
            part.micro_tokens = min(part.micro_tokens, micro_tokens)
    return saved


def newest_checkpoint(folder: RunFolder, strict: bool) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint and a complaint about each newer, damaged one.

    Damaged checkpoints are renamed, so that their steps can be saved again and rotation ignores them. Raises
    CheckpointError if all are damaged or, with ``strict``, if any is.
    """
    checkpoint, complaints = latest_checkpoint(folder.path)
    if complaints and (strict or checkpoint is None):
        remedy = (
            ", or leave out --strict to resume from the checkpoint before"
            if checkpoint is not None
            else ", or remove the run folder to begin again: there is no other checkpoint"
        )
        raise CheckpointError(f"{'; '.join(complaints)}. Restore the files{remedy}")
    for path in checkpoints(folder.path)[-len(complaints) :] if complaints else ():
        renamed = path.with_name(f"damaged-{path.name}")
        if renamed.exists():
            discard(renamed)
        path.rename(renamed)
    return checkpoint, complaints
