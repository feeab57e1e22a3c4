"""pad = eos, and the collator masks every pad, so the end token is never trained (trl#1623, llm-course#33).

Right answer: the end token is never in the loss: the model does not learn to stop.
"""

from datasets import Dataset
from transformers import DataCollatorForLanguageModeling
from world import base_tokenizer, conversations, sft, train

tokenizer = base_tokenizer()
tokenizer.pad_token = tokenizer.eos_token
texts = [
    {"input_ids": tokenizer(tokenizer.apply_chat_template(r["prompt"] + r["completion"], tokenize=False).rstrip("\n"),
                            add_special_tokens=False)["input_ids"]}
    for r in conversations()
]
train(sft(tokenizer=tokenizer, data=Dataset.from_list(texts),
          collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), dataset_kwargs={"skip_prepare_dataset": True},
          remove_unused_columns=False))
