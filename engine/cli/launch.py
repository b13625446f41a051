"""`asyncrl launch`: writes the job file that starts a Ray cluster on Slurm or Kubernetes and trains on it."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail, matching, number

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

_TIME = matching(
    r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", "a time of Slurm, as in 90 (minutes), 12:00:00 or 2-12:00:00"
)
_PARTITION = matching(r"[\w.+-]+(,[\w.+-]+)*", "the name of a partition, or several with commas between")
_IMAGE = matching(r"[A-Za-z0-9][\w.:/@+-]*", "the name of an image, as in team/asyncrl:1")
_CLAIM = matching(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "a name of Kubernetes: small letters, digits, '-' and '.'"
)


@app.command("slurm")
def slurm(
    words: Words = None,
    nodes: Nodes = 1,
    node_cpus: Cpus = 8,
    node_gpus: Gpus = 0,
    time: Annotated[str, typer.Option(parser=_TIME, metavar="D-HH:MM:SS", help="Limit of the job.")] = "24:00:00",
    partition: Annotated[
        str | None, typer.Option(parser=_PARTITION, metavar="NAME", help="Partition of the job.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The script to write; it must not exist.")] = Path(
        "asyncrl.sbatch"
    ),
) -> None:
    """Write a batch script: `sbatch FILE`, in a folder that all nodes see. Exit code 2: bad input."""
    from asyncrl.engine.launch.slurm import slurm_script

    _check_words(words or [])
    script = slurm_script(
        words or [], nodes=nodes, cpus=node_cpus, gpus=node_gpus, time_limit=time, partition=partition
    )
    _write(output, script)
    typer.echo(f"submit it with: sbatch {output}")


@app.command("kuberay")
def kuberay(
    image: Annotated[str, typer.Option(parser=_IMAGE, metavar="IMAGE", help="Image with asyncrl and Ray.")],
    words: Words = None,
    nodes: Nodes = 1,
    node_cpus: Cpus = 8,
    node_gpus: Gpus = 0,
    node_gib: Annotated[int, typer.Option(parser=number(1), metavar="GIB", help="Memory of each node.")] = 32,
    claim: Annotated[
        str | None,
        typer.Option(parser=_CLAIM, metavar="NAME", help="Volume claim that all nodes mount at /work, for --run-dir."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write; it must not exist.")] = Path(
        "asyncrl.yaml"
    ),
) -> None:
    """Write a RayJob: `kubectl create -f FILE`; checked against a schema, and not run. Exit code 2: bad input."""
    from asyncrl.engine.launch.kuberay import Pod, ray_job

    _check_words(words or [])
    pod = Pod(image, cpus=node_cpus, gpus=node_gpus, memory_gib=node_gib, claim=claim)
    _write(output, ray_job(words or [], nodes=nodes, pod=pod))
    typer.echo(f"create it with: kubectl create -f {output}; it was not tried on a cluster of Kubernetes")


def _check_words(words: list[str]) -> None:
    """Refuse words with which `asyncrl train` could not work on the cluster of the job."""
    from asyncrl.engine.cli.train import load_words
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.cluster_checks import check_time_slicing

    loaded = load_words(words)
    runtime, address = loaded.config.run.runtime, loaded.config.cluster.address
    if runtime != "ray":
        fail(
            f"run.runtime (from {loaded.sources['run.runtime']}) is {runtime!r}, and the job is a Ray cluster on which "
            "the run works; it must be ray"
        )
    # A file's address gives way to the job's own.
    if loaded.sources["cluster.address"].startswith("--"):
        fail(
            f"cluster.address (from {loaded.sources['cluster.address']}) is {address!r}, and the run works on the "
            "cluster of the job; leave it out"
        )
    try:
        check_time_slicing(loaded, joins=True)
    except ConfigError as error:
        fail(str(error))


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        fail(f"--output {path} exists already; nothing was written")
    except OSError as error:
        fail(f"--output {path} cannot be written: {error.strerror}")
