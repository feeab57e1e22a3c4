"""Samplers that Ray places: covey's own engine with the routes of `covey serve`, asked through Ray.

No port is opened: who may call an actor is Ray's matter. A sampler whose node is lost is started again
elsewhere, where there is room, and proves itself to the run as any server does.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPMessage
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError

from starlette.types import Message

from covey.cluster.connect import connect_ray, keep, node_lost, said
from covey.config.schema import Config
from covey.models.policy import Policy, save_policy
from covey.runs.atomic import committed_folder
from covey.sampling.remote import QUICK
from covey.serving.run import service_of
from covey_verify.errors import ConfigError
from covey_verify.web import ask

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SCHEME = "ray:"
SHORT_ANSWER = 5.0
"""Seconds for an answer that takes no work; one that is being started again has none for longer."""
_numbers = itertools.count(1)


class SamplerHost:
    """The actor."""

    def __init__(self, model: str, weights: str, settings: list[str]) -> None:
        self.app = service_of(model, Path(weights), "policy", settings).app()

    def ready(self) -> None:
        """It answers when the model is loaded."""

    async def answer(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the reply to a request, as over HTTP."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        status, parts = HTTPStatus.INTERNAL_SERVER_ERROR.value, list[bytes]()

        async def receive() -> Message:
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, b"".join(parts)


class PlacedSamplers:
    """Samplers on a cluster, asked as servers are: ``ask`` has the signature of ``covey_verify.web.ask``."""

    def __init__(self, policy: Policy, config: Config, folder: Path) -> None:
        """``folder`` is where weights are written; all nodes see it at the same path. Raises ConfigError."""
        assert config.launch.ray is not None
        connect_ray(config.launch.ray)
        start = folder.resolve() / "start"
        with committed_folder(start) as made:
            save_policy(policy, made)
        options = self._options(config)
        settings = [
            f"--threads={config.threads or options['num_cpus']}",
            f"--rollout.max_running={config.rollout.max_running}",
            f"--dtype={str(policy.model.dtype).removeprefix('torch.')}",
            f"--precision={'bfloat16' if policy.rounds else 'float32'}",
            *(["--device=cpu"] if config.device == "cpu" else []),
        ]
        places = str(start), str(folder.resolve())
        self.actors = dict(_place(config.launch.samplers, options, *places, settings))
        self._wait(config)

    @property
    def urls(self) -> tuple[str, ...]:
        """What they are called."""
        return tuple(self.actors)

    @staticmethod
    def _options(config: Config) -> dict[str, int]:
        """What a sampler takes. Raises ConfigError where the cluster can never have it."""
        import ray

        there, count = ray.cluster_resources(), config.launch.samplers
        wanted = {"CPU": config.threads or 1, "GPU": int(config.device != "cpu" and there.get("GPU", 0) > 0)}
        for name, each in wanted.items():
            if each * count > there.get(name, 0):
                raise ConfigError(
                    f"launch.samplers: {count} with {each} {name} each, and the Ray cluster has "
                    f"{there.get(name, 0):g}; ask for fewer, or add a node"
                )
        return {"num_cpus": wanted["CPU"], "num_gpus": wanted["GPU"]}

    def _wait(self, config: Config) -> None:
        """Until the first of them has loaded its model; the others join as they are ready."""
        import ray
        from ray.exceptions import RayError

        timeout = config.rollout.sampler.timeout if config.rollout.sampler else 600.0
        left = [actor.ready.remote() for actor in self.actors.values()]
        while left:
            up, left = ray.wait(left, timeout=timeout)
            if not up:
                raise ConfigError(
                    f"launch.samplers: none was up after {timeout:g} s; `ray status` says what there is"
                )
            try:
                ray.get(up)
            except RayError as error:
                if not (left and node_lost(error)):
                    raise ConfigError(f"launch.samplers: a sampler did not start: {said(error)}") from None
            else:
                return

    def ask(
        self, url: str, body: object = None, token: str = "", timeout: float = QUICK, largest: int = 1 << 20
    ) -> object:
        """As ``covey_verify.web.ask``; a sampler that does not answer is an OSError."""
        if not url.startswith(SCHEME):
            return ask(url, body, token, timeout, largest)
        import ray
        from ray.exceptions import RayError

        name, slash, path = url.partition("/")
        data = None if body is None else json.dumps(body).encode()
        patience = min(timeout, SHORT_ANSWER) if timeout == QUICK else timeout
        reply = self.actors[name].answer.remote(slash + path, data)
        try:
            status, text = ray.get(reply, timeout=patience)
        except TimeoutError:
            ray.cancel(reply)
            raise TimeoutError(f"no answer within {patience:g} s") from None
        except RayError as error:
            raise OSError(said(error)) from None
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise HTTPError(url, status, HTTPStatus(status).phrase, HTTPMessage(), io.BytesIO(text))
        if len(text) > largest:
            raise ValueError(f"a reply of more than {largest} bytes")
        return json.loads(text) if text.strip() else None


def _place(
    count: int, options: dict[str, int], start: str, weights: str, settings: list[str]
) -> Iterator[tuple[str, ActorHandle]]:
    import ray

    kind = ray.remote(SamplerHost).options(**options, max_restarts=-1, scheduling_strategy="SPREAD")
    for _ in range(count):
        yield f"{SCHEME}sampler-{next(_numbers)}", keep(kind.remote(start, weights, settings))
