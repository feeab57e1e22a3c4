"""What `covey plan` would have said of runs that others have published, and how far off it is.

    python benchmarks/plans.py [--write]

Two of the figures gave the plan its share of a GPU's compute; the others were not looked at for it. What a
source does not say is assumed here and named. With --write the table goes to benchmarks/results/plans.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from covey.insight.devices import DEVICES
from covey.insight.fleet import Fleet
from covey.insight.plan import StepWork, step_seconds
from covey.insight.sizes import MODEL_SIZES
from presets import RESULTS

MICRO = 16_384
"""Tokens in the model at once, where a source does not say."""


MISSING = (
    "Tuned systems whose devices and lengths are known are within a quarter. A plan is too low where long "
    "completions end one after the other, where a framework spends time of its own between the phases, and "
    "where small models are run without care; rewards are never in it."
)


@dataclass(frozen=True)
class Published:
    """A figure, and the run it is of."""

    who: str
    where: str
    what: Literal["step", "sampling", "updating", "the longer of both"]
    seconds: float
    size: str
    device: str
    fleet: Fleet
    job: StepWork
    role: str = ""
    """What is assumed, or that the plan's constants come from it."""


H100 = "h100"
NEMO = "NeMo RL 0.4, performance summary"
AREAL = "AReaL v0.3, blog, table 2"
PRIME = "prime-rl, BENCHMARKS.md (2026-02)"
FITTED = "gave the constants"
ROWS = (
    Published(
        PRIME, "Qwen3-0.6B, all weights, sequences of 16K, 1 H100", "updating", 16_384 / 11_900, "0.6B", H100,
        Fleet(), StepWork(1, 1, 1, 0, 16_384, 16_384, 1), FITTED,
    ),
    Published(
        PRIME, "Qwen3-4B, LoRA, sequences of 16K, 1 H100", "updating", 16_384 / 6_200, "4B", H100,
        Fleet(), StepWork(1, 1, 1, 0, 16_384, 16_384, 1), f"{FITTED}; all weights are counted",
    ),
    Published(
        "vLLM 0.19, Qwen3-0.6B (kvcached's benchmark)", "512 tokens in, 128 out, 1,000 requests, 1 H100",
        "sampling", 1000 / 94.9, "0.6B", H100, Fleet(), StepWork(1000, 1, 1, 512, 128, 128, 256),
        "256 at once",
    ),
    Published(
        NEMO, "Llama 3.1 8B, 2,048 samples of 1,060 tokens (4,096 at most), 16 H100", "step", 97.7, "8B",
        H100,
        Fleet(16), StepWork(2048, 2048, 32, 100, 960, 3996, 256, scored=2), "prompts of 100, groups of 32",
    ),
    Published(
        NEMO, "the same, one step off-policy, 1,129 tokens", "the longer of both", 74.6, "8B", H100,
        Fleet(8, 8), StepWork(2048, 2048, 32, 100, 1029, 3996, 256, scored=2), "half of the devices sample",
    ),
    Published(
        NEMO, "Qwen3-32B, 2,048 samples of 3,206 tokens (4,096 at most), 32 H100", "step", 393, "32B", H100,
        Fleet(32), StepWork(2048, 2048, 32, 100, 3106, 3996, 256, scored=2), "prompts of 100, groups of 32",
    ),
    Published(
        NEMO, "the same, one step off-policy, 3,207 tokens, 64 H100", "the longer of both", 215, "32B", H100,
        Fleet(32, 32), StepWork(2048, 2048, 32, 100, 3107, 3996, 256, scored=2), "half of the devices sample",
    ),
    Published(
        "verl, quickstart log", "Qwen2.5-0.5B, 256 samples, 1 GPU", "sampling", 22.2, "0.5B", "a100",
        Fleet(), StepWork(256, 256, 1, 100, 160, 512, 256), "an A100, 160 tokens of 512 at most",
    ),
    Published(
        "verl, quickstart log", "the same, reference and policy", "updating", 24.6, "0.5B", "a100",
        Fleet(), StepWork(256, 256, 1, 100, 160, 512, 256, scored=2), "an A100, 160 tokens of 512 at most",
    ),
    Published(
        AREAL, "R1-Distill-Qwen-1.5B, synchronous, 1,000 updates in 41.0 h, 128 H800", "step", 590, "1.5B",
        H100,
        Fleet(128), StepWork(8192, 8192, 16, 200, 8000, 27_000, 256, scored=1),
        "8,000 tokens, 512 groups of 16, four updates a step",
    ),
    Published(
        AREAL, "R1-Distill-Qwen-7B, synchronous, 1,000 updates in 57.7 h, 192 H800", "step", 831, "7B",
        H100,
        Fleet(192), StepWork(8192, 8192, 16, 200, 7000, 27_000, 256, scored=1),
        "7,000 tokens, 512 groups of 16, four updates a step",
    ),
)  # fmt: skip


def predicted(row: Published) -> float:
    """Seconds."""
    size = MODEL_SIZES[row.size]
    shape = size.shape(None)
    sampling, updating = step_seconds(shape, size.tied, DEVICES[row.device], row.fleet, row.job, MICRO)
    if row.what == "step":
        return sampling + updating + row.fleet.sync(shape, DEVICES[row.device])
    if row.what == "the longer of both":
        return max(sampling, updating)
    return sampling if row.what == "sampling" else updating


def page() -> str:
    """Markdown."""
    head = (
        "`python benchmarks/plans.py --write`. Nothing here was run with covey: this is what `covey plan` "
        "says of a step on the devices of the source, from the model's size and the lengths. The last column "
        "has what the source leaves open, or that the plan's share of compute was read off this row."
    )
    lines = ["# Plans against published runs", "", head, ""]
    lines += ["| source | run | figure | published, s | plan, s | error | assumed |", "|---" * 7 + "|"]
    for row in ROWS:
        said = predicted(row)
        lines.append(
            f"| {row.who} | {row.where} | {row.what} | {row.seconds:,.3g} | {said:,.3g} | "
            f"{said / row.seconds - 1:+.0%} | {row.role} |"
        )
    free = [predicted(r) / r.seconds for r in ROWS if FITTED not in r.role]
    within = sum(0.5 <= ratio <= 2 for ratio in free)
    lines += [
        "",
        f"Of {len(free)} figures that were not fitted, {within} are within a factor of two. {MISSING}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/plans.md")
    text = page()
    print(text)
    if parser.parse_args().write:
        (RESULTS / "plans.md").write_text(text)


if __name__ == "__main__":
    main()
