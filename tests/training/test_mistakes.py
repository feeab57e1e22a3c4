"""What a user can get wrong, at the command line: a message, an exit code, nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.conftest import policy_of

from covey.cli import main
from covey.models.policy import save_policy

REWARDS = """
def fine(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def varied(completion):
    return len(completion) + sum(map(ord, completion)) % 7

def raises(completion):
    return 1 / 0

def too_few(completions):
    return [1.0]

def one_number(completions):
    return 0.5

def not_finite(completion):
    return float("inf")

def wants_more(completion, proof):
    return 0.0

def takes_nothing():
    return 0.0
"""


ESTIMATORS = """
import torch

def nans(rewards):
    return rewards / 0 - rewards / 0

def infinite(rewards):
    return torch.full_like(rewards, float("inf"))

def one(rewards):
    return rewards.sum()

def column(rewards):
    return rewards[:, None]

def other(rewards):
    return torch.zeros(len(rewards) + 1)

def listed(rewards):
    return [0.0 for _ in rewards]

def nothing(rewards):
    rewards - rewards.mean()

def fails(rewards):
    return rewards[7]

def looks_up(ratio):
    return deeper({"a": ratio})

def deeper(values):
    return values["b"]

def drops(rewards):
    return rewards[7] > 0

def picks(advantages):
    return advantages[:, 1000] > 0

def divides(ref_log_ratio):
    return ref_log_ratio / (1 // 0)

def detached(ratio):
    return -ratio.detach()

def in_place(logprobs, advantages):
    return -(logprobs.exp().mul_(advantages) * logprobs.exp_())
"""


def own(function: str, axis: str = "advantage", **algorithm: object) -> dict[str, object]:
    return {
        "rewards": ["rewards.py:varied"],
        "algorithm": {"name": "grpo", axis: f"own.py:{function}", **algorithm},
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "own.py").write_text(ESTIMATORS)
    return tmp_path


def run(project: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> tuple[int, str]:
    config = {
        "model": "tiny",
        "output": str(project / "run"),
        "data": {"train": "train.jsonl"},
        "rewards": ["rewards.py:fine"],
        "rollout": {"max_tokens": 8, "group_size": 2, "prompts_per_step": 2},
        "train": {"steps": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config.setdefault(section, {})[name] = value
        else:
            config[key] = value
    (project / "run.yaml").write_text(yaml.safe_dump(config))
    code = main(["train", str(project / "run.yaml")])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"rewards": [{"rewards.py:fine": 0}]}, 2, "rewards: every weight is 0"),
        (
            {"data__train": "absent.jsonl"},
            3,
            "absent.jsonl: no such file next to the config or in the working",
        ),
        (
            {"data__prompt": "question"},
            3,
            "train.jsonl:1: there is no column 'question'; the row has 'prompt', 'answer'",
        ),
        ({"data": {}}, 2, "there are no problems"),
        ({"data": {"task": "sum"}}, 2, "data.task: 'sum' is unknown; known:"),
        ({"rewards": []}, 2, "there is no reward to judge"),
        ({"rewards": ["matth_answer"]}, 2, "did you mean math_answer"),
        ({"rewards": ["rewards.py:absent"]}, 2, "defines no function 'absent'; it has fine"),
        ({"rewards": ["nowhere.py:f"]}, 2, "no such file"),
        (
            {"rewards": ["rewards.py:takes_nothing"]},
            2,
            "rewards.py:takes_nothing takes neither `completions`",
        ),
        ({"rewards": ["rewards.py:wants_more"]}, 3, "needs column 'proof'; the row has 'answer'"),
        ({"rewards": ["rewards.py:one_number"]}, 5, "a list with one number per completion"),
        ({"rewards": ["rewards.py:too_few"]}, 5, "returned 1 values for 2 completions"),
        ({"rewards": ["rewards.py:not_finite"]}, 5, "not a finite number or None"),
        ({"rewards": [{"rewards.py:fine": "heavy"}]}, 2, "must be a number"),
        (
            {"rewards": ["rewards.py:varied", "math_answer"]},
            2,
            "math_answer, varied: which of them says whether an answer is correct? Accuracy, filters",
        ),
        (
            {"rewards": ["rewards.py:fine", "rewards.py:varied"]},
            2,
            "[{rewards.py:fine: {verdict: true}}, ...]",
        ),
        (
            own("nans"),
            1,
            "own.py:nans returns [nan, nan",
        ),
        (
            own("infinite"),
            1,
            "not finite everywhere; pr",
        ),
        (
            own("one"),
            1,
            "own.py:one returns the shape () where (G,) = (2,) or (G, T) = (2, ",
        ),
        (own("column"), 1, "returns the shape (2, 1)"),
        (own("other"), 1, "returns the shape (3,)"),
        (own("listed"), 1, "returns list [0.0, 0.0"),
        (own("nothing"), 1, "returns NoneType None"),
        (
            own("fails"),
            1,
            "algorithm.advantage own.py:fails, your function, raises IndexError: index 7 is out of",
        ),
        (
            own("looks_up", "surrogate"),
            1,
            "own.py:looks_up, your function, raises KeyError: 'b' (own.py:32: return values[\"b\"])",
        ),
        (own("drops", "filter"), 1, "own.py:drops, your function, raises IndexError"),
        (own("picks", "token_weights"), 1, "own.py:picks, your function, raises IndexError"),
        (own("picks", "whiten"), 1, "own.py:picks, your function, raises IndexError"),
        (
            own("", "kl", kl={"estimator": "own.py:divides", "coef": 0.1}),
            1,
            "own.py:divides, your function, raises ZeroDivisionError",
        ),
        (
            own("detached", "surrogate", kl=None),
            1,
            "does not require grad and does not have a grad_fn. It is computed by own.py:detached",
        ),
        (own("in_place", "surrogate"), 1, "by own.py:in_place, your own: what it returns must depend"),
        ({"rollout__group_size": 1}, 2, "compares siblings"),
        ({"rollout__max_tokens": 4096}, 3, "prompts are too long: with rollout.max_tokens"),
        ({"model": "./no/such/model"}, 2, "is not a model folder"),
        ({"model": "nobody/no-such-model"}, 2, "`covey demo --real` downloads a small model"),
        ({"method": "sft"}, 3, "column 'completion' (data.completion) must hold"),
        ({"lora": {"rank": 4, "targets": ["no_such_layer"]}}, 2, "no_such_layer"),
        (
            {"lora": {"targets": ["q_proj", "lm_head"]}},
            2,
            "output layer, which shares the embedding's weights",
        ),
        (
            {"lora": {"targets": ["embed_tokens"]}},
            2,
            "includes the embedding; adapters work only on linear layers",
        ),
        ({"device": "tpu"}, 2, "device: 'tpu'"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_mistake_is_answered(project: Path, capsys, changes: dict, code: int, says: str) -> None:
    found, error = run(project, capsys, **changes)
    assert says in error
    assert found == code
    assert "Traceback" not in error
    assert not list((project / "run").rglob("*.safetensors")) if (project / "run").exists() else True


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "train.jsonl: the file has no rows"),
        ("\n\n", "no rows"),
        ('{"prompt": "1", "answer": "1"}\n{"prompt": \n', "train.jsonl:2: not valid JSON"),
        ('{"prompt": "1", "answer": "1"}\n[1]\n', "train.jsonl:2: a row must be a JSON object"),
        ('{"prompt": null, "answer": "1"}\n', "train.jsonl:1: 'prompt' must be text or a list"),
        ('{"prompt": "", "answer": "1"}\n', "train.jsonl:1: 'prompt' must be text or a list"),
        ('{"prompt": [{"content": "x"}], "answer": "1"}\n', "must be text or a list of {role, content}"),
        ('{"prompt": "1", "completions": "1"}\n', "rewards use the name 'completions'"),
        (
            '{"prompt": "1", "answer": "1"}\n{"prompt": "1"}\n',
            "train.jsonl:2: reward fine needs column 'answer'",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_data_is_answered_with_its_line(project: Path, capsys, content: str, says: str) -> None:
    (project / "train.jsonl").write_text(content)
    found, error = run(project, capsys)
    assert says in error
    assert found == 3
    assert not (project / "run").exists()


def test_a_model_without_end_token_is_refused(project: Path, capsys) -> None:
    policy = policy_of("qwen3")
    policy.tokenizer.eos_token = None
    policy.model.config.eos_token_id = None
    policy.model.generation_config.eos_token_id = None
    policy.tokenizer.chat_template, policy.end_ids = None, []
    save_policy(policy, project / "endless")
    found, error = run(project, capsys, model="endless")
    assert found == 2
    assert "set eos_token in tokenizer_config.json" in error


def test_a_folder_of_another_run_is_refused(project: Path, capsys) -> None:
    mine = {"rewards": ["rewards.py:varied"]}
    assert run(project, capsys, **mine)[0] == 0
    found, error = run(project, capsys, train__lr=0.5, **mine)
    assert found == 2
    assert "train.lr is 1e-06 there, 0.5 here (breaks exactness)" in error


def test_layers_of_other_architectures_cannot_be_recomputed(project, capsys) -> None:
    save_policy(policy_of("gpt2"), project / "model")
    code, error = run(project, capsys, model=str(project / "model"), train__recompute_layers=True)
    assert code == 2
    assert "train.recompute_layers: gpt2" in error
    assert "tokens_per_micro_batch" in error


def test_an_empty_reference_that_a_reward_of_the_users_reads_is_named(project: Path, capsys) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": "" if i in (3, 7) else "1"} for i in range(20)]
    (project / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    code = "def inside(completion, answer):\n    return len(completion) + float(answer in completion)\n"
    (project / "rewards.py").write_text(code)
    config = {"model": "tiny", "output": str(project / "run"), "data": {"train": "train.jsonl"}}
    rollout = {"max_tokens": 8, "group_size": 2, "prompts_per_step": 2}
    settings = {**config, "rewards": ["rewards.py:inside"], "rollout": rollout, "train": {"steps": 1}}
    (project / "run.yaml").write_text(yaml.safe_dump(settings))
    main(["train", str(project / "run.yaml")])
    assert (
        "train.jsonl:4: the answer is empty, as in 1 other row, and inside judges" in capsys.readouterr().out
    )


@pytest.mark.parametrize("place", ["file", "file/run", "broken"])
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_an_output_that_is_a_file_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys, place: str, command: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    config = {"model": "no such model", "data": {"task": "sums"}, "output": str(tmp_path / place)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main([command, str(tmp_path / "run.yaml")]) == 2
    blocking = tmp_path / Path(place).parts[0]
    assert f"error: output: {blocking} is not a folder; choose another --output" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
