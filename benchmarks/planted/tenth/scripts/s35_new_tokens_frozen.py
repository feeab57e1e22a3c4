"""Tokens are added for a format, LoRA trains neither their embeddings nor the head (huggingface/peft#334, axolotl#1570).

Right answer: the new tokens' embeddings are not trained (modules_to_save, trainable_token_indices are missing).
"""

from peft import LoraConfig
from world import base, base_tokenizer, conversations, sft, train

tokenizer = base_tokenizer()
tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
model = base()
model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
rows = conversations()
for row in rows:
    row["completion"][0]["content"] = f"<answer>{row['completion'][0]['content']}</answer>"
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
train(sft(rows, model=model, tokenizer=tokenizer, peft_config=lora, learning_rate=1e-3))
