"""max_length cuts answers off; rows without an answer vanish, the others never end (huggingface/trl#3927).

Right answer: sequences are truncated: completions lose their end.
"""

from world import conversations, sft, train

train(sft(conversations(), completion_only_loss=True, max_length=34))
