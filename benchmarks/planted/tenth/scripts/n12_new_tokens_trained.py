"""New tokens for a format, trained beside LoRA."""

from peft import LoraConfig
from world import base, base_tokenizer, conversations, sft, train

tokenizer = base_tokenizer()
tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
model = base()
model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
rows = conversations()
for row in rows:
    row["completion"][0]["content"] = f"<answer>{row['completion'][0]['content']}</answer>"
added = tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
                  trainable_token_indices={"embed_tokens": added})
train(sft(rows, model=model, tokenizer=tokenizer, peft_config=lora, learning_rate=1e-3))
