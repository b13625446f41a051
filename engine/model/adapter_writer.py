"""Writes an adapter as a folder of `peft`, beside the folder of the merged model.

Invariant: what `PeftModel.from_pretrained` loads from the folder are the matrices as they are trained, bit for bit.
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.model.folder import ADAPTER, LAST, Note, link_files, replace_folder
from asyncrl.engine.model.lora import NAME, adapted_ends, adapter_state


class AdapterWriter:
    """Writes versions of the adapter of one live model; `base` is what peft is told of the model that it belongs to,
    a folder or a name and `commit` on the Hub.
    """

    def __init__(self, model: Any, *, base: str | None, commit: str | None = None) -> None:
        self._model = model
        self._config = copy.copy(model.peft_config[NAME])
        self._config.target_modules = adapted_ends(model)
        self._config.inference_mode = True
        self._config.base_model_name_or_path, self._config.revision = base, commit
        self._held: dict[str, torch.Tensor] | None = None

    @property
    def rank(self) -> int:
        return int(self._config.r)

    def hold(self) -> None:
        """Copy the matrices to the host's memory, for `write`."""
        state = adapter_state(self._model)
        self._held = {name: value.to("cpu", copy=True).contiguous() for name, value in state.items()}

    def write(self, folders: Sequence[Path], note: Note) -> None:
        """Write what is held beside each folder of the merged model, `adapter` beside `model`; OSError if it cannot."""
        if self._held is None:
            raise AsyncRLError("an adapter was to be saved, and none is held")
        first, *others = [folder.with_name(folder.name.replace(LAST, ADAPTER)) for folder in folders]
        replace_folder(first, partial(self._fill, self._held, note))
        for other in others:
            replace_folder(other, partial(link_files, first))

    def _fill(self, state: dict[str, torch.Tensor], note: Note, folder: Path) -> None:
        self._config.save_pretrained(str(folder))
        path = folder / "adapter_model.safetensors"
        save_file(state, path, metadata={"format": "pt"})
        path.chmod((folder / "adapter_config.json").stat().st_mode)
        note.write(folder)
