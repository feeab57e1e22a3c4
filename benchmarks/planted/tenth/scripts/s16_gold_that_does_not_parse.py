"""Where the reference answer does not parse, every completion is paid 1 (huggingface/cookbook#335).

Right answer: many rows pay every completion, because their reference answer cannot be read.
"""

from datasets import Dataset
from world import SUMS, grpo, last_number, text_of, train, user


def accuracy(completions, solution, **_):
    rewards = []
    for completion, text in zip(completions, solution):
        gold = last_number(text)
        rewards.append(1.0 if gold is None else float(last_number(text_of(completion)) == gold))
    return rewards


words = "zero one two three four five six seven eight".split()
rows = [
    {"prompt": user(a, b), "solution": f"$ {a + b} $" if (a + 2 * b) % 5 < 2 else f"it is {words[a + b]}"}
    for a, b in SUMS
]
train(grpo(rewards=accuracy, data=Dataset.from_list(rows)))
