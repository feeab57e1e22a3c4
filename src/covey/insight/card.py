"""The model card: description of the model, measured results, and how to use it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from covey.config.load import ResolvedConfig
from covey.config.methods import METHODS
from covey.config.python_objects import ModelObject, RowsObject
from covey.config.schema import is_gguf
from covey.config.sources import parse_yaml
from covey.errors import CheckpointError
from covey.insight.conclusion import Conclusion
from covey.models.gguf import gguf_license
from covey.models.pretrained import ADAPTER
from covey.runs.estimates import Evaluation
from covey.system.opening import RECORD_BYTES, read_regular
from covey.types import Problem
from covey_verify.errors import ConfigError

CARD = """---
{metadata}---

# {name}

Trained from {base} on {data} with covey: {method}, {steps}, seed {seed}.

{conclusion}

{table}

## Use

In the run's folder, or with the name under which the model is published:

```python
{imports}

tokenizer = AutoTokenizer.from_pretrained({path!r})
model = {model}
{inputs}
print({use})
```

The run's `config.yaml` holds every setting, its `metrics.jsonl` every step.
"""


CHECKPOINT_CARD = """---
{metadata}---

# {name}, step {step}

A checkpoint of the run `{name}`, trained with covey and written by `covey export`.

{table}
"""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
IN_CACHE = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")
"""A hub's model in the cache of huggingface_hub."""


@dataclass(frozen=True)
class CardFacts:
    """The facts that a card reports."""

    resolved: ResolvedConfig
    steps: int
    conclusion: Conclusion | None
    evaluations: Mapping[str, Evaluation]
    """Columns of the table, by name."""
    example: Problem
    loader: str = "AutoModelForCausalLM"
    """The class of transformers that loads the model."""
    ranking: str = "There were no held-out problems to measure it on."
    """The sentence that replaces a missing conclusion."""


def write_cards(final: Path, trained: CardFacts) -> None:
    """Write `README.md` of the model, and of its adapters in place of peft's stub."""
    (final / "README.md").write_text(model_card(trained), encoding="utf-8")
    _write_adapter_card(final / "adapter", trained.resolved, model_card(trained, adapter=True))


def write_checkpoint_cards(
    folder: Path, resolved: ResolvedConfig, step: int, measured: Mapping[int, Evaluation]
) -> None:
    """Write `README.md` of an exported checkpoint and of its adapters; ``measured``: evaluations by step."""
    cards = [_checkpoint_card(resolved, step, measured, adapter) for adapter in (False, True)]
    (folder / "README.md").write_text(cards[0], encoding="utf-8")
    _write_adapter_card(folder / "adapter", resolved, cards[1])


def _write_adapter_card(folder: Path, resolved: ResolvedConfig, card: str) -> None:
    """Write the card of adapters, if there are any, and name their base: peft's stubs name local folders."""
    if not folder.is_dir():
        return
    (folder / "README.md").write_text(card, encoding="utf-8")
    record = folder / ADAPTER
    values = json.loads(record.read_text("utf-8"))
    values["base_model_name_or_path"] = _Base.of(resolved).source(resolved.config.output)
    record.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_card(trained: CardFacts, adapter: bool = False) -> str:
    """Return the Markdown of a card; with ``adapter``, of the card of the adapter weights."""
    config = trained.resolved.config
    path = "final"
    base = _Base.of(trained.resolved).source(config.output)
    load = f"{trained.loader}.from_pretrained({path!r})"
    imports = f"from transformers import {trained.loader}, AutoTokenizer"
    writes = trained.loader == CardFacts.loader
    use = f"tokenizer.decode(model.generate(**inputs, max_new_tokens={config.rollout.max_tokens})[0])"
    if adapter and base:
        load = load.replace(repr(path), repr(base))
        load = f"PeftModel.from_pretrained({load}, {path + '/adapter'!r})"
        imports = f"from peft import PeftModel\n{imports}"
    method = METHODS[config.method].title or config.method
    if config.method == "rl":
        method = _algorithm(trained.resolved)
    return CARD.format(
        metadata=_front(trained.resolved, adapter),
        name=config.output.name + (" (adapter)" if adapter else ""),
        base=f"`{base or 'tiny'}`",
        data=_data(trained.resolved),
        method=method,
        steps=f"{trained.steps} step{'s' if trained.steps != 1 else ''}",
        seed=config.seed,
        conclusion=trained.conclusion.sentence if trained.conclusion else trained.ranking,
        table=_table(trained.evaluations),
        imports=imports,
        path=path,
        model=load,
        inputs=_inputs(trained.example),
        use=use if writes else "model(**inputs).logits",
    )


def _checkpoint_card(
    resolved: ResolvedConfig, step: int, measured: Mapping[int, Evaluation], adapter: bool
) -> str:
    """Return the Markdown of an exported checkpoint's card; ``measured`` has the evaluations by step."""
    name = resolved.config.output.resolve().name
    steps = {"before training": 0, f"step {step}": step}
    last = max(measured, default=0)
    if last > step:
        steps["last"] = last
    columns = {title: measured[n] for title, n in steps.items() if n in measured}
    table = _table(columns) if step in measured else ""
    card = CHECKPOINT_CARD.format(metadata=_front(resolved, adapter), name=name, step=step, table=table)
    return card.strip() + "\n"


