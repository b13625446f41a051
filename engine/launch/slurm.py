"""The batch script of a run on Slurm: a Ray cluster over the job's nodes, and `asyncrl train` on it."""

import shlex
from collections.abc import Sequence

_START_S = 300
_FOLLOWS = """set -euo pipefail

# Ray answers nobody without this token, which is in the job's environment alone.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
step=(srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=@CPUS@)
address=$("${step[@]}" --nodelist="${nodes[0]}" hostname -I | awk '{ print $1 }')
# Jobs of one user may share a node.
port=$((20000 + SLURM_JOB_ID % 10000))
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT

"${step[@]}" --nodelist="${nodes[0]}" ray start --head --node-ip-address="$address" --port="$port" \\
  --include-dashboard=false @RESOURCES@ --block > /dev/null &
for ((left = @START_S@; left > 0; left -= 2)); do
  "${step[@]}" --nodelist="${nodes[0]}" ray health-check --address "$address:$port" > /dev/null 2>&1 && break
  sleep 2
done
if ((left <= 0)); then
  echo "Ray did not start on ${nodes[0]} within @START_S@ s" >&2
  exit 1
fi
for node in "${nodes[@]:1}"; do
  "${step[@]}" --nodelist="$node" ray start --address="$address:$port" @RESOURCES@ --block > /dev/null &
done

# It waits until the nodes are there: cluster.place_timeout_s.
"${step[@]}" --nodelist="${nodes[0]}" asyncrl train --ray-address "$address:$port" @WORDS@
"""


def slurm_script(
    words: Sequence[str], *, nodes: int, cpus: int, gpus: int, time_limit: str, partition: str | None
) -> str:
    """Return the script; `words` follow `asyncrl train`. Each of the `nodes` gives so many CPUs and GPUs to Ray."""
    asked = {
        "job-name": "asyncrl",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        **({"gpus-per-node": gpus} if gpus else {}),
        "time": time_limit,
        **({"partition": partition} if partition is not None else {}),
    }
    head = "".join(f"#SBATCH --{name}={value}\n" for name, value in asked.items())
    filled = (
        _FOLLOWS.replace("@RESOURCES@", f"--num-cpus={cpus} --num-gpus={gpus}")
        .replace("@CPUS@", str(cpus))
        .replace("@START_S@", str(_START_S))
        .replace("@WORDS@", shlex.join(words))
    )
    return f"#!/usr/bin/env bash\n{head}# Written by `asyncrl launch slurm`.\n{filled}"
