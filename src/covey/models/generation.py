"""Generation settings of a trained model's folder: the settings of its training and evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from transformers import PreTrainedModel

from covey.config.sampling import Rollout

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # What sampling draws from.
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    # What changes the probabilities of some tokens, greedy or not.
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    # What searches instead.
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}
"""Setting of a generation config that changes what is drawn -> its values without an effect, besides None."""


def sample_as_trained(model: PreTrainedModel, rollout: Rollout) -> Iterator[str]:
    """Let a model's generation config draw what the run draws; yield a note if that changes it.

    Other programs read it from the model's folder. It stays greedy if it was, unless the run's sampling has a
    temperature or a truncation that only a sampling one can hold.
    """
    original = getattr(model, "generation_config", None)  # models that cannot generate have none
    if original is None:
        return
    settings = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    samples = bool(original.do_sample) or any(value not in NEUTRAL[name] for name, value in settings.items())
    adjusted = copy.deepcopy(original)
    adjusted.update(**dict.fromkeys(NEUTRAL.keys() & vars(original).keys()))
    if samples:
        # All three, because transformers takes the 50 likeliest tokens where top_k is left out.
        adjusted.update(do_sample=True, **settings)
    model.generation_config = adjusted
    overridden = [
        f"{name} {value}"
        for name, value in sorted(vars(original).items())
        if name in NEUTRAL and value is not None and value not in (*NEUTRAL[name], settings.get(name))
    ]
    if overridden:
        lost_settings = ", ".join(overridden)
        run_settings = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        yield (
            f"the model's generation_config.json has {lost_settings}; this run samples, trains and measures "
            f"it with {run_settings}, and final/ says so"
        )
