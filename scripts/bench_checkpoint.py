"""What a checkpoint of one rank costs: the step waits for the hold; the save runs beside the next steps.

`--model default` is the model of the default run, `smollm2` has the shape of SmolLM2-135M, in float32 with AdamW's two
moments; `--reference` adds the frozen copy that `trainer.reference_kl` keeps. `reserve_s` is what a rank takes at its
start for the memory of the copies; `first_hold_s` the first hold, `hold_s` the median of the others. `save_s` includes
writing to disk, with fsync. `update_s` is one optimizer update, for comparison. The last line is one JSON object.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, LAYERS, INNER, HEADS, KEY_HEADS = 49_152, 576, 30, 1536, 9, 3


def build(name: str) -> Any:
    """Return a model in float32 with random weights."""
    if name == "default":
        from asyncrl.configs import load_config
        from asyncrl.engine.lifecycle.parts import build_run_model

        return build_run_model(load_config("default"))
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape)


def seconds(call: Callable[[], Any], times: int = 1) -> list[float]:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("default", "smollm2"), default="default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure; default: a temporary one")
    options = parser.parse_args()
    import torch

    from asyncrl.trainers.backends.torch_backend import TorchBackend
    from asyncrl.trainers.backends.torch_settings import TorchSettings
    from asyncrl.trainers.loss.objective import Clip
    from asyncrl.trainers.rank_state.keeper import StateKeeper

    torch.set_num_threads(options.threads)
    settings = TorchSettings(
        temperature=1.0,
        clip=Clip(0.2, 0.2, 3.0),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
        reference_kl=0.1 if options.reference else 0.0,
    )
    backend = TorchBackend(build(options.model).to(options.device), settings, pad_id=0)
    gradient = torch.randn_like(backend.gradients())

    def update() -> None:
        backend.apply(gradient, learning_rate=1e-4)
        if options.device != "cpu":
            torch.cuda.synchronize()

    keeper = StateKeeper(0, 1)
    (reserve,) = seconds(lambda: keeper.reserve(backend))
    updates = seconds(update, options.repeats)
    first, *holds = seconds(lambda: keeper.hold(backend, 1), options.repeats + 1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        (save,) = seconds(lambda: keeper.save(folder / "state"))
        (load,) = seconds(lambda: keeper.load(folder / "state", backend))
        written = sum(file.stat().st_size for file in (folder / "state").iterdir())
    finally:
        shutil.rmtree(folder)
    result = {
        "model": options.model,
        "device": options.device,
        "reference": options.reference,
        "weights": gradient.numel(),
        "written_mb": round(written / 1e6, 1),
        "update_s": round(statistics.median(updates), 4),
        "reserve_s": round(reserve, 4),
        "first_hold_s": round(first, 4),
        "hold_s": round(statistics.median(holds), 4),
        "hold_max_s": round(max(holds), 4),
        "save_s": round(save, 4),
        "load_s": round(load, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
