"""Configs of verl (0.9.1): Hydra overrides of `verl.trainer.main_ppo`, with verl's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from covey.migration.migrated import MigrationResult
from covey_verify.errors import ConfigError

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
DIALECT = "verl-0.9.1"
SAME: Mapping[str, str] = {
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.recompute_layers",
    "data.train_files": "data.train",
    "data.val_files": "data.test",
    "data.system_prompt": "data.system",
    "trainer.default_local_dir": "output",
    "trainer.max_actor_ckpt_to_keep": "train.keep",
}
ESTIMATORS: Mapping[str, str] = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gdpo": "gdpo",
}
LOSSES: Mapping[str, str] = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "gpg": "gpg"}
"""policy_loss.loss_mode with adv_estimator grpo -> preset."""
MEANS: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
CLIPPING: Mapping[str, float] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
"""verl's own values, which the dialect has."""
KL: Mapping[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": "full",
}
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
OVERLONG = ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg.")
"""Prefixes of DAPO's penalty for length in recipes of different ages."""
SILENT = (
    "*fsdp*", "*megatron*", "*micro_batch*", "*_max_token_len*", "*use_dynamic_bsz*", "*parallel_size*",
    "*offload*", "*use_remove_padding*", "*torch_compile*", "*.strategy", "*use_shm*", "*profiler*",
    "critic.*", "ray_*", "trainer.critic_warmup", "trainer.total_epochs", "*nccl_timeout", "*checkpoint.*",
    "trainer.nnodes", "trainer.device", "trainer.resume_*", "trainer.project_name",
    "trainer.val_before_train", "trainer.balance_batch", "trainer.log_val_generations", "hydra.*",
    "data.truncation", "data.return_raw_chat", "data.trust_remote_code", "data.dataloader_num_workers",
    f"{ROLLOUT}name", f"{ROLLOUT}mode", f"{ROLLOUT}gpu_memory_utilization", f"{ROLLOUT}load_format",
    f"{ROLLOUT}layered_summon", f"{ROLLOUT}enforce_eager", f"{ROLLOUT}free_cache_engine",
    f"{ROLLOUT}enable_chunked_prefill", f"{ROLLOUT}max_num*", f"{ROLLOUT}max_model_len",
    f"{ROLLOUT}engine_kwargs*", f"{ROLLOUT}dtype", f"{ROLLOUT}calculate_log_probs", "*checkpoint_engine*",
    "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.model.use_*", "*log_prob_*", "reward_model.launch_reward_fn_async",
)  # fmt: skip
"""Settings of placement, memory and logging, which covey chooses itself or does not have."""
WHY: Mapping[str, str] = {
    "defaults": "verl's own defaults are taken; files of yours that it names are not read",
    "data.shuffle": "covey draws problems in an order of its own, from the seed",
    "data.filter_overlong_prompts_workers": "reading is fast enough",
    "data.image_key": "covey trains text only",
    "data.video_key": "covey trains text only",
    "data.sampler.*": "the curriculum is rollout.curriculum",
    "data.*": "covey reads rows by their schema: docs/data.md",
    "algorithm.lam": "no critic",
    "algorithm.gamma": "no critic",
    f"{ROLLOUT}val_kwargs*": "held-out problems are sampled as in training, and greedily",
    f"{ROLLOUT}multi_turn*": "tools are Python functions here: docs/tools.md",
    f"{ROLLOUT}agent*": "tools are Python functions here: docs/tools.md",
    "reward_model.*": "rewards are functions: docs/rewards.md",
    "custom_reward_function.*": "rewards are functions: docs/rewards.md",
}


def from_verl(settings: Mapping[str, object]) -> MigrationResult:
    """Return covey's settings for verl's. Raises ConfigError for a config of another of its trainers."""
    if not any(name.startswith("actor_rollout_ref.") for name in settings):
        raise ConfigError(
            "only settings of verl's main_ppo are read, which begin with actor_rollout_ref; supervised runs "
            "have method: sft here"
        )
    m = MigrationResult(dict(settings))
    m.same(SAME)
    _data(m)
    _batches(m)
    _optimizer(m)
    m.config["algorithm"] = _algorithm(m)
    _rewards(m)
    _trainer(m)
    return m.finish(SILENT, WHY)


def _data(m: MigrationResult) -> None:
    for key in ("data.train", "data.test"):
        files = m.config.get(key)
        if isinstance(files, list):
            m.config[key] = files[0]
            if len(files) > 1:
                m.notes.append(f"{key}: covey reads one file; join {', '.join(map(str, files))}")
    prompt = m.take("data.prompt_key", "prompt")
    if prompt != "prompt":
        m.config["data.prompt"] = prompt
    if m.take("data.filter_overlong_prompts", False) is True:
        m.config["data.long_prompts"] = "drop"
    longest = m.take("data.max_prompt_length")
    if longest is not None:
        m.notes.append(f"prompts may have as many tokens as the context leaves, not {longest}")


