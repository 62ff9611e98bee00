"""Which attention kernel this process uses: chosen once at start-up, and never swapped quietly.

    torch_varlen  GPU, bfloat16
    segment_sdpa  everything else

Only `segment_sdpa` was run by us; `torch_varlen` is written from its documentation, and the packing check at start-up
(`trainer.oracle`) stands between it and a wrong gradient.
"""

from dataclasses import dataclass

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trainer.attention.kernels import Kernel, attention_function, segment_sdpa, torch_varlen
from trainer.errors import AttentionUnavailable


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel and what it needs."""

    name: str
    function: Kernel
    needs_gpu: bool = False
    needs_half: bool = False
    can_share_rows: bool = False
    """Whether it computes one rank's part of a row (`parallel.cp`)."""

    @property
    def implementation(self) -> str:
        """The name transformers knows it by; ours alone, so that no kernel of theirs is meant."""
        return f"tandem_{self.name}"

    def why_unusable(self, device: torch.device, dtype: torch.dtype, *, shares_rows: bool = False) -> str | None:
        """The reason this kernel cannot run here; `None` if it can."""
        if self.needs_gpu and device.type == "cpu":
            return "it has no CPU kernel"
        if self.needs_half and dtype not in (torch.bfloat16, torch.float16):
            return f"it needs model.dtype = 'bfloat16', not {str(dtype).removeprefix('torch.')}"
        if shares_rows and not self.can_share_rows:
            return "it cannot share a row between ranks (parallel.cp)"
        return None

    def install(self, *, outside_of_graphs: bool = False) -> None:
        """Make it known to transformers, with a mask function that never builds a T x T mask; for layers that are
        compiled as a call that is not compiled with them."""
        function = attention_function(self.function)
        if outside_of_graphs:
            function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        AttentionInterface.register(self.implementation, function)
        AttentionMaskInterface.register(self.implementation, _no_mask)


KERNELS = (
    AttentionKernel("torch_varlen", torch_varlen, needs_gpu=True, needs_half=True),
    AttentionKernel("segment_sdpa", segment_sdpa, can_share_rows=True),
)
"""Best first."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, *, shares_rows: bool = False) -> AttentionKernel:
    """The kernel of that name, or for `auto` the first usable one. Raises `AttentionUnavailable` with the reason."""
    reasons = {kernel.name: kernel.why_unusable(device, dtype, shares_rows=shares_rows) for kernel in KERNELS}
    for kernel in KERNELS:
        if name in ("auto", kernel.name) and reasons[kernel.name] is None:
            return kernel
    usable = ", ".join(other for other, reason in reasons.items() if reason is None)
    raise AttentionUnavailable(
        f"model.attention = {name!r} cannot run on {device.type}: {reasons[name]}; usable here: auto, {usable}"
    )


def _no_mask(*args: object, **kwargs: object) -> None:
    """Kernels go by `segments`."""
