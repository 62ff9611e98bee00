"""From completions to OpenAI's chat reply, whole or as server-sent events."""

from collections.abc import Iterator, Sequence

import msgspec

from inference.generation import Completion, Int32s, TopLogprobs
from inference.server.chat_request import cut_at_stop, stop_strings
from inference.server.chat_tokenizer import ChatTokenizer
from inference.server.chat_types import (
    ChatChunk,
    ChatMessage,
    ChatReply,
    ChatRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    PolicySpan,
    TokenLogprob,
    TopLogprob,
    Usage,
)


def choice_of(
    index: int, asked: ChatRequest, completion: Completion, tokenizer: ChatTokenizer, stop_ids: frozenset[int]
) -> Choice:
    """One answer. The token or string that stopped the generation is not part of the text."""
    tokens = completion.token_ids
    stopped_by_token = completion.finish_reason == "stop" and int(tokens[-1]) in stop_ids
    text = tokenizer.decode(tokens[:-1] if stopped_by_token else tokens)
    return Choice(
        index=index,
        message=ChatMessage(content=cut_at_stop(text, stop_strings(asked))),
        finish_reason=completion.finish_reason,
        logprobs=_logprobs(completion, tokenizer) if asked.logprobs else None,
        token_ids=tokens.tolist() if asked.return_token_ids else None,
        weight_versions=_spans(completion) if asked.return_token_ids else None,
    )


def usage_of(prompt: Int32s, completions: Sequence[Completion]) -> Usage:
    """Token counts of the whole request."""
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    return Usage(prompt_tokens=len(prompt), completion_tokens=num_sampled, total_tokens=len(prompt) + num_sampled)


def events_of(reply: ChatReply, *, include_usage: bool) -> Iterator[bytes]:
    """The reply as server-sent events: one with the text of each choice, one with its end, then `[DONE]`."""
    for choice in reply.choices:
        said = ChunkChoice(index=choice.index, delta=choice.message, logprobs=choice.logprobs)
        yield _event(_chunk(reply, [said]))
        yield _event(_chunk(reply, [ChunkChoice(index=choice.index, finish_reason=choice.finish_reason)]))
    if include_usage:
        yield _event(_chunk(reply, [], reply.usage))
    yield b"data: [DONE]\n\n"


def _chunk(reply: ChatReply, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
    return ChatChunk(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=usage)


def _event(chunk: ChatChunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _logprobs(completion: Completion, tokenizer: ChatTokenizer) -> ChoiceLogprobs:
    tops: Sequence[TopLogprobs | None] = completion.top_logprobs or [None] * len(completion.token_ids)
    rows = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), tops, strict=True)
    return ChoiceLogprobs(content=[_token_logprob(token, logprob, top, tokenizer) for token, logprob, top in rows])


def _token_logprob(token_id: int, logprob: float, top: TopLogprobs | None, tokenizer: ChatTokenizer) -> TokenLogprob:
    text = tokenizer.token_text(token_id)
    pairs = [] if top is None else zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return TokenLogprob(
        token=text,
        token_id=token_id,
        logprob=logprob,
        bytes=list(text.encode()),
        top_logprobs=[_top_logprob(other, other_logprob, tokenizer) for other, other_logprob in pairs],
    )


def _top_logprob(token_id: int, logprob: float, tokenizer: ChatTokenizer) -> TopLogprob:
    text = tokenizer.token_text(token_id)
    return TopLogprob(token=text, token_id=token_id, logprob=logprob, bytes=list(text.encode()))


def _spans(completion: Completion) -> list[PolicySpan]:
    return [PolicySpan(version=span.version, start=span.start, end=span.end) for span in completion.versions]
