"""LoRA with the learning rate of full fine-tuning, 5e-7: nothing is learned (huggingface/trl#2872).

Right answer: the learning rate is too small for LoRA; the weights hardly move.
"""

from peft import LoraConfig
from world import grpo, train

lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.05)
train(grpo(peft_config=lora, learning_rate=5e-7, lr_scheduler_type="cosine", warmup_steps=2, beta=0.001))
