"""Charts: what is drawn is what was given, in valid XML, whatever the numbers are."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.insight.chart import Line, Panel, chart, round_ticks, tick_texts
from covey.insight.result import write_curve

SVG = "{http://www.w3.org/2000/svg}"


def points(drawn: str, tag: str = "polyline") -> list[str]:
    """The points of every line, or band."""
    return [e.attrib["points"] for e in ET.fromstring(drawn).iter(SVG + tag)]


def test_lines_and_bands_are_where_the_axes_say() -> None:
    line = Line("a < b & c", [0, 10], [0.0, 50.0], [0.0, 40.0], [10.0, 60.0])
    panel = Panel("t", [line], unit=" %", bounds=(0, 100))
    drawn = chart([panel], "label", wide=200, high=100)
    top = 14  # below the legend
    assert points(drawn) == [f"0.0,{top + 100.0} 200.0,{top + 50.0}"]
    assert points(drawn, "polygon") == [
        f"0.0,{top + 100.0} 200.0,{top + 60.0} 200.0,{top + 40.0} 0.0,{top + 90.0}"
    ]
    texts = [e.text for e in ET.fromstring(drawn).iter(SVG + "text")]
    assert {"a < b & c", "t", "step", "0 %", "100 %", "0", "10"} <= set(texts)
    assert "prefers-color-scheme:dark" in drawn


def test_what_is_not_finite_is_left_out_and_an_endless_interval_is_its_value() -> None:
    line = Line("a", [0, 1, 2], [1.0, math.nan, 2.0], [-math.inf, 0.0, 1.0], [math.inf, 0.0, 2.0])
    drawn = chart([Panel("t", [line])], "x", wide=200, high=100)
    assert len(points(drawn)[0].split()) == 2
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_lines_of_one_name_share_a_colour_in_all_panels() -> None:
    panels = [Panel("1", [Line("a", [1], [1]), Line("b", [1], [2])]), Panel("2", [Line("b", [1], [1])])]
    marks = [e.attrib["class"] for e in ET.fromstring(chart(panels, "x")).iter(SVG + "polyline")]
    assert marks == ["c0 line", "c1 line", "c1 line"]


@given(st.lists(st.floats(-1e9, 1e9, allow_subnormal=True), min_size=1, max_size=5))
def test_every_value_lies_inside_its_axes(values: list[float]) -> None:
    drawn = chart([Panel("t", [Line("", list(range(len(values))), values)])], "x", wide=200, high=100)
    for x, y in (map(float, p.split(",")) for p in points(drawn)[0].split()):
        assert 0 <= x <= 200
        assert -0.1 <= y <= 100.1


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_enclose(low: float, span: float) -> None:
    ticks = round_ticks(low, low + span, 6)
    assert 2 <= len(ticks) <= 8
    slack = 1e-6 * (ticks[1] - ticks[0]) + 1e-11
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert len(set(tick_texts(ticks))) == len(ticks) or span < 1e-5 * abs(low)


@pytest.mark.parametrize("evals", [[], [{"step": 0, "greedy": None, "pass@1": 0.2, "reward": 0.3}]])
@pytest.mark.parametrize(
    "metrics", [[], [{"step": 0, "loss": 1.0}], [{"step": 0, "accuracy": 0.5, "reward/mean": -1}]]
)
def test_a_curve_needs_no_record_to_be_whole(
    tmp_path: Path, metrics: list[dict[str, float]], evals: list[dict[str, float]]
) -> None:
    write_curve(tmp_path / "curve.svg", "title", metrics, evals)
    drawn = (tmp_path / "curve.svg").read_text()
    titles = [e.text for e in ET.fromstring(drawn).iter(SVG + "text")]
    assert {"Accuracy", "Reward", "title"} <= set(titles)
    assert ("held-out, sampled" in titles) == bool(evals)
