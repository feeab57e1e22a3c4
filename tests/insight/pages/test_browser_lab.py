"""The lab in a real browser: its numbers are the library's."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from covey.insight.pages.drawings import lab_texts
from covey.objective.advantages import group_centered, group_zscore, leave_one_out
from tests.insight.pages.browser import numbers, told, walk

RANDOM = np.random.default_rng(5)


def advantages(page, name: str) -> list[float]:
    return numbers(page, f"table.estimators tr:has(code:text-is('{name}')) td .num")


@pytest.mark.parametrize("size", [2, 5, 8])
def test_advantages_in_the_page_are_those_of_the_objective(site, page, size: int) -> None:
    rewards = RANDOM.uniform(0, 1, size).round(2)
    page.goto(site.at(f"#/lab/bench?rewards={','.join(map(str, rewards))}"))
    r = torch.from_numpy(rewards)
    assert advantages(page, "group_zscore") == pytest.approx(group_zscore(r).tolist(), abs=1e-6)
    assert advantages(page, "group_centered") == pytest.approx(group_centered(r).tolist(), abs=1e-6)
    assert advantages(page, "leave_one_out") == pytest.approx(leave_one_out(r).tolist(), abs=1e-6)


def test_clicking_cards_until_all_are_equal_makes_the_group_dead(site, page) -> None:
    page.goto(site.at("#/lab"))
    page.wait_for_selector(".card .gain .num")
    first = numbers(page, ".card .gain .num")
    assert first == pytest.approx(
        group_zscore(torch.tensor([1.0, 1, 0, 1, 0, 1]).double(), ddof=0, eps=0.0).tolist()
    )
    for card in page.query_selector_all(".card[aria-pressed=false]"):
        card.click()
    page.wait_for_selector("text=All correct.")
    assert numbers(page, ".card .gain .num") == [0] * 6
    page.keyboard.press("Enter")  # the last card has the focus
    page.wait_for_selector("text=5 of 6 are correct")


def test_sliders_and_paste_ask_again(site, page) -> None:
    page.goto(site.at("#/lab/bench?rewards=1,0,0,0"))
    page.wait_for_selector("table.estimators")
    page.focus("input[type=range] >> nth=1")
    page.keyboard.press("End")
    page.wait_for_selector("table.estimators thead >> text=2: r = 1")
    expected = group_zscore(torch.tensor([1.0, 1, 0, 0]).double()).tolist()
    assert advantages(page, "group_zscore") == pytest.approx(expected, abs=1e-6)
    page.fill("form input[type=text]", "0.5 0.5 0.5")
    page.click("form button[type=submit]")
    page.wait_for_selector(".facts-row >> text=dead group")
    page.fill("form input[type=text]", "1, x")
    page.click("form button[type=submit]")
    page.wait_for_selector("text=give 2 to 64 numbers")


def test_an_answer_that_comes_late_does_not_speak_for_another_state(site, page) -> None:
    differ = (g for g in lab_texts()["guides"] if told(g, g["looks"][0]) and told(g, g["looks"][1]))
    guide = next(g for g in differ if told(g, g["looks"][0]) != told(g, g["looks"][1]))
    late, ahead = [], []
    page.route(re.compile(r"/lab/\w+\?"), lambda route: route.continue_() if ahead else late.append(route))
    page.goto(site.at(f"#/lab/guide/{guide['id']}"))
    page.wait_for_selector(".steps-of .primary")
    page.wait_for_timeout(100)
    ahead.append(True)
    page.click(".steps-of .primary")
    page.wait_for_selector(".say .num")
    for route in late:
        route.continue_()
    page.wait_for_timeout(300)
    assert late
    assert numbers(page, ".say .num") == pytest.approx(told(guide, guide["looks"][1]), abs=1e-6)


@pytest.mark.parametrize("name", [g["id"] for g in lab_texts()["guides"]])
def test_a_guided_page_shows_the_numbers_of_the_library(site, page, name: str) -> None:
    page.goto(site.at(f"#/lab/guide/{name}"))
    walk(page, next(g for g in lab_texts()["guides"] if g["id"] == name))
