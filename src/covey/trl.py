"""TRL's trainer on top of `covey.train`: change the import to `covey.trl` and keep the script.

Every argument has TRL's meaning and default, or is refused with a hint what to write instead. Arguments that
do not affect learning (logging, memory) are ignored, and a note says so. Two things that TRL's scripts do not
state are inferred, each with a note: which reward decides what is correct, and which engine samples for a
`use_vllm=True` without a server.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from covey import api
from covey.config.given import with_given
from covey.config.start import Start
from covey.config.trl import DEFAULTS, LOSS, NAMES, OTHERS, SAME, advice_on
from covey.config.trl_loss import algorithm_of
from covey.config.usercode import spec_of
from covey.errors import GuardStop
from covey.models.load import load_policy
from covey.models.policy import save_policy
from covey.rewards.contract import Reward
from covey.runs.folder import checkpoints, read_numbers
from covey.runs.reader import seconds_of
from covey.sampling.prompts import texts_of
from covey.tasks.source import load_source
from covey_verify.errors import ConfigError
from covey_verify.usercode import name_of

if TYPE_CHECKING:
    from covey.config.load import Loaded
    from covey.insight.ending import Result

_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_train_epochs",
    "max_steps",
)
"""Arguments that together determine the size and the number of rollout batches."""
_COUNTS = ("save_steps", "eval_steps")
"""Arguments that count optimizer steps."""
_OUR_DEFAULT = "gradient_checkpointing"
"""The argument for which covey's default stays: TRL's recomputes layers, which changes no number."""
_DEFAULTS = {name: value for name, value in DEFAULTS.items() if name != _OUR_DEFAULT and value is not None}
_VLLM = "vllm_importance_sampling_"
NO_LIMIT = 1_000
"""Limit on tool calls if TRL sets none."""
_PROMPTS = frozenset({"prompt", "prompts", "completion", "completions"})
"""Columns that say nothing about what is correct."""
_LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_LORA_SAYS_NOTHING = frozenset({"task_type", "peft_type", "auto_mapping", "peft_version", "inference_mode"})
"""Fields of peft's config that do not affect what is trained."""
_OWN = frozenset(
    {*_BATCH, "adam_beta1", "adam_beta2", "bf16", "reward_weights"}
    | {"use_cpu", "use_vllm", "vllm_server_base_url"}
    | {_VLLM + part for part in ("correction", "mode", "clip_min", "clip_max")}
)
"""Arguments that this file reads."""


