"""TRL's names: all of them known, each meaning what it means there, or refused with what to write."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from covey.config import trl
from covey.config.algorithm import build_algorithm, describe
from covey.config.load import load_config
from covey.config.rows import key_paths
from covey.config.trl_loss import algorithm_of
from covey_verify.errors import ConfigError

OF_SCRIPTS = ("ModelConfig", "ScriptArguments", "GRPOScriptArguments")
ALL_NAMES = frozenset(trl.DEFAULTS).union(*(trl.trl_table(name) for name in OF_SCRIPTS))


def test_every_name_of_trl_is_in_the_table_once() -> None:
    assert ALL_NAMES == trl.NAMES - trl.OLD_NAMES
    kinds = [*trl.SAME_MEANING, *trl.LOSS, *trl.ARGUMENTS]
    assert len(kinds) == len(set(kinds)) == len(trl.NAMES)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_the_table_is_that_of_the_installed_trl() -> None:
    from trl import GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOConfig, ModelConfig, GRPOScriptArguments)
    assert {f.name for kind in kinds for f in dataclasses.fields(kind)} == ALL_NAMES
    made = GRPOConfig(output_dir=None, use_cpu=True, bf16=False)
    every = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    found = {n: getattr(made, n) if d is dataclasses.MISSING else d for n, d in every.items()}
    assert found == trl.DEFAULTS


def test_what_to_write_instead_are_settings() -> None:
    settings = set(key_paths())
    assert set(trl.SAME_MEANING.values()) <= settings
    for name, argument in trl.ARGUMENTS.items():
        keys = re.findall(r"(?:train|rollout|eval|data)(?:\.\w+)+", argument.remark)
        assert set(keys) <= settings, name


def algorithm(**given: Any) -> dict[str, Any]:
    """What TRL's names come to, without what is empty."""
    full = describe(build_algorithm(algorithm_of(given)))
    return {axis: value for axis, value in full.items() if value not in (None, [], 0.0)}


def clip(low: float, high: float, dual: float | None = None) -> dict[str, Any]:
    return {"name": "clip", "clip_low": low, "clip_high": high, "dual_clip": dual}


TRL_DEFAULT = {
    "advantage": {"name": "group_zscore", "ddof": 1, "eps": 1e-4, "single": "zero"},
    "ratio": {"name": "token"},
    "surrogate": clip(0.2, 0.2),
    "reduce": {"name": "token_mean", "eps": 0.0},
    "old": "trainer",
}
CENTRED = {"name": "group_centered", "single": "zero"}


def rows_of(name: str, **settings: object) -> dict[str, object]:
    """A mean over completions, those without a trained token included."""
    return {"name": name, "rows": "all", **settings}


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"loss_type": "dapo"}, {}),
        ({"epsilon": 0.1}, {"surrogate": clip(0.1, 0.1)}),
        ({"epsilon_high": 0.28}, {"surrogate": clip(0.2, 0.28)}),
        ({"epsilon": 0.1, "epsilon_high": 0.28, "delta": 4}, {"surrogate": clip(0.1, 0.28, 4)}),
        ({"loss_type": "grpo"}, {"reduce": rows_of("sequence_mean", eps=0.0)}),
        ({"loss_type": "dr_grpo"}, {"reduce": rows_of("constant_length", length=None)}),
        (
            {"loss_type": "luspo", "epsilon": 2e-3, "importance_sampling_level": "sequence"},
            {
                "ratio": {"name": "sequence"},
                "surrogate": clip(2e-3, 2e-3),
                "reduce": rows_of("sequence_sum"),
            },
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5},
            {"surrogate": {"name": "cispo", "cap": 5, "floor": 0}},
        ),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
            {
                "surrogate": {"name": "sapo", "tau_up": 1.0, "tau_down": 1.2},
                "reduce": rows_of("sequence_mean", eps=0.0),
            },
        ),
        (
            {"loss_type": "vespo", "vespo_k_neg": 4},
            {
                "ratio": {"name": "completion"},
                "surrogate": {"name": "vespo", "k_up": 2, "lam_up": 3, "k_down": 4, "lam_down": 2},
            },
        ),
        ({"scale_rewards": False}, {"advantage": CENTRED}),
        ({"scale_rewards": "none"}, {"advantage": CENTRED}),
        ({"scale_rewards": True}, {}),
        (
            {"scale_rewards": "batch"},
            {"advantage": CENTRED, "whiten": {"name": "batch_std", "of": "rewards", "ddof": 1, "eps": 1e-4}},
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            {
                "advantage": {"name": "component_zscore", "ddof": 1, "eps": 1e-4, "single": "zero"},
                "whiten": {"name": "sample_zscore", "ddof": 1, "eps": 1e-4},
            },
        ),
        ({"off_policy_mask_threshold": 0.5}, {"correction": [{"name": "off_policy_mask", "delta": 0.5}]}),
        ({"entropy_coef": 0.01}, {"entropy": {"coef": 0.01, "target": None}}),
        ({"beta": 0.0}, {}),
    ],
)
def test_a_loss_of_trl_is_what_it_is_there(given: dict[str, Any], differs: dict[str, Any]) -> None:
    assert algorithm(**given) == {**TRL_DEFAULT, **differs}


