"""The RayJob of a run on Kubernetes with KubeRay: a Ray cluster for the run alone, and `asyncrl train` on its head."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml

_RUNS = "/work"


@dataclass(frozen=True, slots=True)
class Pod:
    """What each node is made of. `claim` names a volume that all nodes mount at /work, such as for checkpoints."""

    image: str
    cpus: int
    gpus: int
    memory_gib: int
    claim: str | None


def ray_job(words: Sequence[str], *, nodes: int, pod: Pod) -> str:
    """Return the RayJob as YAML; `words` follow `asyncrl train`. With one node the head is alone."""
    workers = {
        "groupName": "workers",
        "replicas": nodes - 1,
        "minReplicas": nodes - 1,
        "maxReplicas": nodes - 1,
        "rayStartParams": {},
        "template": _template("ray-worker", pod),
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "asyncrl"},
        "spec": {
            "entrypoint": f"asyncrl train --ray-address auto {shlex.join(words)}".strip(),
            # The run starts on the head, in the mounted folder, and goes on from its checkpoints by itself.
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                # Whoever reaches the cluster could otherwise run code on it; KubeRay 1.5.1 makes the token.
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {}, "template": _template("ray-head", pod)},
                **({"workerGroupSpecs": [workers]} if nodes > 1 else {}),
            },
        },
    }
    return "# Written by `asyncrl launch kuberay`.\n" + yaml.safe_dump(job, sort_keys=False)


def _template(name: str, pod: Pod) -> dict[str, Any]:
    amounts = {"cpu": str(pod.cpus), "memory": f"{pod.memory_gib}Gi"}
    if pod.gpus:
        amounts["nvidia.com/gpu"] = str(pod.gpus)
    # A container's own /dev/shm has 64 MiB, in which neither Ray's objects nor payloads have room.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pod.claim is not None:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": pod.claim}})
        mounts.append({"name": "work", "mountPath": _RUNS})
    container: dict[str, Any] = {
        "name": name,
        "image": pod.image,
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "volumeMounts": mounts,
    }
    if pod.claim is not None:
        container["workingDir"] = _RUNS
    return {"spec": {"containers": [container], "volumes": volumes}}
