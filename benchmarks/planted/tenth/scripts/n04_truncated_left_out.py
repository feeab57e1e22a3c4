"""Four steps of accumulation, truncated completions left out, a limit that some reach."""

from world import grpo, train

train(grpo(per_device_train_batch_size=8, gradient_accumulation_steps=4, loss_type="dapo",
           mask_truncated_completions=True, max_completion_length=10))
