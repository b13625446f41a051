"""Megatron on two GPUs through NCCL: splits of a model against the PyTorch backend in float64; and a whole run.

Needs megatron-core. Two processes per split are started once, all at the same time: each takes seconds to begin.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.reducer import MeetingPoint

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

PROGRAM = Path(__file__).parents[1] / "megatron" / "rank_process.py"
RANKS, DEVICE = 2, "cuda"
SPLITS = {"tp2": Split(tensor=2), "pp2": Split(pipeline=2), "dp2": Split(), "ep2": Split(expert=2)}
CASES = [("tp2", "qwen3"), ("tp2", "tied"), ("pp2", "qwen3"), ("pp2", "tied"), ("dp2", "qwen3"), ("ep2", "qwen3_moe")]
VOCABULARY, PROMPT = 61, 2  # Two tensor parts have 31 rows each, of which one is padding.
LENGTHS = ((90, 3, 257), (64, 130), (512, 5, 31, 7), (12, 40))
TOTAL = sum(length - PROMPT for lengths in LENGTHS for length in lengths)
CLIP, BETAS, DECAY, MAX_NORM = Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.1, 0.05
RATE, UPDATES = 3e-4, 2


class Pair:
    """Two processes, a rank and a GPU for each. The first error of one is raised here; then another pair is needed."""

    def __init__(self) -> None:
        self.whole = True
        self._point = MeetingPoint()
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(rank), str(RANKS), self._point.address, DEVICE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]

    def each(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method with the same arguments on both ranks, and return their answers."""
        return self.apart(method, [arguments] * RANKS, **named)

    def apart(self, method: str, arguments: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Call a method with the arguments of each rank."""
        self.whole = False  # Until all answers are here.
        waiting: dict[Any, tuple[IO[bytes], int]] = {}  # By file descriptor.
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump((method, (arguments[rank], named)), process.stdin)
            process.stdin.flush()
            waiting[process.stdout.fileno()] = process.stdout, rank
        answers: list[Any] = [None] * RANKS
        while waiting:
            ready = wait(list(waiting), timeout=200)
            assert ready, f"no rank has answered {method}"
            for number in ready:
                answer = pickle.load(waiting[number][0])
                if isinstance(answer, Exception):  # The other rank may wait for this one for long.
                    raise answer
                answers[waiting.pop(number)[1]] = answer
        self.whole = True
        return answers

    def stop(self) -> None:
        """End both at the same time: to leave their group they wait for each other."""
        for process in self._processes:
            assert process.stdin is not None
            if not self.whole:
                process.kill()
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[str], Pair]]:
    """Return the processes of a split, which are started again after an error."""
    pairs: dict[str, Pair] = {}

    def of(split: str) -> Pair:
        for name in SPLITS if not pairs else [split]:
            if name not in pairs or not pairs[name].whole:
                if name in pairs:
                    pairs[name].stop()
                pairs[name] = Pair()
        return pairs[split]

    try:
        yield of
    finally:
        for one in pairs.values():
            one.stop()


def make_model(family: str) -> Any:
    """Return a random model in float64 whose norms, those of heads among them, are not what they begin with."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "pad_token_id": None,
        "tie_word_embeddings": family == "tied",
    }
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any
        if family == "qwen3_moe":
            config = Qwen3MoeConfig(**sizes, **mixture)
            config._experts_implementation = "eager"  # The others have no float64.
            model = Qwen3MoeForCausalLM(config)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def batches(logprobs: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype = torch.float64) -> list[Rows]:
    """Return micro-batches of unequal samples that were sampled with these log-probabilities."""
    draw = torch.Generator().manual_seed(1)
    return [
        Rows(
            tokens=[torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths],
            logprobs=[values.to(dtype) for values in sampled],
            prompt_tokens=[PROMPT] * len(lengths),
            advantages=[(-1.0) ** i * (1 + i) for i in range(len(lengths))],
            withheld=[0] * len(lengths),
            filler=False,
        )
        for lengths, sampled in zip(LENGTHS, logprobs, strict=True)
    ]


@dataclass(frozen=True)
class Update:
    """What an update comes to: the sums before it, the norm of its gradient, and the moments and weights after it."""

    sums: StepSums
    norm: float
    moments: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The PyTorch backend in float64: what it began with, and what came of it."""

    config: Any
    weights: Mapping[str, torch.Tensor]
    logprobs: list[list[torch.Tensor]]
    sampled: list[list[torch.Tensor]]
    updates: list[Update]


@cache
def reference(family: str) -> Reference:
    """Samples come from a model that is a little off, so that ratios are not 1 and some are clipped."""
    model = make_model(family)
    weights = copied(model.state_dict())
    backend = TorchBackend(model, TorchSettings(1.0, CLIP, BETAS, DECAY, MAX_NORM), pad_id=0)
    logprobs = [backend.logprobs(rows) for rows in batches([[]] * len(LENGTHS))]
    draw = torch.Generator().manual_seed(2)
    sampled = [
        [values + 0.1 * torch.randn(values.shape, generator=draw, dtype=values.dtype) for values in one]
        for one in logprobs
    ]
    updates = []
    for _ in range(UPDATES):
        sums = total([backend.accumulate(rows, TOTAL).read() for rows in batches(sampled)])
        norm = backend.apply(backend.gradients(), learning_rate=RATE)
        assert norm > MAX_NORM  # It is clipped.
        moments = named(backend.training_state().tensors, "optimizer/exp_avg/")
        updates.append(Update(sums, norm, copied(moments), copied(backend.state())))
    return Reference(model.config, weights, logprobs, sampled, updates)


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def total(found: Sequence[StepSums]) -> StepSums:
    sums = StepSums()
    for one in found:
        sums.add(one)
    return sums


def gap(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return how far tensors are from the expected ones, in parts of these ones' size."""
    assert set(found) == set(expected)
    off = sum(float((found[name].double() - value).square().sum()) for name, value in expected.items())
    return float((off / sum(float(value.square().sum()) for value in expected.values())) ** 0.5)


