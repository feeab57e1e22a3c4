"""The base of all trainers: TRL's interface to a run of covey.

``train`` starts a run in ``args.output_dir`` and observes it, to call transformers' callbacks and to update
``state``. ``evaluate`` computes the run's loss and metrics on rows, without an update.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import transformers
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, trainer_pt_utils
from transformers.trainer_callback import CallbackHandler

from covey.api import run_start
from covey.config.python_objects import ModelObject, with_objects
from covey.config.start import Start
from covey.errors import GuardStop
from covey.insight.result import Result
from covey.learner.process import default_torch_modes, restore_process_settings
from covey.models.model_objects import restore_model_object
from covey.runs.inputs import OtherInputs
from covey.system.opening import open_to_readers
from covey.training.observer import Observer, ObserverRequest
from covey.trl.configs import TrainerArguments, config_from
from covey.trl.meanings import UnsupportedArgument
from covey.trl.measure import measure_rows
from covey.trl.models import expert_notes, with_adapters
from covey.trl.rows import Row, is_stream, keep_order, list_rows, streamed_rows
from covey.trl.script_objects import Accelerator, TrainOutput
from covey.trl.settings import SCHEDULES, SETTINGS, Schedule, config_notes

LOGGER = logging.getLogger("covey.trl")


CONTROL_FLAGS: Mapping[str, str] = {
    "on_log": "should_log",
    "on_evaluate": "should_evaluate",
    "on_save": "should_save",
}
"""Event -> the flag of TrainerControl with which a callback asks for it."""
STREAM_HINT = (
    "To resume, give the stream from its start and in the same order; the run skips what it has read"
)


class Trainer(Observer):
    """A model, rows and a config; subclasses define how rows are read and which metrics are logged.

    It is the observer of the run that ``train`` starts.
    """

    config: ClassVar[Any]
    """The class of its config."""
    names: ClassVar[Mapping[str, str]]
    """covey's metric -> the name under which TRL logs it."""

    def __init__(
        self,
        model: object,
        args: object = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        peft_config: object = None,
        **others: object,
    ) -> None:
        self.args = self._config_of(args)
        self.args.check()
        self._refuse_arguments(others)
        if train_dataset is None:
            raise UnsupportedArgument("`train_dataset` is required")
        self.streamed = is_stream(train_dataset)
        if self.streamed:  # read once, from its start, as many rows as the run's steps need
            train_dataset = streamed_rows(train_dataset, self._max_rows())
        self.reference: object = None
        """The reference model of preferences; None if it is the model as the run begins."""
        self.aux_loss_enabled = False
        self.model, self.processing_class = self._load_model(model, processing_class, train_dataset)
        if peft_config is not None:
            self.model = with_adapters(self.model, peft_config)
        self.train_dataset = self._prepare_rows(train_dataset, "train_dataset", self._max_rows())
        self.eval_dataset = self._prepare_eval_rows(eval_dataset)
        self.result: Result | None = None
        """The run's result; None before `train`, and if a guard stopped the run."""
        self.control = TrainerControl()
        self.state = TrainerState()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *(callbacks or ())], self.model, self.processing_class, None, None
        )
        self._running = False
        self._stopped = ""
        """The reason why a guard stopped the run."""
        self._unlogged: list[Mapping[str, float]] = []
        self._losses: list[float] = []
        self.control = self._call_event("on_init_end")
        self.settings = self._settings(self._rows())

    # Methods that subclasses define

    def _load_model(self, model: object, tokenizer: object, rows: object) -> tuple[Any, Any]:
        """Load the model and its tokenizer, and return both."""
        raise NotImplementedError

    def _prepare_rows(self, rows: object, what: str, max_rows: int | None = None) -> Any:
        """Return given rows as the trainer reads them."""
        raise NotImplementedError

    def _covey_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return prepared rows in covey's form."""
        raise NotImplementedError

    def _schedule(self, rows: Sequence[Row]) -> Schedule:
        return SCHEDULES[self.config.__name__](self.args, len(rows))

    def _extra_settings(self) -> dict[str, object]:
        """Return settings that do not follow from the config alone."""
        return {}

    # Methods of TRL's trainers

    def train(self, resume_from_checkpoint: object = None, **_: object) -> TrainOutput:
        """Train in `output_dir`, or continue its run.

        If a guard stops the run, this returns as usual; the reason is printed and in `metrics["stopped"]`.
        """
        resumes = _wants_resume(resume_from_checkpoint, self.args.output_dir)
        rows = self._rows()
        settings = self._settings(rows)
        self.schedule = self._schedule(rows)
        for note in [*config_notes(self.args, self.schedule), *self._notes()]:
            print(f"note: {note}")
        self._keep_reference()
        self._stopped = ""
        began = time.monotonic()
        start = self._start(settings, self._order_rows(rows))
        quiet = bool(self.args.disable_tqdm)
        try:
            self.result = run_start(start, quiet=quiet, overwrite=not resumes, observer=self)
        except OtherInputs as error:
            raise UnsupportedArgument(f"{error}. {STREAM_HINT}" if self.streamed else str(error)) from None
        except GuardStop as reason:
            self._stopped = str(reason)
            print(f"stopped: {reason}")
        finally:
            self._running = False
        return self._train_output(time.monotonic() - began)

    def evaluate(
        self,
        eval_dataset: object = None,
        *,
        metric_key_prefix: str = "eval",
        **_: object,
    ) -> dict[str, float]:
        """Measure rows under the present weights, log the metrics and return them."""
        # Rows of the trainer's own eval_dataset, whole or one of its tables, were prepared when it was made.
        is_prepared = eval_dataset is None or isinstance(eval_dataset, str)
        table = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(table, str):
            metric_key_prefix = f"{metric_key_prefix}_{table}"
            table = self.eval_dataset[table]
        if table is None:
            raise UnsupportedArgument("evaluate: there is no eval_dataset")
        tables = table if isinstance(table, Mapping) else {"": table}
        metrics: dict[str, float] = {}
        for name, rows in tables.items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            prepared = rows if is_prepared else self._prepare_rows(rows, "eval_dataset")
            metrics |= self._evaluate(prepared, prefix)
        return metrics

    def _evaluate(self, rows: object, prefix: str) -> dict[str, float]:
        """Measure prepared rows, log the metrics under a prefix and return them."""
        began = time.monotonic()
        values = self._rename_metrics(self._measure(list_rows(rows, "eval_dataset")))
        values |= {"runtime": round(time.monotonic() - began, 3)}
        metrics = {f"{prefix}_{name}": value for name, value in values.items()}
        self.log(metrics)
        self.control = self._call_event("on_evaluate", metrics=metrics)
        return metrics

    def log(self, logs: dict[str, float], *_: object) -> None:
        """Add an entry to `state.log_history` and tell the callbacks."""
        logs = {**logs, "epoch": round(float(self.state.epoch or 0), 4)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._call_event("on_log", logs=logs)

    def add_callback(self, callback: object) -> None:
        """Add a callback, as a class or an object."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: object) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: object) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    # Functions of transformers, which print the metrics of an evaluation, and write them to `output_dir`.
    log_metrics = trainer_pt_utils.log_metrics
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)
    save_metrics = trainer_pt_utils.save_metrics

    def is_world_process_zero(self) -> bool:
        """Return whether this process writes: always, as the model is trained in one process."""
        return True

    def is_local_process_zero(self) -> bool:
        """Return whether this process writes on its machine."""
        return True

    def get_num_trainable_parameters(self) -> int:
        """Return the number of weights that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def accelerator(self) -> Accelerator:
        """An object with TRL's `print`."""
        return Accelerator()

    @property
    def hub_model_id(self) -> str:
        """Name of the model on the hub."""
        return str(self.args.hub_model_id or Path(self.args.output_dir).absolute().name)

    def save_model(self, output_dir: str | Path | None = None, **_: object) -> None:
        """Write the model (only its adapters, if it has any) and the tokenizer to a folder."""
        folder = str(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)
        open_to_readers(Path(folder))

    def save_state(self) -> None:
        """Write `trainer_state.json` to `output_dir`."""
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def push_to_hub(self, commit_message: str = "End of training", **_: object) -> Any:
        """Upload the model and the tokenizer to the hub."""
        name = self.hub_model_id
        options = {"token": self.args.hub_token, "private": self.args.hub_private_repo}
        self.processing_class.push_to_hub(name, commit_message=commit_message, **options)
        return self.model.push_to_hub(name, commit_message=commit_message, **options)

    def end(self) -> None:
        """Do nothing: `train` has finished the trackers, and no group of processes is open after it."""

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that do not exist. Those of transformers' trainer get an explanation.
        reason = ""
        if not name.startswith("_") and hasattr(transformers.Trainer, name):
            reason = "; covey makes batches, loss and optimizer in its own loop, which no subclass changes"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{reason}")

    # Helpers

    def _config_of(self, args: object) -> TrainerArguments:
        """Return the trainer's config. Raises UnsupportedArgument for an object of another kind."""
        return self.config() if args is None else config_from(args, self.config)

    def _refuse_arguments(self, others: Mapping[str, object]) -> None:
        for name, value in others.items():
            # (None, None) is the default of transformers' argument `optimizers`.
            if value is not None and value != (None, None):
                raise UnsupportedArgument(
                    f"{type(self).__name__}: {name} has no counterpart in covey; remove it"
                )

    def _max_rows(self) -> int | None:
        """Return how many rows of a stream the run takes; None without `max_steps`."""
        if self.args.max_steps < 1:
            return None
        schedule = self._schedule([])
        return schedule.rows * schedule.steps

    def _prepare_eval_rows(self, rows: object) -> Any:
        if rows is None:
            return None
        if isinstance(rows, Mapping):
            return {name: self._prepare_rows(part, f"eval_dataset[{name!r}]") for name, part in rows.items()}
        return self._prepare_rows(rows, "eval_dataset")

    def _rows(self) -> list[Row]:
        return list_rows(self.train_dataset, "train_dataset", self._max_rows())

    def _keep_reference(self) -> None:
        """Copy the model before it is trained, if later evaluations need it as their reference."""

    def _settings(self, rows: Sequence[Row]) -> dict[str, object]:
        """Return covey's settings, without model and data."""
        schedule = self._schedule(rows)
        return {**SETTINGS[self.config.__name__](self.args, schedule), **self._extra_settings()}

    def _source(self, rows: Sequence[Row]) -> dict[str, object]:
        return {"train": self._covey_rows(rows)}

    def _notes(self) -> list[str]:
        return expert_notes(self.model, self.args)

    def _order_rows(self, rows: list[Row]) -> list[Row]:
        """Return rows in an order that the run takes as the config says. Raises UnsupportedArgument."""
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise UnsupportedArgument(
                f"train_sampling_strategy={strategy!r}: rows are taken at random or sequentially"
            )
        if strategy == "random" and self._shuffles():
            return rows
        return keep_order(rows, self.args.seed, self.schedule.rows * self.schedule.steps)

    def _shuffles(self) -> bool:
        return True

    def _start(self, settings: Mapping[str, object], rows: Sequence[Row]) -> Start:
        model = ModelObject(self.model, self.processing_class, self.reference)
        return Start(None, (), with_objects({**settings, "model": model, "data": self._source(rows)}))

    def _measure(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics of prepared rows, by covey's names."""
        resolved = self._start(self._settings_to_measure(), rows).load()
        with ExitStack() as stack:
            if not self._running:  # during a run the process has these settings already
                stack.enter_context(default_torch_modes())
                stack.enter_context(restore_process_settings())
                stack.enter_context(restore_model_object(resolved.config.model))
            return measure_rows(resolved, self.state.global_step)

    def _settings_to_measure(self) -> dict[str, object]:
        """Return the settings of a measurement: those of the run, without its tracker."""
        return {**self._settings(self._rows()), "tracker": None}

    def _call_event(self, event: str, **details: object) -> TrainerControl:
        if event in CONTROL_FLAGS:
            setattr(self.control, CONTROL_FLAGS[event], False)
        answer = self.callback_handler.call_event(event, self.args, self.state, self.control, **details)
        self.control = answer or self.control
        return self.control

    # Methods that the run calls

    def run_begins(self, step: int) -> None:
        """Reset the state, at the start of a run or where it continues."""
        self._running = True
        updates = self.schedule.updates
        history = self.state.log_history
        self.state = TrainerState(max_steps=self.schedule.steps * updates, log_history=history)
        self.state.num_train_epochs = max(1, round(self.schedule.steps / self.schedule.epoch))
        self.state.compute_steps(self.args, self.state.max_steps)
        self._set_progress(step)
        self.control = TrainerControl()
        self._unlogged = []
        self._losses = []
        self._call_event("on_train_begin")
        self._call_event("on_epoch_begin")
        if self.args.eval_on_start and self.eval_dataset is not None:
            self.evaluate()

    def _set_progress(self, step: int) -> None:
        """Set the steps and epochs of the state."""
        self.state.global_step = step * self.schedule.updates
        self.state.epoch = step / self.schedule.epoch

    def step_begins(self, step: int) -> None:
        """Call on_step_begin."""
        self.state.global_step = step * self.schedule.updates
        self._call_event("on_step_begin")

    def checkpoint_written(self, folder: Path) -> None:
        """Call on_save."""
        self._call_event("on_save", checkpoint=str(folder))

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> ObserverRequest:
        """Log and evaluate as callbacks and config ask; return the requests that the run has to fulfil."""
        self._set_progress(step)
        self._unlogged.append(metrics)
        self._losses += [metrics["loss"]] if "loss" in metrics else []
        self._call_event("on_step_end")
        batches_per_epoch = max(1, round(self.schedule.epoch))
        ends_epoch = step % batches_per_epoch == 0 or step == self.schedule.steps
        if ends_epoch:
            self._call_event("on_epoch_end")
        if self.control.should_log:
            self.log(self._rename_metrics(_means(self._unlogged)))
            self._unlogged = []
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            if self.eval_dataset is not None:
                self.evaluate()
        if ends_epoch and step < self.schedule.steps:
            self._call_event("on_epoch_begin")
        return ObserverRequest(
            self.control.should_training_stop, self.control.should_save and step < self.schedule.steps
        )

    def _rename_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that TRL logs too, under TRL's names."""
        return {name: metrics[ours] for ours, name in self.names.items() if ours in metrics}

    def _train_output(self, seconds: float) -> TrainOutput:
        """Log and return the summary of a run, as TRL does."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        loss = fmean(losses) if losses else 0.0
        steps = self.state.global_step
        metrics: dict[str, Any] = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(
                steps / self.schedule.updates * self.schedule.rows / max(seconds, 1e-9), 3
            ),
            "train_steps_per_second": round(steps / max(seconds, 1e-9), 3),
            "train_loss": loss,
        }
        self.log({**self._rename_metrics(_means(self._unlogged)), **metrics})
        if self._stopped:
            metrics["stopped"] = self._stopped
        self._call_event("on_train_end")
        return TrainOutput(steps, loss, {**metrics, "epoch": float(self.state.epoch or 0)})


SHARED_METRICS: Mapping[str, str] = {
    "loss": "loss",
    "optimizer/grad_norm": "grad_norm",
    "optimizer/lr": "learning_rate",
}
"""Metrics that every trainer logs."""


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it; the learning rate is the last one."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {name: fmean(step[name] for step in steps if name in step) for name in names}
    return means | ({"optimizer/lr": steps[-1]["optimizer/lr"]} if steps and "optimizer/lr" in means else {})


def _wants_resume(folder: object, output: str) -> bool:
    """Return whether to continue the run in ``output``. Raises UnsupportedArgument for another folder."""
    if isinstance(folder, str | Path) and Path(output).resolve() not in Path(folder).resolve().parents:
        raise UnsupportedArgument(
            f"train: resume_from_checkpoint={str(folder)!r} is not in {output}, whose run would continue"
        )
    return bool(folder)
