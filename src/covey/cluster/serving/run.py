"""The start of the server of `covey serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from starlette.applications import Starlette

from covey.cluster.serving.app import Service
from covey.cluster.serving.shared import SharedModel
from covey.config.load import ResolvedConfig, load_config
from covey.models.load import load_policy
from covey.models.policy import Policy
from covey.runs.arithmetic import arithmetic_notes, enclosing_run, follow_run, source_run
from covey.sampling.server_client import TOKEN
from covey.system.console import say_aside
from covey.system.device import pick_device
from covey.system.http import HttpServer, listen
from covey.system.machine import available_threads
from covey.system.parent import tell_exit_code
from covey_verify.errors import ConfigError
from covey_verify.web import LOOPBACK


def serve_http(
    model: str, host: str, port: int, weights: Path | None, name: str, settings: Sequence[str] = ()
) -> None:
    """Answer until the process is told to end, and end it. ``port`` 0 takes a free one, which is printed.

    Raises ConfigError if others could reach the address without a token, or if it is taken.
    """
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"--weights {weights}: there is no such folder")

    def build(token: str) -> tuple[Starlette, str, str]:
        service = service_of(model, weights, name or Path(model).name, settings, token)
        return service.app(), service.name, "/v1"

    serve_app(host, port, build)


def serve_app(host: str, port: int, build: Callable[[str], tuple[Starlette, str, str]]) -> NoReturn:
    """Answer with what ``build`` makes of the token: an application, its name, and the path of its address.

    Raises ConfigError as ``serve_http`` does.
    """
    token = os.environ.get(TOKEN, "")
    if not token and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host}: others can reach this server, so it needs a token: set {TOKEN} to a long random "
            "text, for the server and its clients"
        )
    # Before the model is loaded, so that an address that is taken is reported at once.
    with listen(host, port) as listener:
        application, name, path = build(token)
        shown = f"[{host}]" if ":" in host else host
        server = HttpServer(application, "warning")
        print(f"{name} at http://{shown}:{listener.getsockname()[1]}{path}", flush=True)
        server.run(sockets=[listener])
        # The model's thread may be in the middle of a pass or a long prompt: nothing ends it but this.
        sys.stdout.flush()
        sys.stderr.flush()
        tell_exit_code(0)
        os._exit(0)


def service_of(
    model: str, weights: Path | None, name: str, settings: Sequence[str], token: str = ""
) -> Service:
    """Load a model to answer with. The process computes as the run that it serves, or that wrote the model.

    Raises ConfigError.
    """
    resolved = load_config(None, settings, {"model": model})
    # The run whose folder the weights will come from, else the run that saved the model.
    run = (enclosing_run(weights) if weights is not None else None) or source_run(resolved)
    policy = served_policy(resolved, run)
    return Service(SharedModel(policy, resolved.config.rollout.max_running), name, token, weights)


def served_policy(resolved: ResolvedConfig, run: Path | None) -> Policy:
    """Load a config's model; this process computes as ``run`` did from now on. Raises ConfigError."""
    torch.set_num_threads(resolved.config.threads or available_threads())
    follow_run(run, pick_device(resolved.config.device))
    policy = load_policy(resolved)
    for note in arithmetic_notes(policy, resolved.config, run):
        say_aside(note)
    return policy
