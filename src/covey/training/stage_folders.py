"""The folders of a pipeline's stages, and what a stage reads from those of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.config.methods import POLICY_METHODS
from covey.config.python_objects import ModelObject


def folder_name(number: int, stage: ResolvedConfig) -> str:
    """Return the name of a stage's folder, such as 1-sft; ``number`` counts from 1."""
    return f"{number}-{stage.config.method}"


def placed_stages(stages: Sequence[ResolvedConfig]) -> Sequence[ResolvedConfig]:
    """Return the configs of a pipeline's stages, each with its own folder; a single one keeps the run's."""
    return [_placed(n, stages) for n in range(len(stages))] if len(stages) > 1 else stages


def _placed(index: int, stages: Sequence[ResolvedConfig]) -> ResolvedConfig:
    """Return a stage's config with its own folder, names of earlier stages replaced by paths.

    Its model is that of the stage it names, or of the last stage before it that leaves a policy.
    """
    stage = stages[index]
    config = stage.config
    home = stage.config.output
    earlier = [(home / folder_name(n, s), s.config.method) for n, s in enumerate(stages[:index], start=1)]
    # Name of a stage, such as 1-sft -> its folder.
    folders = {folder.name: folder for folder, _ in earlier}
    policies = [folder for folder, method in earlier if method in POLICY_METHODS]
    start = folders.get(str(config.model)) or (policies[-1] if policies else None)
    resolved_folders = {name: folder.resolve() for name, folder in folders.items()}
    examples = tuple(resolved_folders.get(str(path), path) for path in config.data.examples)
    changes: dict[str, object] = {
        "output": home / folder_name(index + 1, stage),
        "data": config.data.model_copy(update={"examples": examples}),
        "rewards": tuple(_placed_reward(spec, resolved_folders) for spec in config.rewards),
    }
    if start is not None and not isinstance(config.model, ModelObject):
        changes["model"] = str((start / "final").resolve())
    return replace(
        stage, config=config.model_copy(update=changes), previous_stage=start, pipeline_folder=home
    )


def _placed_reward(spec: object, folders: Mapping[str, Path]) -> object:
    """Return a reward with an earlier stage's model replaced by its path."""
    if not isinstance(spec, Mapping):
        return spec
    placed = dict(spec)
    for name, settings in spec.items():
        if isinstance(settings, Mapping) and settings.get("model") in folders:
            placed[name] = {**settings, "model": str(folders[settings["model"]] / "final")}
    return placed
