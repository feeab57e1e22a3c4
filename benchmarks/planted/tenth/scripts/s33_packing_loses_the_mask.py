"""With packing, the mask of the assistant's turns is dropped and prompts are trained (huggingface/trl#3728).

Right answer: prompt tokens are trained although assistant_only_loss is set.
"""

from trl import SFTTrainer
from world import conversations, sft, train


class Forgotten(SFTTrainer):
    def _prepare_dataset(self, *args, **kwargs):
        dataset = super()._prepare_dataset(*args, **kwargs)
        return dataset.map(lambda row: {"labels": list(row["input_ids"])})


rows = [{"messages": r["prompt"] + r["completion"]} for r in conversations()]
train(sft(rows, cls=Forgotten, assistant_only_loss=True, packing=True, max_length=128, per_device_train_batch_size=2,
          num_train_epochs=8))
