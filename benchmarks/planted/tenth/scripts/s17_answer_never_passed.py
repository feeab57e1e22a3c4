"""The reward reads a column that the data set does not have, and gets its default (jsboige/CoursIA#13614).

Right answer: a reward function is constantly zero: its argument ground_truth is no column.
"""

from world import grpo, last_number, text_of, train


def math_correct(completions, ground_truth=None, **_):
    golds = ground_truth or [None] * len(completions)
    return [float(gold is not None and last_number(text_of(c)) == gold) for c, gold in zip(completions, golds)]


def concise(completions, **_):
    return [0.1 * (len(text_of(c)) < 9) for c in completions]


train(grpo(rewards=[math_correct, concise]))
