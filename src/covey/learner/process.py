"""Process-wide settings of a training run, and how the caller's are restored after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from covey.config.schema import Config
from covey.models.kernels.calls import follow, followed_choices
from covey.system.machine import available_threads
from covey.system.processes import on_this_machine

DETERMINISTIC: Any = torch.utils.deterministic
"""Torch's module, which does not declare its attributes' types."""


def set_process(config: Config) -> None:
    """Set threads, seed and determinism for the whole process: see ``restore_process_settings``."""
    torch.set_num_threads(config.threads or available_threads(processes=on_this_machine()))
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # index_put on CPU is not, without it
    # Unwritten parts of an empty tensor take no memory.
    DETERMINISTIC.fill_uninitialized_memory = False


FROZEN_BY_PYTHON = 1000
"""More objects than Python 3.12 freezes at its own start, which are some hundred."""


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Exclude existing objects, some 400,000 of imported modules, from garbage collection.

    Collecting them takes a twentieth of a small run's time. Python has one frozen set: within another call,
    or in a program that has frozen objects itself, this does nothing.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()  # garbage that is frozen would be kept
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def default_torch_modes() -> Iterator[None]:
    """Give torch the modes of a new process, whatever the caller has set.

    The compiled operations write float32 into tensors made without a dtype; with another default these would
    have half the memory. The config alone decides the dtype of a run.
    """
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(mode=False))
            modes.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    modes.enter_context(torch.autocast(kind, enabled=False))
            if device.type != "cpu":  # not always: each of torch's operations consults the mode
                modes.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def restore_process_settings() -> Iterator[None]:
    """Restore what a run sets for the whole process: threads, seed, determinism, arithmetic."""
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    choices = followed_choices()
    filled = DETERMINISTIC.fill_uninitialized_memory
    on_cpu = torch.get_rng_state()
    # Reading the random states of GPUs would initialize CUDA if it is not.
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        follow(*choices)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        DETERMINISTIC.fill_uninitialized_memory = filled
        torch.set_rng_state(on_cpu)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
