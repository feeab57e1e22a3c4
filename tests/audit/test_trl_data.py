"""Records of trainers that learn from data, by a stand-in of TRL's: masks, labels, pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from covey.audit.table import audit
from covey.audit.writers.trl import record_run

LETTERS = ["<pad>", "<end>", "<bos>", "<ask>", "<say>", *"0123456789+="]
TEMPLATE = (
    "{% for m in messages %}{{ '<ask>' if m.role == 'user' else '<say>' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<say>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": "<bos>"}
    new = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<ask>", "<say>"], **special
    )
    new.chat_template = TEMPLATE
    return new


class Arguments(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class SFTConfig(Arguments): ...


class DPOConfig(Arguments): ...


class RewardConfig(Arguments): ...


class Trainer:
    """What the writer uses of a trainer of TRL, and the course of its steps."""

    kind: ClassVar[type] = SFTConfig

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(LETTERS), pad_token_id=0, num_labels=1, **size)
        is_score = self.kind is RewardConfig
        self.model = (LlamaForSequenceClassification if is_score else LlamaForCausalLM)(config)
        self.args = self.kind(**{"max_length": 64, "max_grad_norm": 1.0, **settings})
        self.processing_class = tokenizer()
        self.train_dataset = None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.lr_scheduler = None
        self.state = SimpleNamespace(global_step=0)
        context = torch.autocast("cpu", enabled=False)
        self.accelerator = SimpleNamespace(
            is_main_process=True, num_processes=1, unwrap_model=lambda m: m, autocast=lambda: context
        )
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def call(self, name: str) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(None, None, None)

    def _get_grad_norm(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return model(**inputs).loss

    def train(self, batches: list[dict[str, Any]]) -> None:
        self.model.train()
        self.call("on_train_begin")
        for inputs in batches:
            self.compute_loss(self.model, inputs).backward()
            self._get_grad_norm()
            self.call("on_pre_optimizer_step")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
            self.call("on_step_end")


def batch(step: int, change: Callable[[str, str], tuple[str, str]] = lambda p, c: (p, c)) -> dict[str, Any]:
    """Return a batch of sums, padded at the right, whose labels are their answers."""
    words = tokenizer()
    rows = []
    for n in range(4):
        prompt, answer = change(f"<ask>{n + step}+{n}<end><say>", f"{'=' * n}{(2 * n + step) % 10}<end>")
        rows.append((words.encode(prompt), words.encode(answer)))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels, present = (torch.full((4, width), value) for value in (0, -100, 0))
    for n, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        ids[n, :length] = torch.tensor([*prompt, *answer])
        labels[n, len(prompt) : length] = torch.tensor(answer)
        present[n, :length] = 1
    return {"input_ids": ids, "attention_mask": present, "labels": labels}


def names(trainer: Trainer, batches: list[dict[str, Any]], folder: Path) -> list[str]:
    record_run(trainer, folder / "run.jsonl")
    trainer.train(batches)
    return [finding.id for finding in audit(folder / "run.jsonl")[1].findings]


def of_labels(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[dict[str, Any]]:
    batches = [batch(step) for step in range(4)]
    return [{**b, "labels": change(b["input_ids"], b["labels"])} for b in batches]


def without_first(_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first = (labels != -100).cumsum(1) == 1
    return labels.masked_fill(first, -100)


def with_prompt(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.where(ids != 0, ids, labels)


def test_sound_sft_has_no_finding_and_trains_the_same(tmp_path: Path) -> None:
    plain = Trainer(assistant_only_loss=True)
    plain.train([batch(step) for step in range(4)])
    trainer = Trainer(assistant_only_loss=True)
    assert names(trainer, [batch(step) for step in range(4)], tmp_path) == []
    both = zip(plain.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines[1]["completions"][0]["prompt"] == "<ask>0+0<end><say>"
    assert lines[2]["rows"][0]["mask"] == [1, 1]


@pytest.mark.parametrize(
    ("due", "change"),
    [
        ("end_untrained", lambda _, labels: labels.masked_fill(labels == 1, -100)),
        ("mask_shifted", without_first),
        ("prompt_in_loss", with_prompt),
    ],
)
def test_labels_that_an_own_collator_makes(due: str, change: Any, tmp_path: Path) -> None:
    assert names(Trainer(assistant_only_loss=True), of_labels(change), tmp_path)[:1] == [due]


def test_whole_texts_may_be_trained(tmp_path: Path) -> None:
    assert names(Trainer(assistant_only_loss=False), of_labels(with_prompt), tmp_path) == []


class SamePlace(Trainer):
    """Compares the logits with the token that they follow."""

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def test_a_loss_whose_labels_are_not_shifted(tmp_path: Path) -> None:
    record_run(trainer := SamePlace(assistant_only_loss=True), tmp_path / "run.jsonl")
    trainer.train([batch(step) for step in range(4)])
    first, *_ = audit(tmp_path / "run.jsonl")[1].findings
    assert (first.id, "labels are not shifted" in str(first)) == ("tokens_replaced", True)


@pytest.mark.parametrize(
    ("due", "change"),
    [
        ("bos_doubled", lambda prompt, answer: (prompt, f"<bos>{answer}")),
        ("template_twice", lambda prompt, answer: (prompt[5:8], f"{prompt}{answer}")),
    ],
)
def test_answers_of_the_data_with_what_belongs_to_a_prompt(due: str, change: Any, tmp_path: Path) -> None:
    batches = [batch(step, change) for step in range(4)]
    trainer = Trainer(completion_only_loss=True)
    if due == "template_twice":  # The template would find the second prompt; the data know the first.
        rows = [
            tokenizer().encode(change(f"<ask>{n + s}+{n}<end><say>", "")[0])
            for s in range(4)
            for n in range(4)
        ]
        ids = [[token for token in row.tolist() if token] for b in batches for row in b["input_ids"]]
        answers = [whole[len(prompt) :] for prompt, whole in zip(rows, ids, strict=True)]
        trainer.train_dataset = Table({"prompt_ids": rows, "completion_ids": answers})
    assert names(trainer, batches, tmp_path)[:1] == [due]


class Table(dict[str, list[Any]]):
    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self["prompt_ids"])


def test_answers_that_max_length_truncates(tmp_path: Path) -> None:
    batches = [{name: values[:, :8] for name, values in batch(step).items()} for step in range(4)]
    assert names(Trainer(assistant_only_loss=True, max_length=8), batches, tmp_path)[:1] == ["end_lost"]


class Score(Trainer):
    """A reward model, read at the last place of the batch or at the last token of each row."""

    kind = RewardConfig
    at_padding = False

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        present = inputs["attention_mask"]
        hidden = model.model(input_ids=inputs["input_ids"], attention_mask=present).last_hidden_state
        model(input_ids=inputs["input_ids"], attention_mask=present)
        last = present.sum(1) - 1
        place = torch.full_like(last, present.shape[1] - 1) if self.at_padding else last
        chosen, rejected = model.score(hidden[torch.arange(len(last)), place])[:, 0].chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("at_padding", [False, True])
def test_the_token_at_which_a_reward_model_reads_its_score(at_padding: bool, tmp_path: Path) -> None:
    trainer = Score()
    trainer.at_padding = at_padding
    # The second half of a batch is rejected, for the prompts of the first half.
    pairs = [batch(step, lambda _, answer: ("<ask>1+1<end><say>", answer)) for step in range(4)]
    found = names(trainer, pairs, tmp_path)
    assert found == (["padding_trained"] if at_padding else [])
