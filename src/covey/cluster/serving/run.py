"""The start of the server of `covey serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from covey.cluster.serving.app import Service
from covey.cluster.serving.shared import SharedModel
from covey.config.load import load_config
from covey.models.load import load_policy
from covey.runs.arithmetic import follow_run, run_around, run_behind, unfollowed
from covey.sampling.remote import TOKEN
from covey.system.console import say_aside
from covey.system.http import Server, listen
from covey.system.machine import available_threads
from covey.system.parent import ended
from covey_verify.errors import ConfigError
from covey_verify.web import LOOPBACK


def serve_http(
    model: str, host: str, port: int, weights: Path | None, name: str, settings: Sequence[str] = ()
) -> None:
    """Answer until the process is told to end, and end it. ``port`` 0 takes a free one, which is printed.

    Raises ConfigError if others could reach the address without a token, or if it is taken.
    """
    token = os.environ.get(TOKEN, "")
    if not token and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host}: others can reach this server, so it needs a token: set {TOKEN} to a long random "
            "text, for the server and its clients"
        )
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"--weights {weights}: there is no such folder")
    # Before the model is loaded, so that an address that is taken is reported at once.
    with listen(host, port) as listener:
        service = service_of(model, weights, name or Path(model).name, settings, token)
        shown = f"[{host}]" if ":" in host else host
        server = Server(service.app(), "warning")
        print(f"{service.name} at http://{shown}:{listener.getsockname()[1]}/v1", flush=True)
        server.run(sockets=[listener])
        # The model's thread may be in the middle of a pass or a long prompt: nothing ends it but this.
        sys.stdout.flush()
        sys.stderr.flush()
        ended(0)
        os._exit(0)


def service_of(
    model: str, weights: Path | None, name: str, settings: Sequence[str], token: str = ""
) -> Service:
    """Load a model to answer with. The process computes as the run that it serves, or that wrote the model.

    Raises ConfigError.
    """
    loaded = load_config(None, settings, {"model": model})
    torch.set_num_threads(loaded.config.threads or available_threads())
    # The run whose folder the weights will come from, else the one that the model was saved by.
    run = (run_around(weights) if weights is not None else None) or run_behind(loaded)
    follow_run(run)
    policy = load_policy(loaded)
    for note in unfollowed(policy, loaded.config, run):
        say_aside(note)
    return Service(SharedModel(policy, loaded.config.rollout.max_running), name, token, weights)
