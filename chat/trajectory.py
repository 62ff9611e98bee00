"""`Trajectory`: the exact tokens of a conversation, turn by turn.

    messages ──prompt()──▶ Prompt(token_ids) ──engine──▶ reply ──record()──▶ text for the caller
                                                                   └────────▶ branches()

A turn whose messages extend a recorded turn starts with that turn's own tokens, prompt and sampled, and only the text
that the template adds after it is tokenized. Text that the policy sampled is never tokenized again, because the ids
would differ. Messages that extend no recorded turn (an edited history) start a new root.

Turns form a tree, a branch is a path to a leaf, and every sampled token is marked `sampled` in exactly one branch:
the first that holds it. So nothing is trained twice and nothing is lost, however the conversation forks. The same holds
for `observed`: what the environment wrote between turns.

Images are part of the tokens that a turn adds: a turn that extends another inherits its images with its tokens, so
none is lost and none is expanded twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from chat.errors import ImageError
from chat.images.message_parts import digests
from chat.images.patches import ImagePatches
from chat.templates import Message, extends, normalized, tail_after_assistant
from chat.tokenizer import Int32s, Tokenizer
from transport.wire.generation import GenerateReply
from transport.wire.sample import VersionSpan

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
UInt8s = npt.NDArray[np.uint8]
Tools = Sequence[Mapping[str, object]] | None
NO_IMAGES: Mapping[str, ImagePatches] = MappingProxyType({})


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token sequence of a trajectory: exactly what the model saw and sampled. All arrays have the same length."""

    token_ids: Int32s
    sampled: Bools
    """True where the policy sampled the token."""
    logprobs: Floats
    """Log probability of sampled tokens, 0 elsewhere."""
    versions: tuple[VersionSpan, ...]
    """Spans over the whole branch, sampled tokens only; empty if no policy of ours sampled them."""
    observed: Bools | None = None
    """True where the environment wrote the token after the first turn (`None`: nowhere); in one branch only, like
    `sampled`."""
    ref_logprobs: Floats | None = None
    """Log probability of every token under a teacher, 0 at position 0."""
    images: ImagePatches | None = None
    """What the model saw beside text, in the order of the tokens."""
    token_types: UInt8s | None = None
    """1 where a token stands for a part of an image; `None` without images. Sampled tokens are always 0."""

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.sampled, self.logprobs, self.observed, self.ref_logprobs, self.token_types)
        shapes = [array.shape for array in arrays if array is not None]
        if any(shape != (len(self.token_ids),) for shape in shapes):
            raise ValueError(f"the arrays of a branch differ in their shapes: {shapes}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send to the engine for these messages."""

    token_ids: Int32s
    messages: tuple[Message, ...]
    parent: int | None
    """The turn it extends."""
    num_inherited: int
    """Leading tokens that are the parent's."""
    token_types: UInt8s
    """1 where a token stands for a part of an image."""
    images: ImagePatches | None = None
    """All images of the prompt, inherited ones first."""
    added_images: tuple[ImagePatches, ...] = ()


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
    added_types: UInt8s
    images: tuple[ImagePatches, ...]
    """Those among the added tokens."""


class Trajectory:
    """Records turns in the order in which they finish. Not safe for threads; turns may overlap in time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns: list[_Turn] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the newest turn ended with."""
        return self._turns[-1].messages if self._turns else ()

    def prompt(
        self, messages: Sequence[Message], tools: Tools = None, images: Mapping[str, ImagePatches] = NO_IMAGES
    ) -> Prompt:
        """The prompt of the next turn; `images` has those that `messages` name. Raises `ChatTemplateError`, and
        `ImageError` where images and placeholders do not agree."""
        asked = tuple(normalized(message) for message in messages)
        parent = self._longest_prefix(asked)
        added = None if parent is None else self._added_ids(parent, asked, tools)
        if parent is None or added is None:
            return self._root(asked, tools, images)
        new = [images[digest] for digest in digests(asked[len(self._turns[parent].messages) :])]
        added, types = self._expanded(added, new)
        path = self._turns_through(parent)
        inherited = _tokens(path)
        return Prompt(
            np.concatenate((inherited, added)),
            asked,
            parent=parent,
            num_inherited=len(inherited),
            token_types=np.concatenate((_types(path), types)),
            images=self._joined([*(part for turn in path for part in turn.images), *new]),
            added_images=tuple(new),
        )

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
                added_types=prompt.token_types[prompt.num_inherited :],
                images=prompt.added_images,
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
            images = self._joined([part for index in path for part in self._turns[index].images])
            branches.append(_branch([(self._turns[index], index not in owned) for index in path], images))
            owned.update(path)
        return tuple(branches)

    def _root(self, asked: tuple[Message, ...], tools: Tools, images: Mapping[str, ImagePatches]) -> Prompt:
        named = [images[digest] for digest in digests(asked)]
        token_ids, types = self._expanded(self._tokenizer.encode_chat(asked, tools), named)
        return Prompt(
            token_ids,
            asked,
            parent=None,
            num_inherited=0,
            token_types=types,
            images=self._joined(named),
            added_images=tuple(named),
        )

    def _expanded(self, token_ids: Int32s, images: Sequence[ImagePatches]) -> tuple[Int32s, UInt8s]:
        reader = self._tokenizer.images
        if reader is not None:
            return reader.placeholders.expand(token_ids, images)
        if images:
            raise ImageError("the model does not see images")
        return token_ids, np.zeros(len(token_ids), np.uint8)

    def _joined(self, images: Sequence[ImagePatches]) -> ImagePatches | None:
        reader = self._tokenizer.images
        return reader.join(images) if reader is not None and images else None

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

    def _turns_through(self, index: int) -> list[_Turn]:
        return [self._turns[step] for step in self._path(index)]


def _tokens(path: Sequence[_Turn]) -> Int32s:
    return np.concatenate([ids for turn in path for ids in (turn.added_ids, turn.sampled_ids)])


def _types(path: Sequence[_Turn]) -> UInt8s:
    """Sampled tokens are text, whatever their ids are."""
    parts = ((turn.added_types, np.zeros(len(turn.sampled_ids), np.uint8)) for turn in path)
    return np.concatenate([types for pair in parts for types in pair])


def _branch(path: Sequence[tuple[_Turn, bool]], images: ImagePatches | None) -> Branch:
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
        images=images,
        token_types=None if images is None else _types([turn for turn, _ in path]),
    )
