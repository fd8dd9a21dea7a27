"""The category of a kernel, by its name; the names are those of cuBLAS, CUTLASS, cuDNN, PyTorch and Triton."""

import re

CATEGORIES = ("matmul", "attention", "softmax/reduction", "elementwise", "copy", "optimizer", "other")
"""In the order of tables. "attention" is fused attention alone: plain attention is made of the other categories."""

OPTIMIZER_RANGE = "optimizer"
"""Work that is launched inside a range of this name is the optimizer's, whatever the kernel (see `Trace`)."""

# The first rule that is found in the name decides; the order matters, as names quote their template arguments.
KERNEL_RULES: tuple[tuple[str, str], ...] = (
    (r"^triton_(tem|mm|bmm)_(?!.*attention)", "matmul"),
    (r"^triton_tem_", "attention"),
    (r"^triton_(red|per)_", "softmax/reduction"),
    (r"^triton_(poi|for)_", "elementwise"),
    (r"(?i)memcpy|memset", "copy"),
    (r"^nccl", "other"),  # communication, though it reduces
    # FlashAttention, CUTLASS's fmha, cuDNN's graphs
    (r"(?i)flash|fmha|sdpa|attention", "attention"),
    (r"multi_tensor_apply.*Copy<", "copy"),
    (r"multi_tensor_apply|fused_?adam", "optimizer"),
    (r"gemm|gemv|nvjet|cutlass|xmma|splitKreduce|cublas|(?<![a-z])dot_kernel", "matmul"),
    (r"CatArray|(?<![a-z])copy_kernel|_copy_kernel|transpose_readWrite", "copy"),
    # PyTorch's launchers of one function per element, before what that function may be called
    (r"elementwise|gather_kernel|index|where|triu_tril|masked_|dropout|distribution", "elementwise"),
    (r"[Ss]oft[Mm]ax|reduc|norm(?!al)|logsumexp|nll_loss|(?<![a-z])scan|Scan|GammaBeta|welford", "softmax/reduction"),
)

OPERATOR_CATEGORIES: dict[str, str] = {
    "matmul": "mm bmm addmm addbmm baddbmm addmv mv dot _scaled_mm mkldnn_linear",
    "attention": "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention scaled_dot_product_attention"
    " _scaled_dot_product_attention_math",
    "softmax/reduction": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data sum mean amax amin"
    " max min prod var std norm linalg_vector_norm logsumexp argmax argmin cumsum nll_loss_forward nll_loss_backward"
    " native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "elementwise": "add sub rsub mul div neg exp log sqrt rsqrt pow square reciprocal abs sgn sigmoid sigmoid_backward"
    " silu silu_backward tanh sin cos where masked_fill index index_put _index_put_impl index_select gather scatter"
    " scatter_add embedding embedding_dense_backward fill zero arange addcdiv addcmul lerp clamp threshold bitwise_not"
    " logical_not logical_and le lt ge gt eq ne isfinite tril triu bernoulli uniform normal random",
    "copy": "copy _to_copy clone cat stack",
}
"""PyTorch's CPU operators that compute, without `aten::` and the underscore of in-place ones. Operators that only call
others (matmul, linear, reshape) have little time of their own, and are "other" like views and the autograd engine."""

CATEGORY_OF_OPERATOR = {name: category for category, names in OPERATOR_CATEGORIES.items() for name in names.split()}


def kernel_category(name: str) -> str:
    """One of `CATEGORIES`, from a kernel's full name (demangled, with template arguments) or a CPU operator's name."""
    if name.startswith("aten::"):
        operator = name.removeprefix("aten::")
        if operator.startswith(("_foreach_", "_fused_adam", "_fused_sgd")):
            return "optimizer"
        return CATEGORY_OF_OPERATOR.get(operator.rstrip("_"), "other")
    return next((category for pattern, category in KERNEL_RULES if re.search(pattern, name)), "other")


FUNCTION = re.compile(
    r"std::(multiplies|plus|minus|divides)\b|CUDAFunctor(?:On(?:Self|Other))?_(\w+)|(\w+?)_kernel_(?:cuda|impl)\b"
    r"|(\w+?)Functor\b|(\w+?)_functor\b|(\w+?)Ops\b|native::(Copy|Sqrt)<|(arange)_cuda_out|(\w+?)(?:_cuda)?_kernel\("
)
"""Where PyTorch's elementwise and reduction kernels say which function they compute: the last place in the name."""

LAUNCHERS = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply")
WRAPPERS = {"gpu", "func_wrapper"}


def short_name(name: str) -> str:
    """A kernel's name for a sentence: without namespaces and arguments, but with what tells it from its like.

    PyTorch's generic kernels get their function in parentheses, "vectorized_elementwise_kernel (Mul)"; CUTLASS's
    `Kernel2<…>` goes by its argument, "cutlass_80_simt_sgemm_128x64_8x5_nt_align1".
    """
    if (cutlass := re.search(r"\bKernel2?<(?:\w+::)*(cutlass\w+)", name)) is not None:
        return cutlass[1]
    if name.startswith(("aten::", "autograd::")):
        return name
    plain = name.replace("(anonymous namespace)", "<unnamed>").replace("<unnamed>::", "")
    plain = re.split(r"[<(]", plain.removeprefix("void "), maxsplit=1)[0].strip().rpartition("::")[2]
    if not plain or not LAUNCHERS.search(plain):
        return plain or name
    functions = [next(filter(None, found)) for found in FUNCTION.findall(name)]
    functions = [function for function in functions if function not in WRAPPERS]
    return f"{plain} ({functions[-1]})" if functions else plain
