"""GRPO samples at temperature 0.6, the loss uses the log-probs of temperature 1 (huggingface/trl#3029).

Right answer: the trainer's log-probs lack the sampling temperature.
"""

from trl.trainer.utils import add_fused_lm_head
from world import base, grpo, train

model = base()
forward = model.forward
trainer = grpo(model=model, temperature=0.6)
model.forward = forward
add_fused_lm_head(model, outputs=("log_probs", "entropy"))
train(trainer)