class GRPOConfig:
    """TRL's arguments. Raises ConfigError for an unknown name, or a value that covey does not support."""

    def __init__(self, output_dir: str | Path = "trainer_output", **names: object) -> None:
        self.names: dict[str, object] = {"output_dir": output_dir, **names}
        self.notes: list[str] = []
        for name, value in names.items():
            if name not in NAMES:
                raise ConfigError(f"GRPOConfig: TRL has no argument {name!r}")
            # A value equal to TRL's default asks for nothing, so even an unsupported argument may have it.
            default = value == DEFAULTS[name] if name in DEFAULTS else not value
            if name in SAME or name in LOSS or name in _OWN or value is None or default:
                continue
            if OTHERS[name].inert:
                self.note(advice_on(name))
            else:
                raise ConfigError(f"GRPOConfig: {name}={value!r}: {advice_on(name)}")
        if names.get("use_vllm") and not names.get("vllm_server_base_url"):
            # TRL puts vLLM into the training process then; what is sampled has the same distribution.
            self.note(
                "use_vllm=True without vllm_server_base_url: covey samples with its own engine in this "
                "process"
            )

    def note(self, text: str) -> None:
        """Add a note that the run prints once."""
        self.notes += [] if text in self.notes else [text]

    def settings(self, rows: int) -> dict[str, object]:
        """Translate the arguments to covey's settings, for a dataset of ``rows`` rows."""
        # In TRL, None means its default as well.
        given = {**_DEFAULTS, **{name: value for name, value in self.names.items() if value is not None}}
        shared = (*SAME, "loss_type", *(n for n, v in LOSS.items() if given.get(n, v) != v))
        result = {n: given[n] for n in shared if n in given and n not in (*_BATCH, *_COUNTS)}
        for name in _COUNTS:
            if isinstance(given.get(name), float):
                raise ConfigError(f"GRPOConfig: {name}={given[name]!r}: write a number of steps")
        if given.get("bf16"):
            result["dtype"] = "bfloat16"
        if given.get("use_cpu"):
            result["device"] = "cpu"
        result["train.betas"] = [given["adam_beta1"], given["adam_beta2"]]
        url = given.get("vllm_server_base_url")
        if given.get("use_vllm") and url:
            result["rollout.sampler"] = {"url": [url]}
            correction = _correction(given)
            if correction:
                # A correction is a part of covey's algorithm, so the loss arguments are translated here
                # already and joined with it.
                algorithm = algorithm_of({name: result.pop(name) for name in LOSS if name in result})
                first = [algorithm["correction"]] if algorithm["correction"] else []
                result["algorithm"] = {**algorithm, "correction": [*first, correction]}
        return {**result, **self._batches(given, rows)}

    def _batches(self, given: Mapping[str, object], rows: int) -> dict[str, object]:
        """Return sizes and number of rollout batches, for one process."""

        def number(name: str, otherwise: float = 0) -> int:
            value = given.get(name)
            return int(value if isinstance(value, int | float) else otherwise)

        group = number("num_generations")
        passes = number("num_iterations")
        # TRL counts completions: `step` per optimizer step, `size` per rollout batch. A batch is trained on
        # for `updates` optimizer steps; covey counts its steps in rollout batches.
        step = number("per_device_train_batch_size") * number("gradient_accumulation_steps")
        per_pass = number("steps_per_generation", number("gradient_accumulation_steps"))
        size = number("generation_batch_size", number("per_device_train_batch_size") * per_pass)
        if min(group, passes, step, size) < 1 or size % group or size % step:
            raise ConfigError(
                f"GRPOConfig: the rollout batch has {size} completions; it must be a multiple of {group} "
                f"(num_generations) and of {step} (completions of an optimizer step)"
            )
        prompts = size // group
        epochs = given["num_train_epochs"]
        updates = size // step * passes
        batches = rows // prompts * epochs if isinstance(epochs, int | float) else 0
        if number("max_steps") > 0:
            # Rounded up, as all counts of steps below: the note says so if that changes a number.
            batches = -(-number("max_steps") // updates)
        for name in ("max_steps", *_COUNTS):
            steps = number(name)
            if steps > 0 and steps % updates and name in self.names:
                self.note(
                    f"{name}={steps} is rounded up to {-(-steps // updates) * updates}: a rollout batch is "
                    f"trained in {updates} optimizer steps"
                )
        if batches < 1:
            raise ConfigError(
                f"GRPOConfig: the dataset has {rows} rows, but a rollout batch needs {prompts} prompts"
            )
        return {
            "rollout.prompts_per_step": prompts,
            "train.updates_per_batch": size // step,
            "train.steps": int(batches),
            **{SAME[name]: -(-number(name) // updates) for name in _COUNTS if given.get(name)},
        }


def _correction(given: Mapping[str, object]) -> dict[str, object] | None:
    """Return TRL's importance correction for a server's log-probs, or None. Raises ConfigError."""
    if not given[_VLLM + "correction"]:
        return None
    if given.get("loss_type") == "vespo":
        raise ConfigError(
            "GRPOConfig: with loss_type vespo TRL's weights include the server's log-probs, which covey "
            f"does not reproduce: set {_VLLM}correction=False"
        )
    mode, low, high = (given.get(_VLLM + part) for part in ("mode", "clip_min", "clip_max"))
    level, _, kind = str(mode).partition("_")
    if level in ("token", "sequence") and high is not None:
        if kind == "mask":
            return {"name": "masked", "level": level, "low": low or 0.0, "high": high}
        if kind == "truncate" and low is None:
            return {"name": "truncated", "level": level, "cap": high}
    raise ConfigError(
        f"GRPOConfig: {_VLLM}mode={mode!r} with clip_min={low} and clip_max={high} is not supported; use "
        "token or sequence, _mask or _truncate, with clip_max; clip_min only with a mask"
    )


class TrainOutput(NamedTuple):
    """The result of TRL's `train()`."""

    global_step: int
    """Number of training steps of the run, including those before a resume."""
    training_loss: float
    """Mean loss over these steps; NaN if none was logged."""
    metrics: Mapping[str, float | str]


class GRPOTrainer:
    """TRL's trainer: model, rewards, arguments, data. Covey's own result of the run is in `result`."""

    def __init__(
        self,
        model: object,
        reward_funcs: object,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, object]] | None = None,
        eval_dataset: Iterable[Mapping[str, object]] | None = None,
        processing_class: object = None,
        peft_config: object = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: Callable[[], object] | None = None,
        **others: object,
    ) -> None:
        refused = [name for name, value in others.items() if value not in (None, (None, None))]
        if refused:
            raise ConfigError(f"GRPOTrainer: {refused[0]} has no counterpart in `covey.train`; remove it")
        self.model = model
        self.args = args or GRPOConfig()
        self.result: Result | None = None
        """Result of the run; None before `train`, and if a guard stopped it."""
        self._stopped = ""
        """Why a guard stopped the run."""
        if train_dataset is None:
            train_dataset = self._empty_prompts(environment_factory)
        data = {"train": list(train_dataset)}
        if eval_dataset is not None:
            data["test"] = list(eval_dataset)
        named = isinstance(model, str | Path)
        rewards = _rewards(reward_funcs, self.args.names.get("reward_weights"))
        columns = {name for row in data["train"] if isinstance(row, Mapping) for name in row}
        settings = self.args.settings(len(data["train"]))
        self._notes = [*self.args.notes, *_mark_verdict(rewards, columns)]
        self._settings: dict[str, object] = {
            **settings,
            "model": model,
            "tokenizer": None if named else processing_class,
            "data": data,
            "rewards": rewards,
        }
        most = self._settings.pop("max_tool_calling_iterations", None) or NO_LIMIT
        if tools or environment_factory:
            self._settings["rollout.tools"] = {
                "functions": [_spec(f) for f in tools or ()],
                "environment": environment_factory and _spec(environment_factory),
                "max_calls": most,
            }
        if peft_config is not None:
            self._settings["lora"] = _lora(peft_config)

    def _empty_prompts(self, environment: Callable[[], object] | None) -> list[Mapping[str, object]]:
        """Return one empty row per prompt of the run; the environment's `reset` supplies the prompts."""
        steps = self.args.names.get("max_steps")
        if environment is None or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                "GRPOTrainer: train_dataset is missing; give rows with a `prompt`, or an "
                "environment_factory whose `reset` returns prompts, and `max_steps`"
            )
        run = self.args.settings(0)
        count = int(str(run["train.steps"])) * int(str(run["rollout.prompts_per_step"]))
        return [{"prompt": [{"role": "user", "content": ""}]}] * count

    def train(self, resume_from_checkpoint: object = None) -> TrainOutput:
        """Train, or continue an earlier attempt in `output_dir`.

        A run that a guard stops ends as in TRL, with its reason printed and in `metrics["stopped"]`.
        """
        if isinstance(resume_from_checkpoint, str | Path):
            raise ConfigError(f"train: {advice_on('resume_from_checkpoint')}; the newest checkpoint is used")
        for note in self._notes:
            print(f"note: {note}")
        self._stopped = ""
        try:
            self.result = api.train(None, quiet=False, overwrite=False, **self._settings)
        except GuardStop as reason:
            self._stopped = str(reason)
            print(f"stopped: {reason}")
        return self._output()

    def _output(self) -> TrainOutput:
        """Summarize the run's records as TRL does."""
        run = self._loaded().config.output
        metrics, timings = (read_numbers(run, f"{name}.jsonl") for name in ("metrics", "timings"))
        losses = [record["loss"] for record in metrics if "loss" in record]
        loss = sum(losses) / len(losses) if losses else math.nan
        advice_on: dict[str, float | str] = {"train_runtime": seconds_of(run, timings), "train_loss": loss}
        return TrainOutput(
            len(metrics), loss, advice_on | ({"stopped": self._stopped} if self._stopped else {})
        )

    def _loaded(self) -> Loaded:
        return Start(None, (), with_given(self._settings)).load()

    def save_model(self, output_dir: str | Path) -> None:
        """Copy the trained model to a folder; of a run that a guard stopped, its last checkpoint.

        Without a checkpoint no update was kept, and it is the model with which the run began.
        """
        if self.result is not None:
            shutil.copytree(self.result.made, output_dir, dirs_exist_ok=True)
            return
        if not self._stopped:
            raise ConfigError("save_model: nothing is trained yet; call train() first")
        loaded = self._loaded()
        newest = next(reversed(checkpoints(loaded.config.output)), None)
        policy = load_policy(replace(loaded, checkpoint=newest), texts_of(load_source(loaded), loaded.config))
        save_policy(policy, Path(output_dir))


