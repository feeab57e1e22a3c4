"""Requests to sampling servers: sent, repeated while a server is busy, and checked when they are answered."""

from __future__ import annotations

import time
from http import HTTPStatus

from covey.models.policy import Policy
from covey.sampling.base import Request, SamplingParams
from covey.sampling.dialects import Misbehaved, ServerOutput, check_request_id, new_request_id, read_outputs
from covey.sampling.server_text import check_stop
from covey.sampling.servers import RemoteServer, Transport
from covey_verify.web import StatusError, pauses

TOKEN = "COVEY_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable with the token that servers ask for."""
MAX_REPLY_BYTES = 1 << 28
"""Most bytes of a reply."""
SHORT_TIMEOUT = 20.0
"""Seconds for a request other than sampling."""
FIRST_PAUSE = 0.1
"""Seconds until a busy server is asked again; each further pause is twice as long."""
MAX_PAUSE = 5.0
"""Most seconds between two requests to a busy server."""


class ServerClient:
    """Sends requests to servers. Safe from any thread."""

    def __init__(self, policy: Policy, transport: Transport, token: str, timeout: float) -> None:
        """``timeout``: seconds for a request for completions, repetitions included."""
        self.policy = policy
        self.transport = transport
        self.token = token
        self.timeout = timeout
        self.vocabulary = policy.embedded
        """Number of token ids that a server may return."""

    def send(
        self, server: RemoteServer, path: str, body: object = None, timeout: float = SHORT_TIMEOUT
    ) -> object:
        """Send one request and return its reply. Raises an error of FAILURES."""
        return self.transport(server.url + path, body, self.token, timeout, MAX_REPLY_BYTES)

    def complete(self, server: RemoteServer, request: Request, params: SamplingParams) -> list[ServerOutput]:
        """Return a server's completions of a request, each checked to be possible.

        A busy server is asked again until the time of a request is over. Raises an error of FAILURES.
        """
        dialect = server.dialect
        assert dialect is not None, "it has answered"
        deadline = time.monotonic() + self.timeout
        body = dialect.body(request, params, server.model, params.ends_of(self.policy))
        # Read before the request, because the server may get and prove other weights before it answers.
        proven_stamp = server.stamp
        for pause in pauses(FIRST_PAUSE, MAX_PAUSE):
            request_id = new_request_id()
            try:
                with_id = {**body, dialect.id_field: request_id}
                reply = self.send(server, dialect.path, with_id, max(1.0, deadline - time.monotonic()))
                break
            except StatusError as error:
                busy = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
                if not busy or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
        outputs = read_outputs(dialect, reply, request, params, self.vocabulary, params.ends_of(self.policy))
        check_request_id(dialect, reply, request_id)
        if params.stop:
            for output in outputs:
                check_stop(self.policy, output, params)
        _check_stamp(server, proven_stamp, dialect.stamp(reply))
        return outputs


def _check_stamp(server: RemoteServer, proven_stamp: object, stamp: object) -> None:
    """Check that a reply is of the weights that passed the probes: a server may have been restarted."""
    if proven_stamp is None:  # this is the first probe, whose stamp the others have to have
        server.stamp = stamp
    elif proven_stamp != stamp:
        raise Misbehaved("it was restarted, or its weights were changed, after it had proven its weights")
