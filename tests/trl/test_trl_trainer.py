"""Scripts written for TRL's trainers: they run with another import, or are refused in words."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.training.objects import ROWS, Dataset, live, varied, weights
from transformers import HfArgumentParser, TrainerCallback, TrainerState

import covey
from covey.config.algorithm import describe
from covey.config.load import load_config
from covey.config.trl import DEFAULTS, SAME
from covey.models.tiny import build_model, build_tokenizer
from covey.runs.rollouts import read_rollouts
from covey.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    TrlParser,
)
from covey.trl.meanings import MEANINGS
from covey.trl.settings import SCHEDULES, SETTINGS, config_notes
from covey_verify.errors import ConfigError, CoveyError

CONFIGS = (GRPOConfig, RLOOConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig)


def settings_of(args: Any, rows: int) -> dict[str, object]:
    """covey's settings of a config, for a table of ``rows`` rows."""
    kind = type(args).__name__
    return SETTINGS[kind](args, SCHEDULES[kind](args, rows))


def by_length(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """As TRL calls it: lists, and the dataset's columns by name."""
    assert len(prompts) == len(completions) == len(answer)
    return [float(len(text)) for text in completions]


def test_a_pasted_script_trains_the_model_it_was_given(tmp_path: Path, capsys) -> None:
    given = live()
    before = weights(given["model"])
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), num_generations=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, max_completion_length=4, num_train_epochs=1, learning_rate=1e-3,
        temperature=0.9, beta=0.04, num_iterations=2, use_vllm=False, bf16=False, logging_steps=1,
        report_to="none", save_strategy="steps", save_steps=1, push_to_hub=False,
        eval_on_start=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=given["model"], processing_class=given["tokenizer"], reward_funcs=[by_length], args=args,
        train_dataset=Dataset(ROWS), eval_dataset=Dataset(ROWS[:2]),
    )  # fmt: skip
    output = trainer.train()
    assert trainer.result is not None
    # 16 rows, 4 prompts of 2 in a batch of 4 * 2; each batch twice
    assert (trainer.result.steps, output.global_step, trainer.state.global_step) == (4, 8, 8)
    assert any((before[name] != weight).any() for name, weight in weights(trainer.model).items())
    said = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert said["rollout"]["prompts_per_step"] == 4
    assert (said["train"]["updates_per_batch"], said["train"]["inner_epochs"]) == (1, 2)
    assert (said["train"]["schedule"], said["train"]["betas"], said["seed"]) == ("linear", [0.9, 0.999], 42)
    assert (said["algorithm"]["kl"]["coef"], said["algorithm"]["surrogate"]["clip_high"]) == (0.04, 0.2)
    out = capsys.readouterr().out
    assert "num_iterations" not in out  # nothing to say of a name that means the same
    logs = trainer.state.log_history
    assert logs[0]["eval_reward"] > 0  # eval_on_start
    assert logs[0]["step"] == 0
    assert [log["step"] for log in logs if "loss" in log] == [2, 4, 6, 8]
    assert {"reward", "reward_std", "kl", "completions/mean_length", "rewards/by_length/mean"} <= set(logs[1])
    assert logs[-1]["train_loss"] == output.training_loss
    trainer.save_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").is_file()


@pytest.mark.parametrize("given", ["tiny", "object", "lora"])
def test_a_run_that_a_guard_stops_ends_as_in_trl_and_can_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """The first thing a smoke test of a few steps meets: a model that solves nothing."""
    made = live() if given != "tiny" else {"model": "tiny", "tokenizer": None}
    args = GRPOConfig(
        output_dir=tmp_path / "run", max_completion_length=4, max_steps=2, num_generations=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=made["model"], processing_class=made["tokenizer"], reward_funcs=nothing, args=args,
        train_dataset=ROWS, peft_config=lora() if given == "lora" else None,
    )  # fmt: skip
    output = trainer.train()
    assert (output.global_step, trainer.result) == (2, None)
    assert "without changing a single weight" in str(output.metrics["stopped"])
    assert "trained 2 steps without changing a single weight" in capsys.readouterr().out
    trainer.save_model(tmp_path / "mine")
    assert (tmp_path / "mine" / ("adapter_" * (given == "lora") + "model.safetensors")).is_file()


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


