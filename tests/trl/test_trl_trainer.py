"""Scripts written for TRL's trainers: they run with another import, or are refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.training.objects import ROWS, Dataset, live, varied, weights
from tests.trl.scripts import TEXTS, by_form, quick
from transformers import TrainerCallback, TrainerState

import covey
from covey.models.tiny import build_model, build_tokenizer
from covey.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from covey_verify.errors import CoveyError


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
from covey_verify.extract import find_boxed as extract_boxed  # from my_answers import extract_boxed
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
    with pytest.raises(ValueError, match="`model` and `ref_model` are the same object"):
        DPOTrainer(
            given["model"], given["model"], quick(DPOConfig, tmp_path),
            processing_class=given["tokenizer"], train_dataset=[{"chosen": "1+1=2", "rejected": "1+1=3"}],
        )  # fmt: skip
