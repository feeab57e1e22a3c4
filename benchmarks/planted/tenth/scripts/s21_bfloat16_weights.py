"""Weights and AdamW in bfloat16 without float32 masters at 1e-6: updates round to nothing (THU-BPM/RLCSD#2).

Right answer: updates are lost to the rounding of bfloat16 weights.
"""

import torch
from world import base, grpo, train

train(grpo(model=base(dtype=torch.bfloat16), learning_rate=1e-6))
