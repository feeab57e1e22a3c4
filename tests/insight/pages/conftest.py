"""A run folder as a trainer leaves it, a server for it, and a browser that complains."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import uvicorn

from covey.config.load import load_config, resolved_yaml
from covey.insight.pages.server import PromptProtocol, TokenGate, build_site
from covey.runs.atomic import write_file
from covey.runs.folder import RunFolder
from covey.types import Group, Problem
from tests.fakes import completion, component

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKEN = "right"


def made_group(rewards: list[float], texts: list[str], prompt: str = "2 + 2 = ?", name: str = "p") -> Group:
    values = np.array(rewards, dtype=np.float64)
    completions = tuple(completion(t, 4 + i, first=10 + i) for i, t in enumerate(texts))
    return Group(Problem(name, prompt), np.array([1, 2]), completions, values, {"answer": component(values)})


def log_step(folder: RunFolder, step: int, groups: list[Group], **metrics: float) -> None:
    """A step as the trainer writes it."""
    lengths = [len(c.tokens) for g in groups for c in g.completions]
    rewards = np.concatenate([g.rewards for g in groups])
    advantages = [np.full(n, r - rewards.mean()) for n, r in zip(lengths, rewards, strict=True)]
    flat = np.concatenate(advantages).astype(np.float32)
    seen = {"ratios": np.exp(0.1 * flat), "entropies": np.abs(flat), "applied": flat / 100}
    folder.write_rollouts(
        step, groups, advantages, per_token={k: v.astype(np.float32) for k, v in seen.items()}
    )
    dead = float(np.mean([g.dead for g in groups]))
    folder.append(
        "metrics.jsonl",
        {"step": step, "reward/mean": float(rewards.mean()), "accuracy": 0.5, "groups/dead": dead, **metrics},
    )
    folder.append("timings.jsonl", {"step": step, "seconds/rollout": 1.0})


def made_run(path: Path, **settings: object) -> RunFolder:
    """A run that has begun."""
    values = {
        "model": "tiny",
        "data": {"task": "sums"},
        "output": str(path),
        "train": {"steps": 9},
    } | settings
    folder = RunFolder(path)
    write_file(path / "config.yaml", resolved_yaml(load_config(values=values)))
    return folder


@dataclass
class Site:
    root: Path
    url: str

    def at(self, fragment: str) -> str:
        return f"{self.url}?token={TOKEN}{fragment}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two small runs and a server for them."""
    for name in ("one", "two"):
        folder = made_run(tmp_path / name, seed=len(name))
        groups = [
            made_group([1, 0, 1, 0], ["four", "five", "4", "six"]),
            made_group([1, 1, 1, 1], ["same"] * 4, name="easy"),
        ]
        for step in range(3):
            log_step(folder, step, [replace(g) for g in groups])
        folder.close()
    with serving(tmp_path) as url:
        yield Site(tmp_path, url)


class serving:  # noqa: N801 - reads as a verb
    """A server for a folder, in a thread."""

    def __init__(self, root: Path | None, read_only: bool = False, source: Path | None = None) -> None:
        self.site = build_site(root, read_only, source)

    def __enter__(self) -> str:
        import socket

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        port = self.socket.getsockname()[1]
        config = uvicorn.Config(
            TokenGate(self.site, TOKEN, port),
            log_level="critical",
            timeout_graceful_shutdown=1,
            lifespan="off",
            http=PromptProtocol,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{port}/"

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        self.socket.close()


@pytest.fixture(scope="module")  # while it is open its event loop runs in the thread of all tests
def chromium() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium) -> Iterator[object]:
    """A page that may print no error and ask nobody but this machine."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, problems = context.new_page(), []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("dialog", lambda d: (problems.append(f"dialog {d.message}"), d.dismiss()))
    local = ("http://127.0.0.1:", "file:///", "data:")
    page.on("request", lambda r: None if r.url.startswith(local) else problems.append(r.url))
    page.set_default_timeout(30_000)
    yield page
    context.close()
    assert problems == []


def evaluation(step: int, rate: float) -> dict[str, object]:
    """An evaluation of two problems, of which one is answered correctly."""
    outcome = {"greedy": [1, 0], "correct": [1, 0], "majority": [1, 0], "reward": [1.0, 0.0]}
    ends = {"greedy": rate, "greedy/low": rate - 0.1, "greedy/high": rate + 0.1}
    reward = {"reward": 1.2345, "reward/low": 1.2, "reward/high": None}
    return {
        "step": step, "problems": 2, "samples": 1, "verdict": "v", "outcome": outcome,
        "basis": {"problems": ["a" * 64, "b" * 64]}, **ends, **reward,
    }  # fmt: skip