def _batches(m: MigrationResult) -> None:
    prompts = int(m.number("data.train_batch_size", 1024))
    updated = int(m.number(f"{ACTOR}ppo_mini_batch_size", 256))
    m.take("data.gen_batch_size")  # of DAPO's filter, which draws more by itself here
    m.config |= {
        "rollout.prompts_per_step": prompts,
        "rollout.group_size": int(m.number(f"{ROLLOUT}n", 1)),
        "rollout.max_tokens": int(m.number("data.max_response_length", 512)),
        "rollout.temperature": float(m.number(f"{ROLLOUT}temperature", 1.0)),
        "train.updates_per_batch": max(1, math.ceil(prompts / updated)),
        "train.inner_epochs": int(m.number(f"{ACTOR}ppo_epochs", 1)),
    }
    if (top_p := m.number(f"{ROLLOUT}top_p", 1.0)) < 1:
        m.config["rollout.top_p"] = top_p
    if (top_k := m.number(f"{ROLLOUT}top_k", -1)) > 0:
        m.config["rollout.top_k"] = int(top_k)
    if m.take("algorithm.filter_groups.enable", False) is True:
        rounds = m.number("algorithm.filter_groups.max_num_gen_batches", 10)
        m.config["rollout.max_resampling_rounds"] = int(rounds)
    for name in ("max_num_gen_batches", "metric"):
        m.take(f"algorithm.filter_groups.{name}")


def _optimizer(m: MigrationResult) -> None:
    optim = f"{ACTOR}optim."
    m.config |= {
        "train.lr": float(m.number(f"{optim}lr", 1e-6)),
        "train.weight_decay": float(m.number(f"{optim}weight_decay", 0.01)),
        "train.betas": m.take(f"{optim}betas", [0.9, 0.999]),
        "train.grad_clip": float(m.number(f"{optim}clip_grad", m.number(f"{ACTOR}grad_clip", 1.0))),
    }
    steps = int(m.number(f"{optim}lr_warmup_steps", -1))
    ratio = m.number(f"{optim}lr_warmup_steps_ratio", 0.0)
    if steps > 0:
        m.config["train.warmup_steps"] = steps
    elif ratio > 0:
        m.notes.append(f"train.warmup_steps: {ratio:g} of the steps")
    schedule = m.take(f"{optim}lr_scheduler_type", m.take(f"{optim}warmup_style", "constant"))
    if schedule in ("constant", "cosine"):
        m.config["train.schedule"] = schedule
    else:
        m.unsupported[f"{optim}lr_scheduler_type: {schedule}"] = "constant, linear and cosine: train.schedule"
    floor = m.number(f"{optim}min_lr_ratio", 0.0)
    if floor and schedule == "cosine":
        m.config["train.schedule"] = {"cosine": floor}
    model = "actor_rollout_ref.model."
    rank = int(m.number(f"{model}lora.rank", m.number(f"{model}lora_rank", 0)))
    alpha = m.number(f"{model}lora.alpha", m.number(f"{model}lora_alpha", 16))
    targets = m.take(f"{model}target_modules", "all-linear")
    if rank > 0:
        m.config |= {"lora.rank": rank, "lora.alpha": float(alpha), "lora.targets": targets}


def _algorithm(m: MigrationResult) -> dict[str, object]:
    """Return the block `algorithm`: a preset, and the axes in which verl's settings differ from it."""
    name = _preset(m)
    block: dict[str, object] = {"name": name}
    if name == "ppo":
        block |= _with_critic(m)
    else:
        block["dialect"] = DIALECT
    if m.take("algorithm.norm_adv_by_std_in_grpo", True) is False:
        block["advantage"] = "group_centered"
    mean = m.take(f"{ACTOR}loss_agg_mode")
    if mean in MEANS and name != "gspo":  # whose loss has one mean in verl, whatever is set
        block["reduce"] = MEANS[str(mean)]
    elif mean is not None and mean not in MEANS:
        m.unsupported[f"{ACTOR}loss_agg_mode: {mean}"] = "the preset's own mean is kept"
    clipping = _clip_settings(m)
    if name in ("grpo", "ppo") and clipping != CLIPPING:
        block["surrogate"] = clipping
    entropy = m.number(f"{ACTOR}entropy_coeff", 0.0)
    if entropy:
        block["entropy"] = {"coef": entropy}
    block["kl"] = _kl(m)
    if "rollout.max_resampling_rounds" in m.config:
        block["filter"] = "informative"
    return block


def _preset(m: MigrationResult) -> str:
    """Return the preset of verl's estimator and loss."""
    estimator = str(m.take("algorithm.adv_estimator", "gae"))
    mode = str(m.take(f"{ACTOR}policy_loss.loss_mode", "vanilla"))
    name = ESTIMATORS.get(estimator, "grpo")
    if estimator not in ESTIMATORS:
        m.unsupported[f"algorithm.adv_estimator: {estimator}"] = "no such estimator; this is grpo"
    if mode in LOSSES and name == "grpo":
        return LOSSES[mode]
    if mode != "vanilla":
        m.unsupported[f"{ACTOR}policy_loss.loss_mode: {mode}"] = "see covey algorithms"
    return name


