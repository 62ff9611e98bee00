"""Declares the two ops that torchvision's CUDA build must find to be imported, beside a torch that has no CUDA.

vLLM imports torchvision for every model that sees. Package registries have it as a CUDA build only: its compiled ops
cannot be loaded here, and its Python code then fails where it describes them. vLLM uses none of them. A CPU build
(`+cpu` in its version) brings its own.
"""

from importlib.metadata import PackageNotFoundError, version

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_ops() -> None:
    """Called by torch through its entry points `torch.backends`."""
    import torch

    if torch.version.cuda is None and _is_cuda_build():
        for name in ("torchvision::nms", "torchvision::qnms"):
            torch.library.define(name, SIGNATURE)


def _is_cuda_build() -> bool:
    try:
        return not version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return False
