"""`covey migrate`: settings of other trainers that mean the same, and every other one named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from covey.cli import main
from covey.config.load import load_config
from covey.migration.migrate import migrate
from covey.migration.read_settings import read_settings
from covey_verify.errors import ConfigError

VERL = """
#!/usr/bin/env bash
n=16
prompts=${PROMPTS:-64}
longest=$((1024 * 2))   # tokens
base=${BASE:-"/data/${TEAM:-us}"}

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="${base}/gsm8k/train.parquet" \\
    data.val_files=['a.parquet','b.parquet'] \\
    data.train_batch_size=${prompts} \\
    data.max_response_length=$longest \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    +reward_model.overlong_buffer.enable=True \\
    +reward_model.overlong_buffer.len=512 \\
    trainer.logger=['console','wandb'] \\
    trainer.total_training_steps=100 \\
    actor_rollout_ref.actor.something_new=3 $@
"""


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_script_of_verl_becomes_a_config_with_its_defaults(tmp_path: Path) -> None:
    text, migrated = migrate(written(tmp_path, "run.sh", VERL))
    resolved = load_config(values=yaml.safe_load(text))
    config = resolved.config
    assert config.rollout.group_size == 16
    assert config.rollout.prompts_per_step == 64, "the default of a variable"
    assert config.rollout.max_tokens == 2048, "a shell's sum"
    assert config.train.updates_per_batch == 4
    assert config.train.lr == 3e-6, "which YAML alone would read as a text"
    assert (config.train.weight_decay, config.train.betas) == (0.01, (0.9, 0.999)), "verl's own defaults"
    assert str(config.data.train) == "/data/us/gsm8k/train.parquet", "a default within a default"
    assert config.tracker == "wandb"
    assert resolved.algorithm.surrogate.all_settings["clip_high"] == 0.28
    assert resolved.algorithm.surrogate.all_settings["dual_clip"] == 3.0, "of its dialect"
    assert resolved.algorithm.kl is not None
    assert (resolved.algorithm.kl.estimator.name, resolved.algorithm.kl.coef) == ("k3", 0.001)
    assert config.rewards[1] == {"soft_overlong": {"limit": 2048, "buffer": 512, "weight": 1.0}}
    assert migrated.unsupported == {"actor_rollout_ref.actor.something_new: 3": "not known to covey"}
    assert any("join a.parquet, b.parquet" in note for note in migrated.notes)
    assert any(note.startswith("$MODEL: ") for note in migrated.notes)


def test_a_number_that_is_none_is_not_replaced_in_silence(tmp_path: Path) -> None:
    script = "python -m verl actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=$(nproc)\n"
    _, migrated = migrate(written(tmp_path, "run.sh", script))
    assert any(
        "actor_rollout_ref.rollout.n: $(nproc) is not a number; this is 1" in n for n in migrated.notes
    )


def actor_of_verl(folder: Path, *settings: str) -> Path:
    words = " ".join(f"actor_rollout_ref.actor.{setting}" for setting in settings)
    return written(folder, "run.sh", f"main_ppo algorithm.adv_estimator=grpo {words}\n")


@pytest.mark.parametrize(
    ("kind", "estimator", "gradient"),
    [("mse", "k2", "formula"), ("k3+", "k3", "straight_through"), ("new", "k3", "formula")],
)
def test_a_kl_of_verl_keeps_its_estimator(tmp_path: Path, kind: str, estimator: str, gradient: str) -> None:
    script = actor_of_verl(tmp_path, "use_kl_loss=True", f"kl_loss_type={kind}")
    text, migrated = migrate(script)
    kl = load_config(values=yaml.safe_load(text)).algorithm.kl
    assert kl is not None
    assert (kl.estimator.name, kl.gradient) == (estimator, gradient)
    assert (f"actor_rollout_ref.actor.kl_loss_type: {kind}" in migrated.unsupported) == (kind == "new")


def test_a_penalty_that_cannot_act_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k1 in the loss has an expected gradient of zero"):
        migrate(actor_of_verl(tmp_path, "use_kl_loss=True", "kl_loss_type=k1"))


def test_words_that_covey_does_not_have_are_named(tmp_path: Path) -> None:
    _, migrated = migrate(actor_of_verl(tmp_path, "loss_agg_mode=some-mean", "optim.lr_scheduler_type=wsd"))
    assert list(migrated.unsupported) == [
        "actor_rollout_ref.actor.optim.lr_scheduler_type: wsd",
        "actor_rollout_ref.actor.loss_agg_mode: some-mean",
    ]


def test_a_reward_of_verl_is_described_with_its_own_name(tmp_path: Path) -> None:
    script = actor_of_verl(tmp_path, "ppo_epochs=1").read_text().strip()
    _, migrated = migrate(written(tmp_path, "own.sh", f"{script} custom_reward_function.path=r.py\n"))
    assert any("compute_score(data_source, completion" in note for note in migrated.notes)
    assert not any("chooses by data_source" in note for note in migrated.notes)


def test_ppo_of_verl_has_its_critic(tmp_path: Path) -> None:
    script = "main_ppo actor_rollout_ref.model.path=m algorithm.lam=0.9 critic.optim.lr=2e-5\n"
    text, _ = migrate(written(tmp_path, "run.sh", script))
    algorithm = load_config(values=yaml.safe_load(text)).algorithm
    assert algorithm.critic is not None
    assert algorithm.critic.lr == 2e-5
    assert algorithm.advantage.all_settings["lam"] == 0.9


def test_axolotl_becomes_supervised_preferences_or_grpo(tmp_path: Path) -> None:
    common = {
        "base_model": "some/model",
        "learning_rate": 1e-5,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "warmup_steps": 0.1,
        "lora_r": 8,
        "lora_alpha": 16,
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "flash_attention": True,
        "sequence_len": 2048,
    }

    def config_of(**more: object):
        text, migrated = migrate(written(tmp_path, "run.yml", yaml.safe_dump({**common, **more})))
        assert "sequence_len: 2048" in migrated.unsupported
        assert any("0.1 of the steps" in note for note in migrated.notes)
        return load_config(values=yaml.safe_load(text)).config

    sft = config_of()
    assert (sft.method, sft.train.batch_size, sft.data.chat) == ("sft", 16, True)
    assert sft.lora is not None
    assert sft.lora.rank == 8
    assert config_of(rl="dpo", rl_beta=0.2).loss == {"beta": 0.2}
    hub = {"path": "openai/gsm8k", "name": "main", "split": "train", "revision": "e53f048"}
    assert str(config_of(datasets=[hub]).data.train) == "hub:openai/gsm8k@e53f048?config=main&split=train"
    trl = {"num_generations": 8, "max_completion_length": 64, "reward_funcs": ["rewards.good"], "beta": 0.0}
    grpo = config_of(rl="grpo", trl=trl)
    assert (grpo.rollout.group_size, grpo.rollout.prompts_per_step) == (8, 2)
    assert grpo.rewards == ({"rewards.py:good": 1.0},)
    with pytest.raises(ConfigError, match="rl: gkd has no counterpart"):
        config_of(rl="gkd")


def test_names_of_trl_become_coveys(tmp_path: Path) -> None:
    theirs = {"model_name_or_path": "some/model", "learning_rate": 1e-5, "num_generations": 4, "beta": 0.0}
    more = {"max_steps": 40, "warmup_ratio": 0.1, "use_peft": True, "lora_r": 8, "min_p": 0.1}
    text, migrated = migrate(written(tmp_path, "run.yaml", yaml.safe_dump({**theirs, **more})))
    config = yaml.safe_load(text)
    assert (config["train"]["steps"], config["train"]["warmup_steps"]) == (40, 4)
    assert config["train"]["schedule"] == "linear", "TRL's default"
    assert config["lora"] == {"rank": 8}
    assert list(migrated.unsupported) == ["min_p: 0.1"]
    assert config["model"] == "some/model"
    assert config["train"]["lr"] == 1e-5
    assert config["rollout"]["group_size"] == 4
    assert load_config(values=config).algorithm == load_config(values=theirs).algorithm


SCRIPT = """
import os
from trl import GRPOConfig, GRPOTrainer
raise RuntimeError("a script that is read is not run")
STEPS = 2 * 50
def correct(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]
common = dict(learning_rate=5e-6, num_generations=8, seed=int(os.environ["SEED"]))
args = GRPOConfig(os.path.join("out", "grpo"), **common, max_steps=STEPS, per_device_train_batch_size=8,
                  gradient_accumulation_steps=4, loss_type="dr_grpo", min_p=0.1, beta=-0.0)
