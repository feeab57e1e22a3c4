"""The processes that train together: the rank of this one, and the exchange between them.

They are started by torchrun, or by `launch.processes`, and find each other by its environment. A run in one
process has rank 0 of 1, and pays nothing for this module. A process's own news (an error, a request to stop,
its free memory) is exchanged before any process acts on it, so that none waits forever.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from covey.errors import GuardStop, PeersLost, RestartRequired, Stopped
from covey_verify.errors import ConfigError, CoveyError, RewardError

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")
END_KEY = "ended"
"""Key of torchrun's store for the exit code of a run that is not to be started again."""
STORE_VARIABLE = "COVEY_STORE"
"""Environment variable with the file by which processes of one machine meet; else they use MASTER_ADDR."""
WEEK_MINUTES = 7 * 24 * 60.0
"""Minutes that a process waits for the others if no limit is set."""


class _Place(NamedTuple):
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    """The group for objects: over gloo, whatever the tensors use."""
    job: Store | None = None
    """The store that torchrun's later attempts of the same job see too."""


_here = _Place()


def rank() -> int:
    """Return the number of this process, from 0."""
    return _here.rank


def world_size() -> int:
    """Return how many processes train together."""
    return _here.size


def is_rank_zero() -> bool:
    """Whether this is rank 0, which alone prints and writes."""
    return _here.rank == 0


def objects_group() -> ProcessGroup | None:
    """Return the group that exchanges data outside of GPUs; None in a run with one process."""
    return _here.group


def environment_rank() -> int:
    """Return the rank that this process was started with, known before it has joined the others."""
    return int(os.environ.get("RANK", "0"))


def on_this_machine(device: str = "cpu") -> int:
    """Return how many of the processes share this machine's CPUs and memory; 1 if they use GPUs, one each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _here.size > 1 and device == "cpu" else 1


def started_together() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def reported_by_another(error: CoveyError) -> bool:
    """Whether this process may leave an error unsaid, because rank 0 reports it or it was reported before."""
    alike = isinstance(error, GuardStop | RewardError | Stopped | PeersLost)
    return environment_rank() > 0 and (alike or error.joint) and not isinstance(error, RestartRequired)


@contextmanager
def join_processes(minutes: float, device: str) -> Iterator[None]:
    """Join the other processes, if there are any. ``minutes``: the longest wait for one of them; 0: no limit.

    Raises PeersLost if one has ended, or does not answer.
    """
    global _here  # noqa: PLW0603 - a process is one of a group
    if not started_together() or _here.size > 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if ":" in device:
        raise ConfigError(
            f"device: {device}: with several processes each gets its own GPU; leave the number out"
        )
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # The rank is known from torchrun's environment before the processes meet.
    rank = environment_rank()
    count = int(os.environ["WORLD_SIZE"])
    wait = timedelta(minutes=minutes or WEEK_MINUTES)
    # Tensors on the CPU travel over gloo, those on GPUs over NCCL.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        store, job = _meeting_place(rank, count, wait)
        _refuse_ended(job)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait)
        _here = _Place(rank, count, dist.new_group(backend="gloo", timeout=wait), job)
        yield
        dist.destroy_process_group()
    except CoveyError as error:
        if error.code not in (CoveyError.code, PeersLost.code):  # a bug, or what follows from a lost process
            record_job_end(error.code)
        raise
    except RuntimeError as error:
        raise as_peers_lost(error) from None
    finally:
        _here = _Place()


def as_peers_lost(error: Exception) -> Exception:
    """Return PeersLost for an error of torch.distributed which says that another process is gone."""
    if not started_together() or not isinstance(error, RuntimeError) or not _is_peer_failure(error):
        return error
    return PeersLost(
        "another process of this run has ended or does not answer, so this one exits too; its error is "
        f"above, if it could print one ({str(error).strip().splitlines()[0][:200]})"
    )


def record_job_end(code: int) -> None:
    """Record that the run has ended for good: torchrun starts a job again after any exit code but 0."""
    if _here.job is not None:
        # Only the first process to end sets it: an empty expected value means that the key is not there yet.
        _here.job.compare_set(END_KEY, "", str(code))


def _refuse_ended(job: Store | None) -> None:
    if job is not None and job.check([END_KEY]):
        error = CoveyError(
            "torchrun restarted a run that had already ended. Nothing was changed; its end is described above"
        )
        error.code = int(job.get(END_KEY))
        error.joint = True
        raise error


def _meeting_place(rank: int, count: int, wait: timedelta) -> tuple[Store, Store | None]:
    """Return the store for the processes' addresses, and torchrun's store for all attempts of a job."""
    from torch._C._distributed_c10d import FileStore, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if path := os.environ.get(STORE_VARIABLE):
        return FileStore(path, count), None
    store, _, _ = next(rendezvous("env://", rank, count, timeout=wait))
    # torchrun may keep its store at a restart, with the addresses of processes that are gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", store), store


def _is_peer_failure(error: RuntimeError) -> bool:
    # torch raises a plain RuntimeError for some of these, so only the words of the backends tell.
    words = str(error)
    return type(error).__name__.startswith("Dist") or any(
        w in words for w in ("onnection closed", "onnection reset", "roken pipe", "imed out", "NCCL", "gloo")
    )


def gather(value: T) -> list[T]:
    """Return the values of all processes, in the order of ranks, on each of them."""
    if _here.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[T | None] = [None] * _here.size
    dist.all_gather_object(values, value, group=_here.group)
    return cast("list[T]", values)


def all_reduce_sum(values: Tensor) -> Tensor:
    """Add up a tensor (on the CPU) over all processes, in place."""
    if _here.size > 1:
        import torch.distributed as dist

        dist.all_reduce(values, group=_here.group)
    return values


def run_on_all(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and return this rank's result. All ranks raise the lowest rank's error."""
    results: list[T] = []
    gather_from_all(lambda: results.append(work()))
    return results[0]


def gather_from_all(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, by rank. Raises as ``run_on_all``."""
    if _here.size == 1:
        return [work()]
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = work(), None
    except Exception as error:
        # A lost peer: the exchange below would fail as well.
        if isinstance(error, RuntimeError) and _is_peer_failure(error):
            raise
        outcome = None, portable_error(error)
    outcomes = gather(outcome)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        errors[0].joint = True  # type: ignore[attr-defined]  # any error, not only ours
        raise errors[0]
    return [cast("T", value) for value, _ in outcomes]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only and return its result on every rank. Raises as ``run_on_all``."""
    return gather_from_all(work if is_rank_zero() else lambda: cast("T", None))[0]


def is_joint(error: BaseException) -> bool:
    """Whether all processes have raised this error."""
    return _here.size == 1 or getattr(error, "joint", False)


def rank_slice(count: int) -> range:
    """Return the numbers below ``count`` that this process takes."""
    return range(_here.rank, count, _here.size)


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """Merge the results of all processes' ``rank_slice`` in the order of the numbers."""
    longest = max(map(len, parts), default=0)
    return [part[n] for n in range(longest) for part in parts if n < len(part)]


def portable_error(error: Exception) -> Exception:
    """Return the error, or one with the same message if it cannot be pickled."""
    try:
        # Both ways: an exception with arguments of its own often pickles, and fails only when it is read.
        pickle.loads(pickle.dumps(error))  # noqa: S301 - bytes of this line
    except Exception:
        return CoveyError(f"{type(error).__name__}: {error}")
    return error
