"""TRL's trainers of given rows: texts, pairs, judged answers, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.conftest import SMALL
from tests.training.objects import ROWS, live, varied, weights
from tests.trl.scripts import TEXTS, quick
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback, TrainerState

from covey.runs.rollouts import read_rollouts
from covey.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from covey_verify.errors import ConfigError

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 5)}
    for a in range(3)
    for b in range(4)
]
JUDGED = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b), "label": b % 2 == 0} for a in range(4) for b in range(4)
]


@pytest.mark.parametrize(
    ("trainer", "config", "rows"),
    [
        (SFTTrainer, SFTConfig, TEXTS),
        (DPOTrainer, DPOConfig, PAIRS),
        (KTOTrainer, KTOConfig, JUDGED),
        (RewardTrainer, RewardConfig, PAIRS),
    ],
)
def test_trainers_of_given_rows(tmp_path: Path, trainer: Any, config: Any, rows: Any) -> None:
    from transformers import Qwen2ForSequenceClassification

    given = live()
    model = given["model"]
    if trainer is RewardTrainer:
        torch.manual_seed(0)
        model.config.num_labels = 1
        model.config.pad_token_id = given["tokenizer"].pad_token_id or 0
        model = Qwen2ForSequenceClassification(model.config)
    before = weights(model)
    made = trainer(
        model=model, args=quick(config, tmp_path, eval_strategy="epoch", num_train_epochs=2),
        processing_class=given["tokenizer"], train_dataset=rows, eval_dataset={"a": rows[:4], "b": rows[4:8]},
    )  # fmt: skip
    first = made.evaluate()
    output = made.train()
    assert output.global_step == made.state.global_step == 4  # two epochs of 12 or 16 rows, 8 at once
    logs = made.state.log_history
    losses = [log["eval_a_loss"] for log in logs if "eval_a_loss" in log]
    assert len(losses) == 3
    assert losses[0] == first["eval_a_loss"] > losses[-1]
    assert all(not torch.equal(before[n], w) for n, w in model.named_parameters())
    assert logs[-1]["train_loss"] == output.training_loss


@pytest.mark.parametrize(
    ("trainer", "config", "rows", "order"),
    [
        (SFTTrainer, SFTConfig, TEXTS, "text"),
        (DPOTrainer, DPOConfig, PAIRS, "chosen rejected"),
        (KTOTrainer, KTOConfig, JUDGED, "completion"),
        (RewardTrainer, RewardConfig, PAIRS, "chosen rejected"),
    ],
)
def test_a_users_metrics_are_computed_from_predictions_in_the_order_of_trl(
    tmp_path: Path, trainer: Any, config: Any, rows: Any, order: str
) -> None:
    """Of each evaluated batch first all chosen answers, then all rejected ones."""
    from transformers import Qwen2ForSequenceClassification

    given = live()
    words = given["tokenizer"]
    model = given["model"]
    if trainer is RewardTrainer:
        model.config.num_labels = 1
        model.config.pad_token_id = words.pad_token_id or 0
        model = Qwen2ForSequenceClassification(model.config)
    seen = []

    def length(found: Any) -> dict[str, float]:
        seen.append(found)
        return {"rows/count": float(len(found.predictions))}

    made = trainer(
        model, args=quick(config, tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1,
        per_device_eval_batch_size=2), processing_class=words, train_dataset=rows, eval_dataset=rows[:3],
        compute_metrics=length,
    )  # fmt: skip
    made.train()
    columns = order.split()
    assert made.state.log_history[-2]["eval_rows/count"] == 3 * len(columns)
    (found,) = seen
    if trainer is RewardTrainer:
        assert found.predictions.shape == (6, 1)
        assert found.label_ids == ()
        return
    expected = [row[name] for batch in (rows[:2], rows[2:3]) for name in columns for row in batch]
    read = [
        words.decode([i for i in labels if i >= 0], skip_special_tokens=True) for labels in found.label_ids
    ]
    assert all(text.endswith(answer) for text, answer in zip(read, expected, strict=True)), read
    assert found.predictions.shape[:2] == found.label_ids.shape
    with pytest.raises(ValueError, match="batch_eval_metrics=True: compute_metrics is called once"):
        trainer(model, args=quick(config, tmp_path, batch_eval_metrics=True), processing_class=words,
                train_dataset=rows, compute_metrics=length)  # fmt: skip


@pytest.mark.parametrize(("given", "noted"), [({}, True), ({"router_aux_loss_coef": 0.0}, False)])
def test_a_run_says_that_experts_get_no_loss_for_their_balance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, float], noted: bool
) -> None:
    words = live()["tokenizer"]
    sizes = {**SMALL, "vocab_size": len(words), "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    args = quick(SFTConfig, tmp_path, max_steps=1, **given)
    SFTTrainer(model, args=args, processing_class=words, train_dataset=TEXTS).train()
    assert ("note: router_aux_loss_coef: TRL would add 0.001 times" in capsys.readouterr().out) == noted


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_takes_a_pair_as_two_judged_answers(tmp_path: Path, loss_type: str) -> None:
    pairs = [
        {"chosen": f"{n}+1={n + 1}", "rejected": f"{n}+1={n + 2}"}
        for n in range(4)  # the prompt is what both begin with
    ]
    given = live()
    trainer = KTOTrainer(
        given["model"], args=quick(KTOConfig, tmp_path, loss_type=loss_type, max_steps=2),
        processing_class=given["tokenizer"], train_dataset=pairs,
    )  # fmt: skip
    bad = {"prompt": "2+1=", "completion": "9", "label": False}
    assert trainer.evaluate([bad, bad])["eval_loss"] > 0  # nothing to compare with, but to measure
    trainer.train()
    rows = trainer.train_dataset
    read = [given["tokenizer"].decode(row["prompt_ids"] + row["completion_ids"]) for row in rows]
    assert [row["label"] for row in rows] == [True, False] * 4
    assert [text[:5] for text in read[:4]] == ["0+1=1", "0+1=2", "1+1=2", "1+1=3"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == loss_type


def test_sft_trains_the_tokens_that_trl_trains(tmp_path: Path) -> None:
    given = live()
    words = given["tokenizer"]

    def prepared(row: dict[str, Any], **names: Any) -> dict[str, Any]:
        args = quick(SFTConfig, tmp_path, **names)
        made = SFTTrainer(given["model"], args, processing_class=words, train_dataset=[row])
        (found,) = made.train_dataset
        return found

    end = words.eos_token_id
    text = prepared({"text": "1+2=3"})
    assert text["input_ids"] == text["labels"] == [*words("1+2=3")["input_ids"], end]
    assert len(prepared({"text": "1+2=3"}, max_length=2)["input_ids"]) == 2
    pair = prepared({"prompt": "1+2=", "completion": "3"})
    asked = len(words("1+2=")["input_ids"])
    assert pair["labels"][:asked] == [-100] * asked
    assert pair["labels"][asked:] == pair["input_ids"][asked:]
    whole = prepared({"prompt": "1+2=", "completion": "3"}, completion_only_loss=False)
    assert whole["labels"] == whole["input_ids"] == pair["input_ids"]
    assert prepared({"input_ids": [1, 2, 3], "labels": [-100, 2, -100]})["labels"] == [-100, 2, -100]


def test_rows_in_order_are_taken_in_order(tmp_path: Path) -> None:
    given = live()
    args = quick(GRPOConfig, tmp_path, shuffle_dataset=False, max_steps=5)
    GRPOTrainer(given["model"], varied, args, ROWS[:6], processing_class=given["tokenizer"]).train()
    logs = [read_rollouts(tmp_path / "run", step).rows for step in range(1, 6)]
    asked = [row["prompt"] for row in ROWS[:6]] * 2
    assert [{row["prompt"] for row in rows} for rows in logs] == [
        set(asked[n : n + 2]) for n in range(0, 10, 2)
    ]


def test_a_stream_is_read_as_far_as_steps_need(tmp_path: Path) -> None:
    def endless() -> Any:
        while True:
            yield from ROWS

    given = live()
    made = GRPOTrainer(
        given["model"], varied, quick(GRPOConfig, tmp_path, max_steps=2), endless(),
        processing_class=given["tokenizer"],
    )  # fmt: skip
    assert made.train().global_step == 2
    with pytest.raises(ConfigError, match="a stream has no length, so `max_steps` must be set"):
        GRPOTrainer("tiny", varied, quick(GRPOConfig, tmp_path), endless())


class Interrupt(TrainerCallback):
    """Ends the process in the middle of a run, as Ctrl-C does."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


