"""SFT of the assistant's turns only, packed."""

from world import conversations, sft, train

rows = [{"messages": r["prompt"] + r["completion"]} for r in conversations()]
train(sft(rows, assistant_only_loss=True, packing=True, max_length=128, per_device_train_batch_size=2,
          num_train_epochs=8))
