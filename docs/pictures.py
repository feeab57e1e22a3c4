"""The README's pictures, from a finished demo: `make demo`, then `python docs/pictures.py [RUN]`.

Copies the learning curve, and draws the live panel as it stood after half of the steps. Takes some seconds.
RUN is the folder of a finished run of method rl; runs/demo/2-rl by default.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
from pathlib import Path

from rich.console import Console

from covey.insight.show import spoken_prompt
from covey.runs.folder import read_numbers
from covey.runs.reader import load_recorded
from covey.runs.rollouts import RolloutLog, read_rollouts, recorded_steps
from covey.system.console import PanelCompletion, RunConsole
from covey.training.metrics import console_facts, unhealthy_facts

IMAGES = Path(__file__).parent / "images"


def main(run: Path) -> None:
    """Write demo.svg and panel.svg."""
    if not (run / "curve.svg").is_file() or len(recorded_steps(run)) < 2:
        raise SystemExit(f"{run}: no finished run with its completions; `make demo` makes one")
    IMAGES.mkdir(exist_ok=True)
    shutil.copy(run / "curve.svg", IMAGES / "demo.svg")
    rows, times, evals = (read_numbers(run, f"{name}.jsonl") for name in ("metrics", "timings", "evals"))
    half = max(1, len(rows) // 2)
    shown = min(recorded_steps(run), key=lambda step: abs(step - half))  # old steps may be gone
    terminal = Console(
        record=True, width=118, height=30, force_terminal=True, file=io.StringIO(), highlight=False
    )
    console = RunConsole(quiet=True)
    console.begin(f"{run.name} (rl)", load_recorded(run).config.train.steps, may_end_early=True)
    for number, (metrics, lap) in enumerate(zip(rows[:half], times, strict=False), start=1):
        console.step(number, metrics["reward/mean"], console_facts(metrics, lap), unhealthy_facts(metrics))
    console.recall(rows[:half], [e for e in evals if e["step"] <= half])
    console.examples = most_mixed(read_rollouts(run, shown))
    console.started -= sum(v for lap in times[:half] for k, v in lap.items() if k.startswith("seconds/"))
    console.console = terminal
    console.show_sampling(181, 256)
    terminal.print(console.panel())
    drawing = terminal.export_svg(title="covey demo")
    # Without the fonts it would load from elsewhere.
    (IMAGES / "panel.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL))


def most_mixed(log: RolloutLog) -> tuple[str, PanelCompletion, PanelCompletion]:
    """The prompt, the best and the worst completion of the group whose rewards differ the most."""
    groups = ([log.rows[place] for place in places] for places in log.groups.values())
    known = ([row for row in rows if row["reward"] is not None] for rows in groups)
    ordered = [sorted(rows, key=lambda r: r["reward"]) for rows in known if rows]
    worst, *_, best = max(ordered, key=lambda rows: rows[-1]["reward"] - rows[0]["reward"])
    shown = [PanelCompletion(row["reward"], row["completion"]) for row in (best, worst)]
    return spoken_prompt(best["prompt"]), shown[0], shown[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo/2-rl"))
    main(parser.parse_args().run)