class Stream:
    """As `datasets.IterableDataset`: rows from the first one whenever it is iterated, no length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.read = 0

    def __iter__(self) -> Any:
        for row in self.rows * 9:
            self.read += 1
            yield row


@pytest.mark.parametrize(
    ("trainer", "config", "rows"), [(SFTTrainer, SFTConfig, TEXTS), (DPOTrainer, DPOConfig, PAIRS)]
)
@pytest.mark.parametrize("once", [False, True], ids=["data set", "generator"])
def test_a_run_on_a_stream_resumes_on_the_rows_that_it_had_not_seen(
    tmp_path: Path, trainer: Any, config: Any, rows: Any, once: bool
) -> None:
    def made(name: str, stream: Any, *callbacks: Any) -> Any:
        given = live()
        args = quick(config, tmp_path / name, max_steps=4, save_strategy="steps", save_steps=1,
                     train_sampling_strategy="sequential")  # fmt: skip
        return trainer(given["model"], args=args, processing_class=given["tokenizer"],
                       train_dataset=stream, callbacks=callbacks)  # fmt: skip

    def new() -> Any:
        return iter(Stream(rows)) if once else Stream(rows)

    whole = made("whole", new())
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        made("parts", new(), Interrupt()).train()
    stream = new()
    resumed = made("parts", stream)
    assert once or stream.read == 4 * 8, "no further than the steps need, and once"
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    ended = weights(whole.model)
    assert all(torch.equal(ended[name], weight) for name, weight in weights(resumed.model).items())
    with pytest.raises(KeyboardInterrupt):
        made("others", new(), Interrupt()).train()
    advanced = iter(Stream(rows))
    next(advanced)
    with pytest.raises(
        ConfigError, match=r"rows of data\.train .* To resume, give the stream from its start"
    ):
        made("others", advanced).train(resume_from_checkpoint=True)
