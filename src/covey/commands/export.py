"""`covey export`: write a checkpoint of a run as a model folder of its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from covey.errors import CheckpointError
from covey.insight.card import write_checkpoint_cards
from covey.models.generation import sample_as_trained
from covey.models.gguf_writer import write_gguf
from covey.models.load import load_policy
from covey.models.policy import save_policy
from covey.runs.atomic import clear_killed, committed_folder
from covey.runs.best import best_evaluation
from covey.runs.estimates import Evaluation
from covey.runs.folder import IN_CHECKPOINT, checkpoint_at, checkpoints, read_stream, step_of
from covey.runs.reader import last_stage, load_recorded
from covey.sampling.prompts import texts_of
from covey.system.integrity import MANIFEST, damage
from covey.system.signals import raising_stopped
from covey.tasks.source import load_source
from covey_verify.errors import ConfigError

TRAINER_FILES = (IN_CHECKPOINT, MANIFEST, "optimizer.safetensors", "optimizer", "reference", "critic")
"""Files of a checkpoint that do not belong in a model folder."""


def export(run: Path, step: int | None, output: Path | None, gguf: str = "") -> Path:
    """Write the model of a run's checkpoint, by default the best-evaluated one. Return its folder.

    Adapters are merged, like `final/`. The default folder is `export/step_...` in the run's folder. With
    ``gguf``, a precision of ``models.gguf_writer``, the folder has the model as a GGUF file too. Raises
    ConfigError if there is no such checkpoint or the folder is taken, and CheckpointError if the checkpoint
    is damaged.
    """
    stage = last_stage(run)
    evals = read_stream(stage, "evals.jsonl")
    checkpoint = _checkpoint(stage, _best_step(stage, evals) if step is None else step)
    target = output or stage / "export" / checkpoint.name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists; remove it, or choose another folder with -o")
    measured = {int(str(r["step"])): Evaluation.from_record(r) for r in evals}
    name = stage.resolve().name
    clear_killed(target)
    with raising_stopped("nothing was written"), committed_folder(target) as folder:
        _write_model(stage, checkpoint, folder)
        if gguf:
            write_gguf(folder, folder / f"{name}-{gguf}.gguf", gguf, name)
        write_checkpoint_cards(folder, load_recorded(stage), step_of(checkpoint), measured)
    return target


def _best_step(stage: Path, evals: list[dict[str, object]]) -> int:
    best = best_evaluation(evals)
    if best is None:
        steps = [step_of(p) for p in checkpoints(stage)]
        raise ConfigError(
            f"{stage}: held-out problems were not measured while it trained (eval.every), so no step is the "
            f"best. Say which: --step {steps[-1] if steps else 'N'}"
        )
    return best.step


def _checkpoint(stage: Path, step: int) -> Path:
    checkpoint = checkpoint_at(stage, step)
    if not checkpoint.is_dir():
        steps = ", ".join(str(step_of(p)) for p in checkpoints(stage)) or "none"
        raise ConfigError(
            f"{stage} has no checkpoint of step {step}; there are: {steps}. A run keeps the newest "
            "(train.keep) and the best evaluated one"
        )
    if problem := damage(checkpoint, (IN_CHECKPOINT,)):
        raise CheckpointError(f"{problem}. Put the file back, or choose another step")
    return checkpoint


def _write_model(stage: Path, checkpoint: Path, folder: Path) -> None:
    """Copy a complete model; merge a checkpoint of adapters into the model with which the run began."""
    if (checkpoint / "config.json").is_file():
        for path in checkpoint.iterdir():
            if path.name not in TRAINER_FILES:
                shutil.copy2(path, folder / path.name)
        return
    resolved = load_recorded(stage)
    texts = texts_of(load_source(resolved), resolved.config)
    policy = load_policy(replace(resolved, checkpoint=checkpoint), texts)
    list(sample_as_trained(policy.model, resolved.config.rollout))  # the run has reported what that changes
    save_policy(policy, folder)


def upload(folder: Path, name: str, public: bool = False) -> str:
    """Upload a model folder to the hub, to a private repository unless ``public``. Return its address.

    Raises ConfigError if the hub refuses it; the folder is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        hub = HfApi()
        address = hub.create_repo(name, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by covey export")
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"--push {name}: {reason}. The model is in {folder}; `hf auth login` logs in, and "
            f"`hf upload {name} {folder}` uploads it later"
        ) from None
    return str(address)
