"""Samplers that Ray places: covey's own engine with the routes of `covey serve`, called through Ray.

No port is opened: Ray decides who may call an actor. A sampler whose node is lost is started again where
there is room, and has to pass the run's probes as any server does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Message

from covey.cluster.connect import connect_ray, keep, node_lost, ray_message
from covey.cluster.serving.run import service_of
from covey.config.schema import Config
from covey.models.policy import Policy, save_policy
from covey.runs.atomic import committed_folder
from covey.sampling.server_client import SHORT_TIMEOUT
from covey_verify.errors import ConfigError
from covey_verify.web import MAX_MESSAGE, StatusError, TooLong, ask

if TYPE_CHECKING:
    from ray.actor import ActorHandle

SCHEME = "ray:"
SHORT_ANSWER_SECONDS = 5.0
"""Seconds for an answer that takes no work; a sampler that is being restarted does not answer within them."""
_numbers = itertools.count(1)


class SamplerHost:
    """The actor: a model, and the ASGI application of `covey serve` around it."""

    def __init__(self, model: str, weights: str, settings: list[str]) -> None:
        self.app = service_of(model, Path(weights), "policy", settings).app()

    def ready(self) -> None:
        """Return once the model is loaded: the constructor has ended."""

    async def answer(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Answer a request as over HTTP: return status and body of the reply."""
        # An ASGI request without a server: localhost as the host passes the check of callers.
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value
        parts = list[bytes]()

        async def receive() -> Message:
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            # Two kinds of message come: the first has the status, the others parts of the body.
            parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, b"".join(parts)


class PlacedSamplers:
    """Samplers on a cluster, used as servers: ``ask`` has the signature of ``covey_verify.web.ask``."""

    def __init__(self, policy: Policy, config: Config, folder: Path) -> None:
        """``folder`` is where weights are written; all nodes see it at the same path. Raises ConfigError."""
        assert config.launch.ray is not None
        connect_ray(config.launch.ray)
        # A restarted sampler loads these weights too; the run then gives it the current ones.
        start = folder.resolve() / "start"
        with committed_folder(start) as target_folder:
            save_policy(policy, target_folder)
        options = self._options(config)
        # Samplers compute as this process does, so that log-probs can be bit-exact.
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
        """Addresses of the samplers, as ``ask`` takes them."""
        return tuple(self.actors)

    @staticmethod
    def _options(config: Config) -> dict[str, int]:
        """Return the resources of a sampler. Raises ConfigError if the cluster does not have them."""
        import ray

        resources = ray.cluster_resources()
        count = config.launch.samplers
        demands = {
            "CPU": config.threads or 1,
            "GPU": int(config.device != "cpu" and resources.get("GPU", 0) > 0),
        }
        for name, demand in demands.items():
            if demand * count > resources.get(name, 0):
                raise ConfigError(
                    f"launch.samplers: {count} with {demand} {name} each, and the Ray cluster has "
                    f"{resources.get(name, 0):g}; ask for fewer, or add a node"
                )
        return {"num_cpus": demands["CPU"], "num_gpus": demands["GPU"]}

    def _wait(self, config: Config) -> None:
        """Wait until the first of them has loaded its model; the others join as they are ready."""
        import ray
        from ray.exceptions import RayError

        timeout = config.rollout.sampler.timeout if config.rollout.sampler else 600.0
        waiting = [actor.ready.remote() for actor in self.actors.values()]
        while waiting:
            up, waiting = ray.wait(waiting, timeout=timeout)
            if not up:
                raise ConfigError(
                    f"launch.samplers: none was up after {timeout:g} s; `ray status` shows the resources"
                )
            try:
                ray.get(up)
            except RayError as error:
                # Ray starts one again whose node was lost; meanwhile the others are waited for.
                if not (waiting and node_lost(error)):
                    raise ConfigError(
                        f"launch.samplers: a sampler did not start: {ray_message(error)}"
                    ) from None
            else:
                return

    def ask(
        self,
        url: str,
        body: object = None,
        token: str = "",
        timeout: float = SHORT_TIMEOUT,
        largest: int = 1 << 20,
    ) -> object:
        """Send a request as ``covey_verify.web.ask`` does. A sampler that does not answer raises OSError."""
        if not url.startswith(SCHEME):
            return ask(url, body, token, timeout, largest)
        import ray
        from ray.exceptions import RayError

        name, slash, path = url.partition("/")
        # As bytes, as over HTTP, so that the routes check it in the same way.
        data = None if body is None else json.dumps(body).encode()
        patience = min(timeout, SHORT_ANSWER_SECONDS) if timeout == SHORT_TIMEOUT else timeout
        reply = self.actors[name].answer.remote(slash + path, data)
        try:
            status, text = ray.get(reply, timeout=patience)
        except TimeoutError:
            ray.cancel(reply)
            raise TimeoutError(f"no answer within {patience:g} s") from None
        except RayError as error:
            raise OSError(ray_message(error)) from None
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise StatusError(status, text[:MAX_MESSAGE].decode(errors="replace"))
        if len(text) > largest:
            raise TooLong(f"the reply has more than {largest} bytes")
        return json.loads(text) if text.strip() else None


def _place(
    count: int, options: dict[str, int], start: str, weights: str, settings: list[str]
) -> Iterator[tuple[str, ActorHandle]]:
    import ray

    # -1: restarted without limit, on any node.
    kind = ray.remote(SamplerHost).options(**options, max_restarts=-1, scheduling_strategy="SPREAD")
    for _ in range(count):
        yield f"{SCHEME}sampler-{next(_numbers)}", keep(kind.remote(start, weights, settings))