def change(after: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() - before[name] for name, value in after.items()}


def shares(rows: Sequence[Rows], split: Split) -> list[list[Rows]]:
    """Return each rank's micro-batches: data parallel ranks take turns, and ranks of one replica have the same."""
    replicas = RANKS // (split.tensor * split.pipeline)
    return [list(rows[rank % replicas :: replicas]) for rank in range(RANKS)]


def compare_logprobs(ours: Pair, split: Split, right: Reference, bound: float) -> None:
    expected = shares(batches(right.logprobs), split)  # Log-probabilities of rows do not depend on those they bring.
    for i in range(len(expected[0])):
        answers = ours.apart("logprobs", [(own[i],) for own in expected])
        for own, found in zip(expected, answers, strict=True):
            torch.testing.assert_close(torch.cat(found).double(), torch.cat(list(own[i].logprobs)), rtol=0, atol=bound)


def compare_update(ours: Pair, split: Split, right: Reference, number: int, bound: float) -> None:
    """Ranks of one replica are told the same, and all have the same norm. Both ranks' sums are the whole batch's."""
    mine, parts = shares(batches(right.sampled, torch.float32), split), split.tensor * split.pipeline
    steps = [ours.apart("accumulate", [(own[i], TOTAL) for own in mine]) for i in range(len(mine[0]))]
    assert parts == 1 or all(one == other for one, other in steps)
    sums, expected = total([one for step in steps for one in step]), right.updates[number]
    assert sums.tokens / parts == expected.sums.tokens == TOTAL
    assert sums.loss / parts == pytest.approx(expected.sums.loss, abs=bound)
    norms = ours.apart("apply", [(one,) for one in ours.each("gradients")], learning_rate=RATE)
    assert norms[0] == norms[1] == pytest.approx(expected.norm, rel=bound * 4)


def compare_state(ours: Pair, right: Reference, number: int, dtype: torch.dtype, bound: float) -> None:
    """AdamW makes the largest change of a gradient that is mere rounding, so changes are less alike than moments."""
    saved = ours.each("training_state")[0].tensors
    masters, expected = named(saved, "weights/"), right.updates[number]
    assert gap(named(saved, "optimizer/exp_avg/"), expected.moments) < bound * 4
    changes = change({name: expected.weights[name] for name in masters}, right.weights)
    assert gap(change(masters, right.weights), changes) < CHANGE_BOUNDS[dtype]
    for state in ours.each("state"):
        assert set(state) == set(expected.weights)
        for name, value in expected.weights.items():
            assert state[name].dtype == dtype
            torch.testing.assert_close(state[name].double(), value, rtol=0, atol=max(bound, 4 * RATE))
        for name, value in masters.items():
            assert torch.equal(state[name], value.to(dtype)), name


CHANGE_BOUNDS = {torch.float32: 0.01, torch.bfloat16: 0.5}
"""By which part changes of weights may differ; without an update it would be 1."""
TYPES = [(torch.float32, 1e-4), (torch.bfloat16, 0.05)]
# In bfloat16 some tokens of a mixture go to other experts.
PRECISE = [(*case, *kind) for case in CASES for kind in TYPES if case[1] != "qwen3_moe" or kind is TYPES[0]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("split", "family", "dtype", "bound"), PRECISE)
def test_two_gpus_train_as_float64_does(
    pair: Callable[[str], Pair], split: str, family: str, dtype: torch.dtype, bound: float, packed: bool
) -> None:
    """Two updates: the second one is of moments and weights that the first one made. Both are clipped."""
    ours, right, how = pair(split), reference(family), SPLITS[split]  # Processes start in the meantime.
    weights = {name: value.float() for name, value in right.weights.items()}
    settings = MegatronSettings(1.0, CLIP, BETAS, DECAY, MAX_NORM, split=how, packed=packed)
    ours.each("build", right.config, weights, settings, dtype=dtype)
    compare_logprobs(ours, how, right, bound)
    for number in range(UPDATES):
        compare_update(ours, how, right, number, bound)
        compare_state(ours, right, number, dtype, bound)


@pytest.mark.timeout(400)
def test_a_run_with_tensors_on_two_gpus_learns(tmp_path: Path) -> None:
    options = (
        "trainer.backend=megatron",
        "trainer.ranks=2",
        "trainer.tensor_parallel=2",
        "trainer.device=cuda",
        "collector.device=cuda",
    )
    command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", "run", "--steps", "120"]
    words = [*command, *(part for option in options for part in ("--set", option))]
    done = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
    assert summary["data_plane_keys_left"] == 0
