"""Configuration: what is accepted, and what a mistake is answered with."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.algorithm import RECORD_AXES, algorithm_rows
from covey.config.layers import SHORT_FORM_KEYS
from covey.config.load import load_config, resolved_values, resolved_yaml
from covey.config.rows import key_paths
from covey.insight.pages.settings import differing_settings
from covey.objective.value import Critic
from covey_verify.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_options_win_over_the_file_and_values_over_options(tmp_path: Path) -> None:
    file = write(tmp_path, "train: {lr: 1.0e-5, steps: 7}\nrollout: {group_size: 4}\n")
    resolved = load_config(
        file, ["--train.lr", "3e-4", "--rollout.top-p=0.9"], {"rollout": {"group_size": 6}}
    )
    assert resolved.config.train.lr == 3e-4
    assert resolved.config.train.steps == 7
    assert resolved.config.rollout.top_p == 0.9
    assert resolved.config.rollout.group_size == 6
    assert resolved.origins["train.steps"] == f"{file}:1"
    assert resolved.origins["train.lr"] == "--train.lr"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "train:\n  lerning_rate: 1\n",
            "run.yaml:2: train.lerning_rate is not a setting; did you mean train.lr?",
        ),
        ("train: {lr: -1}\n", "run.yaml:1: train.lr = -1: input should be greater than or equal to 0"),
        ("guards: {kl_warn: yes}\n", "run.yaml:1: guards.kl_warn = True: write a number"),
        ("method: [rl]\n", "run.yaml:1: method = ['rl']: method must be one of rl, sft"),
        ("train: {betas: [0.9, 1.5]}\n", "run.yaml:1: train.betas.1 = 1.5: input should be less than 1"),
        ("rollout: {group_size: two}\n", "rollout.group_size = 'two'"),
        ("seed: 010\n", "seed: YAML reads 010 as the number 8; write 10"),
        ("train:\n  steps: 1:30\n", ":2: train.steps: YAML reads 1:30 as the number 90"),
        ("train: {steps: yes}\n", "train.steps = True: write a number; YAML reads yes, no"),
        ("train: {lr: off}\n", "train.lr = False: write a number"),
        ("output: ''\n", "output = '': write a path"),
        ("rewards: math_answer\n", "rewards = 'math_answer': write a list, as [first"),
        ("stages: {a: 1}\n", "stages = {'a': 1}: write a list"),
        ("loss: [1]\n", "loss = [1]: write a mapping, for example {"),
        ("model: a\nmodel: b\n", "run.yaml:2: model is set twice"),
        ("train: [1]\n", "run.yaml:1: train = [1]"),
        ("- 1\n", "a config must be a mapping"),
        ("a: b: c\n", "run.yaml:1: not valid YAML"),
        ("a: &x [1]\nb: *x\n", "anchors and aliases"),
        ("lora: {r: 8}\n", "run.yaml:1: lora.r is not a setting; did you mean lora.rank?"),
        ("stages: [{trian: {}}]\n", "trian is not a section; did you mean train?"),
        ("data: {columnz: {a: b}}\n", "data.columnz is not a setting; did you mean data.columns?"),
        ("algorithm: grop\n", "run.yaml:1: algorithm.name: 'grop' is unknown; did you mean grpo?"),
        ("algorithm: {surrogate: {clip_hihg: 1}}\n", "did you mean clip_high?"),
        ("algorithm: {surrogate: {clip_high: -1}}\n", "algorithm.surrogate.clip_high: -1"),
        ("algorithm: {advantage: null}\n", "algorithm.advantage: this axis needs a function"),
        ("algorithm: {name: grpo, kl: {estimator: k9}}\n", "algorithm.kl.estimator: 'k9' is unknown"),
        ("rollout: {stop: ['']}\n", "rollout.stop.0 = ''"),
        ("rollout: {group_size: 1}\n", "compares siblings"),
        (
            "stages: [{train: {lrr: 1}}]\n",
            "(stage 1-rl): train.lrr is not a setting; did you mean train.lr or algorithm.critic.lr?",
        ),
        ("train: {schedule: quadratic}\n", "train.schedule"),
        ("algorithm: dr_grpo\nguards: {kl_action: raise_coef}\n", "there is no coefficient to raise"),
        (
            "algorithm: {name: grpo, kl: {coef: 0.1, target: 1}}\nguards: {kl_action: raise_coef}\n",
            "algorithm.kl.target already adapts",
        ),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert says in str(caught.value)


def test_missing_and_unreadable_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(binary)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rolout.group_size", "8"], "--rolout.group_size: rolout is not a section; did you mean rollout?"),
        (["--optimizer.lr", "1"], "optimizer is not a section; did you mean train or algorithm.critic?"),
        (["--kl.coef", "1"], "kl is not a section; did you mean algorithm.kl?"),
        (["--group_size", "4"], "did you mean rollout.group_size?"),
        (["--clip_high", "0.3"], "did you mean algorithm.surrogate.clip_high?"),
        (["--train.temprature", "1"], "did you mean rollout.temperature?"),
        (["--train.learning_rate", "1"], "TRL's learning_rate is covey's train.lr"),
        (["--train.num_train_epochs", "1"], "for TRL's num_train_epochs write train.steps"),
        (["--lerning_rate", "1"], "did you mean train.lr?"),
        (["--rollout.temperature", "0"], "on the command line, --rollout.temperature: rollout.temperature 0"),
        (["--rollout.temperature", "1e-9"], "all completions of a prompt would be the same"),
        (["--rollout.temperature", ".inf"], "finite number"),
        (["--rollout.top_k", "1"], "all completions of a prompt would be the same"),
        (["--train.updates_per_batch", "99"], "an update trains on whole groups"),
        (["--rollout.sampler.url", "http://a:80,http://b:80"], "write several as a list, [A, B]"),
        (["--rollout.sampler.url", "http://a:8o"], "'http://a:8o' is not an address"),
    ],
)
def test_the_command_line_is_named_as_the_source(tmp_path: Path, options: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "model: tiny\n"), options)
    assert says in str(caught.value)
    assert str(caught.value).startswith("on the command line, --")


def test_unknown_keys_are_told_once_and_briefly(tmp_path: Path) -> None:
    names = ["verbose", "use_peft", "logging_steps", "num_train_epochs", "epochs", "zzz"]
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "".join(f"{n}: 1\n" for n in names)))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(names) + 1
    assert all(f"run.yaml:{n}: {name}" in lines[n - 1] for n, name in enumerate(names, start=1))
    assert "did you mean" not in str(caught.value)
    assert "seed" not in str(caught.value)


def test_greedy_sampling_is_fine_without_rewards() -> None:
    assert (
        load_config(overrides=["--method", "sft", "--rollout.temperature", "0"]).config.rollout.temperature
        == 0
    )


def test_the_resolved_config_loads_to_the_same_run(tmp_path: Path) -> None:
    first = load_config(overrides=["--algorithm", "gspo", "--train.lr", "2e-5", "--model", "some/model"])
    again = load_config(write(tmp_path, resolved_yaml(first)))
    assert resolved_values(first) == resolved_values(again)
    assert "# train.lr: --train.lr" in resolved_yaml(first)


def test_texts_of_options_are_taken_as_they_stand() -> None:
    for text in ("runs/a #1", "two\nlines", "a 'quoted' one", "[half"):
        assert str(load_config(overrides=["--output", text, "--algorithm", "grpo"]).config.output) == text
    assert str(load_config(overrides=["--output", "'7'", "--algorithm", "grpo"]).config.output) == "7"
    with pytest.raises(ConfigError, match=r"--output: .* is not UTF-8"):
        load_config(overrides=["--output", "l\udce4uft"])


def test_stages_inherit_and_override() -> None:
    resolved = load_config(
        values={
            "train": {"lr": 1e-3, "steps": 9},
            "stages": ({"method": "sft"}, {"train": {"steps": 4}}),
        }
    )
    first, second = (s.config for s in resolved.stages())
    assert (first.method, first.train.lr, first.train.steps) == ("sft", 1e-3, 9)
    assert (second.method, second.train.lr, second.train.steps) == ("rl", 1e-3, 4)


STAGED = """
train: {steps: 9}
stages:
  - {method: sft, train: {steps: 800, lr: 1.0e-3}}
  - {train: {lr: 2.0e-4}, algorithm: {name: grpo, kl: 0.1}}
