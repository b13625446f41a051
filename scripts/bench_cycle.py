#!/usr/bin/env python
"""A step's cycle where generation and training overlap, beside both alone: the last line is one JSON object.

    python scripts/bench_cycle.py [--model smollm2-135m|qwen2-1.5b] [--bounds 0 2] [--steps 40] [--set key=value …]

One run on Ray for each of `--bounds` (max_staleness), of a model with random weights and prompts of random words.
Almost no answer ends early, so every group takes as long. A cycle is from the end of a step to that of the next, the
mean over the last half of the steps; other figures are medians over it. Before, code is compiled. `generation_s` and
`training_s` come from the run at S = 0, where neither has anything beside it: from the first dispatch of a batch to
its last put, and a step's own seconds. `over_longer` is a cycle over the larger of the two, `over_sum` over both
together. `publish` has the seconds of the last publishes by part, the pause of generation, and `link_share`: bytes per
second of the transfer over those of a plain copy from the first GPU to the second one, where there are two.

`predicted` is the cycle that `asyncrl simulate` and `asyncrl plan launch` print for each bound from each run's log, and
`error` is (predicted - recorded) / recorded.

With two GPUs the rank has the first and the collector the second one, by `trainer.device` and `collector.device` auto.
With CUDA_VISIBLE_DEVICES=0 they share one.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_train import MODELS, TINY
from transformers import LlamaConfig, LlamaForCausalLM

import asyncrl
from asyncrl.configs import Override, load, parse_set
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, Dispatched, Published, Put, StepEnded, StepStarted
from asyncrl.engine.metrics import TRAINER_WAIT
from asyncrl.engine.simulate.fit import Fitted
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.simulate.timeline import Timeline
from asyncrl.engine.trace.recording import Recording

REWARD = '''"""A reward that has nothing to do with the answer's worth: groups are mixed, and are trained."""


def odd(prompt: object, response: str) -> float:
    return float(sum(map(ord, response)) % 2)