rows = load_dataset("openai/gsm8k", "main", split="train").map(ask)
lora = LoraConfig(r=8, lora_dropout=0.1)
GRPOTrainer("Qwen/Qwen3-0.6B", [correct], args=args, train_dataset=rows, peft_config=lora)
"""


def test_a_script_of_trl_is_read_without_running_it(tmp_path: Path) -> None:
    text, migrated = migrate(written(tmp_path, "train_grpo.py", SCRIPT), "trl")
    values = yaml.safe_load(text)
    assert values["rewards"] == [{"train_grpo.py:correct": 1.0}]
    resolved = load_config(values={**values, "rewards": []})
    config = resolved.config
    assert (config.model, str(config.output)) == ("Qwen/Qwen3-0.6B", "out/grpo")
    assert (config.train.steps, config.train.lr, config.train.schedule) == (100, 5e-6, "linear")
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (4, 8)
    assert resolved.algorithm.reduce.name == "constant_length"
    assert str(config.data.train) == "hub:openai/gsm8k?config=main&split=train"
    assert config.lora is not None
    assert config.lora.rank == 8
    assert sorted(setting.partition(":")[0] for setting in migrated.unsupported) == ["lora_dropout", "min_p"]
    assert any("seed: the script computes it, int(os.environ['SEED'])" in note for note in migrated.notes)


def test_a_variable_that_a_script_sets_twice_is_left_to_the_user(tmp_path: Path) -> None:
    script = "rate = 1e-5\nif large:\n    rate = 5e-5\nargs = GRPOConfig(learning_rate=rate, max_steps=2)\n"
    text, migrated = migrate(written(tmp_path, "twice.py", script))
    assert "5e-05" not in text
    assert any(note.startswith("learning_rate: the script computes it, rate") for note in migrated.notes)


def test_a_script_that_grows_is_read_in_bounded_time(tmp_path: Path) -> None:
    lists = "".join(f"a{i} = [{', '.join([f'a{i + 1}'] * 9)}]\n" for i in range(15))
    script = f"{lists}a15 = 9**9**9\nargs = GRPOConfig(max_steps=2, reward_weights=a0, seed=a15)\n"
    _, migrated = migrate(written(tmp_path, "grow.py", script))
    assert any(note.startswith("seed: the script computes it") for note in migrated.notes)


def test_the_first_trainer_whose_fields_fit_reads_a_file_of_trl(tmp_path: Path) -> None:
    theirs = {
        "learning_rate": "5e-7",
        "f_alpha_divergence_coef": 0.5,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    }
    theirs |= {"lr_scheduler_type": "cosine_with_min_lr", "gradient_accumulation_steps": 2}
    text, _ = migrate(written(tmp_path, "dpo.yaml", yaml.safe_dump(theirs)))
    config = yaml.safe_load(text)
    assert config["method"] == "dpo"
    assert config["train"]["schedule"] == {"cosine": 0.1}
    assert config["train"]["lr"] == 5e-7


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.sh", "echo hello\n", "no settings found"),
        ("train.py", "trainer = make_trainer()\n", "TRL's config in Python"),
        ("train.py", "args = (\n", "TRL's config in Python"),
        (
            "run.sh",
            "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m\n",
            "method: sft here",
        ),
        ("run.yaml", "learning_rate: fast\n", "learning_rate = 'fast': TRL's .* has float"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        migrate(written(tmp_path, name, text))


def test_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_settings(tmp_path / "run.sh")
    with pytest.raises(ConfigError, match="No such file"):
        read_settings(tmp_path / "none.sh")


def test_the_command_writes_a_file_and_keeps_one_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = written(tmp_path, "run.sh", VERL)
    target = tmp_path / "run.yaml"
    assert main(["migrate", str(script), "--output", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "without a counterpart: actor_rollout_ref.actor.something_new: 3" in printed
    assert "#   actor_rollout_ref.actor.something_new: 3" in target.read_text()
    assert main(["migrate", str(script), "--output", str(target), "--json"]) == 2
    assert "already exists" in json.loads(capsys.readouterr().out)["error"]