def _rewards(functions: object, weights: object) -> list[object]:
    """Return covey's entries of `rewards` for functions or names of reward models, each with its weight."""
    every = list(functions) if isinstance(functions, list | tuple) else [functions]
    found: list[object] = []
    given = list(weights) if isinstance(weights, Sequence) else [1.0] * len(every)
    if len(given) != len(every):
        raise ConfigError(f"GRPOConfig: {len(given)} reward_weights for {len(every)} reward_funcs")
    for number, (function, weight) in enumerate(zip(every, given, strict=True)):
        if isinstance(function, str):
            found.append({"reward_model": {"model": function, "weight": weight}})
        elif callable(function) and not hasattr(function, "state_dict"):
            found.append(
                {function: {"weight": weight, "name": getattr(function, "__name__", f"reward{number}")}}
            )
        else:
            raise ConfigError(
                "GRPOTrainer: a reward must be a function, or the folder or hub id of a reward model"
            )
    return found


def _spec(function: Callable[..., object]) -> str:
    """Return the spec by which other processes find a tool or an environment. Raises ConfigError."""
    spec = spec_of(function, Path())
    if spec is None:
        raise ConfigError(
            f"GRPOTrainer: {name_of(function)} must be a function or class of a file or module: calls run in "
            "processes of their own, which import it by name"
        )
    return spec