'''
EOS, WORD = "</s>", "w"


def checkpoint(name: str, folder: Path, *, tiny: bool) -> int:
    """Write a model with random weights and a tokenizer of one word per token; return its vocabulary.

    It is a Llama of the shape: to a Qwen2 transformers would give Qwen2's tokenizer, whatever the folder has.
    """
    shape = {**MODELS[name][2], **({**TINY, "num_key_value_heads": 2} if tiny else {})}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=0, bos_token_id=None))
    model.to(torch.float32 if tiny else torch.bfloat16).save_pretrained(folder)
    words(shape["vocab_size"], folder)
    return int(shape["vocab_size"])


def words(vocabulary: int, folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    table = {EOS: 0, **{f"{WORD}{i}": i for i in range(1, vocabulary)}}
    tokenizer = Tokenizer(WordLevel(table, unk_token=EOS))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=EOS).save_pretrained(folder)


def prompts(vocabulary: int, tokens: int, file: Path, *, count: int = 4096) -> None:
    random = np.random.default_rng(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            text = " ".join(f"{WORD}{i}" for i in random.integers(1, vocabulary, tokens))
            out.write(json.dumps({"prompt": text}) + "\n")


def run_values(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what all runs have in common."""
    tiny = options.device == "cpu"
    return {
        "run.batches": None,
        "run.steps": options.steps,
        "run.save_model": False,
        "checkpoint.every_steps": None,
        "checkpoint.every_s": None,
        "checkpoint.at_end": False,
        "model.path": str(folder / "model"),
        "model.dtype": "float32" if tiny else "bfloat16",
        "data.path": str(folder / "prompts.jsonl"),
        "data.answer_column": None,
        "data.chat_template": "off",
        "reward.functions": [f"{folder / 'reward.py'}:odd"],
        "rollout.groups_per_step": options.groups,
        "rollout.group_size": options.size,
        "rollout.max_new_tokens": options.new_tokens,
        "collector.decode_samples": options.groups * options.size,
        "collector.group_timeout_s": 300.0,
        "collector.device": options.device,
        "trainer.device": options.device,
        "trainer.ranks": 1,
        "trainer.learning_rate": 1e-6,
        "trainer.micro_batch_tokens": options.micro_batch_tokens,
        "trainer.step_timeout_s": 300.0,
        "trainer.publish_timeout_s": 300.0,
    }


def recorded(values: Mapping[str, Any], bound: int, folder: Path, more: Sequence[str]) -> list[AnyEvent]:
    given = [Override(path, value, "bench") for path, value in {**values, "rollout.max_staleness": bound}.items()]
    config = load("default", [*given, *map(parse_set, more)]).config
    asyncrl.run(config, folder)
    return list(read_events(folder / "events.jsonl"))


def cycle_of(events: Sequence[AnyEvent]) -> float:
    figures = Timeline()
    for event in events:
        figures.apply(event)
    return float(figures.summary()["cycle_seconds"])


def alone(events: Sequence[AnyEvent]) -> dict[str, float]:
    """Return what generation and training take, of a run at S = 0."""
    sent = {event.group: event.t for event in events if isinstance(event, Dispatched)}
    put = {event.group: event.t for event in events if isinstance(event, Put)}
    steps = [event for event in events if isinstance(event, StepEnded)]
    batches = [event.groups for event in events if isinstance(event, StepStarted)]
    generation = [max(put[one] for one in batch) - min(sent[one] for one in batch) for batch in batches]
    half = len(steps) // 2
    return {
        "generation_s": statistics.median(generation[half:]),
        "training_s": statistics.median(event.seconds for event in steps[half:]),
    }


def publishes(events: Sequence[AnyEvent], link: float | None) -> dict[str, Any]:
    """Return medians of the last half of a run's publishes."""
    found = [event for event in events if isinstance(event, Published) and event.version]
    found = found[len(found) // 2 :]

    def of(name: str) -> float:
        return float(statistics.median(getattr(event, name) for event in found))

    rate = of("bytes") / of("transfer_s") if of("transfer_s") else None
    return {
        "bytes": of("bytes"),
        **{name: round(of(name), 4) for name in ("seconds", "gather_s", "transfer_s", "stage_s", "pause_s")},
        "pause_s_max": round(max(event.pause_s for event in found), 4),
        "gb_per_s": None if rate is None else round(rate / 1e9, 2),
        "link_share": None if rate is None or link is None else round(rate / link, 3),
    }


def link_rate(size: int = 2**31) -> float | None:
    """Return the bytes per second of plain copies from the first GPU to the second one; None without two."""
    if torch.cuda.device_count() < 2:
        return None
    source = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - started)
    del source, target
    torch.cuda.empty_cache()
    return size / min(seconds)


def waits(events: Sequence[AnyEvent]) -> float:
    steps = [event for event in events if isinstance(event, StepEnded)]
    return float(statistics.median(event.metrics[TRAINER_WAIT] for event in steps[len(steps) // 2 :]))


def predictions(runs: Mapping[int, Sequence[AnyEvent]]) -> dict[str, Any]:
    """Return, by the run that is fitted and the bound that is asked for, how far off the simulator is."""
    found = {}
    for source, events in runs.items():
        profile = Fitted(events)
        for bound, truth in runs.items():
            values = [*Recording(events).values(), Override("rollout.max_staleness", bound, "bench")]
            guess = predict(load("default", values).config, profile).figures["cycle_seconds"]
            cycle = cycle_of(truth)
            found[f"S={bound} from S={source}"] = {
                "recorded": round(cycle, 4),
                "predicted": round(guess, 4),
                "error": round(guess / cycle - 1, 4),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2-135m")
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 2], metavar="S", help="0 is needed for both alone")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16, help="per step")
    parser.add_argument("--size", type=int, default=16, help="samples per group")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of both runs")
    parser.add_argument("--runs", type=Path, help="an empty folder for what the runs write; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        folder.mkdir(exist_ok=True)
        vocabulary = checkpoint(options.model, folder / "model", tiny=options.device == "cpu")
        prompts(vocabulary, options.prompt_tokens, folder / "prompts.jsonl")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        values = run_values(options, folder)
        runs = {bound: recorded(values, bound, folder / f"run-{bound}", options.set) for bound in options.bounds}
    link = link_rate()
    both = {name: round(value, 4) for name, value in alone(runs[0]).items()} if 0 in runs else {}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "gpus": torch.cuda.device_count(),
        "model": options.model,
        **both,
        "link_gb_per_s": None if link is None else round(link / 1e9, 1),
    }
    for bound, events in runs.items():
        cycle = cycle_of(events)
        result[f"S={bound}"] = {"cycle_s": round(cycle, 4), "trainer_wait_s": round(waits(events), 4)}
        if both:
            result[f"S={bound}"]["over_longer"] = round(cycle / max(both.values()), 3)
            result[f"S={bound}"]["over_sum"] = round(cycle / sum(both.values()), 3)
        result[f"S={bound}"]["publish"] = publishes(events, link)
    result["predictions"] = predictions(runs)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
