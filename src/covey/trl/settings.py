"""Conversion of a TRL config to covey's settings: optimizer, schedule, batches, algorithm and loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from covey.config.trl import LOSS, VALUES, covey_value
from covey.config.trl_loss import algorithm_of
from covey.trl.configs import TrainerArguments, enum_value
from covey.trl.meanings import UnsupportedArgument

TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow")
NEVER = 10**9
"""Number of steps that no run reaches, for `train.save_every`."""
NO_CLIP = 1e9
VLLM = "vllm_importance_sampling_"
LossSettings = dict[str, float | str]


def _beta(args: TrainerArguments) -> LossSettings:
    """Return the settings of a loss that has beta alone."""
    return {"beta": args.beta}


DPO_LOSSES: Mapping[str, tuple[str, Callable[[TrainerArguments], LossSettings]]] = {
    "sigmoid": ("dpo", _beta),
    "sigmoid_norm": ("ln_dpo", _beta),
    "hinge": ("hinge", _beta),
    "ipo": ("ipo", lambda a: {"tau": a.beta}),
    "robust": ("robust_dpo", lambda a: {"beta": a.beta, "label_smoothing": a.label_smoothing}),
    # TRL divides by log 0 without smoothing, and recommends this value.
    "exo_pair": ("exo", lambda a: {"beta": a.beta, "label_smoothing": a.label_smoothing or 1e-3}),
    "nca_pair": ("nca", _beta),
    "bco_pair": ("bco", _beta),
    "sppo_hard": ("sppo", _beta),
    "apo_zero": ("apo_zero", _beta),
    "apo_down": ("apo_down", _beta),
    "discopop": ("discopop", lambda a: {"beta": a.beta, "tau": a.discopop_tau}),
}
"""DPOConfig's loss_type -> (covey's method, a function from the config to the settings of its loss)."""
MIXED = {"sigmoid": "preference_weight", "bco_pair": "quality_weight", "sft": "generation_weight"}
"""DPOConfig's losses that may be combined -> their weight in covey's `mpo`."""
DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "jensen_shannon",
    "alpha_divergence": "alpha",
}
"""DPOConfig's f_divergence_type -> covey's loss.divergence."""
KTO_LOSSES = ("kto", "apo_zero_unpaired")
"""KTOConfig's losses; covey's methods have the same names."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run. TRL counts optimizer steps; covey counts batches, of ``updates`` of them each."""

    steps: int
    rows: int
    """Rows, or prompts, of a batch."""
    updates: int
    epoch: float
    """Number of batches in an epoch."""

    def every(self, strategy: object, value: object) -> int:
        """Convert TRL's interval in optimizer steps to batches; 0 means never."""
        strategy = enum_value(strategy)
        if strategy == "epoch":
            return max(1, round(self.epoch))
        if strategy == "no" or not isinstance(value, int | float) or value <= 0:
            return 0
        # TRL reads a value below 1 as a fraction of the run.
        return max(1, math.ceil(value * self.steps if value < 1 else value / self.updates))


def count_argument(args: TrainerArguments, name: str, default: float = 0) -> int:
    """Return a config's number, or ``default`` if it has none."""
    value = getattr(args, name, None)
    return int(value if isinstance(value, int | float) else default)


def given_schedule(args: TrainerArguments, rows: int) -> Schedule:
    """Return the schedule of a trainer of given rows. The next epoch fills up the last batch of an epoch."""
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    per_epoch = math.ceil(rows / size)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return Schedule(int(steps), size, 1, per_epoch)


def sampled_schedule(args: TrainerArguments, rows: int) -> Schedule:
    """Return the schedule of a trainer that samples, for one process. Raises UnsupportedArgument."""
    group = count_argument(args, "num_generations")
    passes = count_argument(args, "num_iterations")
    # TRL counts completions: `step` per optimizer step, `size` per rollout batch, which is trained on for
    # `updates` optimizer steps.
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    per_pass = count_argument(args, "steps_per_generation", args.gradient_accumulation_steps)
    size = count_argument(args, "generation_batch_size", args.per_device_train_batch_size * per_pass)
    if min(group, passes, step, size) < 1 or size % group or size % step:
        raise UnsupportedArgument(
            f"{type(args).__name__}: the rollout batch has {size} completions; it must be a multiple of "
            f"{group} (num_generations) and of {step} (completions of an optimizer step)"
        )
    prompts = size // group
    updates = size // step * passes
    per_epoch = rows // prompts
    # Rounded up, like all counts of optimizer steps.
    steps = (
        math.ceil(args.max_steps / updates) if args.max_steps > 0 else int(per_epoch * args.num_train_epochs)
    )
    if steps < 1:
        raise UnsupportedArgument(
            f"{type(args).__name__}: the dataset has {rows} rows, but a rollout batch needs {prompts} prompts"
        )
    return Schedule(steps, prompts, updates, max(per_epoch, 1))


