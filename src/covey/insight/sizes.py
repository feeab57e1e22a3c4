"""Models by their size alone, for plans on paper: the shapes of Qwen 2.5, Qwen 3 and Llama 3."""

from __future__ import annotations

from typing import NamedTuple

from covey.config.schema import Lora
from covey.learner.memory import Shape

LETTERS = 4
"""Characters of a token, nearly, where there is no tokenizer to ask."""


class ModelSize(NamedTuple):
    """What a published config says."""

    like: str
    layers: int
    width: int
    queries: int
    keys: int
    head: int
    inner: int
    vocabulary: int
    tied: bool = False

    def shape(self, lora: Lora | None) -> Shape:
        """Parameters and all; ``lora`` on every linear layer."""
        d, heads, keys = self.width, self.queries * self.head, self.keys * self.head
        attention = ((d, heads), (d, keys), (d, keys), (heads, d))
        linears = (*attention, (d, self.inner), (d, self.inner), (self.inner, d))
        embeddings = (1 if self.tied else 2) * self.vocabulary * d
        parameters = embeddings + d + self.layers * (sum(i * o for i, o in linears) + 2 * d)
        adapters = 0 if lora is None else lora.rank * self.layers * sum(i + o for i, o in linears)
        return Shape(
            parameters=parameters + adapters,
            trained=adapters or parameters,
            vocabulary=self.vocabulary,
            layers=self.layers,
            width=d,
            queries=self.queries,
            keys=self.keys,
            head=self.head,
            inner=self.inner,
            number=2,
            exact=False,
        )


MODEL_SIZES = {
    "0.5B": ModelSize("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151_936, tied=True),
    "0.6B": ModelSize("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936, tied=True),
    "1.5B": ModelSize("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151_936, tied=True),
    "3B": ModelSize("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11_008, 151_936, tied=True),
    "4B": ModelSize("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936, tied=True),
    "7B": ModelSize("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18_944, 152_064),
    "8B": ModelSize("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256),
    "14B": ModelSize("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13_824, 152_064),
    "32B": ModelSize("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27_648, 152_064),
    "70B": ModelSize("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28_672, 128_256),
}
