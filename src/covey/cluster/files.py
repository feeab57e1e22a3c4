"""Files of `covey launch`, which start a run under torchrun, Slurm or Ray; users read and change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from covey.config.schema import Config
from covey.system.text import shell_word

# The texts are formatted, so braces of the shell are doubled.
TORCHRUN = """\
#!/usr/bin/env bash
# {processes} processes on this machine train together (FSDP2). When one dies, torchrun starts all of them
# again, up to {restarts} times, and they continue from the last checkpoint. PYTHON may name another
# interpreter.
set -euo pipefail
cd {folder}
exec "${{PYTHON:-python}}" -m torch.distributed.run --standalone --nproc-per-node {processes} \\
    --max-restarts {restarts} -m covey {command}
"""
SLURM = """\
#!/usr/bin/env bash
# sbatch {name}: {nodes} machines with {processes} processes each. All of them see {folder} and {output}.
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={processes}
#SBATCH --time=24:00:00
# Ten minutes before the time is over: save, end, and queue again.
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd {folder}

# The processes find each other at the first machine. This port has no token: it has to be a private network.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun "${{PYTHON:-python}}" -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node {processes} \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \\
    --max-restarts {restarts} -m covey {command} &
work=$!
trap 'kill -TERM "$work"' TERM
code=0
wait "$work" || code=$?
while kill -0 "$work" 2> /dev/null; do  # the signal has ended the first wait
    code=0
    wait "$work" || code=$?
done

# covey says in exit.json how it ended: 75 is a stop that was asked for, with everything saved.
if grep -qs '"exit_code": 75' {output}/exit.json; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
RAY = """\
#!/usr/bin/env bash
# A Ray cluster, and the run on it.
#   on the first machine     {name} head
#   on each of the others    {name} join ADDRESS    (as the first one printed it)
#   then, on the first       {name} train
# All machines see {folder} and {output}, and have covey[ray] installed.
set -euo pipefail
cd {folder}

# Ray's ports require this token. Keep the file readable for all machines of the run and for nobody else.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="${{RAY_AUTH_TOKEN_PATH:-$PWD/.ray_token}}"
export RAY_USAGE_STATS_ENABLED=0
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    umask 077
    od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH"
fi

case "${{1:-}}" in
head) exec ray start --head --port 6379 --include-dashboard false ;;
join) exec ray start --address "$2" ;;
train)
    exec "${{PYTHON:-python}}" -m covey {command} {placed}
    ;;
*)
    sed -n '2,6p' "$0" >&2
    exit 2
    ;;
esac
"""


def launch_files(config: Config, path: Path, settings: Sequence[str], nodes: int) -> Mapping[str, str]:
    """Return name -> text. ``path`` is the YAML file, ``settings`` the command line's additions to it."""
    launch = config.launch
    placed = {"ray": "auto", "processes": nodes * launch.processes, "samplers": launch.samplers}
    # Texts are quoted for the shell, since folders and settings may have any characters.
    parts = {
        "folder": shell_word(str(Path.cwd())),
        "output": shell_word(str(config.output)),
        "job": shell_word(f"covey-{config.output.name}"),
        "nodes": nodes,
        "processes": launch.processes,
        "restarts": launch.restarts,
        "command": " ".join(map(shell_word, ["train", str(path), *settings])),
        "placed": " ".join(f"--launch.{name} {value}" for name, value in placed.items()),
    }
    templates = {"torchrun.sh": TORCHRUN, "job.sbatch": SLURM, "ray.sh": RAY}
    return {name: text.format(name=name, **parts) for name, text in templates.items()}