def test_beta_brings_trls_kl() -> None:
    kl = algorithm(beta=0.02)["kl"]
    assert (kl["estimator"], kl["coef"], kl["place"], kl["gradient"]) == (
        {"name": "k3"},
        0.02,
        "loss",
        "ratio",
    )
    assert algorithm(beta=0.02, use_bias_correction_kl=False)["kl"]["gradient"] == "formula"
    kl = algorithm(beta=0.02, sync_ref_model=True)["kl"]
    assert (kl["refresh_every"], kl["refresh_mix"]) == (512, 0.6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss_type": "bnpo"}, "use loss_type: dapo"),
        ({"loss_type": "gspo"}, "TRL has grpo"),
        ({"loss_type": ["grpo"]}, "unknown"),
        ({"loss_type": "cispo"}, "set epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 5, "epsilon": 0.1}, "epsilon has no effect"),
        ({"delta": 4, "loss_type": "sapo"}, "delta has no effect with TRL's loss_type sapo"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "always weights by sequence"),
        ({"loss_type": "vespo", "beta": 0.1}, "use_bias_correction_kl: false"),
        ({"importance_sampling_level": "word"}, "is unknown; TRL has"),
        ({"scale_rewards": "std"}, "is unknown; TRL has"),
        ({"scale_rewards": ["group"]}, "is unknown; TRL has"),
        ({"multi_objective_aggregation": "max"}, "is unknown; TRL has"),
        ({"sync_ref_model": True}, "set beta"),
        ({"beta": 0.1, "ref_model_sync_steps": 9}, "without sync_ref_model"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "mean over tokens"),
        ({"epsilon": "much"}, "clip_low"),
    ],
)
def test_what_trl_ignores_or_covey_cannot_do_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values=given)
    assert says in str(caught.value)
    assert next(iter(given)) in str(caught.value) or len(given) > 1


def test_names_that_mean_the_same_are_renamed_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_generations: 4\nlr_scheduler_type: constant_with_warmup\noptim: adamw_torch_fused\n")
    resolved = load_config(file, ["--learning-rate", "1e-5", "--gradient_checkpointing", "true"])
    train = resolved.config.train
    assert (resolved.config.rollout.group_size, train.lr, train.schedule) == (4, 1e-5, "constant")
    assert (train.optimizer, train.recompute_layers) == ("adamw", True)
    assert f"{file}:1: num_generations is read as rollout.group_size" in resolved.notes
    assert "--learning-rate: learning_rate is read as train.lr" in resolved.notes
    assert any("TRL's default is loss_type: dapo" in note for note in resolved.notes)
    assert resolved.origins["rollout.group_size"] == f"{file}:1"
    with pytest.raises(ConfigError, match="'polynomial' is not supported; use linear"):
        load_config(overrides=["--lr_scheduler_type", "polynomial"])
    with pytest.raises(ConfigError, match=r"rollout.group_size, which is already set .*:2.*; keep one"):
        file.write_text("num_generations: 4\nrollout: {group_size: 8}\n")
        load_config(file)


def test_a_loss_of_trl_is_said_and_stands_alone() -> None:
    resolved = load_config(overrides=["--loss_type", "dr_grpo", "--epsilon", "0.1"])
    assert describe(resolved.algorithm) == describe(
        build_algorithm(algorithm_of({"loss_type": "dr_grpo", "epsilon": 0.1}))
    )
    (note,) = resolved.notes
    assert note.startswith("loss_type, epsilon: read as TRL's loss")
    assert "clip_low: 0.1, clip_high: 0.1" in note
    with pytest.raises(
        ConfigError, match=r"--beta: beta and algorithm \(--algorithm\) both define"
    ) as caught:
        load_config(overrides=["--algorithm", "grpo", "--beta", "0.02"])
    assert "kl: {estimator: k3, coef: 0.02" in str(caught.value)


def test_names_of_trl_inside_stages() -> None:
    stages = [
        {"method": "sft", "max_steps": 3},
        {"num_generations": 4, "loss_type": "grpo", "beta": 0.01, "train": {"updates_per_batch": 2}},
    ]
    first, second = load_config(values={"stages": stages, "epsilon": 0.1}).stages()
    assert first.config.train.steps == 3
    assert second.config.rollout.group_size == 4
    assert second.algorithm.surrogate.settings["clip_high"] == 0.1
    assert second.algorithm.kl is not None and second.algorithm.kl.coef == 0.01
    with pytest.raises(ConfigError, match=r"stage 1-rl.*for TRL's use_peft write lora"):
        load_config(values={"stages": [{"use_peft": True}]})


def test_trls_steps_are_updates() -> None:
    assert load_config(overrides=["--max_steps", "8"]).config.train.steps == 8
    with pytest.raises(ConfigError, match=r"max_steps counts optimizer steps.*each of 4"):
        load_config(overrides=["--max_steps", "8", "--num_iterations", "2", "--train.updates_per_batch", "2"])


@pytest.mark.parametrize("name", sorted(trl.ARGUMENTS))
def test_no_other_name_is_guessed_at(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"--{name}", "1"])
    assert "did you mean" not in str(caught.value)
    assert f"TRL's {name} " in str(caught.value)
