"""Runs with a critic: what they write, that they can be stopped and resumed exactly, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.runs import StopAt, fingerprint, interrupted, metrics_of, start
from transformers import AutoModelForTokenClassification

from covey.config.load import load_config
from covey.config.schema import Guards
from covey.objective.value import gae
from covey.proof.check import check_config
from covey.runs.checkpoint import GuardMemory
from covey.system.console import RunConsole
from covey.training.guards import Warn, apply_guards
from covey_verify.errors import ConfigError


def varied(completion: str) -> float:
    return (len(completion) + sum(map(ord, completion)) % 7) / 20


def ppo(trunk: str, **critic: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": "ppo", "critic": {"trunk": trunk, "lr": 3e-3, **critic}},
        "rewards": (varied,),
    }


def of_critic(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The critic's state in a checkpoint, wherever it is."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    own = folder / "critic.safetensors"
    state = load_file(own if own.exists() else folder / "optimizer.safetensors")
    return {name: value for name, value in state.items() if name.startswith("weight/")}


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_stopping_and_going_on_gives_the_same_bits(tmp_path: Path, trunk: str) -> None:
    settings = {**ppo(trunk, warmup=1), "train": {"updates_per_batch": 2}}
    counter = StopAt()
    start(tmp_path / "whole", counter, **settings)
    for share in (0.2, 0.4, 0.5):
        interrupted(tmp_path / "parts", int(counter.checks * share), **settings)
    start(tmp_path / "parts", **settings)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")
    one, other = (of_critic(tmp_path / name, 4) for name in ("whole", "parts"))
    assert one
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("critic", [{"trunk": "own"}, {"trunk": "policy"}, {"trunk": "policy", "pull": 0.5}])
def test_the_critic_learns_alone_at_first_and_the_log_has_its_values(
    tmp_path: Path, critic: dict[str, Any]
) -> None:
    settings = {**ppo(**critic, warmup=2), "train": {"steps": 4, "save_every": 1, "keep": 9}}
    settings["algorithm"]["kl"] = None
    start(tmp_path / "run", **settings)
    folders = [tmp_path / "run" / "checkpoints" / f"step_{s:06d}" for s in (1, 2, 3)]
    first, second, third = (load_file(f / "model.safetensors") for f in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in second)
    before, after = of_critic(tmp_path / "run", 1), of_critic(tmp_path / "run", 2)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    metrics = metrics_of(tmp_path / "run")
    assert [m["optimizer/updates"] for m in metrics] == [0, 0, 1, 1]
    assert all(m["value/grad_norm"] > 0 for m in metrics[:2])
    assert all("value/explained_variance/quarter_4" in m for m in metrics)
    arrays = np.load(tmp_path / "run" / "rollouts" / "step_000004.npz")
    text = (tmp_path / "run" / "rollouts" / "step_000004.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert arrays["values"].shape == arrays["advantages"].shape == arrays["tokens"].shape
    assert arrays["values"].std() > 0
    # The logged advantages are GAE of the logged values, whitened.
    plain = []
    for row, end in zip(rows, arrays["ends"], strict=True):
        values = torch.from_numpy(arrays["values"][end - row["tokens"] : end]).double()[None]
        rewards = torch.zeros_like(values)
        rewards[0, -1] = row["reward"]
        plain.append(gae(rewards, values, torch.ones_like(values).bool())[0].numpy())
    expected = np.concatenate(plain)
    expected = (expected - expected.mean()) / expected.std(ddof=1)
    np.testing.assert_allclose(arrays["advantages"], expected, atol=1e-5)


def test_a_critic_continues_from_a_finished_run_and_from_nothing_else(tmp_path: Path) -> None:
    start(tmp_path / "one", **ppo("own"), train={"steps": 2})
    saved = tmp_path / "one" / "final" / "critic"
    assert isinstance(AutoModelForTokenClassification.from_pretrained(saved).config.num_labels, int)
    model = {"model": str(tmp_path / "one" / "final"), "train": {"steps": 1}}
    start(tmp_path / "two", **{**ppo("own", model=str(saved)), **model})
    start(tmp_path / "new", **{**ppo("own"), **model})
    (again,), (anew,) = metrics_of(tmp_path / "two"), metrics_of(tmp_path / "new")
    assert anew["value/mean"] == 0.0
    assert again["value/mean"] > 0.05
    with pytest.raises(ConfigError, match=r"critic\.model: .*gone"):
        start(tmp_path / "bad", **{**ppo("own", model="./gone"), **model})


def test_memory_of_a_critic_is_part_of_the_forecast(tmp_path: Path) -> None:
    roles = {}
    for trunk in ("own", "policy"):
        start(tmp_path / trunk, **ppo(trunk), train={"steps": 1})
        roles[trunk] = json.loads((tmp_path / trunk / "env.json").read_text())["memory"]
    weights = roles["own"]["weights"] // 4
    assert roles["policy"]["critic"] == 0
    # A copy with a head instead of an untied one: weights, gradient and two moments in float32.
    assert roles["own"]["critic"] == 16 * (weights + 128 + 1)


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_micro_batches_do_not_change_what_is_learned(tmp_path: Path, trunk: str) -> None:
    found = []
    for tokens in (8192, 40):
        train = {"steps": 2, "tokens_per_micro_batch": tokens}
        start(tmp_path / str(tokens), **ppo(trunk), train=train)
        found.append([m["value/error"] for m in metrics_of(tmp_path / str(tokens))])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_step_with_a_critic_passes_its_own_checks(tmp_path: Path) -> None:
    settings = {"data": {"task": "last_digit", "train_size": 64}, "rollout": {"max_tokens": 12}}
    resolved = load_config(values={**settings, **ppo("own"), "output": tmp_path / "run", "threads": 1})
    assert [c for c in check_config(resolved, RunConsole(quiet=True)) if not c.holds] == []


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"name": "ppo", "critic": None}, "needs the values of a critic"),
        ({"name": "dapo", "critic": "own"}, "no advantage reads its values"),
        ({"name": "ppo", "critic": {"trunk": "policy", "model": "x"}}, "no effect with trunk policy"),
        ({"name": "ppo", "critic": {"pull": 0.5}}, "no effect with trunk own"),
        ({"name": "ppo", "critic": {"warmup": 200}}, "never learns"),
        ({"name": "ppo", "critic": "mine"}, r"algorithm\.critic\.trunk: 'mine'"),
        ({"name": "ppo", "critic": {"lambda": 1}}, "lam"),
    ],
)
def test_what_cannot_work_is_refused(algorithm: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(values={"algorithm": algorithm, "data": {"task": "sums"}})


def test_a_critic_on_the_trunk_is_refused_where_its_schedule_is_0() -> None:
    settings: dict[str, Any] = {"data": {"task": "sums"}, "train": {"lr": 0}}
    with pytest.raises(ConfigError, match=r"train.lr 0: a critic on the policy's trunk .* never learns"):
        load_config(values={"algorithm": {"name": "ppo", "critic": {"trunk": "policy"}}, **settings})
    load_config(values={"algorithm": "ppo", **settings})


def test_a_critic_that_diverges_is_announced_once_until_it_recovers() -> None:
    memory, said = GuardMemory(), []
    for step, explained in enumerate([0.1, *[-3.0] * 8, 0.2, *[-1.0] * 5]):
        metrics = {"entropy/sampled": 1.0, "value/explained_variance": explained}
        memory, actions = apply_guards(step, metrics, True, memory, Guards(), lambda n: f"{n} steps", str)
        said += [(step, a.event) for a in actions if isinstance(a, Warn)]
    assert said == [(5, "critic diverges"), (14, "critic diverges")]
