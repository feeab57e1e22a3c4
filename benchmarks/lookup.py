"""What prompt lookup could save in a rollout: drafts from a prompt and its completion so far, no draft model.

    python benchmarks/lookup.py RUN [--texts PROBLEMS.jsonl] [--step 5M]

A draft is what followed the last place where the latest 3 (else 2) tokens stood before. A keyed draw
decides every token, so a drafted one is accepted exactly where it equals the one that was drawn: recorded
completions say how many are. RUN is a run's folder; `--texts` are lines with `question` and `answer`, read as
if sampled, 8 times each in batches of 128. Printed are the tokens accepted of those checked, the CPU time of
a decoding step by rows, measured here on a model of random weights, and from both the time of all steps with
drafts beside without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from covey.runs.rollouts import read_rollouts, recorded_steps

sys.path.insert(0, str(Path(__file__).parent / "speed"))

import subject

LONGEST, SHORTEST = 3, 2
ROWS = (1, 2, 8, 32, 128)


def drafted(tokens: np.ndarray, at: int, most: int) -> np.ndarray:
    """What followed the last earlier place of the latest tokens before ``at``: up to ``most`` ids."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        if at <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(tokens[: at - 1], size)
        places = np.flatnonzero((windows == tokens[at - size : at]).all(1))
        if len(places):
            start = int(places[-1]) + size
            return tokens[start : min(start + most, at)]
    return tokens[:0]


def advances(prompt: np.ndarray, drawn: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Of each decoding step: tokens gained, the one drawn anyway among them, and checked."""
    tokens, at, found = np.concatenate((prompt, drawn)), len(prompt), list[tuple[int, int]]()
    while at < len(tokens):
        draft = drafted(tokens, at, most)
        agree = tokens[at : at + len(draft)] == draft[: len(tokens) - at]
        gained = 1 + (int(agree.argmin()) if not agree.all() else len(agree))
        gained = min(gained, len(tokens) - at)
        found.append((gained, len(draft)))
        at += gained
    return found


def recorded(run: Path, texts: Path | None) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Batches of (prompt, completion): each rollout of a run, or the texts."""
    if texts is not None:
        from covey.models.tiny import build_tokenizer

        rows = [json.loads(line) for line in texts.read_text().splitlines()]
        tokenizer = build_tokenizer([r["question"] + r["answer"] for r in rows], vocab_size=8000)
        pairs = [tuple(np.array(tokenizer.encode(r[k])) for k in ("question", "answer")) for r in rows]
        return [[p for p in pairs[i : i + 16] for _ in range(8)] for i in range(0, len(pairs), 16)]
    batches = []
    for step in recorded_steps(run)[::20]:
        log = read_rollouts(run, step)
        prompts = np.split(log.arrays["prompt_tokens"], log.arrays["prompt_ends"][:-1])
        drawn = np.split(log.arrays["tokens"], log.arrays["ends"][:-1])
        batches.append([(prompts[row["group"]], d) for row, d in zip(log.rows, drawn, strict=True)])
    return batches


def step_seconds(size: str) -> tuple[float, float]:
    """CPU seconds of a decoding step: of every step, and of each row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from covey.models.policy import Policy
    from covey.sampling.cache import CacheEngine

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        subject.build(size, "equal", "fp32", Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        policy = Policy(model, AutoTokenizer.from_pretrained(folder))
    best = []
    for rows in ROWS:
        engine = CacheEngine(policy, subject.prompts()[:1], rows, 128)
        with torch.no_grad():
            tokens = engine.admit([0] * rows).argmax(-1)
            times = []
            for _ in range(60):
                began = time.process_time()
                engine.decode(tokens)
                times.append(time.process_time() - began)
        best.append(float(np.quantile(times, 0.2)))
        print(f"  {rows:4} rows {1e3 * best[-1]:8.2f} ms")
    slope, start = np.polyfit(ROWS, best, 1, w=1 / np.array(best))
    return float(start), float(slope)


def total(steps: Sequence[Sequence[tuple[int, int]]], cost: tuple[float, float], below: int) -> float:
    """Seconds of a batch: drafts are checked where at most ``below`` completions run."""
    seconds, left = 0.0, [list(reversed(s)) for s in steps]
    while left:
        drafts = len(left) <= below
        for own in left:
            gained, checked = own.pop()
            seconds += cost[1] * (1 + checked * drafts)
            if gained > 1 and not drafts:
                own.append((gained - 1, checked))
        seconds += cost[0]
        left = [own for own in left if own]
    return seconds


def main() -> None:
    """Print the three parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--step", default="5M", help="model whose decoding steps are timed")
    chosen = parser.parse_args()
    batches = recorded(chosen.run, chosen.texts)
    print("CPU time of a decoding step, one thread")
    cost = step_seconds(chosen.step)
    print(f"  {1e3 * cost[0]:.2f} ms, and {1e3 * cost[1]:.3f} for each row")
    for most in (1, 2, 4, 8):
        steps = [[advances(p, d, most) for p, d in batch] for batch in batches]
        flat = [s for batch in steps for own in batch for s in own]
        gained, checked = (sum(s[i] for s in flat) for i in range(2))
        plain = sum(total(batch, cost, 0) for batch in steps)
        times = [sum(total(batch, cost, below) for batch in steps) / plain for below in (1, 4, 16, 1 << 20)]
        print(
            f"  up to {most}: {gained - len(flat):,} of {checked:,} checked accepted, {gained:,} tokens; ",
            end="",
        )
        print("times, if at most 1, 4, 16, any number run:", *(f"{t:.3f}" for t in times))


if __name__ == "__main__":
    main()
