"""The kinds of server that the HTTP engine knows."""

from asyncrl.collectors.engines.http.server import MakeServer
from asyncrl.collectors.engines.http.sglang_server import SGLangServer
from asyncrl.collectors.engines.http.vllm_server import VLLMServer

KINDS: dict[str, MakeServer] = {"vllm": VLLMServer, "sglang": SGLangServer}