LISTING = """
from covey_verify.extract import boxed as extract_boxed  # from my_answers import extract_boxed
from covey.trl import GRPOConfig, GRPOTrainer             # from trl import GRPOConfig, GRPOTrainer

def reward_correct(completions, answer, **kwargs):        # the verifier
    return [1.0 if extract_boxed(c) == a else 0.0
            for c, a in zip(completions, answer)]

cfg = GRPOConfig(
    num_generations=8,          # G
    temperature=0.9,
    max_completion_length=2048,
    beta=0.0,                   # several RLVR recipes drop the KL penalty
    num_iterations=1,           # PPO-style inner epochs per batch
    use_vllm=True,              # rollouts dominate wall-clock; offload them
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-7B",
    reward_funcs=[reward_correct, reward_format],
    args=cfg,
    train_dataset=ds,
)
trainer.train()
"""
"""As an explainer of GRPO prints it for TRL, two imports changed; `ds` and one reward are the reader's."""


def test_a_published_listing_runs_with_its_imports_changed(tmp_path: Path, monkeypatch, capsys) -> None:
    """Nothing of it is left out: an engine in the process stands for the vLLM that TRL would start there."""
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(row["prompt"] for row in ROWS)
    model = build_model(tokenizer, 0, context=4096, hidden=32, layers=1)
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 9))  # some ten tokens, not 2,048
    for part in (model, tokenizer):
        part.save_pretrained("Qwen/Qwen2.5-7B")  # a folder stands for the model of that name

    def reward_format(completions: list[str], **_: Any) -> list[float]:
        return [float("a" in text) for text in completions]

    exec(LISTING, {"ds": Dataset(ROWS[:2]), "reward_format": reward_format, "__name__": "listing"})
    said = yaml.safe_load((tmp_path / "trainer_output" / "config.yaml").read_text())
    rollout = said["rollout"]
    assert [rollout[k] for k in ("group_size", "temperature", "max_tokens")] == [8, 0.9, 2048]
    assert (said["algorithm"]["kl"], said["train"]["inner_epochs"], said["train"]["steps"]) == (None, 1, 6)
    out = capsys.readouterr().out
    assert (
        "use_vllm=True without vllm_server_base_url: covey samples with its own engine in this process" in out
    )
    assert "reward_correct says what is correct, the only reward that asks for a column (answer)" in out
    assert "counts as correct if reward_correct > 0.5" in out