def _clip_settings(m: MigrationResult) -> dict[str, float]:
    clip = m.number(f"{ACTOR}clip_ratio", 0.2)
    return {
        "clip_low": m.number(f"{ACTOR}clip_ratio_low", clip),
        "clip_high": m.number(f"{ACTOR}clip_ratio_high", clip),
        "dual_clip": m.number(f"{ACTOR}clip_ratio_c", 3.0),
    }


def _with_critic(m: MigrationResult) -> dict[str, object]:
    """Return PPO's own parts: the advantage of a critic, and its learning rate."""
    gae = {"name": "gae", "lam": m.number("algorithm.lam", 1.0), "gamma": m.number("algorithm.gamma", 1.0)}
    return {"advantage": gae, "critic": {"lr": float(m.number("critic.optim.lr", 1e-5))}}


def _kl(m: MigrationResult) -> dict[str, object] | None:
    in_loss = m.take(f"{ACTOR}use_kl_loss", False) is True
    in_reward = m.take("algorithm.use_kl_in_reward", False) is True
    of_loss = {
        **_estimator(m, f"{ACTOR}kl_loss_type", "low_var_kl", in_loss),
        "coef": m.number(f"{ACTOR}kl_loss_coef", 0.001),
        "place": "loss",
    }
    of_reward = {
        **_estimator(m, "algorithm.kl_penalty", "kl", in_reward and not in_loss),
        "coef": m.number("algorithm.kl_ctrl.kl_coef", 0.001),
        "place": "reward",
    }
    if m.take("algorithm.kl_ctrl.type") == "adaptive":
        m.unsupported["algorithm.kl_ctrl.type: adaptive"] = "here in nats per completion: algorithm.kl.target"
    if in_loss:
        return of_loss
    return of_reward if in_reward else None


def _estimator(m: MigrationResult, name: str, usual: str, used: bool) -> dict[str, object]:
    """Return a KL's estimator; the suffix + asks for k2's gradient."""
    kind = str(m.take(name, usual))
    estimator = KL.get(kind.removesuffix("+"))
    if estimator is None and used:
        m.unsupported[f"{name}: {kind}"] = f"no such estimator; this is {KL[usual]}"
    gradient = {"gradient": "straight_through"} if kind.endswith("+") else {}
    return {"estimator": estimator or KL[usual], **gradient}


def _rewards(m: MigrationResult) -> None:
    path, name = m.take("custom_reward_function.path"), m.take("custom_reward_function.name", "compute_score")
    m.take("reward_model.enable")
    m.take("reward_model.reward_manager")
    m.take("reward_model.reward_kwargs.max_resp_len")  # rollout.max_tokens
    rule = "hash4" if "gsm8k" in str(m.config.get("data.train")) else "boxed"
    rewards: list[object] = [{"math_answer": {"rule": rule}}]
    if path is None:
        m.notes.append(f"rewards: verl chooses by data_source; this is math_answer with the rule {rule}")
    else:
        m.notes.append(
            f"rewards: write a function (completion, reward_model, data_source) that returns {name}("
            f"data_source, completion, reward_model['ground_truth']) of {path}, and name it in place of "
            "math_answer"
        )
    for over in OVERLONG:
        size, factor = m.number(f"{over}len", 0), m.number(f"{over}penalty_factor", 1.0)
        if m.take(f"{over}enable", False) is True and size:
            limit = m.config["rollout.max_tokens"]
            rewards.append({"soft_overlong": {"limit": limit, "buffer": int(size), "weight": float(factor)}})
        m.take(f"{over}log")
    m.config["rewards"] = rewards


def _trainer(m: MigrationResult) -> None:
    steps = m.take("trainer.total_training_steps")
    if isinstance(steps, int):
        m.config["train.steps"] = steps
        m.take("trainer.total_epochs")
    else:
        m.notes.append("train.steps: rows / rollout.prompts_per_step for each epoch; 200 if it is not set")
    save, test = int(m.number("trainer.save_freq", -1)), int(m.number("trainer.test_freq", -1))
    if save > 0:
        m.config["train.save_every"] = save
    if test > 0:
        m.config["eval.every"] = test
    processes = int(m.number("trainer.n_gpus_per_node", 1))
    if processes > 1:
        m.config["launch.processes"] = processes
    loggers = m.take("trainer.logger", [])
    tracker = next((t for t in TRACKERS if t in str(loggers)), None)
    if tracker:
        m.config["tracker"] = tracker
    name = m.take("trainer.experiment_name")
    if name and "output" not in m.config:
        m.config["output"] = f"runs/{name}"
