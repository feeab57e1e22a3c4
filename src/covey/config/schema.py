"""Every setting there is: its default, its unit, what it does. Nothing here loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from covey.config.given import GivenModel, GivenRows, or_given
from covey.config.sampling import Rollout
from covey.config.section import MANY, Names, Paths, Section
from covey.machine import MOST_THREADS
from covey_verify.web import plain_address

Method = Literal[
    "rl", "sft", "dpo", "ipo", "kto", "orpo", "simpo", "robust_dpo", "hinge", "reward_model", "pairs",
    "rejection_sampling", "filter",
]  # fmt: skip

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Data(Section):
    """Where problems come from: a built-in task, or files with one problem per row."""

    task: str | None = Field(None, description="Built-in generated task: `last_digit`, `sums`, ...")
    train: Annotated[Path | GivenRows | None, or_given(Path | None)] = Field(
        None, description="File of training problems: JSONL, JSON, CSV or parquet; from Python rows, too."
    )
    test: Annotated[Path | GivenRows | None, or_given(Path | None)] = Field(
        None, description="The same for held-out problems."
    )
    prompt: str = Field("prompt", description="Column with the prompt: text or chat messages.")
    completion: str = Field(
        "completion",
        description="Column with the answer (sft, kto), or a text with {columns} in it, as "
        "'<think>{reasoning}</think>{answer}'.",
    )
    examples: Paths = Field(
        (),
        description="Files of answers, pairs or judged answers, where problems come from elsewhere; in a "
        "pipeline also earlier stages that wrote some, as 2-pairs. The last one counts in full.",
    )
    replay: float = Field(
        1.0, ge=0, le=1, description="Fraction of each earlier one of data.examples that is used again."
    )
    held_out: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Fraction of the pairs kept for measuring where data.test has none (preferences, "
        "reward models).",
    )
    answer: str | None = Field(
        None,
        description="Column copied to `answer` for the rewards, where the file names it otherwise; "
        "reward_model.ground_truth is a place inside one.",
    )
    columns: dict[str, str] = Field(
        {}, description="Further columns to copy: the name a reward asks for, the file's own name for it."
    )
    template: str | None = Field(
        None,
        description="Text around each text prompt: {prompt} is its place, {column} that of a column.",
    )
    chat: bool = Field(False, description="Send text prompts as a user's message through the chat template.")
    system: str | None = Field(None, description="System message before every prompt; implies chat.")
    chat_template_kwargs: dict[str, object] = Field(
        {},
        description="Passed on to the chat template, as {enable_thinking: false}; a row's columns "
        "`chat_template_kwargs`, `tools` and `documents` go there too and win.",
    )
    train_size: int = Field(4096, ge=1, le=MANY, description="Problems a generated task offers for training.")
    test_size: int = Field(
        512, ge=1, le=MANY, description="Held-out problems, generated or from the file's head."
    )
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="Prompts that do not fit the context with max_tokens: refuse, or leave out."
    )


class Train(Section):
    """How the policy is updated."""

    steps: int = Field(
        200, ge=1, le=10**9, description="Training steps: rollout batches, or batches of rows."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="adamw_8bit keeps the moments in 2 bytes a weight instead of 8."
    )
    lr: float = Field(1e-6, ge=0, description="AdamW learning rate after warm-up.")
    warmup_steps: int = Field(0, ge=0, le=10**9, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="What the learning rate does after the warm-up, optimizer step by step."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="AdamW weight decay, of every weight, those of norms and biases too."
    )
    betas: tuple[BelowOne, BelowOne] = Field((0.9, 0.99), description="AdamW moment decay rates.")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient.")
    inner_epochs: int = Field(1, ge=1, le=1_000, description="Passes over each rollout batch.")
    updates_per_batch: int = Field(1, ge=1, le=65_536, description="Optimizer steps per pass.")
    tokens_per_micro_batch: int = Field(
        4096, ge=1, le=2**31, description="Tokens in the model at once; changes memory, not the result."
    )
    recompute_layers: bool = Field(
        False, description="Keep only each layer's input: a third more time, a fraction of the memory."
    )
    batch_size: int = Field(32, ge=1, le=65_536, description="Rows or pairs per step (all but rl).")
    stop_at: float | None = Field(
        None, gt=0, le=1, description="End the stage once held-out sampled accuracy reaches this."
    )
    save_every: int = Field(50, ge=1, le=10**9, description="Steps between checkpoints.")
    keep: int = Field(
        2, ge=1, le=10**6, description="Newest checkpoints kept; that of the best evaluation always is."
    )
    final: Literal["last", "best"] = Field(
        "last", description="Whose weights `final/` gets: of the last step, or of the best evaluated one."
    )


class Eval(Section):
    """How progress is measured on held-out problems."""

    every: int = Field(0, ge=0, le=10**9, description="Steps between evaluations; 0: before and after only.")
    problems: int = Field(256, ge=1, le=MANY, description="Held-out problems, the same ones every time.")
    samples: int = Field(4, ge=1, le=65_536, description="Sampled completions per problem, for pass@k.")


class Keep(Section):
    """Which completions become examples (pairs, rejection_sampling, filter)."""

    margin: float = Field(
        0.0, ge=0, description="Pairs: the chosen's reward is above the rejected's by more."
    )
    per_problem: int = Field(4, ge=1, le=65_536, description="Most examples of a problem.")
    least: dict[str, float] = Field(
        {},
        description="Rejection sampling: the least value of a reward, by name, as "
        "{language_consistency: 0.9}; the verdict above 0.5 is always asked for.",
    )
    score: float = Field(0.5, gt=0, lt=1, description="Filter: rows are wanted with a probability above it.")


class Guards(Section):
    """When a run that goes wrong is ended, its last good checkpoint kept."""

    bad_updates: int = Field(
        3,
        ge=1,
        le=10**9,
        description="Stop after this many non-finite updates in a row, each of which is skipped.",
    )
    dead_steps: int = Field(
        20, ge=0, le=10**9, description="Stop after this many steps in a row without an advantage; 0: never."
    )
    kl_warn: float | None = Field(
        5.0, gt=0, description="Warn above this KL to the reference, in nats per completion."
    )
    kl_act: float | None = Field(10.0, gt=0, description="Do what kl_action says above this KL.")
    kl_stop: float | None = Field(20.0, gt=0, description="Stop above this KL, whatever kl_action says.")
    kl_action: Literal["warn", "raise_coef", "stop"] = Field(
        "warn",
        description="Above kl_act. raise_coef multiplies the KL coefficient by 1.5 per step above it "
        "and divides it again per step below.",
    )
    entropy_floor: float = Field(
        0.0, ge=0, description="Stop when the entropy of a step's sampling, nats a token, falls below."
    )
    stall_minutes: float = Field(
        60.0, ge=0, le=10**6, description="End the process after this long without progress; 0: never."
    )


class Scoring(Section):
    """How rewards are run, and when their failures end a run."""

    timeout: float = Field(60.0, gt=0, le=10**6, description="Seconds a call of a reward function may take.")
    max_infra: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Stop if more than this fraction of the last 5 steps' completions could not be judged.",
    )
    max_bad_references: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Refuse data with a larger fraction of reference answers that no answer can equal.",
    )
    noise: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Fraction of labels flipped in training (label noise), to see what a run bears.",
    )


class Sandbox(Section):
    """Where model-written code runs."""

    backend: Literal["auto", "bwrap", "landlock", "wasm", "remote"] = Field(
        "auto", description="auto: the strongest that withstands its own probe."
    )
    url: str | None = Field(None, description="Of a SandboxFusion service, for `remote`.")
    unsafe_local: bool = Field(False, description="If no sandbox works, run model code with your own rights.")
    packages: Names = Field(
        ("numpy", "sympy"),
        description="What a model's programs may import beyond the standard library, with what that needs.",
    )

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        return None if url is None else plain_address(url)


class Lora(Section):
    """Low-rank adapters: train a few weights, keep the rest as the reference."""

    rank: int = Field(16, ge=1, le=65_536, description="Rank of the update.")
    alpha: float = Field(32.0, gt=0, le=10**6, description="Scale of the update: alpha / rank.")
    targets: str | tuple[str, ...] | None = Field(
        "all-linear", description="Which linear layers; null: peft's choice for the architecture."
    )


class Launch(Section):
    """Where the processes of a run are."""

    processes: int = Field(
        1,
        ge=1,
        le=4096,
        description="Processes on this machine that train together, one for each GPU; torchrun starts more.",
    )
    restarts: int = Field(
        3,
        ge=0,
        le=10**6,
        description="How often they are started again, from the last checkpoint, after one of them died.",
    )
    ray: str | None = Field(
        None,
        description="Address of a Ray cluster, as 10.0.0.1:6379, that places samplers and users' reward "
        "functions; auto: the one this machine belongs to, else one of its own.",
    )
    samplers: int = Field(
        0, ge=0, le=65_536, description="Samplers that Ray places, each with a GPU where the cluster has any."
    )

    @model_validator(mode="after")
    def _placed(self) -> Launch:
        if self.samplers and self.ray is None:
            raise ValueError("samplers are placed by Ray: add ray: auto, or its address")
        return self


class Config(Section):
    """One run, or one stage of it."""

    model: Annotated[str | GivenModel, or_given(str)] = Field(
        "tiny", description="Hub id, folder, or `tiny`: built on the spot; from Python a model, too."
    )
    method: Method = Field(
        "rl",
        description="Reinforcement; supervised; from preferences (dpo to hinge); a reward model; or what "
        "makes data for later stages: pairs, rejection_sampling, filter.",
    )
    loss: dict[str, object] = Field(
        {}, description="Settings of the method's loss (dpo to hinge, reward_model), as {beta: 0.1}."
    )
    output: Path = Field(Path("runs/run"), description="Folder of the run.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Of every random draw.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of the weights; auto: float32 on CPU, bfloat16 on GPU."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What a model's products multiply on a CPU whose weights are float32; auto: bfloat16 "
        "where this processor was measured to be 1.5 times as fast with it, else float32.",
    )
    longrope: Literal["short", "long"] = Field(
        "short",
        description="By which table a model of the rope type `longrope` (Phi 3 and 4 mini) turns all "
        "sequences: short, and none is longer than it is for; long, up to the context.",
    )
    device: str = Field("auto", description="`cpu`, `cuda`, `cuda:1`; auto: the first GPU if any.")
    threads: int = Field(
        0,
        ge=0,
        le=MOST_THREADS,
        description="CPU threads; 0: OMP_NUM_THREADS, or one per core that this process may use.",
    )
    data: Data = Data()
    rewards: tuple[object, ...] = Field(
        (),
        description="Reward functions: names, module.py:function, {name: weight} or {name: settings}; "
        "`verdict: true` in one marks what says if a completion is correct.",
    )
    scoring: Scoring = Scoring()
    sandbox: Sandbox = Sandbox()
    rollout: Rollout = Rollout()
    algorithm: str | dict[str, object] = Field("dapo", description="A preset, or a mapping over its axes.")
    train: Train = Train()
    eval: Eval = Eval()
    keep: Keep = Keep()
    guards: Guards = Guards()
    tracker: Literal["wandb", "tensorboard", "trackio", "mlflow"] | None = Field(
        None, description="Who gets a copy of all numbers; offline. The run folder has them anyway."
    )
    lora: Lora | None = Field(None, description="Train adapters instead of all weights.")
    launch: Launch = Launch()
    stages: tuple[dict[str, object], ...] = Field(
        (), description="A pipeline: each stage overrides this config and starts from the last model."
    )

    @model_validator(mode="after")
    def _somebody_samples(self) -> Config:
        servers = self.rollout.sampler
        if servers is not None and not servers.url and not self.launch.samplers:
            raise ValueError("rollout.sampler.url: which servers? Give at least one address")
        return self
