"""`Canary`: what a policy version says to a fixed prompt, so that the weights an engine computes with can be told.

Version and digest are what an engine *says* that it serves. The canary is what it *does*: the trainer computes, under
the weights it publishes, the log probability of the likeliest next token after some prefixes of a fixed prompt. An
engine that answers greedily must come to the same numbers. The likeliest token itself is not compared: where two are
nearly equal, rounding decides; its log probability hardly changes.
"""

import msgspec
import numpy as np

from transport.errors import CodecError
from transport.tensor import EncodedTensor

MAX_TOKENS = 1024


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one policy version. `check()` holds for every canary that was announced."""

    token_ids: EncodedTensor
    """int32[T]: the prompt."""
    lengths: EncodedTensor
    """int32[P]: how many of its tokens each prefix has."""
    logprobs: EncodedTensor
    """float32[P]: log probability of the likeliest token after each prefix, at temperature 1."""

    def check(self) -> None:
        """Raise `CodecError` unless the canary is sound."""
        num_tokens, num_prefixes = (
            tensor.shape[0] if len(tensor.shape) == 1 else 0 for tensor in (self.token_ids, self.lengths)
        )
        if not 0 < num_prefixes <= num_tokens <= MAX_TOKENS:
            raise CodecError(f"a canary has {num_tokens} tokens and {num_prefixes} prefixes")
        is_sound = self.token_ids.is_vector("int32", num_tokens) and self.lengths.is_vector("int32", num_prefixes)
        if not is_sound or not self.logprobs.is_vector("float32", num_prefixes):
            raise CodecError("the arrays of a canary do not have the types and lengths they should have")
        lengths, logprobs = self.lengths.numpy(), self.logprobs.numpy()
        if lengths.min() < 1 or lengths.max() > num_tokens or self.token_ids.numpy().min() < 0:
            raise CodecError("a canary has a prefix longer than its prompt, or a negative token")
        if not np.isfinite(logprobs).all():
            raise CodecError("a canary has a log probability that is not finite")
