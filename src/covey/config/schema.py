"""The schema of all settings, a row each: type, bounds, default and description.

A row has the setting's effect, usual values and their source, TRL's name for it, the effect of a change on a
resumed run, and the methods that read it (``objective/setting.py``). Errors, `covey explain`, notes on unread
settings, `covey resume` and TRL's scripts read it from here. Nothing here loads torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import field_validator, model_validator

from covey.config.methods import (
    ALL_METHODS,
    COMPARING_METHODS,
    EXAMPLE_SAMPLERS,
    LEARNING_METHODS,
    MODEL_METHODS,
    POLICY_METHODS,
    RL,
    SAMPLING_METHODS,
    TRAINING_METHODS,
    MethodName,
)
from covey.config.python_objects import ModelObject, RowsObject, or_object
from covey.config.sampling import Rollout
from covey.config.section import (
    BelowOne,
    Duration,
    DurationOrZero,
    Few,
    LearningRateSchedule,
    Many,
    Names,
    Paths,
    Section,
    Size,
    SizeOrZero,
    Steps,
    StepsOrZero,
    setting,
)
from covey.system.machine import MAX_THREADS
from covey_verify.types import Fraction, NonNegative, OpenFraction, Positive
from covey_verify.web import plain_address


class Data(Section):
    """The source of problems: a built-in task, or files with one problem per row."""

    task: str | None = setting(None, "Built-in generated task: `last_digit`, `sums`, ...")
    train: Annotated[Path | RowsObject | None, or_object(Path | None)] = setting(
        None,
        "File of training problems: JSONL, JSON, CSV or parquet; or a data set of the hub, as "
        "hub:openai/gsm8k?config=main; in Python also rows.",
    )
    test: Annotated[Path | RowsObject | None, or_object(Path | None)] = setting(
        None, "The same for held-out problems."
    )
    prompt: str = setting("prompt", "Column with the prompt: text or chat messages.")
    completion: str = setting(
        "completion",
        "Column with the answer (sft, kto), or a text with {columns} in it, as "
        "'<think>{reasoning}</think>{answer}'.",
    )
    examples: Paths = setting(
        (),
        "Files of answers, pairs or judged answers, if problems come from elsewhere; in a pipeline also "
        "earlier stages that wrote some, as 2-pairs. The last one is used whole.",
    )
    replay: Fraction = setting(1.0, "Fraction of each file in data.examples, except the last, that is used.")
    held_out: BelowOne = setting(
        0.1,
        "Fraction of the pairs kept for measuring where data.test has none (preferences, reward models).",
        read_by=COMPARING_METHODS,
    )
    answer: str | None = setting(
        None,
        "Column that rewards get as `answer`, if the file names it otherwise. Use a dotted name for a nested "
        "field, for example reward_model.ground_truth.",
    )
    columns: dict[str, str] = setting(
        {}, "Further columns to copy: the name that a reward asks for, then the file's name of the column."
    )
    template: str | None = setting(
        None, "Text around each text prompt, which replaces {prompt}; a column replaces its {name}."
    )
    chat: bool = setting(False, "Send text prompts as a user's message through the chat template.")
    system: str | None = setting(None, "System message before every prompt; implies chat.")
    chat_template_kwargs: dict[str, object] = setting(
        {},
        "Variables for the chat template, for example {enable_thinking: false}. A row's columns "
        "`chat_template_kwargs`, `tools` and `documents` are passed too and take precedence.",
        trl="chat_template_kwargs",
    )
    train_size: Many = setting(4096, "Number of training problems of a generated task.")
    test_size: Many = setting(512, "Number of held-out problems, generated or from the start of the file.")
    long_prompts: Literal["error", "drop"] = setting(
        "error", "Prompts that do not fit the context with max_tokens: refuse, or leave out."
    )


class Train(Section):
    """The updates of the policy: steps, optimizer, batches, checkpoints."""

    steps: Steps = setting(
        200,
        "Training steps: rollout batches, or batches of rows.",
        usual="100 to 2,000",
        trl="max_steps",
        read_by=MODEL_METHODS,
    )
    optimizer: Literal["adamw", "adamw_8bit"] = setting(
        "adamw",
        "adamw_8bit keeps the moments in 2 bytes per weight instead of 8.",
        trl="optim",
        resume="refused",
        read_by=MODEL_METHODS,
    )
    lr: NonNegative = setting(
        1e-6,
        "AdamW learning rate after warm-up.",
        usual="1e-7 to 5e-6 for all weights of a large model, 1e-5 to 2e-4 with lora or for a tiny one",
        source="1e-6 in DeepSeekMath (arXiv 2402.03300) and DAPO (2503.14476)",
        trl="learning_rate",
    )
    warmup_steps: StepsOrZero = setting(0, "Steps of linear warm-up of the learning rate.", usual="0 to 20")
    schedule: LearningRateSchedule = setting(
        "constant",
        "Course of the learning rate after the warm-up, by optimizer steps. {cosine: 0.1} ends at a tenth of "
        "lr.",
        trl="lr_scheduler_type",
    )
    weight_decay: NonNegative = setting(
        0.0, "AdamW weight decay of matrices; norms and biases do not decay.", usual="0 to 0.1"
    )
    betas: tuple[BelowOne, BelowOne] = setting((0.9, 0.99), "AdamW moment decay rates.")
    grad_clip: Positive = setting(
        1.0, "Largest norm of the gradient.", usual="0.1 to 1.0", trl="max_grad_norm"
    )
    inner_epochs: Few = setting(
        1,
        "Passes over each rollout batch.",
        usual="1; at most 4",
        source="1 in DeepSeekMath (arXiv 2402.03300), 4 and more in PPO (1707.06347)",
        trl="num_iterations",
        read_by=RL,
    )
    updates_per_batch: Size = setting(
        1, "Optimizer steps per pass.", usual="1 to 16", source="16 in DAPO (arXiv 2503.14476)", read_by=RL
    )
    tokens_per_micro_batch: int = setting(
        4096, "Tokens in the model at once; changes memory, not the result.", ge=1, le=2**31
    )
    recompute_layers: bool = setting(
        False,
        "Keep only each layer's input: a third more time, a fraction of the memory.",
        trl=("gradient_checkpointing", "activation_checkpointing"),
    )
    batch_size: Size = setting(
        32, "Rows or pairs per step (all but rl).", resume="refused", read_by=LEARNING_METHODS
    )
    stop_at: float | None = setting(
        None, "End the stage once held-out sampled accuracy reaches this.", gt=0, le=1, usual="none"
    )
    save_every: Steps = setting(
        50, "Steps between checkpoints.", trl="save_steps", resume="safe", read_by=MODEL_METHODS
    )
    save_minutes: NonNegative = setting(
        10.0,
        "Save after the first step that ends this many minutes after the last checkpoint; 0: by steps alone.",
        usual="5 to 30",
        resume="safe",
        read_by=MODEL_METHODS,
    )
    keep: int = setting(
        2,
        "Number of newest checkpoints to keep; the best-evaluated checkpoint is always kept.",
        ge=1,
        le=10**6,
        trl="save_total_limit",
        resume="safe",
        read_by=MODEL_METHODS,
    )
    final: Literal["last", "best"] = setting(
        "last",
        "Weights in `final/`: from the last step, or from the best-evaluated checkpoint.",
        resume="safe",
        read_by=POLICY_METHODS,
    )

    @property
    def updates_per_rollout_batch(self) -> int:
        """Number of optimizer steps on each rollout batch, over all its passes."""
        return self.inner_epochs * self.updates_per_batch


class Eval(Section):
    """The evaluation on held-out problems."""

    every: StepsOrZero = setting(0, "Steps between evaluations; 0: before and after only.", trl="eval_steps")
    problems: Many = setting(256, "Held-out problems, the same ones every time.")
    samples: Size = setting(
        4, "Sampled completions per problem, for pass@k.", usual="4 to 32", trl="num_generations_eval"
    )

    def is_due(self, step: int) -> bool:
        """Whether an evaluation during training follows after ``step`` steps."""
        return self.every > 0 and step % self.every == 0


class Keep(Section):
    """The choice of completions that become examples (pairs, rejection_sampling, filter)."""

    margin: NonNegative = setting(
        0.0, "Pairs: the two rewards must differ by more than this.", read_by=("pairs",)
    )
    per_problem: Size = setting(4, "Largest number of examples per problem.", read_by=EXAMPLE_SAMPLERS)
    least: dict[str, float] = setting(
        {},
        "Rejection sampling: minimum of each reward, for example {language_consistency: 0.9}; the verdict "
        "must always exceed 0.5.",
        read_by=("rejection_sampling",),
    )
    score: OpenFraction = setting(
        0.5, "Filter: rows with a higher probability are kept.", read_by=("filter",)
    )


class Guards(Section):
    """Conditions that end a failing run; its last good checkpoint is kept."""

    bad_updates: Steps = setting(
        3,
        "Stop after this many non-finite updates in a row, each of which is skipped.",
        read_by=TRAINING_METHODS,
    )
    dead_steps: StepsOrZero = setting(
        20, "Stop after this many steps in a row without an advantage; 0: never."
    )
    kl_warn: Positive | None = setting(5.0, "Warn above this KL to the reference, in nats per completion.")
    kl_act: Positive | None = setting(10.0, "Do what kl_action says above this KL.")
    kl_stop: Positive | None = setting(
        20.0,
        "Stop above this KL, whatever kl_action says.",
        usual="10 to 50 nats per completion",
    )
    kl_action: Literal["warn", "raise_coef", "stop"] = setting(
        "warn",
        "Reaction to a KL above kl_act. raise_coef multiplies the KL coefficient by 1.5 in each step above "
        "it, and divides it again in each step below.",
        resume="breaks exactness",
    )
    on_finding: Literal["report", "rollback"] = setting(
        "report",
        "Reaction to a warning or a severe finding: report prints it; rollback also returns to the last "
        "good checkpoint and continues with the suggested setting.",
    )
    max_rollbacks: Few = setting(3, "Largest number of rollbacks because of findings.")
    entropy_floor: NonNegative = setting(
        0.0, "Stop when the entropy of a step's sampling, in nats per token, falls below this."
    )
    stall_minutes: DurationOrZero = setting(
        60.0, "End the process after this long without progress; 0: never.", read_by=MODEL_METHODS
    )


class Scoring(Section):
    """The limits of reward functions, and the failures that end a run."""

    timeout: Duration = setting(60.0, "Seconds a call of a reward function may take.")
    max_infra: Fraction = setting(
        0.2, "Stop if more than this fraction of the last 5 steps' completions could not be judged."
    )
    max_bad_references: Fraction = setting(
        0.01, "Refuse data with a larger fraction of reference answers that no completion can match."
    )
    noise: float = setting(
        0.0,
        "Fraction of labels flipped in training (label noise), to test how much a run tolerates.",
        ge=0,
        le=0.5,
        usual="0",
        read_by=SAMPLING_METHODS,
    )


class Sandbox(Section):
    """The sandbox that model-written code runs in."""

    backend: Literal["auto", "bwrap", "landlock", "wasm", "remote"] = setting(
        "auto", "auto: the strongest sandbox that passes its probe."
    )
    url: str | None = setting(None, "Address of a SandboxFusion service, for `remote`.")
    unsafe_local: bool = setting(False, "If no sandbox works, run model code with your own rights.")
    packages: Names = setting(
        ("numpy", "sympy"),
        "Packages that a model's programs may import besides the standard library, and their dependencies.",
    )

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        return None if url is None else plain_address(url)


class Lora(Section):
    """Low-rank adapters: train a few weights, keep the rest as the reference."""

    rank: Size = setting(16, "Rank of the update.", usual="8 to 128")
    alpha: float = setting(
        32.0, "Scale of the update: alpha / rank.", gt=0, le=10**6, usual="one or two times the rank"
    )
    targets: str | tuple[str, ...] | None = setting(
        "all-linear", "Linear layers that get adapters; null: peft's choice for the architecture."
    )


class Launch(Section):
    """The processes of a run and the machines that they run on."""

    processes: int = setting(
        1,
        "Processes on this machine that train together, one for each GPU; torchrun starts more.",
        ge=1,
        le=4096,
        usual="one for each GPU",
    )
    restarts: int = setting(
        3,
        "Number of restarts from the last checkpoint after one of them has died.",
        ge=0,
        le=10**6,
        usual="3; more in long runs",
    )
    ray: str | None = setting(
        None,
        "Address of a Ray cluster that places samplers and users' reward functions, for example "
        "10.0.0.1:6379; auto: this machine's cluster, else a new one.",
        usual="none on one machine",
    )
    samplers: SizeOrZero = setting(
        0,
        "Number of samplers that Ray places, each with a GPU if the cluster has any.",
        usual="one for each GPU that does not train",
        resume="breaks exactness",
    )

    @model_validator(mode="after")
    def _check_placement(self) -> Launch:
        if self.samplers and self.ray is None:
            raise ValueError("Ray places the samplers: add ray: auto, or the address of its cluster")
        return self


def is_gguf(model: str) -> bool:
    """Whether a model's name ends like a GGUF file."""
    return model.lower().endswith(".gguf")


