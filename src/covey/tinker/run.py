"""The start of the server for `covey serve --tinker`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette

from covey.cluster.serving.run import serve_app, served_policy
from covey.config.load import load_config
from covey.models.load import source_of
from covey.runs.arithmetic import source_run
from covey.tinker.adapters import Base
from covey.tinker.app import TinkerServer
from covey.tinker.checkpoints import CheckpointStore
from covey_verify.errors import ConfigError


def serve_tinker(
    model: str, host: str, port: int, weights: Path | None, name: str, settings: Sequence[str] = ()
) -> None:
    """Serve clients of Tinker's SDK until a signal ends the process.

    Checkpoints are kept in the folder that `output` names. Raises ConfigError as ``serve_http`` does.
    """
    if weights is not None:
        raise ConfigError("--weights: with --tinker clients train the weights; leave it out")

    def build(token: str) -> tuple[Starlette, str, str]:
        resolved = load_config(None, settings, {"model": model})
        config = resolved.config
        if model == "tiny":
            raise ConfigError(
                "model: tiny has no tokenizer that a client can load; give a folder or a hub id"
            )
        source = source_of(model, resolved.folder)
        store = CheckpointStore(config.output / "tinker")
        policy = served_policy(resolved, source_run(resolved))
        tokens = config.train.tokens_per_micro_batch
        base = Base(policy, name or source, source, tokens, config.rollout.max_running)
        print(f"base_model {base.name}, tokenizer {base.source}")
        print(f"checkpoints in {store.folder}", flush=True)
        return TinkerServer(base, store, token).app(), f"Tinker of {Path(model).name}", ""

    serve_app(host, port, build)
