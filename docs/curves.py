"""The curve of each preset, from the chart of all of them: `python docs/curves.py`, a second.

benchmarks/results/presets.svg has a panel for each preset that was measured. Each panel becomes a picture of
its own in docs/images/presets, with the numbers as they were recorded.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/presets.svg"
CURVES = ROOT / "docs/images/presets"
PANEL = re.compile(
    r'<g transform="translate\(\d+,\d+\)">\n(<text class="head"[^>]*>(\w+)</text>.*?)</g>', re.DOTALL
)
WIDE, HIGH = 270, 176
"""Size of a panel with its margins, px of the chart."""


def curves() -> dict[str, str]:
    """Return preset -> its panel of the recorded chart as an SVG."""
    chart = RECORD.read_text(encoding="utf-8")
    style = chart[chart.index("<style>") : chart.index("</style>") + len("</style>")]
    made = {}
    for panel, name in PANEL.findall(chart):
        made[name] = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.6 * WIDE:g}" viewBox="0 0 {WIDE} {HIGH}"'
            f' class="chart" role="img" aria-label="{name}: held-out greedy accuracy over steps"'
            f' font-family="system-ui, sans-serif" font-size="11">\n{style}\n'
            f'<rect class="paper" width="{WIDE}" height="{HIGH}"/>\n'
            f'<g transform="translate(58,26)">\n{panel}</g>\n</svg>\n'
        )
    return made


if __name__ == "__main__":
    CURVES.mkdir(parents=True, exist_ok=True)
    for name, picture in curves().items():
        (CURVES / f"{name}.svg").write_text(picture, encoding="utf-8")