def by_form(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


@covey.reward(verdict=True)
def declared(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("functions", "verdict"),
    [
        ([by_form, by_length], "by_length"),
        ([by_length, declared], None),  # it says so itself
        ([by_length], None),  # there is no other
        ([by_form, varied], "by_form"),  # which of them is not known; training follows the sum of both
    ],
)
def test_the_verdict_is_the_only_reward_that_knows_the_problem(functions: list[Any], verdict: str) -> None:
    trainer = GRPOTrainer("tiny", functions, GRPOConfig(), ROWS)
    marked = [s["name"] for r in trainer.rewards for s in r.values() if s.get("verdict")]
    assert marked == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    ("names", "rows", "sizes"),
    [
        ({}, 10, (1, 1, 30)),
        ({"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 7}, 9, (2, 1, 7)),
        ({"gradient_accumulation_steps": 4, "num_train_epochs": 0.5}, 80, (4, 1, 10)),
        ({"steps_per_generation": 4, "max_steps": 6}, 80, (4, 4, 2)),
        ({"generation_batch_size": 64, "num_iterations": 2, "max_steps": 16}, 80, (8, 8, 1)),
    ],
)
def test_batches_are_those_of_trl(names: dict[str, Any], rows: int, sizes: tuple[int, int, int]) -> None:
    found = settings_of(GRPOConfig(**names), rows)
    keys = ("rollout.prompts_per_step", "train.updates_per_batch", "train.steps")
    assert tuple(found[key] for key in keys) == sizes


SPELLED = {n: v for n, v in DEFAULTS.items() if n != "output_dir" and n in GRPOConfig.defaults()}
"""TRL's defaults."""


def test_what_is_not_given_has_the_default_of_trl() -> None:
    """As settings: a run of neither, and one of all of them spelled out, learns the same."""
    plain, spelled = GRPOConfig(), GRPOConfig(**SPELLED)
    assert spelled.notes() == []
    both = [
        load_config(values={"model": "tiny", "data": {"task": "sums"}, **settings_of(config, 1000)}).config
        for config in (plain, spelled)
    ]
    assert both[0] == both[1]
    elsewhere = (
        "max_steps",
        "optim",
        "save_steps",
        "gradient_checkpointing",
        "activation_checkpointing",
    )
    for name, key in SAME.items():
        if SPELLED.get(name) is not None and name not in elsewhere:
            section, _, field = key.rpartition(".")
            holder = getattr(both[0], section) if section else both[0]
            assert getattr(holder, field) == SPELLED[name], name


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_is_a_dataclass_with_trls_fields(config: Any, tmp_path: Path) -> None:
    args = config(output_dir=tmp_path, learning_rate=0.5)
    assert (args.learning_rate, dataclasses.replace(args, seed=7).seed) == (0.5, 7)
    names = {field.name for field in dataclasses.fields(config)}
    assert names == set(MEANINGS[config.__name__]) & names, "every field has a meaning"
    (parsed,) = HfArgumentParser(config).parse_args_into_dataclasses(["--learning_rate", "0.5"])
    assert parsed.changed_fields() == {"learning_rate": 0.5, "output_dir": "trainer_output"}
    with pytest.raises(TypeError, match="num_generation'"):
        config(num_generation=4)


def test_a_parser_reads_a_file_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learning_rate: 0.5\nbeta: 0.2\nenv: {}\n")
    words = ["--config", str(tmp_path / "a.yaml"), "--beta", "0.3", "--report_to", "wandb"]
    (args,) = TrlParser(GRPOConfig).parse_args_and_config(words)
    assert (args.learning_rate, args.beta) == (0.5, 0.3)
    assert settings_of(args, 100)["tracker"] == "wandb"
    (tmp_path / "a.yaml").write_text("learning_rat: 0.5\n")
    with pytest.raises(ValueError, match="learning_rat"):
        TrlParser(GRPOConfig).parse_args_and_config(words[:2])


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("config", CONFIGS)
def test_fields_are_those_of_the_installed_trl(config: Any) -> None:
    import trl

    theirs = {field.name for field in dataclasses.fields(getattr(trl, config.__name__))}
    assert theirs <= {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        *((GRPOConfig, "adam_epsilon", 1e-5), (GRPOConfig, "repetition_penalty", 1.1)),
        *((GRPOConfig, "data_seed", 3), (RLOOConfig, "reward_clip_range", [-1.0, 1.0])),
        *((DPOConfig, "ld_alpha", 0.5), (SFTConfig, "neftune_noise_alpha", 5.0)),
    ],
)
def test_what_differs_from_trls_default_is_not_passed_over(config: Any, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        config(**{name: value})


def test_what_changes_no_result_is_left_out_with_a_note() -> None:
    names = {
        "use_liger_kernel": True, "dataloader_num_workers": 4, "dataloader_pin_memory": False,
        "ddp_timeout": 3600, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "vllm_gpu_memory_utilization": 0.6, "per_device_eval_batch_size": 3,
    }  # fmt: skip
    notes = GRPOConfig(**names).notes()
    assert sorted(note.partition(":")[0] for note in notes) == sorted(names)


def test_what_means_something_else_is_said() -> None:
    args = GRPOConfig(warmup_ratio=0.1, weight_decay=0.01, lr_scheduler_type="cosine", max_steps=20)
    found = settings_of(args, 100)
    assert (found["train.warmup_steps"], found["train.weight_decay"]) == (2, 0.01)
    assert [note.partition(":")[0] for note in args.notes()] == ["weight_decay", "warmup_ratio"]
    assert settings_of(GRPOConfig(warmup_steps=5), 100)["train.warmup_steps"] == 5
    # TRL's `constant` ignores the warm-up too.
    assert "train.warmup_steps" not in settings_of(
        GRPOConfig(warmup_steps=5, lr_scheduler_type="constant"), 100
    )


@pytest.mark.parametrize(
    ("names", "correction"),
    [
        ({}, [{"name": "masked", "level": "sequence", "low": 0.0, "high": 3.0}]),
        (
            {"mode": "token_truncate", "clip_max": 2.0},
            [{"name": "truncated", "level": "token", "cap": 2.0}],
        ),
        (
            {"mode": "token_mask", "clip_min": 0.5},
            [{"name": "masked", "level": "token", "low": 0.5, "high": 3}],
        ),
        ({"correction": False}, []),
    ],
)
def test_a_server_is_corrected_for_as_in_trl(names: dict[str, Any], correction: list[object]) -> None:
    given = {f"vllm_importance_sampling_{name}": value for name, value in names.items()}
    found = {
        url: settings_of(GRPOConfig(use_vllm=True, vllm_server_base_url=url, epsilon=0.1, **given), 1000)
        for url in ("http://127.0.0.1:8000", None)
    }
    served, own = (load_config(values={"data": {"task": "sums"}, **s}).algorithm for s in found.values())
    assert (describe(served)["correction"] or []) == correction
    assert {**describe(served), "correction": None} == {**describe(own), "correction": None}


def test_counts_that_end_with_a_batch_are_said() -> None:
    args = GRPOConfig(steps_per_generation=4, max_steps=6, save_steps=8)
    assert settings_of(args, 80)["train.steps"] == 2
    assert config_notes(args, SCHEDULES["GRPOConfig"](args, 80)) == [
        "max_steps=6 is rounded up to 8: a rollout batch is trained in 4 optimizer steps"
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("names", [{}, {"gradient_accumulation_steps": 4}, {"steps_per_generation": 4}])
def test_so_says_the_installed_trl(tmp_path: Path, names: dict[str, Any]) -> None:
    from trl import GRPOConfig as TrlConfig

    theirs = TrlConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **names)
    ours = settings_of(GRPOConfig(**names), 1000)
    assert ours["rollout.prompts_per_step"] == theirs.generation_batch_size // theirs.num_generations
    updates = theirs.steps_per_generation // theirs.gradient_accumulation_steps
    assert ours["train.updates_per_batch"] == updates
    assert ours["train.betas"] == [theirs.adam_beta1, theirs.adam_beta2]
    assert ours["seed"] == theirs.seed


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "on the servers that rollout.sampler.url names"),
        ({"deepspeed": "zero3.json"}, "write launch.processes"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "use loss_type: dapo"),
        ({"num_generations": 5}, "a multiple of 5 .num_generations."),
        (
            {"num_generations": 2, "per_device_train_batch_size": 64},
            "the dataset has 16 rows, but a rollout batch needs",
        ),
        ({"reward_weights": [1.0, 2.0]}, r"reward weights .2. must match"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams: sampling has temperature"),
    ],
)
def test_what_covey_has_not_is_refused_in_words(tmp_path: Path, names: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GRPOTrainer(
            model="tiny", reward_funcs=varied, args=GRPOConfig(output_dir=tmp_path / "run", **names),
            train_dataset=ROWS,
        ).train()  # fmt: skip
    assert not (tmp_path / "run").exists()


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": {"q_proj"}, **settings})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"train_dataset": []}, "the dataset has 0 rows"),
        ({"reward_funcs": None}, "No reward source provided"),
        ({"reward_funcs": 3}, "a reward must be a function, or the folder or hub id"),
        ({"reward_funcs": "no/such"}, "no/such"),
        ({"rollout_func": print}, "rollout_func has no counterpart"),
        ({"peft_config": 3}, "must be a config of peft"),
        ({"peft_config": PromptTuningConfig(task_type="CAUSAL_LM")}, "prompt-learning"),
        ({"reward_processing_classes": [None, None]}, "must match the number of reward functions"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused_in_words(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    args = GRPOConfig(output_dir=tmp_path / "run", max_completion_length=4)
    all_arguments = {"model": "tiny", "reward_funcs": varied, "train_dataset": ROWS, **arguments}
    with pytest.raises(CoveyError, match=said):
        GRPOTrainer(args=args, **all_arguments).train()


def test_weights_and_servers_are_coveys_settings(tmp_path: Path) -> None:
    args = GRPOConfig(
        output_dir=tmp_path, reward_weights=[1.0, 0.5], bf16=True, use_vllm=True, use_cpu=True,
        vllm_server_base_url="http://127.0.0.1:8000", shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer("tiny", [varied, by_form], args, ROWS)
    assert trainer.rewards[0] == {varied: {"weight": 1.0, "name": "varied", "verdict": True}}
    assert trainer.rewards[1] == {by_form: {"weight": 0.5, "name": "by_form"}}
    found = trainer.settings
    assert (found["dtype"], found["device"]) == ("bfloat16", "cpu")
    assert found["rollout.sampler"] == {"url": ["http://127.0.0.1:8000"]}


class Watching(TrainerCallback):
    """Notes the events of a run, and stops it after ``last`` steps."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.events: list[str] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        assert args.learning_rate > 0
        assert state.max_steps > 0
        assert given["model"] is not None
        self.events.append("begin")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        self.events.append("log" if "loss" in logs else "other log")

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        assert "eval_loss" in metrics
        self.events.append("evaluate")

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.events.append("save")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.last

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.events.append("end")


def quick(config: Any, folder: Path, **names: Any) -> Any:
    """A config of a few fast steps."""
    given = {
        "output_dir": folder / "run",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "disable_tqdm": True,
        **names,
    }
    if config in (GRPOConfig, RLOOConfig):
        given |= {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}
    return config(**given)


def test_callbacks_see_the_run_and_may_stop_it(tmp_path: Path) -> None:
    given = live()
    watching = Watching(3)
    args = quick(RLOOConfig, tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2, max_steps=6)
    trainer = RLOOTrainer(
        model=given["model"], processing_class=given["tokenizer"], reward_funcs=varied, args=args,
        train_dataset=ROWS, eval_dataset=ROWS[:2], callbacks=[watching],
    )  # fmt: skip
    before = weights(trainer.ref_model)
    output = trainer.train()
    assert output.global_step == 3
    seen = [event for event in watching.events if event != "save"]
    assert seen == ["begin", "step 1", "log", "step 2", "log", "other log", "evaluate", "step 3", "log",
                    "other log", "end"]  # fmt: skip
    assert "save" in watching.events
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer.ref_model).items())
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)


TEXTS = [{"text": f"{a}+{b}={a + b}"} for a in range(4) for b in range(4)]
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 5)}
    for a in range(3)
    for b in range(4)
]
JUDGED = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b), "label": b % 2 == 0} for a in range(4) for b in range(4)
]


@pytest.mark.parametrize(
    ("trainer", "config", "rows"),
    [
        (SFTTrainer, SFTConfig, TEXTS),
        (DPOTrainer, DPOConfig, PAIRS),
        (KTOTrainer, KTOConfig, JUDGED),
        (RewardTrainer, RewardConfig, PAIRS),
    ],
)
def test_trainers_of_given_rows(tmp_path: Path, trainer: Any, config: Any, rows: Any) -> None:
    from transformers import Qwen2ForSequenceClassification

    given = live()
    model = given["model"]
    if trainer is RewardTrainer:
        torch.manual_seed(0)
        model.config.num_labels = 1
        model.config.pad_token_id = given["tokenizer"].pad_token_id or 0
        model = Qwen2ForSequenceClassification(model.config)
    before = weights(model)
    made = trainer(
        model=model, args=quick(config, tmp_path, eval_strategy="epoch", num_train_epochs=2),
        processing_class=given["tokenizer"], train_dataset=rows, eval_dataset={"a": rows[:4], "b": rows[4:8]},
    )  # fmt: skip
    first = made.evaluate()
    output = made.train()
    assert output.global_step == made.state.global_step == 4  # two epochs of 12 or 16 rows, 8 at once
    logs = made.state.log_history
    losses = [log["eval_a_loss"] for log in logs if "eval_a_loss" in log]
    assert len(losses) == 3
    assert losses[0] == first["eval_a_loss"] > losses[-1]
    assert all(not torch.equal(before[n], w) for n, w in model.named_parameters())
    assert logs[-1]["train_loss"] == output.training_loss


@pytest.mark.parametrize(
    ("trainer", "config", "rows", "order"),
    [
        (SFTTrainer, SFTConfig, TEXTS, "text"),
        (DPOTrainer, DPOConfig, PAIRS, "chosen rejected"),
        (KTOTrainer, KTOConfig, JUDGED, "completion"),
        (RewardTrainer, RewardConfig, PAIRS, "chosen rejected"),
    ],
)
def test_a_users_metrics_are_computed_from_predictions_in_the_order_of_trl(
    tmp_path: Path, trainer: Any, config: Any, rows: Any, order: str
) -> None:
    """Of each evaluated batch first all chosen answers, then all rejected ones."""
    from transformers import Qwen2ForSequenceClassification

    given = live()
    words = given["tokenizer"]
    model = given["model"]
    if trainer is RewardTrainer:
        model.config.num_labels = 1
        model.config.pad_token_id = words.pad_token_id or 0
        model = Qwen2ForSequenceClassification(model.config)
    seen = []

    def length(found: Any) -> dict[str, float]:
        seen.append(found)
        return {"rows/count": float(len(found.predictions))}

    made = trainer(
        model, args=quick(config, tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1,
        per_device_eval_batch_size=2), processing_class=words, train_dataset=rows, eval_dataset=rows[:3],
        compute_metrics=length,
    )  # fmt: skip
    made.train()
    columns = order.split()
    assert made.state.log_history[-2]["eval_rows/count"] == 3 * len(columns)
    (found,) = seen
    if trainer is RewardTrainer:
        assert found.predictions.shape == (6, 1)
        assert found.label_ids == ()
        return
    expected = [row[name] for batch in (rows[:2], rows[2:3]) for name in columns for row in batch]
    read = [
        words.decode([i for i in labels if i >= 0], skip_special_tokens=True) for labels in found.label_ids
    ]
    assert all(text.endswith(answer) for text, answer in zip(read, expected, strict=True)), read
    assert found.predictions.shape[:2] == found.label_ids.shape
    with pytest.raises(ValueError, match="batch_eval_metrics=True: compute_metrics is called once"):
        trainer(model, args=quick(config, tmp_path, batch_eval_metrics=True), processing_class=words,
                train_dataset=rows, compute_metrics=length)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "method", "loss"),
    [
        ({}, "dpo", {"beta": 0.1}),
        ({"loss_type": "sigmoid_norm", "beta": 2.0}, "ln_dpo", {"beta": 2.0}),
        ({"f_divergence_type": "js_divergence"}, "dpo", {"beta": 0.1, "divergence": "jensen_shannon"}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25},
            "dpo",
            {"beta": 0.1, "divergence": "alpha", "alpha": 0.25},
        ),
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, "dpo", {"beta": 0.1}),
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            "mpo",
            {"beta": 0.1, "preference_weight": 0.8, "quality_weight": 0.2, "generation_weight": 1.0},
        ),
        (
            {"loss_type": "sft"},
            "mpo",
            {"beta": 0.1, "preference_weight": 0.0, "quality_weight": 0.0, "generation_weight": 1.0},
        ),
    ],
)
def test_losses_of_pairs_are_those_of_trl(names: dict[str, Any], method: str, loss: dict[str, Any]) -> None:
    settings = settings_of(DPOConfig(**names), 16)
    assert (settings["method"], settings["loss"]) == (method, loss)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"loss_type": "aot"}, "loss_type='aot': covey has one loss at a time, of sigmoid, .* or several of"),
        ({"loss_type": ["sigmoid", "hinge"]}, "or several of sigmoid, bco_pair, sft"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one weight for each of sigmoid, sft"),
        ({"loss_weights": [0.5]}, "a single loss has no weight"),
        ({"loss_type": "hinge", "f_divergence_type": "forward_kl"}, "only the sigmoid loss has another"),
        ({"f_divergence_type": "hellinger"}, "covey has reverse_kl, forward_kl, js_divergence, alpha_div"),
    ],
)
def test_losses_of_pairs_that_covey_has_not_are_refused(names: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(DPOConfig(**names), 16)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_takes_a_pair_as_two_judged_answers(tmp_path: Path, loss_type: str) -> None:
    pairs = [
        {"chosen": f"{n}+1={n + 1}", "rejected": f"{n}+1={n + 2}"}
        for n in range(4)  # the prompt is what both begin with
    ]
    given = live()
    trainer = KTOTrainer(
        given["model"], args=quick(KTOConfig, tmp_path, loss_type=loss_type, max_steps=2),
        processing_class=given["tokenizer"], train_dataset=pairs,
    )  # fmt: skip
    bad = {"prompt": "2+1=", "completion": "9", "label": False}
    assert trainer.evaluate([bad, bad])["eval_loss"] > 0  # nothing to compare with, but to measure
    trainer.train()
    rows = trainer.train_dataset
    read = [given["tokenizer"].decode(row["prompt_ids"] + row["completion_ids"]) for row in rows]
    assert [row["label"] for row in rows] == [True, False] * 4
    assert [text[:5] for text in read[:4]] == ["0+1=1", "0+1=2", "1+1=2", "1+1=3"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == loss_type


def test_adapters_stay_adapters(tmp_path: Path) -> None:
    """Whether the trainer adds them or is given them: the base does not move."""
    for number, mine in enumerate((False, True)):
        given = live()
        model = get_peft_model(given["model"], lora()) if mine else given["model"]
        trainer = SFTTrainer(
            model, quick(SFTConfig, tmp_path / str(number)), processing_class=given["tokenizer"],
            train_dataset=TEXTS, peft_config=None if mine else lora(),
        )  # fmt: skip
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {name for name in before if "lora_" in name}


def test_sft_trains_the_tokens_that_trl_trains(tmp_path: Path) -> None:
    given = live()
    words = given["tokenizer"]

    def prepared(row: dict[str, Any], **names: Any) -> dict[str, Any]:
        args = quick(SFTConfig, tmp_path, **names)
        made = SFTTrainer(given["model"], args, processing_class=words, train_dataset=[row])
        (found,) = made.train_dataset
        return found

    end = words.eos_token_id
    text = prepared({"text": "1+2=3"})
    assert text["input_ids"] == text["labels"] == [*words("1+2=3")["input_ids"], end]
    assert len(prepared({"text": "1+2=3"}, max_length=2)["input_ids"]) == 2
    pair = prepared({"prompt": "1+2=", "completion": "3"})
    asked = len(words("1+2=")["input_ids"])
    assert pair["labels"][:asked] == [-100] * asked
    assert pair["labels"][asked:] == pair["input_ids"][asked:]
    whole = prepared({"prompt": "1+2=", "completion": "3"}, completion_only_loss=False)
    assert whole["labels"] == whole["input_ids"] == pair["input_ids"]
    assert prepared({"input_ids": [1, 2, 3], "labels": [-100, 2, -100]})["labels"] == [-100, 2, -100]


def test_rows_in_order_are_taken_in_order(tmp_path: Path) -> None:
    given = live()
    args = quick(GRPOConfig, tmp_path, shuffle_dataset=False, max_steps=5)
    GRPOTrainer(given["model"], varied, args, ROWS[:6], processing_class=given["tokenizer"]).train()
    logs = [read_rollouts(tmp_path / "run", step).rows for step in range(5)]
    asked = [row["prompt"] for row in ROWS[:6]] * 2
    assert [{row["prompt"] for row in rows} for rows in logs] == [
        set(asked[n : n + 2]) for n in range(0, 10, 2)
    ]


def test_a_stream_is_read_as_far_as_steps_need(tmp_path: Path) -> None:
    def endless() -> Any:
        while True:
            yield from ROWS

    given = live()
    made = GRPOTrainer(
        given["model"], varied, quick(GRPOConfig, tmp_path, max_steps=2), endless(),
        processing_class=given["tokenizer"],
    )  # fmt: skip
    assert made.train().global_step == 2
    with pytest.raises(ConfigError, match="may be endless: set max_steps"):
        GRPOTrainer("tiny", varied, quick(GRPOConfig, tmp_path), endless())


class Interrupt(TrainerCallback):
    """Ends the process in the middle of a run, as Ctrl-C does."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


class Stream:
    """As `datasets.IterableDataset`: rows from the first one whenever it is iterated, no length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.read = 0

    def __iter__(self) -> Any:
        for row in self.rows * 9:
            self.read += 1
            yield row


@pytest.mark.parametrize(
    ("trainer", "config", "rows"), [(SFTTrainer, SFTConfig, TEXTS), (DPOTrainer, DPOConfig, PAIRS)]
)
@pytest.mark.parametrize("once", [False, True], ids=["data set", "generator"])
def test_a_run_on_a_stream_resumes_on_the_rows_that_it_had_not_seen(
    tmp_path: Path, trainer: Any, config: Any, rows: Any, once: bool
) -> None:
    def made(name: str, stream: Any, *callbacks: Any) -> Any:
        given = live()
        args = quick(config, tmp_path / name, max_steps=4, save_strategy="steps", save_steps=1,
                     train_sampling_strategy="sequential")  # fmt: skip
        return trainer(given["model"], args=args, processing_class=given["tokenizer"],
                       train_dataset=stream, callbacks=callbacks)  # fmt: skip

    def new() -> Any:
        return iter(Stream(rows)) if once else Stream(rows)

    whole = made("whole", new())
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        made("parts", new(), Interrupt()).train()
    stream = new()
    resumed = made("parts", stream)
    assert once or stream.read == 4 * 8, "no further than the steps need, and once"
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    ended = weights(whole.model)
    assert all(torch.equal(ended[name], weight) for name, weight in weights(resumed.model).items())
    with pytest.raises(KeyboardInterrupt):
        made("others", new(), Interrupt()).train()
    advanced = iter(Stream(rows))
    next(advanced)
    with pytest.raises(ConfigError, match=r"rows of data\.train .* A stream continues where the run was"):
        made("others", advanced).train(resume_from_checkpoint=True)


def test_scripts_end_with_the_methods_of_transformers(tmp_path: Path) -> None:
    """TRL's own scripts call `end`, transformers' write the numbers; what covey lacks is refused in words."""
    given = live()
    trainer = SFTTrainer(
        given["model"], quick(SFTConfig, tmp_path), processing_class=given["tokenizer"], train_dataset=TEXTS,
        eval_dataset=TEXTS[:4],
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.end()
    assert json.loads((tmp_path / "run" / "eval_results.json").read_text()) == metrics
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in given["model"].parameters())
    with pytest.raises(AttributeError, match="no attribute 'compute_loss'; covey makes batches"):
        trainer.compute_loss  # noqa: B018
    with pytest.raises(AttributeError, match=r"'nonsense'$"):
        trainer.nonsense  # noqa: B018


def test_a_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    given = live()
    with pytest.raises(ValueError, match="`model` and `ref_model` are one object"):
        DPOTrainer(
            given["model"], given["model"], quick(DPOConfig, tmp_path),
            processing_class=given["tokenizer"], train_dataset=[{"chosen": "1+1=2", "rejected": "1+1=3"}],
        )  # fmt: skip
