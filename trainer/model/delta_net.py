"""Linear attention that ends where a sample ends.

transformers runs the convolution and the recurrence of a gated delta net over the whole row; some kernels for GPUs can
be told where samples end, those for CPUs take no notice, and log probabilities are wrong without an error. Here every
sample goes through the layer alone, which all kernels do right. It costs one call per sample instead of one per row.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from trainer.planning.pack import SegmentInfo


class SegmentDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]  # transformers does not export its types
    """A gated delta net that runs each sample of a packed row by itself; same weights, same names."""

    # Not compiled with its layer: the loop depends on the lengths of the samples, every new row would compile again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, *, segments: SegmentInfo, **unused: object) -> Tensor:
        """[1, T, H] to [1, T, H]. Arguments about caches and masks are ignored: there are none."""
        samples = torch.split(hidden_states, list(segments.seq_lens), dim=1)
        return torch.cat([super(SegmentDeltaNet, self).forward(sample) for sample in samples], dim=1)


def separate_samples(model: PreTrainedModel) -> int:
    """Put `SegmentDeltaNet` in the place of every gated delta net that we know; returns how many there were."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Qwen3_5GatedDeltaNet)]
    for name, module in found:
        model.set_submodule(name, _separated(module, model))
    return len(found)


def _separated(module: nn.Module, model: PreTrainedModel) -> SegmentDeltaNet:
    with torch.device("meta"):
        separated = SegmentDeltaNet(model.config.get_text_config(), module.layer_idx)
    separated.load_state_dict(module.state_dict(), assign=True)
    return separated
