"""The base of all trainers: TRL's surface over a run of covey.

``train`` starts a run in ``args.output_dir``. The trainer observes it: it calls transformers' callbacks and
keeps ``state``. ``evaluate`` measures rows by the run's objective, without an update.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
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
from covey.trl.configs import Arguments
from covey.trl.meanings import Refused
from covey.trl.measure import measure
from covey.trl.models import expert_notes, with_adapters
from covey.trl.rows import Row, in_order, is_stream, list_rows, streamed_rows
from covey.trl.script_objects import Printer, TrainOutput
from covey.trl.settings import SCHEDULES, SETTINGS, Schedule, config_notes, enum_value

LOGGER = logging.getLogger("covey.trl")


ASKED_BY: Mapping[str, str] = {
    "on_log": "should_log",
    "on_evaluate": "should_evaluate",
    "on_save": "should_save",
}
"""Event -> the wish of a callback that it fulfils."""
ANEW = "A stream continues where the run was if it is given from its start, and in the same order"


class Trainer(Observer):
    """A model, rows and a config; subclasses say how rows are read and what is logged.

    The run that ``train`` starts tells it of each step.
    """

    config: ClassVar[Any]
    """The config's class."""
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
        self._refuse(others)
        if train_dataset is None:
            raise Refused("`train_dataset` is required")
        self.streamed = is_stream(train_dataset)
        if self.streamed:  # it is read once, from its start, as far as the run's steps need
            train_dataset = streamed_rows(train_dataset, self._most())
        self.reference: object = None
        """The frozen model that preferences are compared with, if it is not the model as the run begins."""
        self.aux_loss_enabled = False
        self.model, self.processing_class = self._load(model, processing_class, train_dataset)
        if peft_config is not None:
            self.model = with_adapters(self.model, peft_config)
        self.train_dataset = self._prepare_rows(train_dataset, "train_dataset", self._most())
        self.eval_dataset = self._prepare_each(eval_dataset)
        self.result: Result | None = None
        """covey's result of the run; None before `train`, and if a guard stopped it."""
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
        self.control = self._call("on_init_end")
        self.settings = self._settings(self._rows())

    # Subclasses

    def _load(self, model: object, tokenizer: object, rows: object) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        raise NotImplementedError

    def _prepare_rows(self, rows: object, what: str, most: int | None = None) -> Any:
        """Return rows as the trainer reads them."""
        raise NotImplementedError

    def _data(self, rows: Sequence[Row]) -> list[Row]:
        """Return prepared rows in covey's form."""
        raise NotImplementedError

    def _schedule(self, rows: Sequence[Row]) -> Schedule:
        return SCHEDULES[self.config.__name__](self.args, len(rows))

    def _further(self) -> dict[str, object]:
        """Return settings that do not follow from the config alone."""
        return {}

    # TRL's surface

    def train(self, resume_from_checkpoint: object = None, **_: object) -> TrainOutput:
        """Train in `output_dir`, or continue its run.

        A run that a guard stops ends as in TRL, with its reason printed and in `metrics["stopped"]`.
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
            raise Refused(f"{error}. {ANEW}" if self.streamed else str(error)) from None
        except GuardStop as reason:
            self._stopped = str(reason)
            print(f"stopped: {reason}")
        finally:
            self._running = False
        return self._output(time.monotonic() - began)

    def evaluate(
        self,
        eval_dataset: object = None,
        *,
        metric_key_prefix: str = "eval",
        **_: object,
    ) -> dict[str, float]:
        """Measure rows under the present weights, log the metrics and return them."""
        ready = eval_dataset is None or isinstance(eval_dataset, str)
        table = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(table, str):
            metric_key_prefix = f"{metric_key_prefix}_{table}"
            table = self.eval_dataset[table]
        if table is None:
            raise Refused("evaluate: there is no eval_dataset")
        tables = table if isinstance(table, Mapping) else {"": table}
        metrics: dict[str, float] = {}
        for name, rows in tables.items():
            prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
            metrics |= self._evaluate(rows if ready else self._prepare_rows(rows, "eval_dataset"), prefix)
        return metrics

    def _evaluate(self, rows: object, prefix: str) -> dict[str, float]:
        """Measure prepared rows, log the metrics under a prefix and return them."""
        began = time.monotonic()
        values = self._rename_metrics(self._measure(list_rows(rows, "eval_dataset")))
        values |= {"runtime": round(time.monotonic() - began, 3)}
        metrics = {f"{prefix}_{name}": value for name, value in values.items()}
        self.log(metrics)
        self.control = self._call("on_evaluate", metrics=metrics)
        return metrics

    def log(self, logs: dict[str, float], *_: object) -> None:
        """Add an entry to `state.log_history` and tell the callbacks."""
        logs = {**logs, "epoch": round(float(self.state.epoch or 0), 4)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self._call("on_log", logs=logs)

    def add_callback(self, callback: object) -> None:
        """Add a callback, as a class or an object."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: object) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: object) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    # transformers' own: they print the numbers of an evaluation as a table, and write them to `output_dir`.
    log_metrics = trainer_pt_utils.log_metrics
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)
    save_metrics = trainer_pt_utils.save_metrics

    def is_world_process_zero(self) -> bool:
        """Whether this process writes."""
        return True

    def is_local_process_zero(self) -> bool:
        """Whether this process writes on its machine."""
        return True

    def get_num_trainable_parameters(self) -> int:
        """Return the number of weights that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def accelerator(self) -> Printer:
        """An object with TRL's `print`."""
        return Printer()

    @property
    def hub_model_id(self) -> str:
        """The name under which push_to_hub uploads."""
        return str(self.args.hub_model_id or Path(self.args.output_dir).absolute().name)

    def save_model(self, output_dir: str | Path | None = None, **_: object) -> None:
        """Write the model, its adapters alone if it has some, and the tokenizer to a folder."""
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
        # Called for names that are not found: names of transformers' trainer get their reason.
        reason = ""
        if not name.startswith("_") and hasattr(transformers.Trainer, name):
            reason = "; covey makes batches, loss and optimizer in its own loop, which no subclass changes"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{reason}")

    # Inside

    def _config_of(self, args: object) -> Arguments:
        """Return the config; transformers' TrainingArguments become one."""
        if args is None:
            return self.config()
        if isinstance(args, self.config):
            return args
        if not is_dataclass(args):
            raise Refused(f"args: give a {self.config.__name__}, not {type(args).__name__}")
        names = {f.name for f in fields(self.config)}
        values = {f.name: enum_value(getattr(args, f.name)) for f in fields(args) if f.name in names}
        defaults = self.config.defaults()
        usual = {"accelerator_config", "parallelism_config", "fsdp_config", "fsdp"}
        return self.config(**{n: v for n, v in values.items() if n not in usual and v != defaults[n]})

    def _refuse(self, others: Mapping[str, object]) -> None:
        for name, value in others.items():
            if value is not None and value != (None, None):
                raise Refused(f"{type(self).__name__}: {name} has no counterpart in covey; remove it")

    def _most(self) -> int | None:
        """Return how many rows of a stream a run takes; None if that is not known."""
        if self.args.max_steps < 1:
            return None
        schedule = self._schedule([])
        return schedule.rows * schedule.steps

    def _prepare_each(self, rows: object) -> Any:
        if rows is None:
            return None
        if isinstance(rows, Mapping):
            return {name: self._prepare_rows(part, f"eval_dataset[{name!r}]") for name, part in rows.items()}
        return self._prepare_rows(rows, "eval_dataset")

    def _rows(self) -> list[Row]:
        return list_rows(self.train_dataset, "train_dataset", self._most())

    def _keep_reference(self) -> None:
        """Copy the model before it moves, where the trainer will compare with it later."""

    def _settings(self, rows: Sequence[Row]) -> dict[str, object]:
        """Return covey's settings, without model and data."""
        schedule = self._schedule(rows)
        return {**SETTINGS[self.config.__name__](self.args, schedule), **self._further()}

    def _source(self, rows: Sequence[Row]) -> dict[str, object]:
        return {"train": self._data(rows)}

    def _notes(self) -> list[str]:
        return expert_notes(self.model, self.args)

    def _order_rows(self, rows: list[Row]) -> list[Row]:
        """Return rows so that the run takes them as the config says. Raises Refused."""
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise Refused(f"train_sampling_strategy={strategy!r}: rows are taken at random or sequentially")
        if strategy == "random" and self._shuffles():
            return rows
        return in_order(rows, self.args.seed, self.schedule.rows * self.schedule.steps)

    def _shuffles(self) -> bool:
        return True

    def _start(self, settings: Mapping[str, object], rows: Sequence[Row]) -> Start:
        model = ModelObject(self.model, self.processing_class, self.reference)
        return Start(None, (), with_objects({**settings, "model": model, "data": self._source(rows)}))

    def _measure(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics of prepared rows, by covey's names."""
        resolved = self._start(self._settings_to_measure(), rows).load()
        with ExitStack() as around:
            if not self._running:  # within a run all of this is so already
                around.enter_context(default_torch_modes())
                around.enter_context(restore_process_settings())
                around.enter_context(restore_model_object(resolved.config.model))
            return measure(resolved, self.state.global_step)

    def _settings_to_measure(self) -> dict[str, object]:
        """Return the settings with which some rows are measured."""
        return {**self._settings(self._rows()), "tracker": None}

    def _call(self, event: str, **details: object) -> TrainerControl:
        if event in ASKED_BY:
            setattr(self.control, ASKED_BY[event], False)
        answer = self.callback_handler.call_event(event, self.args, self.state, self.control, **details)
        self.control = answer or self.control
        return self.control

    # What the run tells

    def run_begins(self, step: int) -> None:
        """Prepare the state for a run that begins or continues."""
        self._running = True
        updates = self.schedule.updates
        history = self.state.log_history
        self.state = TrainerState(max_steps=self.schedule.steps * updates, log_history=history)
        self.state.num_train_epochs = max(1, round(self.schedule.steps / self.schedule.epoch))
        self.state.compute_steps(self.args, self.state.max_steps)
        self._count(step)
        self.control = TrainerControl()
        self._unlogged, self._losses = [], []
        self._call("on_train_begin")
        self._call("on_epoch_begin")
        if self.args.eval_on_start and self.eval_dataset is not None:
            self.evaluate()

    def _count(self, step: int) -> None:
        """Note how far the run is."""
        self.state.global_step = step * self.schedule.updates
        self.state.epoch = step / self.schedule.epoch

    def step_begins(self, step: int) -> None:
        """Call on_step_begin."""
        self.state.global_step = step * self.schedule.updates
        self._call("on_step_begin")

    def checkpoint_written(self, folder: Path) -> None:
        """Call on_save."""
        self._call("on_save", checkpoint=str(folder))

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> ObserverRequest:
        """Carry out the requests of callbacks and config after a step; return the requests that are left."""
        self._count(step)
        self._unlogged.append(metrics)
        self._losses += [metrics["loss"]] if "loss" in metrics else []
        self._call("on_step_end")
        epoch = max(1, round(self.schedule.epoch))
        ends = step % epoch == 0 or step == self.schedule.steps
        if ends:
            self._call("on_epoch_end")
        if self.control.should_log:
            self.log(self._rename_metrics(_means(self._unlogged)))
            self._unlogged = []
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            if self.eval_dataset is not None:
                self.evaluate()
        if ends and step < self.schedule.steps:
            self._call("on_epoch_begin")
        return ObserverRequest(
            self.control.should_training_stop, self.control.should_save and step < self.schedule.steps
        )

    def _rename_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that TRL has, by TRL's names."""
        return {name: metrics[ours] for ours, name in self.names.items() if ours in metrics}

    def _output(self, seconds: float) -> TrainOutput:
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
        self._call("on_train_end")
        return TrainOutput(steps, loss, {**metrics, "epoch": float(self.state.epoch or 0)})


BASES: Mapping[str, str] = {
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
    """Whether the run in ``output`` is to continue. Raises Refused for another folder."""
    if isinstance(folder, str | Path) and Path(output).resolve() not in Path(folder).resolve().parents:
        raise Refused(
            f"train: resume_from_checkpoint={str(folder)!r} is not in {output}, whose run would continue"
        )
    return bool(folder)
