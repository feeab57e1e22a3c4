"""Whole runs of seconds: what they write, that they can be repeated and resumed exactly."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import policy_of
from tests.training.runs import FAST, StopAt, alike, fingerprint, interrupted, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.config.load import load_config
from covey.errors import GuardStop
from covey.insight.pages.records import run_page
from covey.insight.show import show_run
from covey.models.policy import save_policy
from covey.runs.checkpoint import newest_checkpoint
from covey.runs.folder import RunFolder
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.training.pipeline import run_pipeline
from covey_verify.errors import DataError


def test_a_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    (result,) = start(tmp_path / "run", algorithm="grpo")
    folder = tmp_path / "run"
    assert result.folder == folder
    assert result.conclusion is not None
    names = {p.name for p in folder.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "timings.jsonl", "evals.jsonl", "curve.svg"} <= names
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for name in (
        "reward/mean",
        "reward/varied/mean",
        "groups/dead",
        "groups/dead_incorrect",
        "groups/effective_completions",
        "kl/token_k1",
        "kl/completion_k1",
        "clip/high",
        "ratio/q99",
        "entropy",
        "length/truncated",
        "mismatch/max",
        "optimizer/grad_norm",
        "text/repetition",
    ):
        assert np.isfinite(metrics[-1][name]), name
    timings = json.loads((folder / "timings.jsonl").read_text().splitlines()[-1])
    assert timings["seconds/rollout"] > 0
    assert timings["seconds/reward"] >= 0
    assert timings["tokens_per_second/update"] > 0
    assert timings["memory/peak_mib"] > 0
    measured = sum(seconds for name, seconds in timings.items() if name.startswith("seconds/"))
    assert measured < timings["elapsed"] <= result.seconds + 0.1  # which is rounded
    assert show_run(folder)[0]["conclusion"] == result.conclusion.sentence
    assert run_page("run", folder)["conclusion"]["sentence"] == result.conclusion.sentence
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evals] == [0, 4]
    card = (folder / "final" / "README.md").read_text()
    assert result.conclusion.sentence in card
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    inputs = tokenizer(result.example, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] >= inputs["input_ids"].shape[1] + 1


def test_the_log_agrees_with_the_metrics(tmp_path: Path) -> None:
    start(tmp_path / "run", algorithm="grpo")
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for step in range(4):
        log = tmp_path / "run" / "rollouts" / f"step_{step + 1:06d}.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(rows) == 16
        assert np.mean([r["reward"] for r in rows]) == pytest.approx(metrics[step]["reward/mean"])
        groups = {g: [r["reward"] for r in rows if r["group"] == g] for g in range(4)}
        dead = sum(len(set(rewards)) == 1 for rewards in groups.values())
        assert metrics[step]["groups/dead"] == dead / 4
        arrays = np.load(log.with_suffix(".npz"))
        assert arrays["ends"].tolist() == np.cumsum([r["tokens"] for r in rows]).tolist()


def test_rejected_groups_are_logged_and_marked(tmp_path: Path) -> None:
    rollout = {"curriculum": "frontier", "max_resampling_rounds": 1}
    with pytest.raises(GuardStop, match="without changing a single weight"):
        start(tmp_path / "run", rollout=rollout, algorithm="dapo", rewards=())
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(m["rollout/filtered"] for m in metrics) > 0
    for step, seen in enumerate(metrics):
        log = tmp_path / "run" / "rollouts" / f"step_{step + 1:06d}.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        left_out = [r for r in rows if not r["trained"]]
        assert len(left_out) == 4 * seen["rollout/filtered"]
        assert {r["advantage"] for r in left_out} <= {0.0}
        assert len({r["reward"] for r in left_out if r["group"] == rows[-1]["group"]}) <= 1
        assert seen["rollout/scored"] == 2 * len(rows)  # the task has two rewards
        assert seen["rollout/reward_calls"] > 0
        frontier = [v for k, v in seen.items() if k.startswith("difficulty/pass_rate")]
        assert sum(frontier) == pytest.approx(1.0)
        assert 0 < seen["difficulty/tried"] <= 1


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "lora"])
def test_the_record_names_the_reference_by_its_weights(tmp_path: Path, lora: dict[str, int] | None) -> None:
    save_policy(policy_of("qwen2"), tmp_path / "model")
    short = {"model": str(tmp_path / "model"), "train": {"steps": 1}, "lora": lora}
    start(tmp_path / "none", **short, algorithm="dapo")
    assert json.loads((tmp_path / "none" / "env.json").read_text())["reference"] is None
    hashes = []
    for seed in (0, 1):  # adapters start at random, the reference below them does not
        start(tmp_path / str(seed), **short, algorithm="grpo", seed=seed)
        hashes.append(json.loads((tmp_path / str(seed) / "env.json").read_text())["reference"])
    assert len(hashes[0]) == 64
    assert hashes[0] == hashes[1]
    start(tmp_path / "next", **{**short, "model": str(tmp_path / "0" / "final")}, algorithm="grpo")
    trained = json.loads((tmp_path / "next" / "env.json").read_text())["reference"]
    same = (tmp_path / "0" / "final" / "model.safetensors").read_bytes() == (
        tmp_path / "model" / "model.safetensors"
    ).read_bytes()
    assert (trained == hashes[0]) == same


HARD: list[dict[str, Any]] = [
    {"algorithm": "grpo"},
    {
        "algorithm": {"name": "dapo", "kl": {"coef": 0.01, "target": 0.1}, "entropy": {"coef": 0.001}},
        "train": {"inner_epochs": 2, "updates_per_batch": 2, "tokens_per_micro_batch": 60},
    },
    {
        "algorithm": {"name": "grpo", "kl": {"refresh_every": 2, "refresh_mix": 0.5}},
        "rollout": {"curriculum": "frontier", "adapt_group_size": True},
    },
    {"algorithm": "dr_grpo", "lora": {"rank": 4}},
    {"algorithm": "gspo", "dtype": "bfloat16", "train": {"updates_per_batch": 2}},
    {"algorithm": "rae", "rollout": {"retire_after": 1}, "data": {"task": "last_digit", "train_size": 8}},
    {
        "algorithm": {
            "name": "vine_ppo",
            "nll": 0.1,
            "advantage": {"split_by": "unlikely", "continuations": 2, "most": 3},
        },
    },
]
NAMES = ["grpo", "dapo", "refresh", "lora", "bfloat16", "means", "continuations"]
EIGHT_BIT = pytest.param(
    {"dtype": "bfloat16", "train": {"optimizer": "adamw_8bit"}},
    id="8-bit",
    marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
)


@pytest.mark.parametrize(
    "settings", [*(pytest.param(s, id=n) for s, n in zip(HARD, NAMES, strict=True)), EIGHT_BIT]
)
def test_stopping_and_going_on_gives_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter, **settings)
    for share in (0.2, 0.4, 0.5):  # of what an uninterrupted run checks, each time from where it is
        interrupted(tmp_path / "parts", int(counter.checks * share), **settings)
    start(tmp_path / "parts", **settings)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


def test_an_evaluation_that_was_interrupted_is_made_up_for(tmp_path: Path) -> None:
    settings = {"eval": {"every": 1, "problems": 8, "samples": 2}, "train": {"steps": 3}}
    counter = StopAt()
    start(tmp_path / "whole", counter, **settings)
    for number, check in enumerate(range(3, counter.checks, 37)):
        interrupted(tmp_path / f"parts{number}", check, **settings)
        start(tmp_path / f"parts{number}", **settings)
        assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / f"parts{number}")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter, train={"steps": 6})
    interrupted(tmp_path / "parts", counter.checks - 1, train={"steps": 6})
    checkpoints = sorted((tmp_path / "parts" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    weights = checkpoints[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    start(tmp_path / "parts", train={"steps": 6})
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


def test_a_damaged_checkpoint_does_not_stand_for_a_step_that_is_saved_again(tmp_path: Path) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter, train={"steps": 6})
    interrupted(tmp_path / "parts", counter.checks - 1, train={"steps": 6})
    first, second = sorted(p.name for p in (tmp_path / "parts" / "checkpoints").iterdir())
    weights = tmp_path / "parts" / "checkpoints" / second / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with closing(RunFolder(tmp_path / "parts")) as folder:
        found, complaints = newest_checkpoint(folder, strict=False)
        assert (found, len(complaints)) == (tmp_path / "parts" / "checkpoints" / first, 1)
        assert newest_checkpoint(folder, strict=True) == (found, [])
        folder.rotate(1)
    assert sorted(p.name for p in found.parent.iterdir()) == [f"damaged-{second}", first]


@pytest.mark.parametrize("setting", [{"eval": {"every": 2}}, {"train": {"stop_at": 0.9}}])
def test_what_needs_held_out_problems_is_refused_without_them(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    with pytest.raises(DataError, match=r"(eval\.every|train\.stop_at) needs .* or leave \1 out"):
        start(tmp_path / "run", data={"task": None, "train": tmp_path / "t.jsonl"}, **setting)


def test_a_run_that_did_not_learn_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {**FAST, "train": {"steps": 2, "lr": 0.0}, "eval": {"problems": 128, "samples": 1}}
    data = {**FAST["data"], "test_size": 128}
    resolved = load_config(values={**values, "data": data, "algorithm": "grpo", "output": tmp_path / "run"})
    (result,) = run_pipeline(resolved, RunConsole(), StopSignal())
    assert result.conclusion is not None
    assert result.conclusion.word == "did not learn"
    assert "likely cause: " in capsys.readouterr().out


def test_micro_batches_do_not_change_the_run(tmp_path: Path) -> None:
    settings = {"algorithm": "dapo", "train": {"steps": 3}}
    weights = []
    for name, tokens in (("one", 10_000), ("many", 40)):
        start(tmp_path / name, **{**settings, "train": {"steps": 3, "tokens_per_micro_batch": tokens}})
        weights.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    alike(*weights)


def test_a_learning_rate_of_zero_changes_no_weight(tmp_path: Path) -> None:
    start(tmp_path / "run", train={"steps": 2, "lr": 0.0, "save_every": 1, "keep": 9})
    first, last = (
        load_file(p / "model.safetensors")
        for p in (tmp_path / "run" / "checkpoints" / "step_000001", tmp_path / "run" / "final")
    )
    assert all(torch.equal(first[k], last[k]) for k in first)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    (first,) = start(tmp_path / "run")
    before = fingerprint(tmp_path / "run")
    (again,) = start(tmp_path / "run")
    assert again.conclusion == first.conclusion
    assert fingerprint(tmp_path / "run") == before


def test_stages_pass_the_model_on(tmp_path: Path) -> None:
    stages = ({"method": "sft", "train": {"steps": 3}}, {"method": "rl", "train": {"steps": 1, "lr": 0.0}})
    first, second = start(tmp_path / "run", stages=stages)
    assert first.folder.name == "1-sft"
    assert second.folder.name == "2-rl"
    a, b = (load_file(r.folder / "final" / "model.safetensors") for r in (first, second))
    assert all(torch.equal(a[k], b[k]) for k in a)
    losses = [json.loads(x)["loss"] for x in (first.folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["gpt2", "gemma", "llama"])
def test_models_from_a_folder_train(tmp_path: Path, name: str) -> None:
    save_policy(policy_of(name), tmp_path / "model")
    start(tmp_path / "run", model=str(tmp_path / "model"))
    a, b = (load_file(tmp_path / p / "model.safetensors") for p in ("model", "run/final"))
    assert any(not torch.equal(a[k], b[k]) for k in a)


def test_lora_trains_adapters_only_and_ships_merged_weights(tmp_path: Path) -> None:
    save_policy(policy_of("qwen2"), tmp_path / "model")
    start(
        tmp_path / "run",
        model=str(tmp_path / "model"),
        algorithm={"name": "grpo", "kl": {"coef": 0.1}},
        lora={"rank": 2},
    )
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["kl/token_k1"] == 0
    assert metrics[-1]["kl/token_k3"] > 0
    final = tmp_path / "run" / "final"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        p.name for p in (final / "adapter").iterdir()
    }
    merged = load_file(final / "model.safetensors")
    base = load_file(tmp_path / "model" / "model.safetensors")
    changed = {k for k in base if not torch.equal(base[k], merged[k])}
    assert changed
    assert not any("norm" in k or "embed" in k for k in changed)


def test_chat_prompts_go_through_the_template(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(prompts, completions, answer):
        seen.append((prompts[0], completions[0]))
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": f"What is {i}+1?", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    start(
        tmp_path / "run",
        data={"task": None, "train": tmp_path / "t.jsonl", "system": "Be brief."},
        rewards=(judge,),
        train={"steps": 1},
    )
    prompt, completion = seen[-1]
    assert prompt.startswith("What is") and isinstance(completion, str), "as the rows have them"
    arrays = np.load(tmp_path / "run" / "rollouts" / "step_000001.npz")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    text = tokenizer.decode(arrays["prompt_tokens"][: arrays["prompt_ends"][0]])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is")
    assert text.endswith("<|im_start|>assistant\n")


def test_a_fresh_copy_of_the_folder_resumes_elsewhere(tmp_path: Path) -> None:
    counter = StopAt()
    start(tmp_path / "whole", counter, train={"steps": 5})
    interrupted(tmp_path / "first", counter.checks // 2, train={"steps": 5})
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    start(tmp_path / "moved", train={"steps": 5})
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "moved")
