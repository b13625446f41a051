"""A run whose task attaches extras: a model that names them is given them, any other is refused at the start."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

TASK = """
import torch
from asyncrl.collectors.tasks import Reward
from asyncrl.collectors.tasks.digits import Echo


class Seeing(Echo):
    extras = ("pixel_values",)

    def score(self, prompt, response):
        pixels = torch.full((2, 3), float(prompt.id))
        return Reward(len(response), extras={"pixel_values": pixels})
"""
MODEL = """
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "</s>", *"0123456789>"]


class SeeingConfig(LlamaConfig):
    model_type = "seeing_llama"


class SeeingLlama(LlamaForCausalLM):
    config_class = SeeingConfig
    seen = 0

    def forward(self, input_ids=None, pixel_values=None, **more):
        if pixel_values is not None:
            SeeingLlama.seen += 1
            prompts = input_ids[0, more["position_ids"][0] == 0] if "position_ids" in more else input_ids[:, 0]
            assert pixel_values.shape == (2 * len(prompts), 3), (pixel_values.shape, len(prompts))
            assert torch.equal(pixel_values[::2, 0].long() + 2, prompts), (pixel_values, prompts)
        return super().forward(input_ids=input_ids, **more)


AutoConfig.register("seeing_llama", SeeingConfig)
AutoModelForCausalLM.register(SeeingConfig, SeeingLlama)
tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
tokenizer.decoder = Fuse()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained("model")
SeeingLlama(
    SeeingConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1, bos_token_id=None, pad_token_id=None,
    )
).save_pretrained("model")
"""
RUN = """
import sys
from asyncrl.engine.cli import main

sys.argv = [
    "asyncrl", "train", "--runtime", "local", "--steps", "2", "--run-dir", "out", "--set", "task.name=seeing:Seeing",
    "--set", "trainer.sft_warm_up_steps=0", "--set", "trainer.ranks=2", "--set", "filters=[]",
    "--set", "rollout.groups_per_step=4", "--set", "rollout.group_size=4", "--set", "trainer.reference_kl=0.01",
    *sys.argv[1:],
]
try:
    main()
finally:
    print("batches with pixels:", globals().get("SeeingLlama") and SeeingLlama.seen)
"""


@pytest.fixture
def run(warm_python: Any, tmp_path: Path) -> Any:
    """Run a program in the test's folder, beside the task."""
    (tmp_path / "seeing.py").write_text(TASK, encoding="utf-8")
    return partial(warm_python, tmp_path, "-c")


@pytest.mark.parametrize("packed", ["true", "false"])
def test_every_rank_hands_the_model_the_extras_of_its_own_samples(run: Any, packed: str) -> None:
    done = run(MODEL + RUN, "--set", "model.path=model", "--set", f"trainer.packed={packed}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition("batches with pixels: ")[2]) >= 2 * 2 * 2


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_model_that_does_not_take_an_extra_is_refused_before_anything_starts(
    tmp_path: Path, run: Any, runtime: str
) -> None:
    done = run(RUN, "--runtime", runtime)
    assert done.returncode == 2
    assert "'pixel_values', which LlamaForCausalLM.forward does not take" in done.stderr
    assert not (tmp_path / "out").exists()
