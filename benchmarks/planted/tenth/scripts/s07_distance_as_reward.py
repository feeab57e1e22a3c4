"""The reward is the distance to the wanted length, so it grows without bound (huggingface/trl#2777, HF forum 139165).

Right answer: the reward pays length (or distance); completions grow to the limit.
"""

from world import grpo, text_of, train


def reward_len(completions, **_):
    return [float(abs(10 - len(text_of(c)))) for c in completions]


train(grpo(rewards=reward_len))
