"""Trainers that learn from given rows: SFT, DPO, KTO and reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from covey.trl import rows
from covey.trl.configs import DPOConfig, KTOConfig, RewardConfig, SFTConfig, TrainerArguments
from covey.trl.meanings import UnsupportedArgument
from covey.trl.models import load_language_model, load_text_classifier
from covey.trl.predictions import Sequences, in_trl_order, predict, sequence_reader
from covey.trl.rows import Row, RowReader, as_table, covey_row, list_rows
from covey.trl.settings import Schedule
from covey.trl.trainer import SHARED_METRICS, Trainer


class RowForm(NamedTuple):
    """The form of a trainer's rows, and the functions that read them."""

    read: Callable[[RowReader, Row], Row]
    truncate: Callable[[Row, TrainerArguments], Row | None]
    """Returns the row within the config's length; None if nothing is left to train."""
    tokens_of: rows.TokenReader
    prepared_by: str
    """A column that only prepared rows have; '' if reading a prepared row again does not change it."""
    labels_of: Sequences | None = None
    """Returns the labels for `compute_metrics`; None if these are the ids that the model reads."""


class GivenTrainer(Trainer):
    """A trainer that learns from given rows, which it tokenizes and truncates once, when it is made."""

    form: ClassVar[RowForm]

    def __init__(self, model: Any, args: Any = None, *, compute_metrics: Any = None, **others: Any) -> None:
        self.compute_metrics = compute_metrics
        self._computed: Mapping[str, float] = {}
        """The metrics that ``compute_metrics`` returned last."""
        super().__init__(model, args, **others)
        if compute_metrics is not None and self.args.batch_eval_metrics:
            raise UnsupportedArgument(
                "batch_eval_metrics=True: compute_metrics is called once, with the predictions of all rows"
            )

    def _load_model(self, model: Any, tokenizer: Any, rows: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        def texts() -> Iterator[str]:
            return _texts(list_rows(rows, "train_dataset", 1000))

        loaded, loaded_tokenizer = load_language_model(model, tokenizer, self.args, texts)
        if getattr(self.args, "pad_token", None):
            loaded_tokenizer.pad_token = self.args.pad_token
        self.reader = RowReader(loaded_tokenizer, self.args)
        return loaded, loaded_tokenizer

    def _prepare_rows(self, rows: Any, what: str, max_rows: int | None = None) -> Any:
        readable = [
            self._read_row(part) for row in list_rows(rows, what, max_rows) for part in self._rows_of(row)
        ]
        shortened = [self.form.truncate(row, self.args) for row in readable]
        usable = [row for row in shortened if row is not None]
        if readable and not usable:
            raise UnsupportedArgument(
                f"{what}: no row has a trained token within max_length {self.args.max_length}"
            )
        return as_table(rows, usable)

    def _rows_of(self, row: Row) -> Sequence[Row]:
        """Return the rows to which a given row is converted."""
        return [row]

    def _read_row(self, row: Row) -> Row:
        return row if self.form.prepared_by in row else self.form.read(self.reader, row)

    def _covey_rows(self, prepared: Sequence[Row]) -> list[Row]:
        return [covey_row(self.reader, row, self.form.tokens_of) for row in prepared]

    def _measure(self, prepared: Sequence[Row]) -> dict[str, float]:
        metrics = super()._measure(prepared)
        if self.compute_metrics is None:
            return metrics
        size = self.args.per_device_eval_batch_size
        inputs_of = sequence_reader(self.form.tokens_of)
        inputs = in_trl_order(prepared, inputs_of, size)
        labels = in_trl_order(prepared, self.form.labels_of or inputs_of, size)
        self._computed = self.compute_metrics(predict(self.model, inputs, labels))
        return {**self._computed, **metrics}

    def _rename_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        # The metrics of a user's function keep their names.
        computed = {name: metrics[name] for name in self._computed if name in metrics}
        return {**computed, **super()._rename_metrics(metrics)}


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the texts of rows."""
    for row in rows:
        for value in row.values():
            yield from (str(m.get("content", m)) if isinstance(m, dict) else str(m) for m in _items(value))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class SFTTrainer(GivenTrainer):
    """TRL's SFTTrainer: imitates texts, conversations or completions."""

    config = SFTConfig
    names = SHARED_METRICS
    form = RowForm(rows.language_row, rows.truncate_language, rows.language_tokens, "", rows.language_labels)

    def __init__(self, model: Any, args: Any = None, *, formatting_func: Any = None, **others: Any) -> None:
        self.formatting_func = formatting_func
        super().__init__(model, args, **others)

    def _prepare_rows(self, rows: Any, what: str, max_rows: int | None = None) -> Any:
        if (getattr(rows, "format", None) or {}).get("type") == "custom":
            raise UnsupportedArgument(
                f"{what}: Dataset.with_transform() is applied whenever a row is read, but rows are read once "
                "here, with skip_prepare_dataset too. Use map(), which gives trainer-ready rows"
            )
        return super()._prepare_rows(rows, what, max_rows)

    def _read_row(self, row: Row) -> Row:
        ready = (self.args.dataset_kwargs or {}).get("skip_prepare_dataset")
        masked = {"assistant_masks", "completion_mask"} & set(row)
        if ready and masked and row.get("labels") is None:
            raise UnsupportedArgument(
                f"train_dataset: with skip_prepare_dataset {', '.join(sorted(masked))} is not read. Add a "
                "'labels' column"
            )
        if self.formatting_func is not None:
            row = {self.args.dataset_text_field: self.formatting_func(row)}
        return super()._read_row(row)

    def _schedule(self, prepared: Sequence[Row]) -> Schedule:
        tokens = sum(len(row.get("input_ids", ())) for row in prepared)
        if not (self.args.packing and self.args.max_length and tokens):
            return super()._schedule(prepared)
        # A batch of TRL has this many packed sequences of max_length; take the rows that they would hold.
        packed = math.ceil(tokens / self.args.max_length)
        schedule = super()._schedule([{}] * packed)
        return replace(schedule, rows=max(1, round(schedule.rows * len(prepared) / packed)))


class DPOTrainer(GivenTrainer):
    """TRL's DPOTrainer: learns from pairs, compared with a frozen reference."""

    config = DPOConfig
    names: ClassVar[Mapping[str, str]] = {
        **SHARED_METRICS,
        "preference/margin": "rewards/margins",
        "preference/accuracy": "rewards/accuracies",
        "preference/chosen": "rewards/chosen",
        "preference/rejected": "rewards/rejected",
    }
    form = RowForm(rows.pair_row, rows.truncate_pair, rows.answer_tokens, "prompt_ids")

    def __init__(self, model: Any, ref_model: object = None, args: Any = None, **others: Any) -> None:
        if ref_model is not None and ref_model is model:
            raise UnsupportedArgument(
                f"{type(self).__name__}: `model` and `ref_model` are the same object. Leave "
                "ref_model out: the reference is the model as the run begins"
            )
        super().__init__(model, args, **others)
        if isinstance(ref_model, str):
            ref_model, _ = load_language_model(ref_model, self.processing_class, self.args, lambda: ())
        self.ref_model = ref_model
        self.reference = ref_model

    def _keep_reference(self) -> None:
        if self.reference is None and self.eval_dataset is not None:
            self.reference = deepcopy(self.model)

    def _measure(self, prepared: Sequence[Row]) -> dict[str, float]:
        if self.reference is None and self.state.global_step:
            raise UnsupportedArgument(
                "Cannot compute reference log-probs for a dataset passed to `evaluate` after training began: "
                "the model has moved. Give eval_dataset to the trainer, which then keeps a copy of the model"
            )
        return super()._measure(prepared)

    def _rename_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        named = super()._rename_metrics(metrics)
        # TRL's rewards are log-ratios times beta.
        scaled = ("rewards/margins", "rewards/chosen", "rewards/rejected")
        return {name: value * self.args.beta if name in scaled else value for name, value in named.items()}


class KTOTrainer(DPOTrainer):
    """TRL's KTOTrainer: learns from answers that are labelled one by one."""

    config = KTOConfig
    names: ClassVar[Mapping[str, str]] = {
        **SHARED_METRICS,
        "preference/accuracy": "rewards/accuracies",
        "preference/reference_point": "kl",
    }
    form = RowForm(rows.judged_row, rows.truncate_judged, rows.answer_tokens, "prompt_ids")

    def _rows_of(self, row: Row) -> Sequence[Row]:
        return rows.pair_as_judged(row) if {"chosen", "rejected"} <= set(row) else [row]


class RewardTrainer(GivenTrainer):
    """TRL's RewardTrainer: trains a model to give the chosen answer of a pair the larger number."""

    config = RewardConfig
    names: ClassVar[Mapping[str, str]] = {
        **SHARED_METRICS,
        "reward_model/accuracy": "accuracy",
        "reward_model/margin": "margin",
    }
    form = RowForm(rows.scored_row, rows.drop_long_pair, rows.scored_tokens, "chosen_ids", rows.no_labels)

    def _load_model(self, model: Any, tokenizer: Any, _rows: object) -> tuple[Any, PreTrainedTokenizerBase]:
        loaded, loaded_tokenizer = load_text_classifier(model, tokenizer, self.args.model_init_kwargs)
        self.reader = RowReader(loaded_tokenizer, self.args)
        return loaded, loaded_tokenizer
