"""Settings of TRL's configs: they get TRL's defaults and covey's names, or are refused in words."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.objects import ROWS, varied
from tests.trl.scripts import by_form
from transformers import HfArgumentParser, get_scheduler

from covey.config.algorithm import describe
from covey.config.load import load_config
from covey.config.schema import Train
from covey.config.trl import DEFAULTS, SAME_MEANING
from covey.learner.schedule import learning_rate
from covey.trl import (
    DPOConfig,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    TrlParser,
)
from covey.trl.meanings import MEANINGS
from covey.trl.settings import SCHEDULES, SETTINGS, config_notes
from covey_verify.errors import ConfigError

CONFIGS = (GRPOConfig, RLOOConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig)


def settings_of(args: Any, rows: int) -> dict[str, object]:
    """covey's settings of a config, for a table of ``rows`` rows."""
    kind = type(args).__name__
    return SETTINGS[kind](args, SCHEDULES[kind](args, rows))


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
    for name, key in SAME_MEANING.items():
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
    assert [note.partition(":")[0] for note in args.notes()] == ["warmup_ratio"]
    assert settings_of(GRPOConfig(warmup_steps=5), 100)["train.warmup_steps"] == 5
    # TRL's `constant` ignores the warm-up too.
    assert "train.warmup_steps" not in settings_of(
        GRPOConfig(warmup_steps=5, lr_scheduler_type="constant"), 100
    )


@pytest.mark.parametrize(
    ("scheduler", "options", "course", "floor"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, "cosine", 0.1),
        ("cosine_with_min_lr", '{"min_lr": 1e-6}', "cosine", 0.1),
        ("polynomial", {}, "linear", 0.01),
        ("constant_with_warmup", None, "constant", 0.0),
    ],
)
def test_a_scheduler_may_end_above_zero(scheduler: str, options: object, course: str, floor: float) -> None:
    args = GRPOConfig(
        learning_rate=1e-5,
        lr_scheduler_type=scheduler,
        lr_scheduler_kwargs=options,
        max_steps=9,
        warmup_steps=3,
    )
    found = settings_of(args, 100)
    assert found["train.schedule"] == ({course: pytest.approx(floor)} if floor else course)
    model = torch.nn.Linear(1, 1)
    theirs = get_scheduler(
        scheduler, torch.optim.SGD(model.parameters(), 1e-5), 3, 9, args.lr_scheduler_kwargs
    )
    ours = Train(steps=9, lr=1e-5, warmup_steps=3, schedule=found["train.schedule"])
    for step in range(3, 9):  # the warm-ups differ by a step
        assert learning_rate(step, ours) == pytest.approx(theirs.lr_lambdas[0](step) * 1e-5)


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("inverse_sqrt", {}),
        ("polynomial", {"power": 2}),
        ("cosine", {"num_cycles": 3}),
        ("cosine_with_min_lr", {}),
    ],
)
def test_another_scheduler_is_refused(scheduler: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="lr_scheduler_kwargs"):
        settings_of(GRPOConfig(lr_scheduler_type=scheduler, lr_scheduler_kwargs=options, max_steps=3), 100)


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
