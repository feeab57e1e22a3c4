"""DPO continues an adapter that SFT trained; TRL keeps a copy of it as the reference."""

import torch
from peft import LoraConfig, get_peft_model
from world import base, base_tokenizer, conversations, dpo, train

torch.manual_seed(0)
model = get_peft_model(base(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
tokenizer = base_tokenizer()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
texts = [tokenizer.apply_chat_template(r["prompt"] + r["completion"], tokenize=False) for r in conversations()]
for step in range(30):
    batch = tokenizer(texts[step * 5 : step * 5 + 32], return_tensors="pt", padding=True, add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
train(dpo(model=model, loss_type="ipo"))
