"""`Trajectory`: the exact tokens of a conversation, turn by turn.

    messages ──prompt()──▶ Prompt(token_ids) ──engine──▶ reply ──record()──▶ text for the caller
                                                                   └────────▶ branches()

A turn whose messages extend a recorded turn starts with that turn's own tokens, prompt and sampled, and only the text
that the template adds after it is tokenized. Text that the policy sampled is never tokenized again, because the ids
would differ. Messages that extend no recorded turn (an edited history) start a new root.

Turns form a tree, a branch is a path to a leaf, and every sampled token is marked `sampled` in exactly one branch:
the first that holds it. So nothing is trained twice and nothing is lost, however the conversation forks. The same holds
for `observed`: what the environment wrote between turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.chat import extends, normalized, tail_after_assistant
from orchestrator.chat_template import Message
from orchestrator.rollout import Bools, Branch, Floats, Int32s
from orchestrator.tokenizer import Tokenizer
from transport.generation import GenerateReply
from transport.sample import VersionSpan

Tools = Sequence[Mapping[str, object]] | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send to the engine for these messages."""

    token_ids: Int32s
    messages: tuple[Message, ...]
    parent: int | None
    """The turn it extends."""
    num_inherited: int
    """Leading tokens that are the parent's."""


@dataclass(frozen=True, slots=True)
class _Turn:
    parent: int | None
    messages: tuple[Message, ...]
    """The whole conversation, the reply of this turn included."""
    added_ids: Int32s
    """Prompt tokens after the parent's."""
    sampled_ids: Int32s
    logprobs: Floats
    versions: tuple[VersionSpan, ...]
    """Spans over `sampled_ids`."""


class Trajectory:
    """Records turns in the order in which they finish. Not safe for threads; turns may overlap in time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns: list[_Turn] = []

    @property
    def num_turns(self) -> int:
        """Recorded turns over all branches."""
        return len(self._turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the newest turn ended with."""
        return self._turns[-1].messages if self._turns else ()

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> Prompt:
        """The prompt of the next turn. Raises `ChatTemplateError`."""
        asked = tuple(normalized(message) for message in messages)
        parent = self._longest_prefix(asked)
        added = None if parent is None else self._added_ids(parent, asked, tools)
        if parent is None or added is None:
            return Prompt(self._tokenizer.encode_chat(asked, tools), asked, parent=None, num_inherited=0)
        inherited = self._tokens_through(parent)
        return Prompt(np.concatenate((inherited, added)), asked, parent=parent, num_inherited=len(inherited))

    def record(self, prompt: Prompt, reply: GenerateReply) -> str:
        """Keep the turn that `reply` finished; returns the assistant's text."""
        sampled_ids = reply.token_ids.numpy()
        text = self._tokenizer.decode(sampled_ids)
        self._turns.append(
            _Turn(
                parent=prompt.parent,
                messages=(*prompt.messages, {"role": "assistant", "content": text}),
                added_ids=prompt.token_ids[prompt.num_inherited :],
                sampled_ids=sampled_ids,
                logprobs=reply.logprobs.numpy(),
                versions=reply.versions,
            )
        )
        return text

    def branches(self) -> tuple[Branch, ...]:
        """One branch per leaf, in the order in which the leaves were recorded."""
        parents = {turn.parent for turn in self._turns}
        leaves = [index for index in range(len(self._turns)) if index not in parents]
        owned: set[int] = set()
        branches = []
        for leaf in leaves:
            path = self._path(leaf)
            branches.append(_branch([(self._turns[index], index not in owned) for index in path]))
            owned.update(path)
        return tuple(branches)

    def _longest_prefix(self, asked: tuple[Message, ...]) -> int | None:
        """The recorded turn with the most messages that `asked` extends; the newest of equals."""
        matches = [index for index, turn in enumerate(self._turns) if extends(asked, turn.messages)]
        return max(matches, key=lambda index: (len(self._turns[index].messages), index), default=None)

    def _added_ids(self, parent: int, asked: tuple[Message, ...], tools: Tools) -> Int32s | None:
        """Ids of what the template adds after the parent's reply; `None` if it cannot be told apart."""
        turn = self._turns[parent]
        reply_position = len(turn.messages) - 1
        tail = tail_after_assistant(lambda chat: self._tokenizer.render(chat, tools=tools), asked, reply_position)
        if tail is None:
            return None
        added = self._tokenizer.encode(tail)
        # The end-of-turn token is the model's own if it sampled it, and the template's otherwise.
        sampled_end = len(added) > 0 and added[0] == turn.sampled_ids[-1] and int(added[0]) in self._tokenizer.eos_ids
        return added[1:] if sampled_end else added

    def _path(self, leaf: int) -> list[int]:
        path = []
        index: int | None = leaf
        while index is not None:
            path.append(index)
            index = self._turns[index].parent
        return path[::-1]

    def _tokens_through(self, index: int) -> Int32s:
        turns = [self._turns[step] for step in self._path(index)]
        return np.concatenate([ids for turn in turns for ids in (turn.added_ids, turn.sampled_ids)])


def _branch(path: Sequence[tuple[_Turn, bool]]) -> Branch:
    """Concatenate turns; those that another branch owns are context here: not sampled, no versions."""
    token_ids: list[Int32s] = []
    sampled: list[Bools] = []
    observed: list[Bools] = []
    logprobs: list[Floats] = []
    versions: list[VersionSpan] = []
    position = 0
    for turn, is_owned in path:
        num_added, num_sampled = len(turn.added_ids), len(turn.sampled_ids)
        start = position + num_added
        token_ids += [turn.added_ids, turn.sampled_ids]
        sampled += [np.zeros(num_added, np.bool_), np.full(num_sampled, is_owned)]
        # What is added after a reply is the environment's answer to it; before the first reply it is the task.
        is_answer = is_owned and turn.parent is not None
        observed += [np.full(num_added, is_answer), np.zeros(num_sampled, np.bool_)]
        logprobs += [np.zeros(num_added, np.float32), turn.logprobs if is_owned else np.zeros(num_sampled, np.float32)]
        if is_owned:
            versions += [VersionSpan(span.version, start + span.start, start + span.end) for span in turn.versions]
        position = start + num_sampled
    return Branch(
        token_ids=np.concatenate(token_ids),
        sampled=np.concatenate(sampled),
        logprobs=np.concatenate(logprobs),
        versions=tuple(versions),
        observed=np.concatenate(observed),
    )
