"""Settings that nothing reads are said, and really change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.training.runs import start, varied
from tests.training.short_answers import SHORT

from covey.config.layers import with_value
from covey.config.load import load_config
from covey.config.schema import Config
from covey.config.unread import reads

OTHER: dict[str, Any] = {
    "algorithm": {"name": "vine_ppo", "critic": None},
    "rewards": ({"exact_match": {}},),
    "rollout.curriculum": "frontier",
    "train.schedule": "cosine",
    "train.betas": [0.7, 0.8],
    "train.stop_at": 0.1,
    "guards.kl_warn": 1e-9,
    "guards.kl_act": 1e-9,
    "guards.kl_stop": 1e-9,
    "guards.kl_action": "stop",
    "guards.on_finding": "rollback",
    "train.final": "best",
    "keep.least": {"nobody": 2.0},
    "scoring.noise": 0.4,
}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting with its default."""
    for name, field in section.model_fields.items():
        key, value = f"{prefix}{name}", field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from leaves(type(value), f"{key}.")
        else:
            yield key, value


def other(key: str, value: object) -> object:
    """A value that is not the default."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float), f"{key}: which other value?"
    return value + 1 if isinstance(value, int) else value / 2 or 0.25


@pytest.mark.parametrize("method", ["rl", "sft", "dpo", "reward_model", "pairs", "rejection_sampling"])
def test_what_a_method_does_not_read_changes_nothing(method: str, tmp_path: Path) -> None:
    """All such settings at once: the same numbers, the same model or examples, and each is said."""
    pairs = [{"prompt": f"{i}+1=", "chosen": f"{i}{i}", "rejected": "7"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    learns = method in ("dpo", "reward_model")
    data = {"task": None, "train": str(tmp_path / "pairs.jsonl")} if learns else {}
    own: dict[str, Any] = {
        "method": method,
        "data": data,
        "train": {"steps": 2},
        "rewards": () if learns else (varied,),
    }
    own["rollout"] = SHORT
    strange: dict[str, Any] = {}
    for key, value in leaves(Config):
        if not reads(method, key) and key != "loss":
            strange = with_value(strange, key, other(key, value))
    given = [key for key, _ in leaves(Config) if not reads(method, key) and key != "loss"]
    assert len(given) > 5
    results = []
    for name, more in (("plain", {}), ("strange", strange)):
        values = {
            **own,
            **{k: {**own.get(k, {}), **v} if isinstance(v, dict) else v for k, v in more.items()},
        }
        (result,) = start(tmp_path / name, **values)
        files = [result.product / "model.safetensors" if result.product.is_dir() else result.product]
        results.append([f.read_bytes() for f in (*files, result.folder / "metrics.jsonl")])
    assert results[0] == results[1]
    (note,) = load_config(values={**strange, "method": method}).notes
    assert note.startswith(f"method {method} does not read ")
    assert sorted(note.removesuffix(": these change nothing").partition("read ")[2].split(", ")) == sorted(
        given
    )


def test_it_is_said_where_it_was_set_and_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {task: sums}\nrollout: {curriculum: frontier}\nkeep: {margin: 1}\n"
        "stages:\n- {method: sft, algorithm: dapo}\n- {method: rl, train: {batch_size: 2}}\n"
    )
    notes = load_config(tmp_path / "run.yaml", ["--stages.1.train.inner_epochs", "2"]).notes
    assert [n.replace(f"{tmp_path}/", "") for n in notes] == [
        (
            "stage 1-sft: method sft does not read algorithm, train.inner_epochs (run.yaml:5): these change "
            "nothing"
        ),
        "stage 2-rl: method rl does not read train.batch_size (run.yaml:6): this changes nothing",
        "no stage reads keep.margin (run.yaml:3): this changes nothing",
    ]
    assert (
        load_config(values={"method": "sft", "data": {"task": "sums"}, "rollout": {"group_size": 8}}).notes
        == []
    )
