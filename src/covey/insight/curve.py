"""The learning curve of a run as an SVG: accuracy in training and on held-out problems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jinja2 import Template

from covey.insight.explain import Records
from covey.runs.atomic import write_file

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 56, 16, 40, 44
SMOOTHING = 10
"""Steps averaged into a point of the training curve."""

SVG = Template(
    """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ w }} {{ h }}"
     role="img" aria-label="{{ title }}"
     font-family="system-ui, sans-serif" font-size="12">
<rect width="{{ w }}" height="{{ h }}" fill="#ffffff"/>
<text x="{{ left }}" y="22" font-size="13" font-weight="600" fill="#1f2933">{{ title }}</text>
{%- for y, label in ticks_y %}
<line x1="{{ left }}" x2="{{ w - right }}" y1="{{ y }}" y2="{{ y }}" stroke="#e4e7eb"/>
<text x="{{ left - 8 }}" y="{{ y + 4 }}" text-anchor="end" fill="#616e7c">{{ label }}</text>
{%- endfor %}
{%- for x, label in ticks_x %}
<text x="{{ x }}" y="{{ h - 22 }}" text-anchor="middle" fill="#616e7c">{{ label }}</text>
{%- endfor %}
<text x="{{ middle }}" y="{{ h - 5 }}" text-anchor="middle" fill="#616e7c">step</text>
<polyline points="{{ training }}" fill="none" stroke="#9fb3c8" stroke-width="2"/>
{%- for color, points in held_out %}
<polyline points="{% for p in points %}{{ p.x }},{{ p.y }} {% endfor %}" fill="none"
          stroke="{{ color }}" stroke-width="2"/>
{%- for p in points %}
<line x1="{{ p.x }}" x2="{{ p.x }}" y1="{{ p.low }}" y2="{{ p.high }}"
      stroke="{{ color }}" stroke-width="2"/>
<circle cx="{{ p.x }}" cy="{{ p.y }}" r="3.5" fill="{{ color }}"/>
{%- endfor %}
{%- endfor %}
{%- for color, name, y in legend %}
<circle cx="{{ w - 190 }}" cy="{{ y - 4 }}" r="4" fill="{{ color }}"/>
<text x="{{ w - 180 }}" y="{{ y }}" fill="#1f2933">{{ name }}</text>
{%- endfor %}
</svg>
"""
)


def write_curve(path: Path, title: str, metrics: Records, evals: Records) -> None:
    """Draw a run's `metrics.jsonl` and `evals.jsonl` records."""
    known = [(m["step"] + 1, m["accuracy"]) for m in metrics if m.get("accuracy") is not None]
    last = max([1, *(step for step, _ in known), *(e["step"] for e in evals)])

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(share: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    def points(name: str) -> list[dict[str, float]]:
        return [
            {"x": x(e["step"]), "y": y(e[name]), "low": y(e[f"{name}/low"]), "high": y(e[f"{name}/high"])}
            for e in evals
        ]

    means = [np.mean(known[i : i + SMOOTHING], axis=0) for i in range(0, len(known), SMOOTHING)]
    low = HEIGHT - BOTTOM
    svg = SVG.render(
        title=title,
        w=WIDTH,
        h=HEIGHT,
        left=LEFT,
        right=RIGHT,
        middle=(LEFT + WIDTH - RIGHT) / 2,
        ticks_y=[(y(p / 4), f"{25 * p} %") for p in range(5)],
        ticks_x=[(x(last * i / 5), round(last * i / 5)) for i in range(6)],
        training=" ".join(f"{x(s)},{y(a)}" for s, a in means),
        held_out=[("#0b69a3", points("greedy")), ("#cb6e17", points("pass@1"))],
        legend=[
            ("#0b69a3", "held-out, greedy", low - 46),
            ("#cb6e17", "held-out, sampled", low - 28),
            ("#9fb3c8", "training, sampled", low - 10),
        ],
    )
    write_file(path, svg)
