"""A format reward matches '.*' over a newline without DOTALL, so it is always 0 (unslothai/unsloth#1761).

Right answer: one of the reward functions is constantly zero.
"""

import re

from world import correct, grpo, text_of, train


def soft_format(completions, **_):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.match(pattern, text_of(c)) else 0.0 for c in completions]


train(grpo(rewards=[soft_format, correct]))
