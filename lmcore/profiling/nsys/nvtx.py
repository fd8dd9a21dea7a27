"""Named ranges on the parts of a step, for profilers to see (CS336 A2 section 1.1.4)."""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import lmcore.model
from lmcore.errors import require
from lmcore.functional import at_least_float32, softmax
from lmcore.model import CausalMultiHeadSelfAttention, RMSNorm, SiLUFeedForward, SwiGLU, TransformerBlock
from lmcore.profiling.workload import Span, no_span

ATTENTION_PARTS = ("computing attention scores", "computing softmax", "final matmul")
"""Ranges inside "scaled dot product attention", as the handout names them."""


def spans(kind: str) -> Span:
    """Makers of ranges: "nvtx" for Nsight Systems, "torch" for torch.profiler, "off" for none.

    Raises `UserError` for another kind, and for "nvtx" where PyTorch is built without CUDA.
    """
    kinds = {"nvtx": nvtx_span, "torch": torch.profiler.record_function, "off": no_span}
    require(kind in kinds, f"There are no spans of kind {kind!r}; choose one of {', '.join(kinds)}.")
    require(
        kind != "nvtx" or torch.version.cuda is not None,
        "NVTX ranges need a PyTorch that is built for CUDA; take the spans of torch.profiler instead.",
    )
    return kinds[kind]


@contextmanager
def nvtx_span(name: str) -> Iterator[None]:
    """An NVTX range on the calling thread."""
    torch.cuda.nvtx.range_push(name)  # not nvtx.range, which formats the name: braces in it would be fields
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def annotated_scaled_dot_product_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, *, span: Span
) -> Tensor:
    """`lmcore.functional.scaled_dot_product_attention`, operation for operation, with a range on each of its parts."""
    with span("scaled dot product attention"):
        with span("computing attention scores"):
            scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
        with span("computing softmax"):
            weights = softmax(at_least_float32(scores), dim=-1).to(V.dtype)
        del scores  # as early as in the original, where it has no name outside the expression
        with span("final matmul"):
            return weights @ V


def range_name(path: str, module: nn.Module) -> str | None:
    """The range of a module of `TransformerLM` at `path` (such as layers.3.attn), or None for those without one."""
    if isinstance(module, TransformerBlock):
        return f"block {path.rpartition('.')[2]}"
    for kinds, name in (
        (RMSNorm, "norm"),
        (CausalMultiHeadSelfAttention, "attention"),
        (SwiGLU | SiLUFeedForward, "ffn"),
    ):
        if isinstance(module, kinds):
            return name
    return {"token_embeddings": "token embeddings", "lm_head": "lm head"}.get(path)


class ModuleRange:
    """Opens a range when a module's forward pass begins and closes it when it ends, also by an error.

    Ranges are kept by thread: with gradient checkpointing the autograd thread runs the forward pass again.
    """

    def __init__(self, name: str, span: Span):
        self.name, self.span = name, span
        self.open = threading.local()

    def enter(self, *_: Any) -> None:
        """Forward pre-hook."""
        opened: list[AbstractContextManager] = self.open.__dict__.setdefault("ranges", [])
        opened.append(self.span(self.name))
        opened[-1].__enter__()

    def exit(self, *_: Any) -> None:
        """Forward hook; called always."""
        if opened := self.open.__dict__.get("ranges"):
            opened.pop().__exit__(None, None, None)


@contextmanager
def annotated(model: nn.Module, span: Span) -> Iterator[None]:
    """Puts `span` on the model's parts: embeddings, blocks, norms, attention and its parts, feed-forward, output.

    The attention of `lmcore.model` is swapped for the annotated one, as the handout shows; results are bitwise the
    same. On leaving, also by an error, every hook is removed and the attention is the former one. With `no_span`
    nothing is touched, so that it costs nothing. A compiled model is not to be annotated: hooks would break its graph.
    """
    if span is no_span:
        yield
        return
    hooks, kernels = [], {}
    plain = lmcore.model.scaled_dot_product_attention

    def spanned(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(*tensors: Tensor) -> Tensor:
            with span("scaled dot product attention"):
                return kernel(*tensors)

        return attention

    try:
        for path, module in model.named_modules():
            if (name := range_name(path, module)) is not None:
                on_module = ModuleRange(name, span)
                hooks.append(module.register_forward_pre_hook(on_module.enter))
                hooks.append(module.register_forward_hook(on_module.exit, always_call=True))
            if getattr(module, "kernel", None) is not None:
                kernels[module] = module.kernel
                module.kernel = spanned(module.kernel)
        lmcore.model.scaled_dot_product_attention = functools.partial(annotated_scaled_dot_product_attention, span=span)
        yield
    finally:
        lmcore.model.scaled_dot_product_attention = plain
        for module, kernel in kernels.items():
            module.kernel = kernel
        for hook in hooks:
            hook.remove()