def shared_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return the settings that every trainer sets. Raises UnsupportedArgument."""
    scheduler = str(enum_value(args.lr_scheduler_type))
    saves = schedule.every(args.save_strategy, args.save_steps)
    settings: dict[str, object] = {
        "output": args.output_dir,
        "seed": args.seed,
        "train.steps": schedule.steps,
        "train.lr": args.learning_rate,
        "train.schedule": _lr_schedule(args, scheduler),
        "train.optimizer": covey_value("optim", enum_value(args.optim)),
        "train.betas": [args.adam_beta1, args.adam_beta2],
        "train.weight_decay": args.weight_decay,
        # TRL reads 0 as no clipping.
        "train.grad_clip": args.max_grad_norm or NO_CLIP,
        "train.save_every": saves or NEVER,
    }
    if scheduler != "constant":  # TRL's `constant` has no warm-up either
        settings["train.warmup_steps"] = _warmup_batches(args, schedule)
    if args.save_total_limit:
        settings["train.keep"] = args.save_total_limit
    if args.bf16:
        settings["dtype"] = "bfloat16"
    if args.use_cpu:
        settings["device"] = "cpu"
    named = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    trackers = [name for name in named if name in TRACKERS]
    if trackers:
        settings["tracker"] = trackers[0]
    return settings


def _lr_schedule(args: TrainerArguments, scheduler: str) -> str | dict[str, float]:
    """Return train.schedule, with the fraction of the rate at which it ends. Raises UnsupportedArgument."""
    options = dict(args.lr_scheduler_kwargs or {})
    shapes = {"cosine_with_min_lr": "cosine", "polynomial": "linear"}
    shape = shapes.get(scheduler, "") or VALUES["lr_scheduler_type"].get(scheduler, "")
    floor = 0.0
    if scheduler == "cosine_with_min_lr":
        rate, lowest = options.pop("min_lr_rate", None), options.pop("min_lr", None)
        if (rate is None) == (lowest is None):
            raise UnsupportedArgument(
                f"{type(args).__name__}: lr_scheduler_kwargs: give either min_lr or min_lr_rate"
            )
        floor = float(lowest / args.learning_rate if rate is None else rate)
    elif scheduler == "polynomial":
        shape = shape if options.pop("power", 1.0) == 1 else ""
        floor = options.pop("lr_end", 1e-7) / args.learning_rate
    if shape == "cosine" and options.get("num_cycles") == 0.5:
        del options["num_cycles"]
    if not shape or options or not 0 <= floor < 1:
        named = f"lr_scheduler_type={scheduler!r}, lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}"
        raise UnsupportedArgument(
            f"{type(args).__name__}: {named}: covey has {', '.join(VALUES['lr_scheduler_type'])}, "
            "cosine_with_min_lr and polynomial of power 1, which end below the rate that they began with"
        )
    return {shape: floor} if floor else shape


def _warmup_batches(args: TrainerArguments, schedule: Schedule) -> int:
    """Return the number of warm-up batches. TRL reads a value below 1 as a fraction of the run."""
    warmup = args.warmup_steps or args.warmup_ratio or 0
    return math.ceil(warmup * schedule.steps if warmup < 1 else warmup / schedule.updates)


def sampling_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return the settings of trainers that sample. Raises UnsupportedArgument."""
    options = dict(args.generation_kwargs or {})
    names = ("temperature", "top_p", "top_k")
    distribution = {name: options.pop(name, getattr(args, name)) for name in names}
    if options:
        raise UnsupportedArgument(
            f"generation_kwargs: {', '.join(sorted(options))}: sampling has temperature, top_p and top_k, "
            "nothing else"
        )
    settings: dict[str, object] = {
        **shared_settings(args, schedule),
        "rollout.prompts_per_step": schedule.rows,
        "rollout.group_size": args.num_generations,
        "rollout.max_tokens": args.max_completion_length,
        **{f"rollout.{name}": value or 0 for name, value in distribution.items()},
        "rollout.mask_truncated": args.mask_truncated_completions,
        "train.inner_epochs": args.num_iterations,
        "train.updates_per_batch": schedule.updates // args.num_iterations,
    }
    if args.use_vllm and args.vllm_server_base_url:
        settings["rollout.sampler"] = {"url": [args.vllm_server_base_url]}
    return settings


