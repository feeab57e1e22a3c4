"""The README's pictures, from a finished demo: `make demo`, then `python docs/pictures.py`.

Copies the learning curve, and draws the live panel as it stood after half of the steps.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

from rich.console import Console

from covey.console import RunConsole
from covey.metrics import console_facts

IMAGES = Path(__file__).parent / "images"


def main(run: Path) -> None:
    """Write demo.svg and panel.svg."""
    IMAGES.mkdir(exist_ok=True)
    shutil.copy(run / "curve.svg", IMAGES / "demo.svg")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    terminal = Console(record=True, width=118, force_terminal=True, file=io.StringIO(), highlight=False)
    console = RunConsole(quiet=True)
    console.begin("2-rl (rl)", len(rows))
    console.console = terminal
    for number, (metrics, lap) in enumerate(zip(rows[: len(rows) // 2], times, strict=False), start=1):
        console.step(number, metrics["reward/mean"], console_facts(metrics, lap))
    shown = times[: len(rows) // 2]
    console.started -= sum(v for lap in shown for k, v in lap.items() if k.startswith("seconds/"))
    console.sampling(181, 256)
    terminal.print(console.panel())
    drawing = terminal.export_svg(title="covey demo")
    # Without the fonts it would load from elsewhere.
    (IMAGES / "panel.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo/2-rl"))