class Config(Section):
    """One run, or one stage of it."""

    model: Annotated[str | ModelObject, or_object(str)] = setting(
        "tiny",
        "Hub id, folder, or `tiny`, which is built on the spot; in Python also a model.",
        trl="model_name_or_path",
        resume="refused",
        read_by=ALL_METHODS,
    )
    method: MethodName = setting(
        "rl",
        "Way of training: reinforcement (rl), imitation (sft), preferences (dpo to discopop), a reward "
        "model; or of making data for later stages: pairs, rejection_sampling, filter.",
        resume="refused",
        read_by=ALL_METHODS,
    )
    loss: dict[str, object] = setting(
        {}, "Settings of the method's loss (dpo to discopop, reward_model), for example {beta: 0.1}."
    )
    output: Path = setting(
        Path("runs/run"), "Folder of the run.", trl="output_dir", resume="safe", read_by=ALL_METHODS
    )
    seed: int = setting(0, "Seed of every random draw.", ge=0, le=2**63 - 1, trl="seed", resume="refused")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Type of the weights; auto: float32 on CPU, bfloat16 on GPU.", trl="dtype", resume="refused"
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Type of the factors in matrix products on a CPU whose weights are float32; auto: bfloat16 where "
        "this processor was measured to be 1.5 times as fast with it, else float32.",
    )
    longrope: Literal["short", "long"] = setting(
        "short",
        "Rotary table of a model of the rope type `longrope` (Phi 3 and 4 mini), the same for all "
        "sequences: short, if none is longer than it allows; long, up to the context.",
        resume="refused",
    )
    device: str = setting("auto", "`cpu`, `cuda`, `cuda:1`; auto: the first GPU if any.")
    threads: int = setting(
        0,
        "CPU threads; 0: OMP_NUM_THREADS, or one per core that this process may use.",
        ge=0,
        le=MAX_THREADS,
        resume="safe",
    )
    data: Data = setting(Data(), resume="refused", read_by=ALL_METHODS)
    rewards: tuple[object, ...] = setting(
        (),
        "Reward functions: names, module.py:function, {name: weight} or {name: settings}; `verdict: true` in "
        "one marks the reward that decides whether a completion is correct.",
        trl="reward_funcs",
        read_by=tuple(m for m in MODEL_METHODS if m != "reward_model"),
    )
    scoring: Scoring = Scoring()
    sandbox: Sandbox = setting(Sandbox(), resume="safe")
    rollout: Rollout = Rollout()
    algorithm: str | dict[str, object] = setting(
        "dapo",
        "A preset, or a mapping that overrides its axes. With one update per rollout batch, all ratios are 1 "
        "and clip settings have no effect.",
        read_by=RL,
    )
    train: Train = setting(Train(), read_by=TRAINING_METHODS)
    eval: Eval = setting(Eval(), read_by=TRAINING_METHODS)
    keep: Keep = setting(Keep(), read_by=())
    guards: Guards = setting(Guards(), resume="safe", read_by=RL)
    tracker: Literal["wandb", "tensorboard", "trackio", "mlflow"] | None = setting(
        None,
        "Experiment tracker that gets a copy of all numbers, offline. The run folder always has them.",
        resume="safe",
    )
    lora: Lora | None = setting(None, "Train adapters instead of all weights.", resume="refused")
    launch: Launch = setting(Launch(), resume="safe")
    stages: tuple[dict[str, object], ...] = setting(
        (),
        "A pipeline: each stage overrides this config and starts from the last model.",
        read_by=ALL_METHODS,
    )

    @model_validator(mode="after")
    def _somebody_samples(self) -> Config:
        # Samplers that Ray places bring their own addresses.
        servers = self.rollout.sampler
        if servers is not None and not servers.url and not self.launch.samplers:
            raise ValueError("rollout.sampler.url is missing; give the address of at least one server")
        return self
