"""Scripts written for TRL's GRPOTrainer: they run with another import, or are refused in words."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import IA3Config, LoraConfig
from tests.train.test_from_objects import ROWS, Dataset, live, varied, weights

import covey
from covey.config.algorithm import describe
from covey.config.load import load_config
from covey.config.trl import DEFAULTS, SAME
from covey.models.tiny import build_model, build_tokenizer
from covey.trl import GRPOConfig, GRPOTrainer
from covey.trl import _lora as trl_lora
from covey_verify.errors import ConfigError, CoveyError


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
    assert trainer.result.steps == output.global_step == 4  # 16 rows, 4 prompts of 2 in a batch of 4 * 2
    assert any((before[name] != weight).any() for name, weight in weights(trainer.model).items())
    said = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert said["rollout"]["prompts_per_step"] == 4
    assert (said["train"]["updates_per_batch"], said["train"]["inner_epochs"]) == (1, 2)
    assert (said["train"]["schedule"], said["train"]["betas"], said["seed"]) == ("linear", [0.9, 0.999], 42)
    assert (said["algorithm"]["kl"]["coef"], said["algorithm"]["surrogate"]["clip_high"]) == (0.04, 0.2)
    out = capsys.readouterr().out
    assert "TRL's logging_steps has no equivalent: metrics, completions and curves are always written" in out
    assert "for TRL's eval_on_start leave it out" in out
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
    assert (tmp_path / "mine" / "model.safetensors").is_file()


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
        ([by_form, varied], None),  # which of them is not known, and a run refuses them
    ],
)
def test_the_verdict_is_the_only_reward_that_knows_the_problem(functions: list[Any], verdict: str) -> None:
    trainer = GRPOTrainer("tiny", functions, GRPOConfig(), ROWS)
    marked = [s["name"] for r in trainer._settings["rewards"] for s in r.values() if s.get("verdict")]
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
    found = GRPOConfig(**names).settings(rows)
    keys = ("rollout.prompts_per_step", "train.updates_per_batch", "train.steps")
    assert tuple(found[key] for key in keys) == sizes


SPELLED = {n: v for n, v in DEFAULTS.items() if n not in ("output_dir", "gradient_checkpointing")}
"""TRL's defaults; that of `gradient_checkpointing` changes memory alone, and is not taken over."""


def test_what_is_not_given_has_the_default_of_trl() -> None:
    """As settings: a run of neither, and one of all of them spelled out, learns the same."""
    plain, spelled = GRPOConfig(), GRPOConfig(**SPELLED)
    assert spelled.notes == []
    both = [
        load_config(values={"model": "tiny", "data": {"task": "sums"}, **config.settings(1000)}).config
        for config in (plain, spelled)
    ]
    assert both[0] == both[1]
    for name, key in SAME.items():
        if name in SPELLED and SPELLED[name] is not None and name not in ("max_steps", "optim"):
            section, _, field = key.rpartition(".")
            holder = getattr(both[0], section) if section else both[0]
            assert getattr(holder, field) == SPELLED[name], name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shuffle_dataset", False), ("top_entropy_quantile", 0.8), ("repetition_penalty", 1.1)),
        *(("adam_epsilon", 1e-5), ("data_seed", 3), ("train_sampling_strategy", "sequential")),
    ],
)
def test_what_differs_from_trls_default_is_not_passed_over(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}: "):
        GRPOConfig(**{name: value})


def test_what_changes_no_result_is_left_out_with_a_note() -> None:
    names = {
        "use_liger_kernel": True, "dataloader_num_workers": 4, "dataloader_pin_memory": False,
        "ddp_timeout": 3600, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "vllm_gpu_memory_utilization": 0.6, "attn_implementation": "sdpa",
    }  # fmt: skip
    notes = GRPOConfig(**names).notes
    assert [note.split()[1] for note in notes] == list(names)


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
        url: GRPOConfig(use_vllm=True, vllm_server_base_url=url, epsilon=0.1, **given).settings(1000)
        for url in ("http://127.0.0.1:8000", None)
    }
    served, own = (load_config(values={"data": {"task": "sums"}, **s}).algorithm for s in found.values())
    assert (describe(served)["correction"] or []) == correction
    assert {**describe(served), "correction": None} == {**describe(own), "correction": None}