def grpo_algorithm(args: TrainerArguments) -> dict[str, object]:
    """Return covey's algorithm for GRPOConfig. Raises ConfigError."""
    loss = {name: value for name, value in args.changed_fields().items() if name in LOSS}
    if loss.get("loss_type") == "bnpo":
        if args.gradient_accumulation_steps > 1:
            raise UnsupportedArgument(
                "loss_type bnpo divides by the tokens of each micro-batch, whose size does not matter here; "
                "use loss_type: dapo, or gradient_accumulation_steps=1, with which both are the same"
            )
        loss["loss_type"] = "dapo"
    algorithm = algorithm_of(loss)
    if args.top_entropy_quantile < 1:
        algorithm |= {
            "select_tokens": {"name": "top_entropy", "fraction": args.top_entropy_quantile},
            "token_weights": ["selected_only"],
        }
    correction = _correction(args) if args.use_vllm and args.vllm_server_base_url else None
    if correction:
        first = [algorithm["correction"]] if algorithm["correction"] else []
        algorithm["correction"] = [*first, correction]
    return algorithm


def rloo_algorithm(args: TrainerArguments) -> dict[str, object]:
    """Return covey's algorithm for RLOOConfig: a clipped ratio per completion, and the KL in the reward."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    kl: dict[str, object] | None = None
    if args.beta:
        kl = {"estimator": "k1", "coef": args.beta, "place": "reward", "level": "completion"}
        if args.sync_ref_model:
            kl |= {"refresh_every": args.ref_model_sync_steps, "refresh_mix": args.ref_model_mixup_alpha}
    return {
        "name": "rloo",
        "ratio": "completion",
        "surrogate": {"name": "clip", "clip_low": args.epsilon, "clip_high": high},
        "reduce": {"name": "sequence_mean", "rows": "all"},
        "kl": kl,
        "whiten": "sample_zscore" if args.normalize_advantages else None,
    }


def _correction(args: TrainerArguments) -> dict[str, object] | None:
    """Return TRL's importance correction for a server's log-probs, or None. Raises UnsupportedArgument."""
    if not getattr(args, f"{VLLM}correction", False):
        return None
    if args.loss_type == "vespo":
        raise UnsupportedArgument(
            "GRPOConfig: with loss_type vespo TRL's weights include the server's log-probs, which covey "
            f"does not reproduce: set {VLLM}correction=False"
        )
    mode, low, high = (getattr(args, VLLM + part) for part in ("mode", "clip_min", "clip_max"))
    level, _, kind = str(mode).partition("_")
    if level in ("token", "sequence") and high is not None:
        if kind == "mask":
            return {"name": "masked", "level": level, "low": low or 0.0, "high": high}
        if kind == "truncate" and low is None:
            return {"name": "truncated", "level": level, "cap": high}
    raise UnsupportedArgument(
        f"GRPOConfig: {VLLM}mode={mode!r} with clip_min={low} and clip_max={high} is not supported; use "
        "token or sequence, _mask or _truncate, with clip_max; clip_min only with a mask"
    )


def given_settings(
    args: TrainerArguments, schedule: Schedule, method: str, **loss: float | str
) -> dict[str, object]:
    """Return the settings of a trainer of given rows."""
    return {
        **shared_settings(args, schedule),
        "method": method,
        "train.batch_size": schedule.rows,
        # A trainer evaluates on its eval_dataset only.
        "data.held_out": 0.0,
        **({"loss": loss} if loss else {}),
    }


def sft_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return SFT's settings. Raises UnsupportedArgument."""
    if args.loss_type not in ("nll", "chunked_nll"):
        raise UnsupportedArgument(
            f"SFTConfig: loss_type={args.loss_type!r}: covey has the negative log-likelihood, nll"
        )
    return given_settings(args, schedule, "sft")


def dpo_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return DPO's settings. Raises UnsupportedArgument for a loss that covey does not have."""
    losses = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    if losses == ["sft"] or (len(losses) > 1 and set(losses) <= set(MIXED)):
        return given_settings(args, schedule, "mpo", **_mixture_weights(args, losses))
    if len(losses) != 1 or losses[0] not in DPO_LOSSES:
        raise UnsupportedArgument(
            f"DPOConfig: loss_type={args.loss_type!r}: covey has one loss at a time, of "
            f"{', '.join(DPO_LOSSES)}, or several of {', '.join(MIXED)}"
        )
    method, loss = DPO_LOSSES[losses[0]]
    if list(args.loss_weights or [1.0]) != [1.0]:
        raise UnsupportedArgument(
            f"DPOConfig: loss_weights={args.loss_weights!r}: a single loss has no weight"
        )
    return given_settings(args, schedule, method, **loss(args), **_divergence(args, losses[0]))


