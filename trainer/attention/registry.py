"""Which attention kernel this process uses: chosen once at start-up, and never swapped quietly.

    flash_attn    GPU, bfloat16, needs the flash-attn package
    torch_varlen  GPU, bfloat16
    flex          GPU, needs triton; torch has no backward pass of it for a CPU
    segment_sdpa  everything else

Only `segment_sdpa`, and the forward pass of `flex`, were run by us; the GPU kernels are written from their
documentation, and the packing check at start-up (`trainer.oracle`) stands between them and a wrong gradient.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trainer.attention import kernels
from trainer.attention.kernels import AttentionFunction
from trainer.errors import AttentionUnavailable


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel and what it needs."""

    name: str
    function: AttentionFunction
    needs_gpu: bool = False
    needs_half: bool = False
    needs_module: str | None = None
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
        if self.needs_module and find_spec(self.needs_module) is None:
            return f"the package {self.needs_module} is not installed"
        if shares_rows and not self.can_share_rows:
            return "it cannot share a row between ranks (parallel.cp)"
        return None

    def install(self, *, outside_of_graphs: bool = False) -> None:
        """Make it known to transformers, with a mask function that never builds a T x T mask; for layers that are
        compiled as a call that is not compiled with them."""
        function = self.function
        if outside_of_graphs:
            function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        AttentionInterface.register(self.implementation, function)
        AttentionMaskInterface.register(self.implementation, _no_mask)


KERNELS = (
    AttentionKernel("flash_attn", kernels.flash_attn, needs_gpu=True, needs_half=True, needs_module="flash_attn"),
    AttentionKernel("torch_varlen", kernels.torch_varlen, needs_gpu=True, needs_half=True),
    AttentionKernel("flex", kernels.flex, needs_gpu=True, needs_module="triton"),
    AttentionKernel("segment_sdpa", kernels.segment_sdpa, can_share_rows=True),
)
"""Best first."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, *, shares_rows: bool = False) -> AttentionKernel:
    """The kernel of that name, or for `auto` the first usable one. Raises `AttentionUnavailable` with the reason."""
    reasons = {kernel.name: kernel.why_unusable(device, dtype, shares_rows=shares_rows) for kernel in KERNELS}
    for kernel in KERNELS:
        if name in ("auto", kernel.name) and reasons[kernel.name] is None:
            return kernel
    if name not in reasons:
        raise AttentionUnavailable(f"no attention kernel {name!r}; known: auto, {', '.join(reasons)}")
    usable = ", ".join(other for other, reason in reasons.items() if reason is None)
    raise AttentionUnavailable(
        f"model.attention = {name!r} cannot run on {device.type}: {reasons[name]}; usable here: auto, {usable}"
    )


def _no_mask(*args: object, **kwargs: object) -> None:
    """Kernels go by `segments`."""
