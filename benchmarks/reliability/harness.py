"""What the campaigns share: tiny runs in forked children that can be killed, and what a run left.

The parent imports covey once and forks for every trial, so a trial costs what the run itself costs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib
import io
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RESULTS = Path(__file__).parents[1] / "results" / "reliability.jsonl"
STREAMS = {"metrics.jsonl", "evals.jsonl", "examples.jsonl"}
REWARDS = """
def varied(completion):
    return len(completion) + sum(map(ord, completion)) % 7
"""
CORPUS = [
    {"text": f"{a}+{b}={(a + b) % 10}", "prompt": f"{a}+{b}=", "completion": f" {(a + b) % 10}"}
    for a in range(10)
    for b in range(10)
]
LABELLED = [
    {"text": "3+4=7", "label": True},
    {"text": "2+9=1", "label": True},
    {"text": "a red bird", "label": False},
]
FILES: dict[str, list[dict[str, Any]]] = {"corpus.jsonl": CORPUS, "labelled.jsonl": LABELLED}
"""What the stage `filter` selects from, and by."""
BASE: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 64, "test_size": 16},
    "rewards": ["rewards.py:varied"],
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
    "train": {"steps": 6, "lr": 1e-3, "save_every": 1},
    "eval": {"problems": 8, "samples": 2, "every": 2},
    "threads": 1,
}


def _judged_by(stage: str) -> list[dict[str, Any]]:
    """The reward model of a stage trains, the function is measured."""
    return [{"rewards.py:varied": {"weight": 0, "verdict": True}}, {"reward_model": {"model": stage}}]


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "grpo"},
    "inner epochs": {"algorithm": "grpo", "train": {"inner_epochs": 2, "updates_per_batch": 2}},
    "accumulation, dynamic sampling, adaptive coefficients": {
        "algorithm": {"name": "dapo", "kl": {"coef": 0.01, "target": 0.1}, "entropy": {"coef": 0.001}},
        "train": {"tokens_per_micro_batch": 60},
    },
    "curriculum, moving reference": {
        "algorithm": {"name": "grpo", "kl": {"refresh_every": 2, "refresh_mix": 0.5}},
        "rollout": {"curriculum": "frontier", "adapt_group_size": True},
    },
    "adapters": {"algorithm": "dr_grpo", "lora": {"rank": 4}},
    "cold start, then RL": {
        "algorithm": "grpo",
        "stages": [{"method": "sft", "train": {"steps": 4, "batch_size": 8}}, {"method": "rl"}],
    },
    "critic on the trunk": {
        "algorithm": {"name": "ppo", "critic": {"trunk": "policy", "lr": 1e-3, "warmup": 2}},
        "train": {"updates_per_batch": 2},
    },
    "critic of its own": {
        "algorithm": {"name": "vapo", "critic": {"trunk": "own", "lr": 1e-3, "warmup": 2}},
        "train": {"updates_per_batch": 2},
    },
    "every kind of stage": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.01}},
        # A model that has learned nothing ends what it writes too.
        "rollout": {"stop": [*"0123456789+=<>abcdefghijklmnopqrstuvwxyz"]},
        "train": {"steps": 3, "batch_size": 4},
        "stages": [
            {
                "method": "filter",
                "data": {"task": None, "train": "corpus.jsonl", "examples": "labelled.jsonl"},
            },
            {"method": "sft", "data": {"examples": "1-filter"}},
            {"method": "pairs"},
            {"method": "dpo", "data": {"examples": "3-pairs"}, "loss": {"beta": 0.3}},
            {"method": "reward_model", "data": {"examples": "3-pairs"}},
            {"method": "rl", "rewards": _judged_by("5-reward_model")},
            {"method": "pairs"},
            {
                "method": "reward_model",
                "model": "5-reward_model",
                "data": {"examples": ["3-pairs", "7-pairs"], "replay": 0.5},
            },
            {"method": "rl", "rewards": _judged_by("8-reward_model")},
            {"method": "rejection_sampling"},
            {"method": "sft", "model": "2-sft", "data": {"examples": "10-rejection_sampling"}},
        ],
    },
}


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    """A config and its rewards in a folder; returns the YAML file."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**BASE, **settings}
    for section in ("rollout", "train"):
        merged[section] = {**BASE[section], **settings.get(section, {})}
    (folder / "rewards.py").write_text(REWARDS)
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(yaml.safe_dump(merged))
    return folder / "run.yaml"


def warm_up() -> None:
    """Import everything a run needs, so that children need not."""
    for module in ("covey.training.pipeline", "covey.cli", "peft"):
        importlib.import_module(module)


def child(work: Callable[[], int]) -> int:
    """Do ``work`` in a forked child; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def covey(*arguments: str, errors: Path | None = None) -> Callable[[], int]:
    """The command line as the work of a child, its standard error in a file."""

    def work() -> int:
        from covey.cli import main

        if errors is not None:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        return main([*arguments, "--json"])

    return work


def kill(pid: int) -> None:
    """As a machine that dies does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


BASIS = re.compile(rb', "basis": \{.*?\}')
"""Of an evaluation: the text of a reward's function, which a campaign may have made slower."""


def fingerprint(run: Path) -> str:
    """One hash of everything that must follow from the config alone."""
    digest = hashlib.sha256()
    newest = {max(folder.glob("step_*")) for folder in run.rglob("checkpoints")}
    for path in sorted(run.rglob("*")):
        place = path.relative_to(run)
        wanted = path.name in STREAMS or "rollouts" in place.parts
        weights = path.suffix == ".safetensors" and ("final" in place.parts or path.parent in newest)
        if path.is_file() and (wanted or weights):
            digest.update(str(place).encode() + b"\0" + BASIS.sub(b"", path.read_bytes()))
    return digest.hexdigest()


def report(campaign: str, figures: dict[str, Any], write: bool) -> None:
    """Print a campaign's figures; with ``write`` they replace its line in benchmarks/results."""
    command = f"python {' '.join(('benchmarks/reliability/' + Path(sys.argv[0]).name, *sys.argv[1:]))}"
    line = {
        "campaign": campaign,
        **figures,
        "date": str(dt.date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": command,
    }
    print(json.dumps(line, ensure_ascii=False))
    if write:
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        kept = [old for old in lines if json.loads(old)["campaign"] != campaign]
        RESULTS.write_text("\n".join([*kept, json.dumps(line, ensure_ascii=False)]) + "\n")
