"""Dr. GRPO with a reward that is never positive: minus the distance to a length."""

from world import grpo, text_of, train


def near(completions, **_):
    return [-abs(10 - len(text_of(c))) / 10 for c in completions]


train(grpo(rewards=near, loss_type="dr_grpo", scale_rewards="none"))
