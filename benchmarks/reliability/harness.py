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
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RESULTS = Path(__file__).parents[1] / "results" / "reliability.jsonl"
REWARDS = """
def varied(completion):
    return len(completion) + sum(map(ord, completion)) % 7
"""
BASE: dict[str, Any] = {
    "data": {"task": "last_digit", "train_size": 64, "test_size": 16},
    "rewards": ["rewards.py:varied"],
    "rollout": {"group_size": 4, "prompts_per_step": 4, "max_tokens": 12},
    "train": {"steps": 6, "lr": 1e-3, "save_every": 1},
    "eval": {"problems": 8, "samples": 2, "every": 2},
    "threads": 1,
}
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
}


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    """A config and its rewards in a folder; returns the YAML file."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**BASE, **settings}
    for section in ("rollout", "train"):
        merged[section] = {**BASE[section], **settings.get(section, {})}
    (folder / "rewards.py").write_text(REWARDS)
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


def fingerprint(run: Path) -> str:
    """One hash of everything that must follow from the config alone."""
    digest = hashlib.sha256()
    for path in sorted(run.rglob("*")):
        place = path.relative_to(run)
        wanted = path.name in {"metrics.jsonl", "evals.jsonl"} or "rollouts" in place.parts
        if path.is_file() and (wanted or (path.suffix == ".safetensors" and "final" in place.parts)):
            digest.update(str(place).encode() + b"\0" + path.read_bytes())
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
