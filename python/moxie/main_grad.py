"""Checks main_grad, the f32 tensor to which backward adds the gradient of a weight. It must lie in memory as the weight does."""

from torch import Tensor


def check_main_grad(op: str, name: str, main_grad: Tensor | None, w: Tensor) -> None:
    """Raises if main_grad is stored transposed relative to w, and says how to make one that is not. The op checks everything
    else."""
    if main_grad is None or main_grad.dim() != 3 or w.dim() != 3:
        return
    other_shape = main_grad.shape != w.shape and main_grad.shape == w.mT.shape
    other_order = main_grad.shape == w.shape and _is_transposed(main_grad) and not _is_transposed(w)
    if other_shape or other_order:
        raise ValueError(
            f"{op}: {name} must lie as the weight does, {list(w.shape)} with strides {list(w.stride())}, got its transpose, "
            f"{list(main_grad.shape)} with strides {list(main_grad.stride())}; torch.zeros_like(w, dtype=torch.float32) lies so, "
            "and a weight that is stored [G, K, N] is given as the view w.mT, with main_grad.mT"
        )


def _is_transposed(x: Tensor) -> bool:
    return x.mT.is_contiguous() and not x.is_contiguous()
