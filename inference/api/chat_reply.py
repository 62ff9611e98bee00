"""From completions to OpenAI's chat reply, whole or as server-sent events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from inference.api.arrays import Int32s
from inference.api.chat_request import ChatRequest, ChatTokenizer, cut_at_stop, stop_strings
from inference.api.generation import Completion, TopLogprobs

Json = dict[str, Any]


def choice_of(
    index: int, asked: ChatRequest, completion: Completion, tokenizer: ChatTokenizer, stop_ids: frozenset[int]
) -> Json:
    """One answer. The token or string that stopped the generation is not part of the text."""
    tokens = completion.token_ids
    stopped_by_token = completion.finish_reason == "stop" and int(tokens[-1]) in stop_ids
    text = tokenizer.decode(tokens[:-1] if stopped_by_token else tokens)
    return {
        "index": index,
        "message": {"content": cut_at_stop(text, stop_strings(asked)), "role": "assistant"},
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": _logprobs(completion, tokenizer)} if asked.logprobs else None,
        "token_ids": tokens.tolist() if asked.return_token_ids else None,
        "weight_versions": _versions(completion) if asked.return_token_ids else None,
    }


def usage_of(prompt: Int32s, completions: Sequence[Completion]) -> dict[str, int]:
    """Token counts of the whole request."""
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    total = len(prompt) + num_sampled
    return {"prompt_tokens": len(prompt), "completion_tokens": num_sampled, "total_tokens": total}


def events_of(reply: Mapping[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """The reply as server-sent events: one with the text of each choice, one with its end, then `[DONE]`."""
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk", "usage": None}
    for choice in reply["choices"]:
        index, logprobs = choice["index"], choice["logprobs"]
        said = {"index": index, "delta": choice["message"], "finish_reason": None, "logprobs": logprobs}
        end = {"index": index, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        yield _event(head | {"choices": [said]})
        yield _event(head | {"choices": [end]})
    if include_usage:
        yield _event(head | {"choices": [], "usage": reply["usage"]})
    yield b"data: [DONE]\n\n"


def _event(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _versions(completion: Completion) -> list[Json]:
    return [msgspec.structs.asdict(span) for span in completion.versions]


def _logprobs(completion: Completion, tokenizer: ChatTokenizer) -> list[Json]:
    """One entry per sampled token."""
    tops: Sequence[TopLogprobs | None] = completion.top_logprobs or [None] * len(completion.token_ids)
    rows = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), tops, strict=True)
    return [
        _token(token, logprob, tokenizer) | {"top_logprobs": _top_logprobs(top, tokenizer)}
        for token, logprob, top in rows
    ]


def _top_logprobs(top: TopLogprobs | None, tokenizer: ChatTokenizer) -> list[Json]:
    pairs = [] if top is None else zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return [_token(token, logprob, tokenizer) for token, logprob in pairs]


def _token(token_id: int, logprob: float, tokenizer: ChatTokenizer) -> Json:
    text = tokenizer.token_text(token_id)
    return {"token": text, "token_id": token_id, "logprob": logprob, "bytes": list(text.encode())}