def _mixture_weights(args: TrainerArguments, losses: list[str]) -> LossSettings:
    """Return the settings of `mpo` for several losses; losses that are not named get the weight 0."""
    weights = list(args.loss_weights or [1.0] * len(losses))
    if len(weights) != len(losses) or len(set(losses)) != len(losses):
        raise UnsupportedArgument(
            f"DPOConfig: loss_weights={args.loss_weights!r}: give one weight for each of "
            f"{', '.join(losses)}, and each loss once"
        )
    _divergence(args, "a mixture")  # only to refuse any other divergence than the reverse KL
    weight_of = dict(zip(losses, weights, strict=True))
    return {"beta": args.beta, **{weight: float(weight_of.get(name, 0.0)) for name, weight in MIXED.items()}}


def _divergence(args: TrainerArguments, loss: str) -> LossSettings:
    """Return the divergence of DPO's own loss. Raises UnsupportedArgument for another loss with one."""
    name = DIVERGENCES.get(str(enum_value(args.f_divergence_type)))
    if name is None:
        raise UnsupportedArgument(
            f"DPOConfig: f_divergence_type={args.f_divergence_type!r}: covey has {', '.join(DIVERGENCES)}"
        )
    # At an order of 1 the alpha divergence is the reverse KL, as TRL has it too.
    if name == "reverse_kl" or (name == "alpha" and abs(args.f_alpha_divergence_coef - 1) < 1e-6):
        return {}
    if loss != "sigmoid":
        raise UnsupportedArgument(
            f"DPOConfig: f_divergence_type={args.f_divergence_type!r} with {loss}: only the sigmoid loss "
            "has another divergence than the reverse KL"
        )
    return {"divergence": name, **({"alpha": args.f_alpha_divergence_coef} if name == "alpha" else {})}


def kto_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return KTO's settings. Raises UnsupportedArgument."""
    if args.loss_type not in KTO_LOSSES:
        raise UnsupportedArgument(
            f"KTOConfig: loss_type={args.loss_type!r}: covey has {' and '.join(KTO_LOSSES)}"
        )
    names = ("beta", "desirable_weight", "undesirable_weight")
    return given_settings(args, schedule, args.loss_type, **{name: getattr(args, name) for name in names})


def reward_settings(args: TrainerArguments, schedule: Schedule) -> dict[str, object]:
    """Return a reward model's settings."""
    return given_settings(args, schedule, "reward_model", center=args.center_rewards_coefficient or 0.0)


def config_notes(args: TrainerArguments, schedule: Schedule) -> list[str]:
    """Return notes on arguments that have another effect here than in TRL."""
    notes = args.notes()
    if getattr(args, "use_vllm", False) and not args.vllm_server_base_url:
        notes.append(
            "use_vllm=True without vllm_server_base_url: covey samples with its own engine in this process"
        )
    step_counts = {"max_steps": args.max_steps}
    if enum_value(args.save_strategy) == "steps":
        step_counts["save_steps"] = args.save_steps
    for name, steps in step_counts.items():
        if steps >= 1 and steps % schedule.updates and name in args.changed_fields():
            rounded = math.ceil(steps / schedule.updates) * schedule.updates
            notes.append(
                f"{name}={steps} is rounded up to {rounded}: a rollout batch is trained in "
                f"{schedule.updates} optimizer steps"
            )
    return notes


SettingsFunction = Callable[[TrainerArguments, Schedule], dict[str, object]]
SCHEDULES: Mapping[str, Callable[[TrainerArguments, int], Schedule]] = {
    **dict.fromkeys(("GRPOConfig", "RLOOConfig"), sampled_schedule),
    **dict.fromkeys(("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig"), given_schedule),
}


def _with_algorithm(
    algorithm: Callable[[TrainerArguments], dict[str, object]], args: TrainerArguments, schedule: Schedule
) -> dict[str, object]:
    return {**sampling_settings(args, schedule), "algorithm": algorithm(args)}


SETTINGS: Mapping[str, SettingsFunction] = {
    "GRPOConfig": partial(_with_algorithm, grpo_algorithm),
    "RLOOConfig": partial(_with_algorithm, rloo_algorithm),
    "SFTConfig": sft_settings,
    "DPOConfig": dpo_settings,
    "KTOConfig": kto_settings,
    "RewardConfig": reward_settings,
}
"""Name of a config -> the function that converts it to covey's settings."""
