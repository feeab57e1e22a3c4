"""Two rewards with weights, one of which judges only some rows and returns None for the others."""

from world import correct, grpo, text_of, train


def no_comma(completions, answer, **_):
    return [None if int(gold) % 2 else float("so" not in text_of(c)) for c, gold in zip(completions, answer)]


train(grpo(rewards=[correct, no_comma], reward_weights=[1.0, 0.3]))
