"""Writers of verl and OpenRLHF: a sound run has no finding, a mistake in the trainer is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.audit.checks.check import apply
from covey.audit.readers.record_file import read_record
from covey.audit.table import CHECKS
from covey.audit.writers import verl as verl_writer
from covey.audit.writers.recorder import settings_of
from tests.audit.recorded import MISTAKES, run
from tests.audit.stand_ins import PROMPT, Batch, Column, OpenRlhfTrainer, VerlTrainer, worth

SCORE: dict[type, Callable[..., Any]] = {
    VerlTrainer: lambda data_source, solution_str, ground_truth, extra_info: {
        "score": worth(solution_str, ground_truth)
    },
    OpenRlhfTrainer: lambda queries, prompts, labels: {
        "rewards": torch.tensor([worth(queries[0][len(prompts[0]) :], labels[0])])
    },
}


@pytest.mark.parametrize("kind", [VerlTrainer, OpenRlhfTrainer])
def test_a_sound_run_has_no_finding(kind: type, tmp_path: Path) -> None:
    record, report = run(kind(), tmp_path, score=SCORE[kind])
    assert [str(f) for f in report.findings] == []
    unjudged = {name for names in report.unjudged.values() for name in names}
    judged = {
        "mask_shifted",
        "end_untrained",
        "old_stale",
        "sampler_behind",
        "std_over_batch",
        "rewards_order",
    }
    assert not unjudged & (judged | {"wrong_way", "group_mixed", "rate_zero"})
    assert "secret" not in (tmp_path / "run.jsonl").read_text()
    assert record.setting("max_completion_length") == 8 and len(record.updates) == 4


@pytest.mark.parametrize("name", sorted(MISTAKES))
@pytest.mark.parametrize("kind", [VerlTrainer, OpenRlhfTrainer])
def test_a_mistake_in_the_trainer_is_named_first(kind: type, name: str, tmp_path: Path) -> None:
    trainer = kind()
    MISTAKES[name](trainer)
    _, report = run(trainer, tmp_path, score=SCORE[kind])
    assert [f.id for f in report.findings][:1] == [name]


@pytest.mark.parametrize("kind", [VerlTrainer, OpenRlhfTrainer])
def test_training_is_the_same_with_a_record(kind: type, tmp_path: Path) -> None:
    alone, recorded = kind(), kind()
    alone.fit()
    run(recorded, tmp_path)
    assert torch.equal(alone.policy.logits, recorded.policy.logits)


def test_a_batch_in_verls_transfer_queue_is_read(tmp_path: Path, monkeypatch) -> None:
    trainer = VerlTrainer()
    inner = trainer._update_actor
    held: list[Batch] = []

    def fields(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        own = held[-1].batch
        lengths = own["attention_mask"][:, PROMPT:].sum(1)
        # There fields are not padded.
        found = {
            name: Column(row[:n] for row, n in zip(own[name], lengths, strict=True))
            for name in ("responses", "response_mask", "old_log_probs", "rollout_log_probs", "advantages")
        }
        found |= {"prompts": own["prompts"], "rm_scores": own["token_level_scores"]}
        known = {**found, **held[-1].non_tensor_batch}
        return {name: known[name] for name in select_fields if name in known}

    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_get=fields))

    def update_actor(meta: SimpleNamespace, metrics: dict[str, float]) -> SimpleNamespace:
        metrics |= inner(held[-1]).meta_info["metrics"]
        return meta

    trainer._update_actor = update_actor
    verl_writer.record_run(trainer, tmp_path / "run.jsonl")
    recorded = trainer._update_actor

    def sent(batch: Batch) -> SimpleNamespace:
        held.append(batch)
        return recorded(SimpleNamespace(keys=["a"], partition_id="train"), metrics={})

    trainer._update_actor = sent
    trainer.fit()
    record = read_record(tmp_path / "run.jsonl")
    assert [str(f) for f in apply(CHECKS, record).findings] == []
    assert len(record.samples) == 96 and record.updates[0].learning_rate == 2.0


@pytest.mark.parametrize("kind", [VerlTrainer, OpenRlhfTrainer])
def test_after_its_batches_a_record_has_metrics_alone(kind: type, tmp_path: Path) -> None:
    record, _ = run(kind(), tmp_path, batches=2)
    assert [len(update.rows) for update in record.updates] == [24, 24, 0, 0]
    assert len(record.rollouts) == 2 and record.updates[3].learning_rate == 2.0
    assert [update.step for update in record.updates] == [0, 1, 2, 3]


def test_settings_that_cannot_be_read_are_left_out() -> None:
    class Config(dict):
        def __getitem__(self, key: str) -> Any:
            if self.get(key) == "???":
                raise ValueError(key)
            return super().__getitem__(key)

    config = Config(a=Config(missing="???", number=1), api_key="secret", max_tokens=5)
    found = settings_of(config)
    assert found["a.number"] == 1 and found["max_tokens"] == 5
    assert "api_key" not in found and found.get("a.missing") is None


def test_a_writer_that_fails_leaves_the_trainer_alone(tmp_path: Path, capsys) -> None:
    trainer = VerlTrainer()
    trainer.tokenizer.decode = lambda ids, **_: 1 / 0 if _ == {} else ""
    verl_writer.record_run(trainer, tmp_path / "run.jsonl")
    trainer.fit()
    assert (
        "the record ends here (ZeroDivisionError: division by zero); training continues"
        in capsys.readouterr().out
    )
