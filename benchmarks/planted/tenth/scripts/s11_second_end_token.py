"""Generation stops at <|im_end|>, the trainer knows only <|endoftext|>: all masked as truncated (huggingface/trl#7039).

Right answer: completions that ended are taken for truncated and left out of the loss: the end token differs.
"""

from trl import GRPOTrainer
from world import base_tokenizer, grpo, train


class OneEnd(GRPOTrainer):
    def _generate(self, prompts):
        self.generation_config.eos_token_id = [self.chat_end, self._tokenizer.eos_token_id]
        return super()._generate(prompts)


tokenizer = base_tokenizer()
chat_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
tokenizer.eos_token = "<|endoftext|>"
trainer = grpo(OneEnd, tokenizer=tokenizer, mask_truncated_completions=True)
trainer.chat_end = chat_end
trainer.eos_token_ids = [tokenizer.eos_token_id]
train(trainer)
