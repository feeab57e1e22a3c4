"""RLOO with a KL penalty in the reward."""

from trl import RLOOConfig, RLOOTrainer
from world import base, base_tokenizer, correct, grpo_config, problems, train

settings = {k: getattr(grpo_config(), k) for k in (
    "output_dir", "per_device_train_batch_size", "num_generations", "max_completion_length", "learning_rate",
    "max_steps", "logging_steps", "report_to", "save_strategy", "use_cpu", "disable_tqdm", "bf16", "seed",
    "gradient_checkpointing")}
train(RLOOTrainer(model=base(), reward_funcs=correct, args=RLOOConfig(**settings, beta=0.2),
                  train_dataset=problems(), processing_class=base_tokenizer()))
