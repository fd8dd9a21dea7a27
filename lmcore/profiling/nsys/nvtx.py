"""Named ranges on the parts of a step, for profilers to see (CS336 A2 section 1.1.4)."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

import lmcore.model
from lmcore.functional import at_least_float32, softmax
from lmcore.model import CausalMultiHeadSelfAttention, RMSNorm, SiLUFeedForward, SwiGLU, TransformerLM
from lmcore.profiling.workload import Span, no_span


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


def range_names(model: nn.Module) -> dict[str, str]:
    """The ranges of a model's modules, by their paths; none of a compiled model.

    A `TransformerLM` has those of its parts. Any other model has one for each module, by its place in Python, such as
    `encoder.layers[0].linear1` with the number in a list in brackets, and for itself by its class.
    """
    modules, names = dict(model.named_modules()), {"": ""}
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in modules.values()):
        return {}
    if isinstance(model, TransformerLM):
        by_type = {RMSNorm: "norm", CausalMultiHeadSelfAttention: "attention", SwiGLU: "ffn", SiLUFeedForward: "ffn"}
        found = {path: by_type[type(module)] for path, module in modules.items() if type(module) in by_type}
        blocks = {f"layers.{number}": f"block {number}" for number in range(len(model.layers))}
        return found | blocks | {"token_embeddings": "token embeddings", "lm_head": "lm head"}
    for path in [*modules][1:]:
        parent, _, last = path.rpartition(".")
        of_list = isinstance(modules.get(parent), nn.ModuleList)
        names[path] = names[parent] + (f"[{last}]" if of_list else f".{last}" if parent else last)
    return names | {"": type(model).__name__}


def in_span(function: Callable[..., Any], name: str, span: Span) -> Callable[..., Any]:
    """The function with a range around each call."""

    @functools.wraps(function)
    def spanned(*arguments: Any, **options: Any) -> Any:
        with span(name):
            return function(*arguments, **options)

    return spanned


@contextmanager
def annotated(model: nn.Module, span: Span) -> Iterator[None]:
    """Puts `span` on the model's parts: embeddings, blocks, norms, attention and its parts, feed-forward, LM head; of a
    model that is not lmcore's on all its modules (see `range_names`).

    Each module's forward runs in its range, and the attention of `lmcore.model` is swapped for the annotated one, as
    the handout shows; results are bitwise the same. On leaving, also by an error, all is as it was. With `no_span`
    nothing is touched, so that it costs nothing. A compiled model is not to be annotated: that would break its graph.
    """
    if span is no_span:
        yield
        return
    with ExitStack() as undo:
        modules = dict(model.named_modules())
        for path, name in range_names(model).items():
            own = vars(modules[path])  # the forward of this module, before that of its class
            restore = (own.update, {"forward": own["forward"]}) if "forward" in own else (own.pop, "forward")
            undo.callback(*restore)
            own["forward"] = in_span(modules[path].forward, name, span)
        for module in modules.values():
            if isinstance(module, CausalMultiHeadSelfAttention) and (kernel := module.kernel) is not None:
                module.kernel = in_span(kernel, "scaled dot product attention", span)
                undo.callback(setattr, module, "kernel", kernel)
        undo.callback(setattr, lmcore.model, "scaled_dot_product_attention", lmcore.model.scaled_dot_product_attention)
        annotated_attention = functools.partial(annotated_scaled_dot_product_attention, span=span)
        lmcore.model.scaled_dot_product_attention = annotated_attention
        yield
