"""Trainers that sample: GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from covey.config.usercode import spec_of
from covey.trl.configs import GRPOConfig, RLOOConfig, TrainerArguments
from covey.trl.meanings import UnsupportedArgument
from covey.trl.models import load_language_model
from covey.trl.rewards import mark_verdict, reward_entries
from covey.trl.rows import Row, list_rows
from covey.trl.trainer import LOGGER, SHARED_METRICS, Trainer
from covey_verify.extract import message_texts
from covey_verify.usercode import name_of

NO_LIMIT = 1_000
"""Limit on tool calls if TRL sets none."""
METRICS: Mapping[str, str] = {
    **SHARED_METRICS,
    "policy_loss": "policy_loss",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "groups/dead": "frac_reward_zero_std",
    "length/mean": "completions/mean_length",
    "length/min": "completions/min_length",
    "length/max": "completions/max_length",
    "length/truncated": "completions/clipped_ratio",
    "entropy": "entropy",
    "kl/token_k3": "kl",
    "clip/low": "clip_ratio/low_mean",
    "clip/high": "clip_ratio/high_mean",
    "entropy/coef": "entropy_coef",
    "tools/calls": "tools/call_frequency",
}


class GRPOTrainer(Trainer):
    """TRL's GRPOTrainer: samples groups of completions and learns from their rewards."""

    config = GRPOConfig
    names = METRICS

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *,
        reward_processing_classes: Any = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        self.tools = tools
        self.environment_factory = environment_factory
        self.ref_model: Any = None
        """Reference model of the KL; None if there is no KL, or if it is the model without its adapters."""
        config = self._config_of(args)
        if train_dataset is None:
            train_dataset = self._empty_prompts(config)
        self.rewards = reward_entries(reward_funcs, reward_processing_classes, config)
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        tokenizers = reward_processing_classes
        several = isinstance(tokenizers, list | tuple)
        self.reward_processing_classes = list(tokenizers) if several else [tokenizers] * len(self.rewards)
        super().__init__(model, config, train_dataset=train_dataset, **others)
        # With adapters the reference is the model without them.
        if config.beta and not hasattr(self.model, "get_base_model"):
            self.ref_model = self.reference = deepcopy(self.model)
        if getattr(config, "importance_sampling_level", "") == "sequence" and config.loss_type != "grpo":
            LOGGER.warning(
                "importance_sampling_level='sequence' with loss_type=%r weights each sequence by its "
                "completion length; GSPO is loss_type='grpo'",
                config.loss_type,
            )
        columns = {name for row in self._rows() for name in row}
        self._reward_notes = mark_verdict(self.rewards, columns)

    def _load_model(self, model: object, tokenizer: object, rows: object) -> tuple[Any, Any]:
        return load_language_model(
            model, tokenizer, self.args, lambda: _prompts(list_rows(rows, "train_dataset", 1000))
        )

    def _prepare_rows(self, rows: object, what: str, *_: object) -> Any:
        if isinstance(rows, Mapping):
            raise UnsupportedArgument(
                f"{what}: this is a mapping of tables; give one of them, as rows['train']"
            )
        return rows

    def _covey_rows(self, rows: Sequence[Row]) -> list[Row]:
        # A table has every column in every row, None where a row had no value.
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def _source(self, rows: Sequence[Row]) -> dict[str, object]:
        data: dict[str, object] = {"train": self._covey_rows(rows)}
        if self.args.chat_template_kwargs:
            data["chat_template_kwargs"] = self.args.chat_template_kwargs
        return data

    def _shuffles(self) -> bool:
        return self.args.shuffle_dataset is not False

    def _extra_settings(self) -> dict[str, object]:
        settings: dict[str, object] = {"rewards": self.rewards}
        if self.tools or self.environment_factory:
            settings["rollout.tools"] = {
                "functions": [_spec(f) for f in self.tools or ()],
                "environment": self.environment_factory and _spec(self.environment_factory),
                "max_calls": getattr(self.args, "max_tool_calling_iterations", None) or NO_LIMIT,
            }
        return settings

    def _notes(self) -> list[str]:
        return [*super()._notes(), *self._reward_notes]

    def _empty_prompts(self, args: TrainerArguments) -> list[Row]:
        """Return an empty row for each prompt of the run, which the environment's `reset` fills."""
        if self.environment_factory is None:
            raise UnsupportedArgument(
                "`train_dataset` is required: give rows with a `prompt`, or an environment_factory whose "
                "`reset` returns prompts"
            )
        if args.max_steps < 1:
            raise UnsupportedArgument("environment_factory without a train_dataset needs `max_steps`")
        self.args = args
        schedule = self._schedule([])
        return [{"prompt": [{"role": "user", "content": ""}]} for _ in range(schedule.steps * schedule.rows)]

    def _settings_to_measure(self) -> dict[str, object]:
        group = self.args.num_generations_eval or self.args.num_generations
        settings = {**super()._settings_to_measure(), "rollout.group_size": group}
        # A completion without siblings has no advantage, so the loss is 0 under any algorithm.
        return {**settings, "algorithm": "reinforce"} if group == 1 else settings

    def _rename_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        named = super()._rename_metrics(metrics)
        for entry in self.rewards:
            for settings in entry.values():
                name = settings["name"]
                # A single reward function has no metrics of its own: they are those of the total reward.
                metric_of_part = {"mean": f"reward/{name}/mean", "std": f"reward/{name}/std"}
                alone = (
                    {"mean": "reward/mean", "std": "reward/std"} if len(self.rewards) == 1 else metric_of_part
                )
                for part, key in metric_of_part.items():
                    value = metrics.get(key, metrics.get(alone[part]))
                    named |= {f"rewards/{name}/{part}": value} if value is not None else {}
        logged = {n.removeprefix("user/"): v for n, v in metrics.items() if n.startswith("user/")}
        return {**named, **logged}


class RLOOTrainer(GRPOTrainer):
    """TRL's RLOOTrainer: the baseline is the mean of a completion's siblings."""

    config = RLOOConfig


def _prompts(rows: Sequence[Row]) -> list[str]:
    """Return the prompts of rows as texts."""
    return [" ".join(message_texts(row["prompt"])) for row in rows if "prompt" in row]


def _spec(function: object) -> str:
    """Return the spec with which other processes import a tool or environment. Raises UnsupportedArgument."""
    if isinstance(function, Mapping):
        raise UnsupportedArgument("environment_factory: a run has one environment; give its class")
    spec = spec_of(function, Path())
    if spec is None:
        raise UnsupportedArgument(
            f"{name_of(function)} must be a function or class of a file or module: calls run in processes of "
            "their own, which import it by name"
        )
    return spec
