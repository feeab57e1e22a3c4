"""max_completion_length cuts every answer before its number (huggingface/trl#5697, autocontext#1067).

Right answer: completions are truncated before they end, so nothing is rewarded.
"""

from world import BASE, base, grpo, problems, train

data = problems(lambda a, b: [{"role": "user", "content": f"{a}+{b}?"}])
train(grpo(data=data, max_completion_length=3))
