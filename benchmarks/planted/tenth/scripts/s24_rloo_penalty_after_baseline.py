"""RLOO takes the baseline from rewards without KL and subtracts KL afterwards (compare OpenRLHF/OpenRLHF#515).

Right answer: advantages are not rewards (with the KL penalty) less the mean of the others.
"""

import torch
from trl import RLOOConfig, RLOOTrainer
from world import base, base_tokenizer, correct, grpo_config, problems, train


class Late(RLOOTrainer):
    def _generate_and_score_completions(self, inputs):
        coefficient, self.beta = self.beta, 0.0
        old = self._get_per_token_logps_and_entropies
        output = super()._generate_and_score_completions(inputs)
        self.beta = coefficient
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        mask = output["completion_mask"]
        with torch.no_grad():
            ref, _ = self._get_per_token_logps_and_entropies(self.ref_model, ids, attention, mask.size(1))[:2]
        kl = ((output["old_per_token_logps"] - ref) * mask).sum(-1)
        output["advantages"] = output["advantages"] - self.beta * kl
        return output


settings = {k: getattr(grpo_config(), k) for k in (
    "output_dir", "per_device_train_batch_size", "num_generations", "max_completion_length", "learning_rate",
    "max_steps", "logging_steps", "report_to", "save_strategy", "use_cpu", "disable_tqdm", "bf16", "seed",
    "gradient_checkpointing")}
train(Late(model=base(), reward_funcs=correct, args=RLOOConfig(**settings, beta=0.2), train_dataset=problems(),
           processing_class=base_tokenizer()))