"""


def test_the_command_line_holds_in_every_stage_and_says_what_it_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, STAGED)
    resolved = load_config(file, ["--train.steps", "2", "--algorithm.kl.gradient", "ratio"])
    first, second = resolved.stages()
    assert (first.config.train.steps, second.config.train.steps) == (2, 2)
    assert (first.config.train.lr, second.config.train.lr) == (1e-3, 2e-4)
    assert second.algorithm.kl is not None
    assert (second.algorithm.kl.coef, second.algorithm.kl.gradient) == (0.1, "ratio")
    assert resolved.notes == ["--train.steps 2 overrides 800 in stage 1-sft"]
    assert first.origins["train.steps"] == "--train.steps"
    assert first.origins["train.lr"] == f"{file}:4 (stage 1-sft)"
    values = load_config(file, values={"train": {"steps": 3}}).stages()
    assert [s.config.train.steps for s in values] == [3, 3]
    both = load_config(file, ["--train.steps", "2"], {"train": {"steps": 3}}).stages()
    assert [s.config.train.steps for s in both] == [2, 2]


def test_a_warm_up_that_outlasts_the_run_is_told_with_the_rate_it_reaches(tmp_path: Path) -> None:
    given = ["--train.steps", "5", "--train.lr", "1e-3"]
    [note] = load_config(overrides=[*given, "--train.warmup_steps", "20"]).notes
    assert note == "train.warmup_steps 20: the learning rate only reaches 0.00025, since train.steps is 5"
    assert not load_config(overrides=[*given, "--train.warmup_steps", "5"]).notes
    staged = load_config(write(tmp_path, STAGED), ["--stages.2.train.warmup_steps", "300"]).notes
    assert staged[0].startswith("stage 2-rl: train.warmup_steps 300")


@pytest.mark.parametrize("which", ["1", "1-sft", "1_sft"])
def test_one_stage_is_addressed_by_number_or_folder(tmp_path: Path, which: str) -> None:
    resolved = load_config(
        write(tmp_path, STAGED), [f"--stages.{which}.train.steps", "5", "--train.steps", "2"]
    )
    assert [s.config.train.steps for s in resolved.stages()] == [5, 2]
    assert f"--stages.{which}.train.steps 5 overrides 2 in stage 1-sft" in resolved.notes


@pytest.mark.parametrize("which", ["0", "3", "sft", "2-sft"])
def test_a_stage_that_is_none_is_answered_with_those_there_are(tmp_path: Path, which: str) -> None:
    with pytest.raises(ConfigError, match="by its number or folder, 1-sft, 2-rl"):
        load_config(write(tmp_path, STAGED), [f"--stages.{which}.train.steps", "5"])
    with pytest.raises(ConfigError, match="has no stages"):
        load_config(overrides=[f"--stages.{which}.train.steps", "5"])


def test_the_demo_takes_its_steps_from_the_command_line() -> None:
    from importlib.resources import files

    demo = Path(str(files("covey") / "config" / "recipes" / "demo.yaml"))
    assert [s.config.train.steps for s in load_config(demo, ["--train.steps", "2"]).stages()] == [2, 2]


def test_there_are_at_most_110_settings_and_each_says_what_it_does() -> None:
    from covey.config import schema

    assert len(key_paths()) <= 110
    for section in (schema.Config, schema.Data, schema.Rollout, schema.Train, schema.Eval, schema.Lora):
        for name, info in section.model_fields.items():
            assert info.description or issubclass(info.annotation, schema.Section), name


def test_a_bad_config_is_refused_within_a_second_and_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path, "algorithm: {surrogate: {clip_hihg: 1}}\n")
    code = (
        "import sys; from covey.cli import main; rc = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded too much'; sys.exit(rc)"
    )
    started = time.process_time()
    done = subprocess.run([sys.executable, "-c", code, "train", str(file)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean clip_high?" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.process_time() - started < 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({p.split(".")[0] for p in key_paths()})) | st.text(max_size=6), JSON
    )
)
def test_any_config_is_accepted_or_answered(tmp_path_factory, raw) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_text(yaml.safe_dump(raw, allow_unicode=True), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_accepted_or_answered(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize(
    "setting",
    [
        f"--{key}={value}"
        for key in (
            "rollout.group_size", "rollout.prompts_per_step", "rollout.max_tokens", "rollout.max_running",
            "train.updates_per_batch", "train.inner_epochs", "train.steps", "train.batch_size", "train.keep",
            "eval.samples", "eval.problems", "data.train_size", "data.test_size",
            "seed", "threads", "lora.rank",
        )
        for value in (10**40, 2**63)
    ]
    + ["--train.lr=.inf", "--guards.kl_stop=.inf", "--scoring.timeout=.nan", "--output=a\0b", "--model=a\0b"]
    + ["--data.train=a\0b", '--data.system="\\ud800"'],
)  # fmt: skip
def test_absurd_values_are_refused_before_any_work(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting[2:].partition("=")[0]):
        load_config(overrides=[setting])


def test_a_step_has_no_absurd_number_of_completions() -> None:
    with pytest.raises(ConfigError, match="group_size times prompts_per_step"):
        load_config(overrides=["--rollout.group_size=65536", "--rollout.prompts_per_step=65536"])


def test_dotted_keys_in_a_file_reach_inside(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    lines = ("model: tiny", "algorithm: grpo", "rollout: {group_size: 4}")
    file.write_text("\n".join([*lines, "rollout.max_tokens: 64", "algorithm.kl.coef: 0.1", ""]))
    resolved = load_config(file)
    assert (resolved.config.rollout.group_size, resolved.config.rollout.max_tokens) == (4, 64)
    assert resolved.algorithm.kl is not None
    assert resolved.algorithm.kl.coef == 0.1
    assert resolved.origins["rollout.max_tokens"] == f"{file}:4"
    file.write_text("model: tiny\nrollout: {max_tokens: 5}\nrollout.max_tokens: 64\n")
    with pytest.raises(ConfigError, match=r"run.yaml:3: rollout.max_tokens is already set"):
        load_config(file)


def test_the_length_that_a_loss_divides_by_stands_as_a_number(tmp_path: Path) -> None:
    values = {"data": {"task": "sums"}, "algorithm": "dr_grpo", "rollout": {"max_tokens": 77}}
    recorded = resolved_values(load_config(values=values))
    assert recorded["algorithm"]["reduce"]["length"] == 77
    again = load_config(values={**values, "algorithm": recorded["algorithm"]})
    assert resolved_values(again)["algorithm"] == recorded["algorithm"]
    (tmp_path / "config.yaml").write_text(resolved_yaml(again))
    shown = {s["setting"]: s["value"] for s in differing_settings(tmp_path)}
    assert shown["algorithm.name"] == "dr_grpo" and not any("reduce" in name for name in shown)


def test_the_page_says_what_a_changed_setting_of_the_algorithm_does(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "surrogate": {"clip_high": 0.3}, "kl": {"coef": 0.5, "estimator": "k2"}}
    resolved = load_config(values={"data": {"task": "sums"}, "algorithm": algorithm})
    (tmp_path / "config.yaml").write_text(resolved_yaml(resolved))
    says = {s["setting"]: s["says"] for s in differing_settings(tmp_path)}
    effects = {(row.key, row.owner): row.setting.effect for row in algorithm_rows()}
    assert says["algorithm.surrogate.clip_high"] == effects["algorithm.surrogate.clip_high", "clip"]
    assert says["algorithm.kl.coef"] == effects["algorithm.kl.coef", "kl"]
    assert says["algorithm.kl.estimator.name"] == effects["algorithm.kl.estimator", "kl"]


def test_a_setting_of_an_axis_leaves_what_its_short_form_says(tmp_path: Path) -> None:
    assert set(RECORD_AXES) <= set(SHORT_FORM_KEYS)
    (tmp_path / "run.yaml").write_text("algorithm: {name: ppo, critic: policy, kl: 0.2}\n")
    options = ["--algorithm.critic.lr", "1e-4", "--algorithm.kl.estimator", "k2"]
    algorithm = load_config(tmp_path / "run.yaml", options).algorithm
    assert algorithm.critic == Critic(trunk="policy", lr=1e-4)
    assert algorithm.kl is not None and algorithm.kl.coef == 0.2
