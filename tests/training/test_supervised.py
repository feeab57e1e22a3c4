"""Supervised stages: which rows a step takes, and what is learned of them, beside float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.proof.cases import make_model
from tests.training.runs import metrics_of, start
from transformers import AutoTokenizer

import covey
from covey.proof import decoder, descent
from covey.training.examples_loop import batch_rows


def test_rows_are_read_on_without_a_gap_in_a_new_order_each_epoch() -> None:
    taken = [row for step in range(5) for row in batch_rows(10, 4, step, seed=0)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]
    assert taken[:10] != [row for step in range(3) for row in batch_rows(10, 4, step, seed=1)][:10]


@pytest.mark.parametrize("micro_tokens", [8192, 12])
def test_a_supervised_run_is_that_of_a_naive_float64_trainer(tmp_path: Path, micro_tokens: int) -> None:
    model = make_model(tmp_path / "model")
    rows = [{"prompt": f"{i}+{j}=", "completion": "7" * j + str(i)} for i in range(4) for j in range(1, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"steps": 3, "lr": 1e-3, "batch_size": 5, "warmup_steps": 2, "grad_clip": 0.5, "save_every": 9}
    start(
        tmp_path / "run",
        method="sft",
        model=str(model.folder),
        data={"task": None, "train": tmp_path / "rows.jsonl", "test": tmp_path / "rows.jsonl"},
        rewards=(lambda completion: 0.0,),
        train={**train, "tokens_per_micro_batch": micro_tokens},
        eval={"problems": 1, "samples": 1},
    )
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    weights = {n: w.clone().requires_grad_() for n, w in model.weights.items()}
    trainer, moving = descent.ShadowTrainer(weights, {}), list(weights.values())
    adam = {"betas": (0.9, 0.999), "weight_decay": 0.0, "schedule": "constant", "inner_epochs": 1}
    adam |= {"updates_per_batch": 1, **train}
    setting = descent.ShadowConfig(model.shape, {}, adam, 1.0, 12, False, 1, 0)
    for step, record in enumerate(metrics_of(tmp_path / "run")):
        losses, tokens = [], 0
        for row in (rows[i] for i in batch_rows(len(rows), 5, step, seed=0)):
            prompt, answer = (tokenizer(row[k])["input_ids"] for k in ("prompt", "completion"))
            answer = [*answer, tokenizer.eos_token_id]
            log_pi = decoder.logits(weights, model.shape, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            losses.append(-log_pi.log_softmax(-1)[range(len(answer)), answer].sum())
            tokens += len(answer)
        loss = torch.stack(losses).sum() / tokens
        gradient = dict(zip(weights, torch.autograd.grad(loss, moving), strict=True))
        norm = float(torch.cat([g.flatten() for g in gradient.values()]).norm())
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert record["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-3)
        descent.adamw(trainer, setting, gradient, norm, step)
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    for name, weight in final.items():
        moved, off = (
            (weights[name] - other.double()).norm().item() for other in (model.weights[name], weight)
        )
        assert off < 0.02 * moved


def test_rows_that_are_dropped_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model")
    rows = [{"prompt": "1+", "completion": "2" * n} for n in (1, 2, 5000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": tmp_path / "rows.jsonl", "long_prompts": "drop"}
    settings = {"model": str(model.folder), "method": "sft", "train": {"steps": 1, "batch_size": 2}}
    covey.train(**settings, data=data, output=tmp_path / "run", quiet=False)
    assert "1 of 3 rows exceed the model's context and are dropped" in capsys.readouterr().out