def _mark_verdict(rewards: list[object], columns: set[str]) -> list[str]:
    """Mark the reward that decides what is correct, if none is declared. Return notes about the choice.

    TRL only adds rewards up and needs no verdict. Among several the verifier is chosen that knows the
    problem: the only function whose signature names a column of the data.
    """
    functions = [(entry, next(iter(entry))) for entry in rewards if isinstance(entry, dict)]
    known = [(entry, Reward("", f)) for entry, f in functions if callable(f)]
    if len(rewards) < 2 or any(reward.options.verdict for _, reward in known):
        return []
    able = [(entry, reward) for entry, reward in known if reward.may_be_verdict]
    columns_read = [(entry, sorted(columns.intersection(r.parameters) - _PROMPTS)) for entry, r in able]
    verifiers = [(entry, read) for entry, read in columns_read if read]
    if len(verifiers) != 1:
        return []
    ((entry, read),) = verifiers
    (settings,) = entry.values()
    settings["verdict"] = True
    why = f"the only reward that asks for a column ({read[0]}); @covey.reward(verdict=True) chooses another"
    return [f"{settings['name']} says what is correct, {why}"]


def _lora(peft: object) -> dict[str, object]:
    """Translate peft's LoraConfig. Raises ConfigError for fields that covey lacks, and for other adapters."""
    if not is_dataclass(peft) or isinstance(peft, type) or not hasattr(peft, "lora_alpha"):
        raise ConfigError(f"GRPOTrainer: peft_config must be peft's LoraConfig, not {name_of(peft)}")
    plain = type(peft)()
    for name in (f.name for f in fields(peft) if f.name not in _LORA and f.name not in _LORA_SAYS_NOTHING):
        value = getattr(peft, name)
        if value != getattr(plain, name):
            why = advice_on(name) or "lora has rank, alpha and targets, nothing else"
            raise ConfigError(f"GRPOTrainer: peft_config.{name}={value!r}: {why}")
    values = {ours: getattr(peft, theirs) for theirs, ours in _LORA.items()}
    return {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
