"""A model whose kernels torch.compile has fused, for passes of one shape."""

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch._dynamo.exc import TorchDynamoException

log = structlog.get_logger()


class FusedModel:
    """Calls a compiled model, or the model as it is once it turns out that it cannot be compiled."""

    def __init__(self, model: Any, *, compiler: Callable[..., Any] = torch.compile) -> None:
        self._model = model
        self._call = compiler(model, dynamic=False)

    def __call__(self, **inputs: Any) -> Any:
        try:
            return self._call(**inputs)
        except TorchDynamoException as error:
            log.warning("decoding runs without torch.compile: it cannot compile this model", error=str(error))
            self._call = self._model
            return self._model(**inputs)
