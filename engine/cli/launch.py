"""`asyncrl launch`: writes the job file that starts a Ray cluster on Slurm or Kubernetes and trains on it."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail, number

app = typer.Typer(
    help="Write a job file for a cluster: --nodes 2 … -- the words of `asyncrl train`.",
    no_args_is_help=True,
    add_completion=False,
)

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[-- WORDS…]", help="What follows `asyncrl train` on the cluster.")
]
Nodes = Annotated[int, typer.Option(parser=number(1, 4096), metavar="N", help="Nodes.")]
Cpus = Annotated[int, typer.Option(parser=number(1), metavar="N", help="CPUs of each node.")]
Gpus = Annotated[int, typer.Option(parser=number(0), metavar="N", help="GPUs of each node.")]


@app.command("slurm")
def slurm(
    words: Words = None,
    nodes: Nodes = 1,
    node_cpus: Cpus = 8,
    node_gpus: Gpus = 0,
    time: Annotated[str, typer.Option(metavar="D-HH:MM:SS", help="Limit of the job.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Partition of the job.")] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The script to write.")] = Path("asyncrl.sbatch"),
) -> None:
    """Write a batch script: `sbatch FILE`, in a folder that all nodes see. Exit code 2: bad input."""
    from asyncrl.engine.launch.slurm import slurm_script

    script = slurm_script(
        words or [], nodes=nodes, cpus=node_cpus, gpus=node_gpus, time_limit=time, partition=partition
    )
    _write(output, script)
    typer.echo(f"submit it with: sbatch {output}")


@app.command("kuberay")
def kuberay(
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Image with asyncrl and Ray.")],
    words: Words = None,
    nodes: Nodes = 1,
    node_cpus: Cpus = 8,
    node_gpus: Gpus = 0,
    node_gib: Annotated[int, typer.Option(parser=number(1), metavar="GIB", help="Memory of each node.")] = 32,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="Volume claim that all nodes mount at /work, for --run-dir.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("asyncrl.yaml"),
) -> None:
    """Write a RayJob: `kubectl create -f FILE`; checked against a schema, and not run. Exit code 2: bad input."""
    from asyncrl.engine.launch.kuberay import Pod, ray_job

    pod = Pod(image, cpus=node_cpus, gpus=node_gpus, memory_gib=node_gib, claim=claim)
    _write(output, ray_job(words or [], nodes=nodes, pod=pod))
    typer.echo(f"create it with: kubectl create -f {output}; it was not tried on a cluster of Kubernetes")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--output {path} cannot be written: {error.strerror}")
