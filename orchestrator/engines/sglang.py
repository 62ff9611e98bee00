"""`SglangClient`: one SGLang server, by its public native API. Implements `ReplicaClient`.

| ours | SGLang |
|---|---|
| sample | `POST /generate` with `input_ids` and `return_logprob` |
| weights | `POST /update_weights_from_disk` with the folder of the publish; our version and digest are its label |
| what is served | `GET /get_model_info`: the label that came with the last update |
| health | `GET /health` |

Without a pause an update waits for the requests in flight, so that every reply is of one version: the one in its
`meta_info`. The label proves that the server took the update, not what is in its memory: that is the canary's part.
"""

from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from orchestrator.engines.http_client import HEALTH_TIMEOUT_S, EngineHealth, decoded, exchange
from orchestrator.engines.protocol import EngineError
from transport.wire.generation import ApplyWeights, FinishReason, GenerateReply, GenerateRequest, ServedWeights
from transport.wire.sample import EncodedTensor, VersionSpan

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class _Finish(msgspec.Struct, frozen=True):
    type: str


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_version: str


class _Generated(msgspec.Struct, frozen=True):
    meta_info: _Meta


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str = "default"


class _Updated(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


_generated_decoder = msgspec.json.Decoder(_Generated)
_info_decoder = msgspec.json.Decoder(_ModelInfo)
_updated_decoder = msgspec.json.Decoder(_Updated)


class SglangClient:
    """Talks to `url`. `vocab_size` is the tokenizer's: the server does not tell its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str | None, vocab_size: int) -> None:
        self.url = url
        self._session = session
        self._vocab_size = vocab_size
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def sample(self, request: GenerateRequest, timeout_s: float) -> GenerateReply:
        if request.adapter is not None:
            raise EngineError(f"{self.url}: adapters are not supported with engines.backend = 'sglang'")
        if request.mm_kwargs:
            raise EngineError(f"{self.url}: images are not supported with engines.backend = 'sglang'")
        payload = await self._exchange("POST", "/generate", timeout_s, _generate_body(request))
        return _reply(request, decoded(_generated_decoder, payload, f"the answer of {self.url}/generate").meta_info)

    async def apply_weights(self, order: ApplyWeights, digest: str, timeout_s: float) -> ServedWeights:
        """See `ReplicaClient`. The server must see the same file system."""
        if "://" in order.location:
            raise EngineError(f"{self.url}: SGLang loads weights from files only, not from {order.location}")
        body = {
            "model_path": str(Path(order.location).parent),
            "weight_version": _label(ServedWeights(version=order.version, digest=digest)),
            "flush_cache": True,
        }
        payload = await self._exchange("POST", "/update_weights_from_disk", timeout_s, body)
        answer = decoded(_updated_decoder, payload, f"the answer of {self.url}/update_weights_from_disk")
        if not answer.success:
            raise EngineError(f"{self.url} refused version {order.version}: {answer.message}")
        return await self.served_weights(timeout_s)

    async def served_weights(self, timeout_s: float) -> ServedWeights:
        """See `ReplicaClient`. Weights that were not ours are version 0."""
        return _parse_label((await self._info(min(timeout_s, HEALTH_TIMEOUT_S))).weight_version)

    async def health(self) -> EngineHealth:
        await self._exchange("GET", "/health", HEALTH_TIMEOUT_S)
        info = await self._info(HEALTH_TIMEOUT_S)
        return EngineHealth(status="ok", vocab_size=self._vocab_size, model=info.model_path)

    async def _info(self, timeout_s: float) -> _ModelInfo:
        payload = await self._exchange("GET", "/get_model_info", timeout_s)
        return decoded(_info_decoder, payload, f"the answer of {self.url}/get_model_info")

    async def _exchange(self, method: str, path: str, timeout_s: float, body: object = None) -> bytes:
        encoded = None if body is None else msgspec.json.encode(body)
        return await exchange(self._session, method, self.url + path, timeout_s, encoded, self._headers)


def _generate_body(request: GenerateRequest) -> dict[str, object]:
    sampling: dict[str, object] = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "skip_special_tokens": False,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = request.stop_token_ids
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed & 0x7FFFFFFF
    # Its API is JSON: here, and only here, a list holds one number per token.
    return {
        "rid": request.request_id,
        "input_ids": request.token_ids.numpy().tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
    }


def _reply(request: GenerateRequest, meta: _Meta) -> GenerateReply:
    logprobs = np.array([entry[0] for entry in meta.output_token_logprobs], np.float32)
    token_ids = np.array([entry[1] for entry in meta.output_token_logprobs], np.int32)
    finish = "abort" if meta.finish_reason is None else meta.finish_reason.type
    return GenerateReply(
        request_id=request.request_id,
        token_ids=EncodedTensor.of(token_ids),
        logprobs=EncodedTensor.of(logprobs),
        finish_reason=_FINISH.get(finish, "abort"),
        versions=(VersionSpan(_parse_label(meta.weight_version).version, 0, len(token_ids)),),
    )


def _label(served: ServedWeights) -> str:
    return f"tandem:{served.version}:{served.digest}"


def _parse_label(label: str) -> ServedWeights:
    parts = label.split(":")
    if len(parts) == 3 and parts[0] == "tandem" and parts[1].isdecimal():
        return ServedWeights(version=int(parts[1]), digest=parts[2])
    return ServedWeights(version=0, digest=label)
