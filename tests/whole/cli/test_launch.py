"""`asyncrl launch` and `asyncrl plan launch`: job files that others can read, and what fits where."""

import json
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from asyncrl.collectors.tasks import load_task
from asyncrl.engine.cli import app
from asyncrl.engine.events.types import RunStarted
from asyncrl.engine.launch.slurm import slurm_script
from asyncrl.engine.model import smollm2
from asyncrl.engine.simulate.durations import parse_durations
from asyncrl.engine.simulate.profile import Given
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.testing.simulation import Collected, simulated_config
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.recording import Recording

# What the resource definition of KubeRay 1.5 asks of a RayJob, as far as the file uses it.
_CONTAINER = {
    "type": "object",
    "required": ["name", "image"],
    "properties": {
        "resources": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
}
_TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "additionalProperties": False,
            "properties": {
                "containers": {"type": "array", "minItems": 1, "items": _CONTAINER},
                "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            },
        }
    },
}
_START = {"type": "object", "additionalProperties": {"type": "string"}}
_CLUSTER = {
    "type": "object",
    "required": ["headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {"type": "object", "properties": {"mode": {"enum": ["disabled", "token"]}}},
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "additionalProperties": False,
            "properties": {"rayStartParams": _START, "template": _TEMPLATE},
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                "additionalProperties": False,
                "properties": {
                    "groupName": {"type": "string"},
                    "replicas": {"type": "integer"},
                    "minReplicas": {"type": "integer"},
                    "maxReplicas": {"type": "integer"},
                    "rayStartParams": _START,
                    "template": _TEMPLATE,
                },
            },
        },
    },
}
_RAY_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"},
                "backoffLimit": {"type": "integer"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": {"type": "integer"},
                "rayClusterSpec": _CLUSTER,
            },
        },
    },
}

