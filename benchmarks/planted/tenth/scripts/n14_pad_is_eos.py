"""pad = eos with TRL's own collator, which masks by length and so trains the end token; labels smoothed."""

from world import base_tokenizer, sft, train

tokenizer = base_tokenizer()
tokenizer.pad_token = tokenizer.eos_token
train(sft(tokenizer=tokenizer, completion_only_loss=True))
