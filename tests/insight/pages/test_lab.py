"""The lab's answers are the library's, its formulas hold, and its sentences have numbers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.algorithm import algorithm_rows
from covey.insight.pages import lab
from covey.insight.pages.copy import copy_page, stored_answers
from covey.insight.pages.drawings import lab_contents, lab_texts
from covey.runs.estimates import chance_of_dead
from covey_verify.errors import ConfigError


def asked(tool: str, **query: object) -> dict:
    return lab.answer_tool(tool, {name: [str(value)] for name, value in query.items()})


def by_name(answer: dict, name: str) -> dict:
    return next(e for e in answer["estimators"] if e["name"] == name)


rewards_of_groups = st.lists(st.integers(-20, 20).map(lambda i: i / 4), min_size=2, max_size=12)


@settings(deadline=None, max_examples=30)
@given(rewards=rewards_of_groups, ddof=st.sampled_from([0, 1]), eps=st.sampled_from([1e-8, 1e-4]))
def test_each_formula_with_its_numbers_gives_the_advantage(rewards, ddof, eps) -> None:
    answer = asked("group", rewards=",".join(map(str, rewards)), ddof=ddof, eps=eps)
    shown = [e for e in answer["estimators"] if e["formula"]]
    assert len(shown) >= 7
    for e in shown:
        for advantage, numbers in zip(e["advantages"], e["numbers"], strict=True):
            text = e["formula"]
            for symbol, value in numbers.items():
                text = text.replace(symbol, f"({value!r})")
            if e["name"] == "mean_normalized" and answer["mean"] <= 0:
                assert advantage == 0  # the docstring says so
            else:
                assert eval(text) == pytest.approx(advantage, abs=1e-6), (e["name"], text)


def test_a_tie_is_a_dead_group() -> None:
    answer = asked("group", rewards="0.3,0.3,0.3")
    assert answer["dead"]
    assert by_name(answer, "group_zscore")["advantages"] == [0, 0, 0]
    assert not asked("group", rewards="0.3,0.3,0.31")["dead"]


def test_weights_are_those_of_the_step() -> None:
    found = {
        r["name"]: r["weights"]
        for r in asked("group", rewards="1,0", lengths="4,12", max_tokens=20)["reductions"]
    }
    assert found["token_mean"] == pytest.approx([1 / 16, 1 / 16])
    assert found["sequence_mean"] == pytest.approx([1 / 8, 1 / 24])
    assert found["constant_length"] == pytest.approx([1 / 40, 1 / 40])


def test_the_gate_closes_where_the_clip_says() -> None:
    def clip(**query: object) -> float:
        return next(r for r in asked("gate", **query)["rules"] if r["name"] == "clip")["push"]

    assert clip(ratio=1.19) == pytest.approx(1.19)
    assert clip(ratio=1.21) == 0
    assert clip(ratio=1.21, clip_high=0.28) == pytest.approx(1.21)
    assert clip(ratio=0.79, advantage=-1) == 0
    assert clip(ratio=0.79) == pytest.approx(0.79)


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    answer = asked("kl", p=0.9, q=0.2)
    expected = {e["name"]: e["expected"] for e in answer["estimators"]}
    assert expected["k1"] == pytest.approx(answer["exact"])
    assert expected["k3"] == pytest.approx(answer["exact"])
    assert abs(expected["k2"] - answer["exact"]) > 0.05


def test_the_toy_learns_and_counts_its_dead_groups() -> None:
    answer = asked("toy", size=16, start=0.2, updates=60)
    assert answer["course"][0][0] == pytest.approx(0.2)
    assert answer["course"][-1][0] > 0.9
    ties = [all(k == 0 for k in d) or all(k != 0 for k in d) for d in answer["drawn"]]
    assert answer["dead"] == ties
    assert asked("toy", updates=1, seed=3)["course"] == asked("toy", updates=50, seed=3)["course"][:2]


def test_odds() -> None:
    assert chance_of_dead(0.5, 2) == 0.5
    assert asked("odds", p=0.05, size=8)["dead"] == pytest.approx(0.95**8 + 0.05**8)
    assert asked("odds", p=0, size=8)["cost"] == float("inf")


@pytest.mark.parametrize(
    ("tool", "query", "says"),
    [
        ("nothing", {}, "no such tool"),
        ("group", {"rewards": "1"}, "at least 2"),
        ("group", {"rewards": ",".join("1" * 65)}, "at most 64"),
        ("group", {"rewards": "1,nan"}, "rewards.1"),
        ("group", {"rewards": "1,0", "lengths": "3"}, "2 rewards, but 1 lengths"),
        ("group", {"rewards": "1,0", "bogus": "3"}, "bogus"),
        ("odds", {"p": "1.5"}, "less than or equal to 1"),
        ("steps", {"rewards": "1,a"}, "is not like"),
        ("prefixes", {"rewards": "1,0", "texts": "a|"}, "give 2 non-empty completions"),
        ("toy", {"estimator": "gae"}, "one of"),
    ],
)
def test_a_senseless_question_is_refused_in_words(tool: str, query: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lab.answer_tool(tool, {k: [v] for k, v in query.items()})


PLACES = [(g["id"], i) for g in lab_texts()["guides"] for i in range(len(g["looks"]))]


@pytest.mark.parametrize(("name", "number"), PLACES)
def test_every_sentence_finds_its_numbers(name: str, number: int) -> None:
    guide = next(g for g in lab_texts()["guides"] if g["id"] == name)
    look = guide["looks"][number]
    answer = asked(guide["tool"], **look["ask"])
    for path in re.findall(r"\{([^{}:]+):[+%]?\d\}", look["say"]):
        value = answer
        for part in path.split("."):
            if isinstance(value, list) and not part.isdecimal():
                value = next(v for v in value if v["name"] == part)
            else:
                value = value[int(part)] if isinstance(value, list) else value[part]
        assert isinstance(value, float), path
    assert "{" not in re.sub(r"\{[^{}:]+:[+%]?\d\}", "", look["say"])


def test_the_numbers_of_worked_examples_are_in_the_guided_pages() -> None:
    """Values that the published walk-throughs print, by page, state and path."""

    def z(name: str, state: int) -> list[float]:
        guide = next(g for g in lab_texts()["guides"] if g["id"] == name)
        return by_name(asked(guide["tool"], **guide["looks"][state]["ask"]), "group_zscore")["advantages"]

    assert z("tickets", 0) == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
    assert z("tickets", 1) == pytest.approx([1, -1, 1, -1])
    assert z("apples", 0)[:2] == pytest.approx([0.77, -1.29], abs=5e-3)
    assert z("cards", 0)[1:3] == pytest.approx([0.707, -1.414], abs=1e-3)
    assert z("sliders", 1) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert z("seven", 0)[0] > 0 > z("seven", 1)[0]
    assert z("scale", 0) == pytest.approx(z("scale", 1))
    assert z("nearties", 0)[7] == pytest.approx(z("nearties", 1)[7]) == pytest.approx(2.646, abs=1e-3)
    steps = asked("steps", rewards="1,1,1,-1;1,1,1,1")["credits"]
    assert steps["sum_to_go"][0] == pytest.approx([-1.51, -1.89, -2.27, -2.65], abs=5e-3)
    assert steps["own_step"][0] == pytest.approx([0.38, 0.38, 0.38, -2.65], abs=5e-3)
    (committing,) = (g for g in lab_texts()["guides"] if g["id"] == "prefix")
    answer = asked("prefixes", **committing["looks"][0]["ask"])
    assert answer["outcome"] == [0.5, 0.5, -0.5, -0.5]
    assert [v[1:3] for v in answer["values"]] == [[0.5, 1]] * 2 + [[0.5, 0]] * 2


def test_ppo_keeps_four_models_and_grpo_three() -> None:
    drawn = {a["name"]: a for a in lab_contents()["algorithms"]}
    kept = {name: [r["role"] for r in a["roles"] if r["kept"]] for name, a in drawn.items()}
    assert kept["ppo"] == ["policy", "critic", "reference", "reward"]
    assert kept["grpo"] == ["policy", "reference", "reward"]
    assert kept["dapo"] == ["policy", "reward"]
    assert (
        drawn["ppo"]["total"] > drawn["grpo"]["total"] > drawn["dapo"]["total"] == pytest.approx(4, abs=0.1)
    )
    assert lab_contents()["dpo"] == pytest.approx(4, abs=0.1)
    assert drawn["ppo"]["axes"]["ratio"] == drawn["grpo"]["axes"]["ratio"]
    assert drawn["ppo"]["axes"]["surrogate"] == drawn["grpo"]["axes"]["surrogate"]


def test_the_page_says_of_settings_and_methods_what_their_rows_say() -> None:
    contents = lab_contents()
    assert [way["title"] for way in contents["ways"]] == ["Imitation", "Preferences", "Verifiable rewards"]
    rows = {row.key: row for row in algorithm_rows() if row.owner in ("clip", "group_zscore")}
    for axis, name in (("surrogate", "clip_high"), ("advantage", "ddof")):
        shown = contents["settings"][name]
        row = rows[f"algorithm.{axis}.{name}"]
        assert (shown["default"], shown["says"]) == (row.default, row.setting.effect)
    assert contents["presets"]["group_zscore"] == "grpo"
    begin = contents["first"]["group"][0]
    assert [float(begin[name]) for name in ("ddof", "eps")] == [
        contents["settings"][name]["default"] for name in ("ddof", "eps")
    ]
    with pytest.raises(ConfigError, match=r"clip_high: 0\.0: Input should be greater than 0"):
        asked("gate", clip_high=0)


def test_the_copy_holds_the_librarys_answers() -> None:
    found = stored_answers()
    for address, answer in list(found.items())[1::40]:
        tool, _, query = address.removeprefix("lab/").partition("?")
        again = asked(tool, **dict(part.split("=", 1) for part in query.split("&")))
        assert list(numbers_in(answer)) == pytest.approx(list(numbers_in(again)), rel=1e-9)
    assert "src=" not in copy_page()[:2000]


def numbers_in(value: object) -> list[float]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in numbers_in(v)]
    if isinstance(value, list | tuple):
        return [x for v in value for x in numbers_in(v)]
    return [value] if isinstance(value, float) and abs(value) < 1e300 else []
