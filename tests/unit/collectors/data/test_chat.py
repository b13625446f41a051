"""Chat templates: one text for texts and messages, with one first token, and a refusal where a template cannot be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from asyncrl.collectors.data.prepare import with_data
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import RunConfig, load_config
from asyncrl.engine.cli import app
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.checks import check_checkpoint
from asyncrl.engine.lifecycle.parts import run_tokenizer
from asyncrl.engine.records import Prompt

Chat = Callable[..., tuple[RunConfig, Prompt]]
# Roles are digits: the tokenizer knows no other characters.
MESSAGES = (
    "{% for m in messages %}{{ {'system': 9, 'user': 8, 'assistant': 7}[m.role] }}{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}7{% endif %}"
)
TEMPLATE = "{{ bos_token }}" + MESSAGES
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}" + TEMPLATE
TEXT = "1"
TURNS = [{"role": "user", "content": "1"}]


@pytest.fixture
def chat(tmp_path: Path, save_checkpoint: Callable[..., Path]) -> Chat:
    """Return the configuration, and the prompt, of one record under a template."""
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1, "bos_token_id": None}
    folder = save_checkpoint(LlamaConfig(**sizes, **heads, pad_token_id=None), bos=True)

    def prepared(prompt: Any, *, template: str | None = TEMPLATE, **options: Any) -> tuple[RunConfig, Prompt]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
        path = tmp_path / "train.jsonl"
        path.write_text(json.dumps({"prompt": prompt, "answer": "2"}), encoding="utf-8")
        values = {name if "." in name else f"data.{name}": value for name, value in options.items()}
        config = load_config("default", {"model.path": str(folder), "data.path": str(path), **values})
        return config, with_data(config, prepare_task("echo", {}, warm_up=False, lists=False)).prompts[0]

    return prepared


def test_a_text_is_a_message_of_the_user(chat: Chat) -> None:
    assert chat(TEXT)[1].text == chat(TURNS)[1].text == "<s>81>7"
    assert chat(TEXT, chat_template="off")[1].text == chat(TEXT, template=None)[1].text == "1"


def test_system_prompt_and_examples_come_first(chat: Chat) -> None:
    options = {"system_prompt": "0", "few_shot": [{"prompt": "3", "answer": "4"}], "prompt_format": "5{prompt}6"}
    assert chat(TEXT, **options)[1].text == "<s>90>8536>74>8516>7"
    own = [{"role": "system", "content": "00"}, *TURNS]
    assert chat(own, **options)[1].text == "<s>900>8536>74>81>7"
    del options["system_prompt"]
    assert chat(TEXT, chat_template="off", **options)[1].text == "5364\n\n516"


def test_a_template_that_writes_the_first_token_gets_no_second(chat: Chat) -> None:
    config, prompt = chat(TEXT)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    ids = tokenizer.apply_chat_template(TURNS, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert run_tokenizer(config).encode(prompt.text) == ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_writes_no_first_token_is_refused_until_the_user_has_decided(chat: Chat) -> None:
    with pytest.raises(ConfigError, match=r"does not write the tokenizer's BOS token.*rollout\.add_bos to false"):
        chat(TEXT, template=MESSAGES)
    config, prompt = chat(TEXT, template=MESSAGES, **{"rollout.add_bos": False})
    assert len(run_tokenizer(config).encode(prompt.text)) == len("81>7")


def test_a_limit_on_prompts_that_the_model_has_no_positions_for_is_refused(chat: Chat) -> None:
    config, prompt = chat(TEXT, max_prompt_tokens=2047)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens is 2047 .* at most the model's 2048 positions"):
        check_checkpoint(config, [prompt])


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (
            TURNS,
            {"template": None},
            r"line 1, field 'prompt': chat messages need .* the tokenizer has no chat template",
        ),
        (TURNS, {"chat_template": "off"}, r"line 1, field 'prompt': chat messages need .* data\.chat_template is off"),
        (TEXT, {"template": None, "chat_template": "on"}, r"data\.chat_template is on, and the tokenizer has no chat"),
        (TEXT, {"template": None, "system_prompt": "0"}, r"data\.system_prompt needs a chat template"),
        (
            TEXT,
            {"template": NO_SYSTEM, "system_prompt": "0"},
            "line 1, field 'prompt', cannot be used: .*no system, pl",
        ),
        (
            [*TURNS, {"role": "assistant", "content": "2"}],
            {},
            "line 1, field 'prompt' ends with a message of the assis",
        ),
        ([{"role": "user"}], {}, "line 1, field 'prompt', message 0, is {'role': 'user'}; it needs role and content"),
    ],
)
def test_what_no_template_can_render_is_refused_with_the_reason(
    chat: Chat, prompt: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        chat(prompt, **options)


@pytest.mark.parametrize(
    ("named", "options", "warned"),
    [
        (
            "model",
            {"template": None},
            "has no chat template, so prompts go in as plain text; set data.chat_template to off",
        ),
        ("gemma-3-1b-it", {"template": None}, "By its name gemma-3-1b-it was trained on chats"),
        ("model", {"template": None, "chat_template": "off"}, None),
        ("model", {}, None),
    ],
)
def test_a_template_that_is_missing_is_warned_of_once_unless_that_is_meant(
    chat: Chat, tmp_path: Path, named: str, options: dict[str, Any], warned: str | None
) -> None:
    """In --dry-run, and at the start of a run: in its log and in what the host is told."""
    config, _ = chat(TEXT, **options)
    (tmp_path / "model").rename(tmp_path / named)
    sets = {
        "model.path": tmp_path / named,
        "data.path": config.data.path,
        "data.chat_template": config.data.chat_template,
        "rollout.max_new_tokens": 8,
    }
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    result = CliRunner().invoke(app, ["train", "--dry-run", *words])
    assert result.exit_code == 0, result.output
    assert ("warning: " in result.stderr) is (warned is not None)
    if warned is not None:
        assert warned in result.stderr
        assert result.stderr.count("warning: ") == 1
