"""Prompts are raw strings, although the model was tuned on a chat template; it never stops (autocontext#1070).

Right answer: the prompts lack the model's chat template, (so that completions do not end).
"""

from world import grpo, problems, question, train

train(grpo(data=problems(question)))
