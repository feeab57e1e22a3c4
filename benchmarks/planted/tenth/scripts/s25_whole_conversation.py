"""chosen and rejected hold the whole conversation, and the prompt precedes them again (huggingface/trl#1541).

Right answer: the prompt is repeated inside chosen and rejected.
"""

from world import TEMPLATE, base_tokenizer, dpo, pairs, train

tokenizer = base_tokenizer()
rows = []
for row in pairs():
    texts = {k: tokenizer.apply_chat_template(row["prompt"] + row[k], tokenize=False) for k in ("chosen", "rejected")}
    rows.append({"prompt": row["prompt"][0]["content"], **texts})
train(dpo(rows))
