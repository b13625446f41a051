"""A Hugging Face checkpoint folder: whole files, and exactly the weights that its model has."""

import json
import pickle
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.settings import check_small_files, weight_map_files, why_not_loaded
from asyncrl.engine.model.vector_math import settle_vector_math

SMALL_BYTES = 256 * 2**20
"""A checkpoint of at most so many bytes is loaded by the checks before a run; of a larger one they read headers."""
_SHOWN = 6
_LARGEST_HEADER = 100_000_000  # As in safetensors itself.
_MOST_MODULES = 10_000
"""Layers, or experts of a layer: each is a module, which is built before a weight is looked at."""
_WRONG_VALUES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError)
"""What transformers raises for a config.json whose values no model has."""
_COUNTS = re.compile(r"(^|_)(layers?|experts)$")


def read_config(path: str) -> Any:
    """Return the configuration of a folder's model; ConfigError for one that transformers cannot read.

    ConfigError for quantized weights too: they have no gradients, and would be saved as what they are not.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if Path(path).is_dir():
        check_small_files(path)
    try:
        # Otherwise transformers asks the terminal whether to run the folder's code, and waits for the answer.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ImportError, StrictDataclassError, *_WRONG_VALUES) as error:
        raise ConfigError(
            f"model.path is {path!r}, whose config.json transformers cannot read: {why_not_loaded(error)}"
        ) from error
    for name, value in config.get_text_config().to_dict().items():
        if _COUNTS.search(name) and isinstance(value, int) and value > _MOST_MODULES:
            raise ConfigError(f"model.path is {path!r}, whose config.json has {name} {value:,}; 10,000 is the most")
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise ConfigError(
            f"model.path is {path!r}, whose weights are quantized ({method}); asyncrl trains whole weights: take the "
            "checkpoint that it was made from, or save it dequantized"
        )
    return config


def load_checkpoint(path: str) -> Any:
    """Return the model in float32, with all of its weights from the folder.

    ConfigError for a damaged file, and for weights that are missing, unexpected or of another shape: each
    process would fill those in from its own random numbers, so that ranks and generators differ.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settle_vector_math()
    _outlined(path, weight_files(path))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=read_config(path),
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are named below, with the others.
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"model.path is {path!r}, which transformers cannot load: {why_not_loaded(error)}") from error
    except (pickle.UnpicklingError, EOFError) as error:
        # The error itself says how to run the file's code.
        raise ConfigError(
            f"model.path is {path!r}, whose *.bin is damaged or holds more than tensors; save weights as safetensors"
        ) from error
    # A mismatched entry is (name, shape in the file, shape in the model).
    mismatched = [name if isinstance(name, str) else name[0] for name in info["mismatched_keys"]]
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": mismatched}
    _refuse(path, type(model).__name__, wrong)
    return model.eval()


def check_weights(path: str) -> None:
    """Check, before a run, what can be told quickly: whole files; of a small checkpoint, every weight's name.

    Of a larger one only the output layer is looked for: transformers renames and joins weights as it loads them.
    """
    files = weight_files(path)
    if sum(file.stat().st_size for file in files) <= SMALL_BYTES:
        load_checkpoint(path)
        return
    model = _outlined(path, files)
    names = {name for file in files if file.suffix == ".safetensors" for name in _header(file)}
    head = model.get_output_embeddings()
    own = [name for name, module in model.named_modules() if module is head]
    tied = model.config.get_text_config().tie_word_embeddings
    if names and own and not tied and not any(name.endswith(f"{own[0]}.weight") for name in names):
        _refuse(path, type(model).__name__, {"missing": [f"{own[0]}.weight"]})


def outline(path: str) -> Any:
    """Return a folder's model without weights; ConfigError if its config.json describes none."""
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ImportError, RuntimeError, *_WRONG_VALUES) as error:
        raise ConfigError(
            f"model.path is {path!r}, whose config.json describes no model: {why_not_loaded(error)}"
        ) from error


def _outlined(path: str, files: Sequence[Path]) -> Any:
    """Return the model without weights. ConfigError if it has more than the files can hold.

    transformers would make what they lack, of whatever size config.json says, before it is named.
    """
    model = outline(path)
    numbers, held = sum(one.numel() for one in model.parameters()), sum(file.stat().st_size for file in files)
    if numbers > held:
        raise ConfigError(
            f"model.path is {path!r}, whose config.json describes {numbers:,} weights; its files have {held:,} bytes"
        )
    return model


def weight_files(path: str) -> list[Path]:
    """Return the files of weights; ConfigError names one that is missing, cut short or otherwise damaged."""
    folder = Path(path)
    for index in sorted(folder.glob("*.index.json")):
        names = weight_map_files(index)
        lost = [name for name in names if not (folder / name).is_file()]
        if lost:
            raise ConfigError(f"model.path is {path!r}: {index.name} names {lost[0]}, which is not in the folder")
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        _header(file)
    files = files or sorted(folder.glob("*.bin"))
    if not files:
        raise ConfigError(f"model.path is {path!r}, which holds no weights (*.safetensors, *.bin)")
    return files


def _header(file: Path) -> Mapping[str, Any]:
    """Return the weights' entries of a safetensors file whose size is what its header says; ConfigError if not.

    Its format: 8 bytes with the header's length, the header in JSON, then the weights.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size or length > _LARGEST_HEADER:
            raise ConfigError(f"{file} is damaged: it has {size} bytes, and its header alone needs {8 + length}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            needed = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged: its header is not that of a safetensors file") from error
    if needed != size:
        raise ConfigError(f"{file} is damaged: it has {size} bytes, and its weights need {needed}")
    return entries


def _refuse(path: str, model: str, wrong: Mapping[str, Iterable[str]]) -> None:
    """Raise a ConfigError that names the weights of each kind, if there are any."""
    parts = []
    for kind, unsorted in wrong.items():
        names = sorted(unsorted)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        if names:
            parts.append(f"{len(names)} {kind} ({', '.join(names[:_SHOWN])}{more})")
    if parts:
        raise ConfigError(
            f"model.path is {path!r}, whose weights are not those of its {model}: {'; '.join(parts)}. "
            "Correct config.json (tie_word_embeddings, sizes), or save the checkpoint again with all weights"
        )
