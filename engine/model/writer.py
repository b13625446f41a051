"""Writes a model as a Hugging Face folder: weights, configuration, tokenizer, and asyncrl's note.

Invariant: what `from_pretrained` loads from the folder are the weights given, bit for bit.
"""

import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from asyncrl.configs.sections.model import Model
from asyncrl.engine.errors import AsyncRLError, NotWritten
from asyncrl.engine.model.adapter_writer import AdapterWriter
from asyncrl.engine.model.causal_lm import outline_model
from asyncrl.engine.model.folder import NOTE, Note, link_files, replace_folder
from asyncrl.engine.model.hub import source_of
from asyncrl.engine.model.lora import has_adapter
from asyncrl.engine.model.tokenizer import CharTokenizer

SHARD = "5GB"
"""A larger model is written as several files of at most this size."""
_WRITTEN_ANEW = ("config.json", NOTE)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")


class ModelWriter:
    """Writes versions of one model. `model` is the live one, of `config`; no weight of it is looked at.

    What transformers builds with a changed default type of torch is built here, in the thread that builds the rank:
    a step that runs beside it would compute in that type.
    """

    def __init__(self, config: Model, model: Any, *, vocab_size: int, shard: str = SHARD) -> None:
        self._source = None if config.path is None else Path(config.path)
        origin = None if self._source is None else Note.read(self._source)
        self._characters = self._source is None or (origin is not None and origin.characters)
        self._outline = outline_model(config, vocab_size=vocab_size)
        self._shard = shard
        name, commit = (None, None) if config.path is None else source_of(config.path)
        self._base = name if commit is None else f"{name}@{commit}"
        self._adapter = AdapterWriter(model, base=name, commit=commit) if has_adapter(model) else None
        self._lora_rank = None if self._adapter is None else self._adapter.rank
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is not None:  # The names that weights had in the checkpoint, where transformers changes them.
            self._outline._weight_conversions = conversions

    def hold_adapter(self) -> None:
        """Copy the adapter, if one is trained, to the host's memory; `write` then writes it beside the weights."""
        if self._adapter is not None:
            self._adapter.hold()

    def write(self, state: Mapping[str, torch.Tensor], folders: Sequence[Path], note: Note) -> None:
        """Write the weights to the first folder, and the same to the others; each is replaced whole or not at all.

        `state` is a whole state dict on the CPU, in the type that is to be written. AsyncRLError for a weight that is
        not finite, before anything is touched; NotWritten if the disk refuses.
        """
        _check_finite(state, note.version)
        note = replace(note, characters=self._characters, source=self._base, lora_rank=self._lora_rank)
        first, *others = folders
        try:
            replace_folder(first, partial(self._fill, state, note))
            for other in others:
                replace_folder(other, partial(link_files, first))
            if self._adapter is not None:
                self._adapter.write(folders, note)
        except (OSError, SafetensorError) as error:
            raise NotWritten.of(first, error) from error

    def _fill(self, state: Mapping[str, torch.Tensor], note: Note, folder: Path) -> None:
        from transformers import GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = copy.deepcopy(self._outline)
        model.load_state_dict(dict(state), strict=True, assign=True)
        model.tie_weights()
        # The checkpoint's own may be one that transformers loads and refuses to write.
        model.generation_config = GenerationConfig()
        model.save_pretrained(folder, max_shard_size=self._shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        for path in folder.glob("*.safetensors"):  # They are for the user alone, whatever the umask says.
            path.chmod((folder / "config.json").stat().st_mode)
        if self._source is None:
            _write_characters(folder)
        else:
            _copy_rest(self._source, folder)
        note.write(folder)


def _check_finite(state: Mapping[str, torch.Tensor], version: int) -> None:
    bad = [name for name, value in state.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise AsyncRLError(
            f"version {version} was not saved: {len(bad)} of {len(state)} weights are not finite, such as {bad[0]}"
        )


def _copy_rest(source: Path, folder: Path) -> None:
    """Copy the checkpoint's other files: tokenizer, chat template, generation settings, licence."""
    for path in source.iterdir():
        other = path.name in _WRITTEN_ANEW or path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not other and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)


def _write_characters(folder: Path) -> None:
    """Write the character tokenizer as one that transformers loads; asyncrl itself goes by the note."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    # A character that has no token is an error: "<unk>" is not in the vocabulary.
    tokenizer = Tokenizer(WordLevel(CharTokenizer.vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=CharTokenizer.pad_text, eos_token=CharTokenizer.eos_text
    ).save_pretrained(folder)