def test_counts_that_end_with_a_batch_are_said() -> None:
    args = GRPOConfig(steps_per_generation=4, max_steps=6, save_steps=8)
    for _ in range(2):
        assert args.settings(80)["train.steps"] == 2
    assert args.notes == ["max_steps=6 is rounded up to 8: a rollout batch is trained in 4 optimizer steps"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("names", [{}, {"gradient_accumulation_steps": 4}, {"steps_per_generation": 4}])
def test_so_says_the_installed_trl(tmp_path: Path, names: dict[str, Any]) -> None:
    from trl import GRPOConfig as TrlConfig

    theirs = TrlConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **names)
    ours = GRPOConfig(**names).settings(1000)
    assert ours["rollout.prompts_per_step"] == theirs.generation_batch_size // theirs.num_generations
    updates = theirs.steps_per_generation // theirs.gradient_accumulation_steps
    assert ours["train.updates_per_batch"] == updates
    assert ours["train.betas"] == [theirs.adam_beta1, theirs.adam_beta2]
    assert ours["seed"] == theirs.seed


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"num_generation": 4}, "TRL has no argument 'num_generation'"),
        ({"warmup_ratio": 0.1}, "write train.warmup_steps"),
        ({"weight_decay": 0.01}, "TRL spares biases and norms"),
        ({"use_vllm": True, "vllm_mode": "server"}, "on the servers that rollout.sampler.url names"),
        ({"deepspeed": "zero3.json"}, "write launch.processes"),
        ({"loss_type": "bnpo"}, "use loss_type: dapo"),
        ({"num_generations": 5}, "a multiple of 5 .num_generations."),
        (
            {"num_generations": 2, "per_device_train_batch_size": 64},
            "the dataset has 16 rows, but a rollout batch needs",
        ),
        ({"save_steps": 0.1}, "write a number of steps"),
        ({"reward_weights": [1.0, 2.0]}, "2 reward_weights for 1 reward_funcs"),
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
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": []}, "the dataset has 0 rows"),
        ({"reward_funcs": 3}, "a reward must be a function, or the folder or hub id"),
        ({"reward_funcs": "no/such"}, "no/such"),
        ({"callbacks": [object()]}, "callbacks has no counterpart"),
        ({"peft_config": lora(lora_dropout=0.1)}, "lora has rank, alpha and targets"),
        ({"peft_config": lora(rank_pattern={"q_proj": 2})}, r"rank_pattern=.'q_proj': 2.: lora has rank"),
        ({"peft_config": lora(init_lora_weights="gaussian")}, "init_lora_weights='gaussian'"),
        ({"peft_config": lora(layers_to_transform=[0])}, "layers_to_transform="),
        ({"peft_config": IA3Config()}, "peft_config must be peft's LoraConfig, not IA3Config"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused_in_words(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    args = GRPOConfig(output_dir=tmp_path / "run", max_completion_length=4)
    all_arguments = {"model": "tiny", "reward_funcs": varied, "train_dataset": ROWS, **arguments}
    with pytest.raises(CoveyError, match=said):
        GRPOTrainer(args=args, **all_arguments).train()


def test_weights_adapters_and_servers_are_coveys_settings(tmp_path: Path, monkeypatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("covey.trl.api.train", lambda _, **settings: asked.update(settings))
    args = GRPOConfig(
        output_dir=tmp_path, reward_weights=[1.0, 0.5], bf16=True, use_vllm=True, use_cpu=True,
        vllm_server_base_url="http://127.0.0.1:8000",
    )  # fmt: skip
    GRPOTrainer("tiny", [varied, "a/judge"], args, ROWS, peft_config=lora()).train()
    assert asked["rewards"][0] == {varied: {"weight": 1.0, "name": "varied"}}
    assert asked["rewards"][1] == {"reward_model": {"model": "a/judge", "weight": 0.5}}
    assert asked["lora"] == {"rank": 4, "alpha": 8, "targets": ["q_proj"]}
    assert trl_lora(LoraConfig(task_type="CAUSAL_LM")) == {"rank": 8, "alpha": 8, "targets": None}
    assert (asked["dtype"], asked["device"]) == ("bfloat16", "cpu")
    assert asked["rollout.sampler"] == {"url": ["http://127.0.0.1:8000"]}
