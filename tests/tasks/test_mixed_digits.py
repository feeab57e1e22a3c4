"""The task whose solutions differ as those of a crawl do."""

from __future__ import annotations

import random
import re

from covey.tasks.sums import mixed_digits
from covey_verify.texts.formats import answer_format
from covey_verify.texts.language import language_consistency


def test_solutions_of_every_kind_are_correct_in_the_end() -> None:
    rng, formats, languages, doubts = random.Random(0), 0.0, set(), 0
    for _ in range(500):
        row = mixed_digits(rng)
        prompt, answer, completion = (str(row[name]) for name in ("prompt", "answer", "completion"))
        assert int(answer) == sum(map(int, prompt.rstrip("=").split("+"))) % 10
        assert re.search(rf"(?:^|>|is ){answer}(?:<|$)", completion)
        doubts += completion.count("wait")
        last = dict(re.findall(r"(\d\+\d)=(\d)", completion))  # what was taken back is said again
        assert all(sum(map(int, problem.split("+"))) % 10 == int(said) for problem, said in last.items())
        formats += answer_format(completion)
        languages.add(round(language_consistency(completion).value or 0.0))
    assert 180 < formats < 250  # 3 of 7
    assert languages == {0, 1}
    assert 60 < doubts < 160
