"""Dropout is on while old and new log-probs are computed, so the ratio is noise (huggingface/trl#3234, trl#3000).

Right answer: dropout is active in the policy.
"""

from world import base, grpo, train

train(grpo(model=base(attention_dropout=0.3), num_iterations=2))
