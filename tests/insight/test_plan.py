"""`covey plan`: held to recorded measurements; what does not fit is said; bad input is one error."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from covey.cli import main
from covey.insight.devices import DEVICES, device_named
from covey.insight.plan import seconds
from covey.insight.sizes import MODEL_SIZES
from covey.models.policy import save_policy
from tests.conftest import policy_of

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (\S.*?) \| ([\d.]+) \| [^|]+ \| ([\d.]+) \|")


def measured() -> dict[str, tuple[float, float]]:
    """Cell -> seconds of rollout and update, as benchmarks/results/cost.md has them."""
    lines = (ROOT / "benchmarks/results/cost.md").read_text().splitlines()
    found = {m[1]: (float(m[2]), float(m[3])) for m in map(ROW.match, lines) if m}
    assert len(found) == 19
    return found


def test_it_agrees_with_what_was_measured_on_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group sizes 2 to 32, lengths 32 to 512, vocabularies 1k to 152k, widths and depths: within 8 %."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks/speed"), *sys.path])
    import cost

    recorded = measured()
    for name, (axis, value, _, group, length) in cost.CELLS.items():
        rollout, update = recorded[f"{axis} {value:,.0f}" if axis else "base"]
        work = cost.work_of(name, group, length)
        found = seconds(DEVICES["epyc-2"], work, work)
        assert found[0] == pytest.approx(rollout, rel=0.08, abs=0.01), name
        assert found[1] == pytest.approx(update, rel=0.08, abs=0.01), name


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {task: last_digit, train_size: 64, test_size: 8}\n"
        "rollout: {group_size: 4, prompts_per_step: 4, max_tokens: 32}\ntrain: {steps: 10}\n"
    )
    return path


def out(capsys, *words: object) -> dict[str, object]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_more_work_takes_longer_and_a_price_is_hours_times_price(config: Path, capsys) -> None:
    plain = out(capsys, config, "--device", "epyc-2", "--price", 2)
    assert plain["cost"] == pytest.approx(2 * plain["hours"])
    assert plain["assumed"]["length"] == 32
    assert plain["tokens"] == 10 * 16 * 32
    half = out(capsys, config, "--device", "epyc-2", "--length", 16)
    assert half["rollout"] < plain["rollout"]
    more = out(capsys, config, "--device", "epyc-2", "--rollout.group_size", 8)
    assert more["rollout"] > plain["rollout"]
    dead = out(capsys, config, "--device", "epyc-2", "--dead", 0.5)
    assert dead["tokens"] > plain["tokens"]
    gpu = out(capsys, config, "--device", "h200")
    assert gpu["rollout"] < plain["rollout"]
    assert "not measured" in gpu["source"]
    pulled = out(capsys, config, "--device", "h200", "--algorithm", "grpo")
    assert pulled["memory"]["reference"] > 0


def test_continuations_take_tokens_and_time(config: Path, capsys) -> None:
    """Four parts of 8 tokens: three cuts, 24, 16 and 8 tokens left, four times each: 192 beside 32."""
    plain = out(capsys, config, "--device", "h100", "--algorithm", "dr_grpo")
    cutting = "{name: vine_ppo, advantage: {split_by: tokens, most: 4, continuations: 4}}"
    vine = out(capsys, config, "--device", "h100", "--algorithm", cutting)
    assert vine["tokens"] == plain["tokens"] * (32 + 192) / 32
    assert vine["continued"] == vine["tokens"] * 192 / 224
    assert vine["rollout"] > 1.5 * plain["rollout"]
    assert vine["evaluation"] == plain["evaluation"]


def test_samplers_of_their_own_work_while_an_update_is_made(config: Path, capsys) -> None:
    """Under staleness a step takes as long as the slower of the two; who does both has nothing to gain."""
    many = (config, "--device", "h100", "--model", "7B", "--devices", 8)
    ahead = ("--rollout.staleness", 1)
    turns, same = out(capsys, *many), out(capsys, *many, *ahead)
    assert turns["hours"] == same["hours"]
    turns, both = (out(capsys, *many, "--samplers", 8, *more) for more in ((), ahead))
    sampling = both["rollout"] + both["sync"]
    count, evaluations = both["steps"], both["evaluations"] * both["evaluation"]
    assert both["hours"] == pytest.approx((count * max(sampling, both["update"]) + evaluations) / 3600)
    assert turns["hours"] == pytest.approx((count * (sampling + both["update"]) + evaluations) / 3600)
    main(["plan", *map(str, (*many, "--samplers", 8, *ahead))])
    assert "both at the same time" in capsys.readouterr().out


def test_a_preview_gives_lengths_and_dead_groups(config: Path, tmp_path: Path, capsys) -> None:
    previewed = tmp_path / "preview.json"
    previewed.write_text(json.dumps({"length": {"mean": 20.5}, "dead": {"4": {"value": 0.25}}}))
    found = out(capsys, config, "--device", "l4", "--preview", previewed)
    assert found["assumed"] == {"length": 20.5, "dead": 0.25, "source": f"as {previewed} measured them"}


def test_of_a_model_only_the_shape_is_read(config: Path, tmp_path: Path, capsys) -> None:
    save_policy(policy_of("qwen3"), tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    words = (config, "--device", "h100", "--model", tmp_path / "model", "--rollout.max_tokens", 16)
    found = out(capsys, *words)["memory"]
    parameters = sum(p.numel() for p in policy_of("qwen3").model.parameters())
    assert found["weights"] == 2 * parameters
    assert found["optimizer"] == (8 + 4) * parameters
    adapters = out(capsys, *words, "--lora.rank", 2)["memory"]
    assert adapters["optimizer"] < found["optimizer"] / 4


def test_what_does_not_fit_is_said(config: Path, tmp_path: Path, capsys) -> None:
    rates = tmp_path / "small.json"
    device = vars(DEVICES["epyc-2"]) | {"memory": 1 << 20, "name": "small"}
    rates.write_text(json.dumps(device))
    assert main(["plan", str(config), "--device", str(rates)]) == 1
    assert "it does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "h900"], "known are epyc-2, h200"),
        (["--device", "rates.json"], "no rates of benchmarks/cost.py"),
        (["--device", "l4", "--length", "99"], "at most rollout.max_tokens, 32"),
        (["--device", "l4", "--dead", "1"], "0 to below 1"),
        (["--device", "l4", "--preview", "nothing.json"], "not what `covey preview --json` prints"),
        (["--device", "l4", "--model", "/no/such"], "model"),
    ],
)
def test_mistakes_are_one_error(config: Path, words: list[str], says: str, capsys) -> None:
    assert main(["plan", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert says in error


def test_devices_have_sane_constants() -> None:
    for name in DEVICES:
        device = device_named(name)
        assert all(rate >= 0 for rate in (*device.sampling, *device.update))
        assert device.memory > 1 << 30


def test_tuned_systems_with_known_devices_and_lengths_are_within_a_quarter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the plan was not fitted to; benchmarks/results/plans.md has also those that are further off."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plans

    tuned = [r for r in plans.ROWS if r.who.startswith(("NeMo", "vLLM")) and plans.FITTED not in r.role]
    assert len(tuned) == 5
    for row in tuned:
        assert plans.predicted(row) == pytest.approx(row.seconds, rel=0.25), row.where
    assert (ROOT / "benchmarks/results/plans.md").read_text() == plans.page()


def test_more_devices_hold_less_each_and_sample_faster(config: Path, capsys) -> None:
    words = (config, "--device", "h200", "--model", "3B", "--rollout.group_size", 64, "--length", 30)
    one, eight, apart = (out(capsys, *words, *more) for more in ((), EIGHT, (*EIGHT, "--samplers", 8)))
    held = one["memory"], eight["memory"], apart["memory"]
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"] / 8, rel=1e-6)
    assert held[1]["gathered"] > 0
    assert held[1]["whole"] == held[0]["weights"]
    assert held[2]["sampling"] == 0
    assert eight["rollout"] < one["rollout"]
    assert one["sync"] == 0 < eight["sync"] < apart["sync"]
    assert one["devices"] == {"trainers": 1, "samplers": 0}
    assert eight["copies"] == [8, 1]


EIGHT = ("--devices", 8)


def test_a_model_larger_than_a_device_is_sampled_over_several(config: Path, capsys) -> None:
    words = [str(config), "--device", "h100", "--model", "70B", "--devices", "32"]
    assert main(["plan", *words, "--samplers", "8", "--json"]) == 1, "a trainer's whole copy does not fit"
    assert json.loads(capsys.readouterr().out)["copies"] == [2, 4]
    assert main(["plan", *words, "--samplers", "2"]) == 2
    assert "need 4 devices of 86 GB to sample from, there are 2" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "billions"), [("0.5B", 0.494), ("7B", 7.62), ("8B", 8.03), ("70B", 70.6)])
def test_sizes_have_the_parameters_that_their_models_have(size: str, billions: float) -> None:
    assert MODEL_SIZES[size].shape(None).parameters == pytest.approx(billions * 1e9, rel=5e-3)