# A stand-in: it says where a command would run, and runs it here.
_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && node=${1#*=}; shift; done
echo "$node: $*" >> "$SAID"
exec "$@"
"""
_SCONTROL = '#!/usr/bin/env bash\n[[ "$1 $2 $3" == "show hostnames n[1-2]" ]] && printf "n1\\nn2\\n"\n'
_RAY = """#!/usr/bin/env bash
[[ $RAY_AUTH_MODE == token && ${#RAY_AUTH_TOKEN} == 64 ]] || exit 3
[[ $1 == start ]] && exec sleep 60
[[ -e $SAID.tried ]] || { touch "$SAID.tried"; exit 1; }
"""
_HOSTNAME = "#!/usr/bin/env bash\necho 10.0.0.1 fe80::1\n"
_ASYNCRL = """#!/usr/bin/env bash
until grep -q '^n2' "$SAID"; do sleep 0.05; done
exit 7
"""

REFILL = Path(__file__).parents[2] / "traces" / "refill.jsonl"
TIMES = ("--group-seconds", "1", "--step-seconds", "1")
MEGATRON = ("--set", "trainer.backend=megatron")


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "launch", *words])


def test_the_slurm_script_starts_ray_on_all_nodes_and_trains_on_the_first(tmp_path: Path) -> None:
    """Its first look at the head is too early; the code of the run is that of the job, and nothing runs on."""
    commands = {"srun": _SRUN, "scontrol": _SCONTROL, "ray": _RAY, "hostname": _HOSTNAME, "asyncrl": _ASYNCRL}
    for name, text in commands.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(stat.S_IRWXU)
    words = ["--set", "task.name=it's", "--run-dir", "out"]
    script = slurm_script(words, nodes=2, cpus=4, gpus=1, time_limit="1:00:00", partition="long")
    (tmp_path / "job").write_text(script, encoding="utf-8")
    said = tmp_path / "said"
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "123456", "SAID": str(said)}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job}
    # What the script left running would hold the pipes, and be waited for.
    done = subprocess.run(
        ["bash", "job"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 7, done.stdout + done.stderr
    lines = said.read_text(encoding="utf-8").splitlines()
    started = [line for line in lines if " ray start " in line]
    assert [line.partition(":")[0] for line in started] == ["n1", "n2"]
    assert "--node-ip-address=10.0.0.1 --port=23456" in started[0]
    assert "--address=10.0.0.1:23456 --num-cpus=4 --num-gpus=1" in started[1]
    assert "n1: asyncrl train --ray-address 10.0.0.1:23456 --set task.name=it's --run-dir out" in lines
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --gpus-per-node=1" in head
    assert "#SBATCH --partition=long" in head


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_the_ray_job_keeps_to_the_schema_of_kuberay(tmp_path: Path, nodes: str) -> None:
    file = tmp_path / "job.yaml"
    given = ["--image", "team/asyncrl:1", "--nodes", nodes, "--node-gpus", "2", "--claim", "runs"]
    words = ["launch", "kuberay", *given, "--output", str(file), "--", "--run-dir", "out"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    jsonschema.validate(job, _RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    assert [group["replicas"] for group in cluster.get("workerGroupSpecs", [])] == ([2] if nodes == "3" else [])
    assert job["spec"]["entrypoint"] == "asyncrl train --ray-address auto --run-dir out"


LAUNCH = {"slurm": ("launch", "slurm"), "kuberay": ("launch", "kuberay", "--image", "team/asyncrl:1")}


@pytest.mark.parametrize("kind", ["slurm", "kuberay"])
def test_a_file_that_exists_is_not_written_over(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "job"
    file.write_text("mine", encoding="utf-8")
    result = CliRunner().invoke(app, [*LAUNCH[kind], "--output", str(file)])
    assert result.exit_code == 2, result.output
    assert "exists already; nothing was written" in result.stderr
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("kind", "option", "bad", "good"),
    [
        ("slurm", "--time", ("banana", "", "1:", "1-"), ("90", "90:00", "12:00:00", "2-12", "2-12:00:00", "UNLIMITED")),
        ("slurm", "--partition", ("a b", "", "a\n#SBATCH"), ("long", "gpu_a-1,gpu.b")),
        ("kuberay", "--image", ("", "a b", "-x"), ("asyncrl", "host.io:5000/team/asyncrl:1@sha256:ab")),
        ("kuberay", "--claim", ("Bad Name!", "", "-a", "a" * 254), ("runs", "team-1.runs")),
    ],
)
def test_a_value_that_the_scheduler_would_refuse_is_named(
    tmp_path: Path, kind: str, option: str, bad: tuple[str, ...], good: tuple[str, ...]
) -> None:
    for value in bad:
        result = CliRunner().invoke(app, [*LAUNCH[kind], "--output", str(tmp_path / "bad"), option, value])
        said = " ".join(result.stderr.replace("│", " ").split())
        assert (result.exit_code, f"Invalid value for '{option}'" in said, "it must be" in said) == (2, True, True)
    assert not (tmp_path / "bad").exists()
    for number, value in enumerate(good):
        result = CliRunner().invoke(app, [*LAUNCH[kind], "--output", str(tmp_path / str(number)), option, value])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["slurm", "kuberay"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-stalness", "2"), "No such option: --max-stalness"),
        (("train", "--max-staleness", "2"), "unexpected extra argument"),
        (("--config", "missing.yaml"), "--config missing.yaml is neither a file nor a preset"),
        (("--max-staleness", "-1"), "--max-staleness (rollout.max_staleness) is -1; it must be"),
        (("--runtime", "local"), "run.runtime (from --runtime) is 'local'"),
        (("--ray-address", "1.2.3.4:5"), "cluster.address (from --ray-address) is '1.2.3.4:5'"),
        (("--set", "cluster.address=auto"), "cluster.address (from --set cluster.address=auto) is 'auto'"),
        (("--set", "cluster.time_slicing=keep"), "cluster.time_slicing (from --set cluster.time_slicing=keep)"),
        (("--allow-code", "a:b"), "it goes with --resume"),
    ],
)
def test_words_with_which_no_run_could_start_are_refused(
    tmp_path: Path, kind: str, words: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, [*LAUNCH[kind], "--output", str(tmp_path / "job"), "--", *words])
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "job").exists()


def test_words_of_a_run_that_is_only_there_when_the_job_starts_are_taken(tmp_path: Path) -> None:
    words = ["--resume", "auto", "--steps", "400", "--set", "cluster.layout=apart"]
    result = CliRunner().invoke(app, [*LAUNCH["slurm"], "--output", str(tmp_path / "job"), "--", *words])
    assert result.exit_code == 0, result.output
    assert "--resume auto --steps 400 --set cluster.layout=apart" in (tmp_path / "job").read_text(encoding="utf-8")


def test_a_plan_says_who_goes_where_what_to_expect_and_what_does_not_fit() -> None:
    def on_two(*words: str) -> tuple[int, str]:
        result = plan("--nodes", "2", "--node-cpus", "4", *words)
        return result.exit_code, result.output

    code, said = on_two("--set", "cluster.layout=apart", *TIMES)
    assert code == 0, said
    places = said.partition("node 1: 2 of 4 CPUs")
    assert ("rank1" in places[0], "collector0" in places[2]) == (True, True)
    assert "predicted: mean age" in said
    code, said = on_two("--set", "trainer.ranks=9")
    assert (code, "does not fit: there is no room for rank" in said) == (1, True)
    code, said = on_two("--set", "collector.cache_gib=9", "--node-gib", "8")
    assert (code, "the parts on node 0 take 9." in said) == (1, True)
    code, said = on_two("--set", "cluster.time_slicing=keep")
    assert (code, "a plan is for a Ray cluster that is joined" in said) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "model.path=missing"), "model.path (from --set model.path=missing) is 'missing'; it must be"),
        (("--set", "model.path=ada/none"), "model.path is 'ada/none'"),
        (("--set", "lora.rank=4", "--set", "lora.target_modules=[nope]"), "lora.target_modules has 'nope'"),
        (("--filter", "nofile:X"), "filter nofile:X: cannot import nofile"),
        (("--filter", "nofile:X", *TIMES), "filter nofile:X: cannot import nofile"),
        ((*MEGATRON, "--set", "trainer.pipeline_parallel=2", "--set", "model.layers=3"), "divide layers: 3"),
        ((*MEGATRON, "--set", "lora.rank=4"), "lora.rank (from --set lora.rank=4) is 4 and trainer.backend"),
        (("--set", "run.runtime=local"), "run.runtime (from --set run.runtime=local) is 'local'"),
        (("--set", "cluster.address=127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--ray-address", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--from", "nowhere"), "--from nowhere cannot be read as an event log"),
    ],
)
def test_a_plan_refuses_what_no_cluster_could_run(
    monkeypatch: pytest.MonkeyPatch, words: Sequence[str], says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = plan(*words)
    assert (result.exit_code, says in result.output) == (2, True), result.output
    assert result.output.startswith("error: ")


def test_a_model_is_planned_by_its_name_once_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_checkpoint: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    refused = plan("--config", "gsm8k-like")
    assert (refused.exit_code, "is 'smollm2'" in refused.output) == (2, True), refused.output
    smollm2.cached_folder().parent.mkdir(parents=True)
    llama_checkpoint.rename(smollm2.cached_folder())
    planned = plan("--config", "gsm8k-like")
    assert (planned.exit_code, "rank0 (1 CPUs)" in planned.output) == (0, True), planned.output


def test_a_predicted_run_that_fails_is_told_with_its_error() -> None:
    result = plan(*TIMES, "--set", "filters=[{name: zero_std, tag: nonsense}]")
    assert result.exit_code == 1
    assert "error: the predicted run fails: TagError: filter zero_std needs tag 'nonsense'" in result.output
    assert "no step" not in result.output


def test_where_nothing_takes_time_there_are_no_figures_per_second() -> None:
    result = plan("--group-seconds", "0", "--step-seconds", "0")
    assert (result.exit_code, "predicted: 0 s per cycle, - groups/s" in result.output) == (0, True), result.output


def test_a_plan_from_a_run_is_of_its_configuration_with_the_users_on_top_and_elsewhere(tmp_path: Path) -> None:
    """The bound on age of the trace is 1, and run-ahead 6 groups of 4; the run's own cluster is not joined."""
    events = Recording.read(REFILL).events
    config = {**Recording(events).started.config}
    config["run"] = {**config["run"], "runtime": "local"}
    config["cluster"] = {**config.get("cluster", {}), "address": "127.0.0.1:1"}
    elsewhere = [msgspec.structs.replace(e, config=config) if isinstance(e, RunStarted) else e for e in events]
    write_log(tmp_path / "run.jsonl", elsewhere)
    for run in (REFILL, tmp_path / "run.jsonl"):
        result = plan("--from", str(run))
        assert result.exit_code == 0, result.output
        assert "ages at most 1 versions, run-ahead at most 6 groups of 4" in result.output
    assert "ages at most 3 versions" in plan("--from", str(REFILL), "--set", "rollout.max_staleness=3").output


@pytest.mark.parametrize(("recorded", "asked"), [(2, 0), (0, 2)])
def test_from_a_run_at_one_bound_the_cycle_at_another_is_predicted(tmp_path: Path, recorded: int, asked: int) -> None:
    """By `simulate` and by `plan launch`; the runs are of a world of known durations, on the virtual clock."""
    world = Given(
        load_task("reverse", {}).prompts(),
        parse_durations("uniform:0.8,1.2", "--group-seconds"),
        parse_durations("uniform:0.5,0.7", "--step-seconds"),
        100,
        publish_seconds=parse_durations("0.1", "--publish-seconds"),
    )
    values = {"rollout.groups_per_step": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 100, "trainer.ranks": 1}
    given = {path.replace(".", "__"): value for path, value in values.items()}
    here, there = (
        simulated_config(**given, rollout__max_staleness=bound, run__steps=60, run__seed=bound)
        for bound in (recorded, asked)
    )
    seen = Collected()
    predict(here, world, folds=[seen])
    events = [RunStarted(schema=2, config=here.model_dump(), software={}), *seen.events]
    write_log(
        tmp_path / "run.jsonl", [msgspec.structs.replace(event, seq=i) for i, event in enumerate(events, start=1)]
    )
    truth = predict(there, world).figures["cycle_seconds"]
    run = ("--from", str(tmp_path / "run.jsonl"))
    said = CliRunner().invoke(app, ["simulate", *run, "--sweep", f"max_staleness={asked}", "--steps", "60", "--json"])
    [figures] = json.loads(said.output)["max_staleness"]
    assert figures["cycle_seconds"] == pytest.approx(truth, rel=0.15)
    said = plan(*run, "--set", f"rollout.max_staleness={asked}")
    [cycle] = re.findall(r"predicted: ([0-9.]+) s per cycle", said.output)
    assert float(cycle) == pytest.approx(truth, rel=0.15), said.output
