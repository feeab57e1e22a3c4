"""The threads of the operations: made once, lent by torch, and nobody waits for one that does not come."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from covey.models.kernels import calls
from covey.models.kernels.calls import DTYPES, Numbers, available, memory_of, threads_lent
from covey.models.linear import PackedWeight, outer_sum
from covey.models.packing import pack
from covey.sampling.base import Request, SamplingParams
from covey.sampling.local import LocalSampler
from tests.conftest import policy_of, random_prompts

pytestmark = pytest.mark.skipif(
    not available(torch.float32, torch.device("cpu")), reason="no C compiler on this machine"
)
SIZES = ((2000, 512, 512), (8, 32, 32), (600, 512, 256), (100, 128, 64))
"""Work for all threads, for one, for some."""


def threads_now() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/task").iterdir())


def products(threads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = []
    for m, n, k in SIZES * 3:
        torch.set_num_threads(1)  # torch's own threads shall not come and go here
        x, weight = torch.randn(m, k), torch.randn(n, k)
        torch.set_num_threads(threads)
        with threads_lent(True):
            found.append(PackedWeight.pack(weight).product(x, None))
    torch.set_num_threads(1)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_threads_are_made_once_whatever_the_sizes() -> None:
    products(5)
    tasks = threads_now()
    alone = products(1)
    for _ in range(3):
        assert all(map(torch.equal, products(5), alone))
        assert threads_now() == tasks


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_that_has_none_of_the_threads_computes_alone() -> None:
    expected = products(3)
    child = os.fork()
    if not child:
        signal.alarm(20)
        x, weight = torch.ones(600, 256), torch.ones(512, 256)
        calls.call("pack_weight", weight, panels := torch.empty(4 * 512 * 256 + 4096, dtype=torch.uint8),
                   512, 256, dtype=torch.float32)  # fmt: skip
        out = torch.zeros(600, 512)
        calls.call("product", x, panels, None, out, 600, 512, 256, dtype=torch.float32)
        os._exit(0 if bool((out == 256).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(torch.equal, products(3), expected))


def test_threads_are_given_back_whatever_happens() -> None:
    torch.set_num_threads(3)
    with pytest.raises(ValueError, match="broken"), threads_lent(True):
        assert torch.get_num_threads() == 1
        with threads_lent(True):
            raise ValueError("broken")
    assert torch.get_num_threads() == 3
    with threads_lent(False):
        assert torch.get_num_threads() == 3


def test_sampling_and_scoring_have_the_same_bits_with_any_number_of_threads() -> None:
    """Also where a thread's first row has another prompt than the batch's, or has drawn fewer tokens."""
    policy, prompts = policy_of("qwen3"), random_prompts(40, 9, 23)
    requests = [Request(p, list(range(50 * i, 50 * i + 50))) for i, p in enumerate(prompts)]
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        drawn = list(LocalSampler(policy, 100).sample(requests, SamplingParams(40)))
        drawn.sort(key=lambda d: (d.request, d.sample))
        tokens = [[d.completion.tokens for d in drawn if d.request == r] for r in range(len(prompts))]
        recorded = torch.cat([torch.from_numpy(d.completion.logprobs) for d in drawn])
        with threads_lent(True):
            assert torch.equal(policy.token_outputs(pack(prompts, tokens), 1.0).logprobs, recorded)
        found.append(recorded)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("numbers", list(DTYPES))
def test_a_gradient_is_the_same_bits_with_any_number_of_threads(numbers: Numbers) -> None:
    """Also where threads part the rows in the middle of a tile: 272 are 17 x 16."""
    tokens, outputs, inputs = 600, 272, 144
    torch.manual_seed(0)
    grad, x = (torch.randn(tokens, n).to(memory_of(numbers)) for n in (outputs, inputs))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        into = torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs).clone()
        outer_sum(grad, x, into, numbers)
        found.append(into)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