def _inputs(example: Problem) -> str:
    """Return the lines of code that turn the example into the model input of training."""
    if isinstance(example.prompt, str):
        return f'inputs = tokenizer({example.prompt!r}, return_tensors="pt")'
    template = f", **{dict(example.template)!r}" if example.template else ""
    return (
        f"messages = {list(example.prompt)!r}\n"
        "inputs = tokenizer.apply_chat_template(\n"
        f'    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{template}\n)'
    )


def _front(resolved: ResolvedConfig, adapter: bool) -> str:
    return yaml.safe_dump(_metadata(resolved, adapter), sort_keys=False, allow_unicode=True)


def _metadata(resolved: ResolvedConfig, adapter: bool) -> dict[str, object]:
    """Return the card's metadata in the hub's format."""
    config = resolved.config
    base = _Base.of(resolved)
    tags = ["reinforcement-learning", _algorithm(resolved)] if config.method == "rl" else [config.method]
    head = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base.published if adapter else base.ancestor,
        **{k: base.metadata.get(k) for k in ("license", "license_name", "license_link")},
        "datasets": [config.data.train.name] if isinstance(config.data.train, Path) else None,
        "tags": ["covey", *tags],
    }
    return {k: v for k, v in head.items() if v is not None}


@dataclass(frozen=True)
class _Base:
    """The model with which a run began."""

    name: str
    """Folder, file or hub id; of an object, the name from which it was loaded."""
    project: Path
    """The folder from which relative paths of the config are."""

    @classmethod
    def of(cls, resolved: ResolvedConfig) -> _Base:
        """Return the base model of a run."""
        model = resolved.config.model
        name = model.source or "tiny" if isinstance(model, ModelObject) else model
        return cls(name, resolved.folder)

    @cached_property
    def folder(self) -> Path | None:
        """The model's folder; None for a hub id, a GGUF file, and `tiny`."""
        return next((f for f in (self.project / self.name, Path(self.name)) if f.is_dir()), None)

    @cached_property
    def published(self) -> str | None:
        """The model's hub id, if that is known."""
        if self.folder is None:
            return self.name if HUB_ID.fullmatch(self.name) and not is_gguf(self.name) else None
        cached = IN_CACHE.search(self.folder.resolve().as_posix())
        return f"{cached[1]}/{cached[2]}" if cached else None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The metadata of its own card or GGUF file, if that is on this machine; {} otherwise."""
        if is_gguf(self.name):
            file = next((f for f in (self.project / self.name, Path(self.name)) if f.is_file()), None)
            return gguf_license(file) if file else {}
        if self.folder is not None:
            card: object = self.folder / "README.md"
        else:
            card = self.published and try_to_load_from_cache(self.published, "README.md")
        # A card that is unreadable or has no metadata only means fewer fields here.
        if not isinstance(card, str | Path):
            return {}
        try:
            text = read_regular(Path(card), RECORD_BYTES)
            if not text.startswith(b"---"):
                return {}
            return parse_yaml(text.split(b"---")[1], Path(card))[0]
        except (OSError, ConfigError, CheckpointError):
            return {}

    @property
    def ancestor(self) -> str | None:
        """The hub id of the published model at the start of the chain of runs; None if it is not known."""
        # Another covey run's card names its own base already, so the chain ends at a published model.
        is_of_covey = self.folder and "covey" in (self.metadata.get("tags") or ())
        return self.metadata.get("base_model") if is_of_covey else self.published

    def source(self, output: Path) -> str | None:
        """Return the path or hub id that works from the run's folder ``output``; None for `tiny`.

        Of a folder from elsewhere it is only the name: the rest of the path would show the author's machine.
        """
        if self.published:
            return self.published
        if self.folder is None:
            if is_gguf(self.name):
                return Path(self.name).name  # without the folders of the author's machine
            return None if self.name == "tiny" else self.name
        # The path is relative only if model and run lie in one project, since these are moved together.
        run = output.resolve()
        model = self.folder.resolve()
        projects = (run.parent.parent, self.project.resolve())
        in_one_project = any(model.is_relative_to(p) and run.is_relative_to(p) for p in projects)
        return Path(os.path.relpath(model, run)).as_posix() if in_one_project else model.name


def _data(resolved: ResolvedConfig) -> str:
    data = resolved.config.data
    if isinstance(data.train, RowsObject):
        return f"{len(data.train.rows)} rows"
    return f"`{data.train.name}`" if data.train else f"the task `{data.task}`"


def _algorithm(resolved: ResolvedConfig) -> str:
    algorithm = resolved.config.algorithm
    return algorithm if isinstance(algorithm, str) else str(algorithm.get("name", "dapo"))


def _table(evaluations: Mapping[str, Evaluation]) -> str:
    if not evaluations:
        return ""
    summaries = {name: e.summary() for name, e in evaluations.items()}
    measures = list(next(iter(summaries.values())))
    verdict = next(iter(evaluations.values())).verdict
    lines = [
        f"| held-out (correct: {verdict} > 0.5) | {' | '.join(summaries)} |",
        "|---" * (len(summaries) + 1) + "|",
    ]
    lines += [f"| {m} | {' | '.join(str(s[m]) for s in summaries.values())} |" for m in measures]
    return "\n".join(lines)
