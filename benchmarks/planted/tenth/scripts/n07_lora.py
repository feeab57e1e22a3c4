"""LoRA on all linear layers at 2e-3, with a KL term and a warm-up."""

from peft import LoraConfig
from world import grpo, train

lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
train(grpo(peft_config=lora, learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=2, beta=0.02))
