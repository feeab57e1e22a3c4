"""The remote backend before a service that answers, fails, lies and dies: no verdict is never a 0."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covey_verify.errors import SandboxUnavailable
from covey_verify.programs.code import code_tests
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.portable import Remote

LIMITS = Limits(wall=5.0, output=10_000)
SQUARE = "```python\ndef f(x): return x * x\n```"
TESTS = [{"input": [2], "output": 4}, {"input": [3], "output": 9}]


class Service:
    """Runs programs as SandboxFusion does, unless it is told what to answer instead."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.orders: list[dict[str, Any]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.orders.append(order)
                reply = service.replies.pop(0) if service.replies else ran(order)
                if reply == "dies":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{")
                elif reply == "hangs up":
                    pass
                elif reply == "no HTTP":
                    self.wfile.write(b"220 mail service ready\r\n\r\n")
                else:
                    self.send_response(reply if isinstance(reply, int) else 200)
                    self.end_headers()
                    self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def ran(order: dict[str, Any]) -> dict[str, Any]:
    """A program, run for real: this test wrote it."""
    done = subprocess.run(
        [sys.executable, "-c", order["code"]], input=order["stdin"], capture_output=True, text=True
    )
    return finished(done.stdout, done.returncode)


def finished(stdout: Any, code: int = 0, status: str = "Finished") -> dict[str, Any]:
    run = {"status": status, "return_code": code, "stdout": stdout, "stderr": "", "execution_time": 0.1}
    return {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": run}


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.stop()


def judged(service: Service, text: str = SQUARE) -> Any:
    return code_tests(text, sandbox=Remote(service.url, pause=0.01), tests=TESTS, entry_point="f")


def test_programs_and_calls_are_run_there(service: Service) -> None:
    remote = Remote(service.url)
    assert remote.script("print(int(input()) + 1)", "41\n", LIMITS)[:2] == ("ok", "42\n")
    assert remote.script("raise SystemExit(3)", "", LIMITS).kind == "crashed"
    assert service.orders[0]["language"] == "python" and service.orders[0]["run_timeout"] == LIMITS.wall
    assert judged(service).value == 1.0
    wrong = judged(service, SQUARE.replace("x * x", "x + 2"))
    assert (wrong.value, wrong.status) == (0.0, "ok")
    assert "9" not in json.dumps(service.orders[-1]["stdin"])  # what is expected stays here


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": "SandboxError", "message": "no worker", "run_result": None},
        {"status": "Success"},
        [1, 2],
        b"<html>busy</html>",
        b"[" * 9_000,
        b"",
        404,
        "dies",
        "hangs up",
        "no HTTP",
    ],
    ids=str,
)
def test_trouble_of_the_service_is_no_verdict(service: Service, trouble: Any) -> None:
    service.replies = [trouble]
    score = judged(service)
    assert (score.value, score.status) == (None, "infra_error")
    assert len(service.orders) == 1


def test_a_busy_service_is_asked_again_but_not_for_ever(service: Service) -> None:
    service.replies = [503, 429]
    assert judged(service).value == 1.0
    service.replies = [500] * 9
    score = judged(service)
    assert (score.value, score.status) == (None, "infra_error")
    assert len(service.orders) == 3 + 3


def test_what_a_program_does_is_its_own_fault(service: Service) -> None:
    for reply, kind in [
        (finished("", status="TimeLimitExceeded", code=-9), "timeout"),
        (finished("", code=139), "crashed"),
        (finished("x" * 20_000), "flood"),
        (finished("x" * 200_000), "flood"),
        (finished(None), "ok"),
    ]:
        service.replies = [reply]
        assert Remote(service.url).script("", "", LIMITS).kind == kind
    for stdout in ("no answer\n", "\x1e{\n", '\x1e{"passed": true}\n', "\x1e" + "[" * 5_000 + "\n"):
        service.replies = [finished(stdout)]
        assert judged(service).value == 0.0


def test_a_service_that_dies_during_a_run_gives_no_verdict_and_nothing_weaker_takes_over(
    service: Service,
) -> None:
    service.replies = [finished("probed []")]
    chosen = choose.__wrapped__("remote", service.url)
    assert chosen.record()["backend"] == "remote"
    assert code_tests(SQUARE, sandbox=chosen.sandbox, tests=TESTS, entry_point="f").value == 1.0
    service.stop()
    score = code_tests(SQUARE, sandbox=chosen.sandbox, tests=TESTS, entry_point="f")
    assert (score.value, score.status) == (None, "infra_error")


def test_a_service_that_does_not_answer_is_refused_before_training(service: Service) -> None:
    address = service.url.removeprefix("http://")
    for url in ("file:///etc/passwd", address, f"https://{address}", "http://127.0.0.1:9"):
        with pytest.raises(SandboxUnavailable, match=r"not an http address|does not run"):
            choose.__wrapped__("remote", url)
    with pytest.raises(SandboxUnavailable, match="tests written as code cannot run in the remote sandbox"):
        code_tests(
            SQUARE, sandbox=Remote(service.url), mode="check", test="def check(f): pass", entry_point="f"
        )
