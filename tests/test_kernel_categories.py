"""The rule that tells categories of kernels by their names."""

import pytest

from lmcore.profiling.nsys.categories import CATEGORIES, kernel_category, short_name

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<(int)4, {}, std::array<char *, (unsigned long)3>>(int)"
UNROLLED = (
    "void at::native::unrolled_elementwise_kernel<{}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1>>(int)"
)

NAMES = {
    "matmul": (
        "ampere_sgemm_128x64_tn",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams<float>)",
        "triton_tem_fused_mm_3",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "triton_tem_fused_flex_attention_2",
    ),
    "softmax/reduction": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, 4>>(T3)",
        "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*)",
        "triton_per_fused__scaled_dot_product_flash_attention_mul_sum_2",
    ),
    "elementwise": (
        ELEMENTWISE.format("at::native::CUDAFunctor_add<float>"),
        "void at::native::elementwise_kernel<128, 2, gpu_kernel_impl_nocast<where_kernel_impl(TensorIterator&)>>(int)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<normal>",  # no norm
        "triton_poi_fused__scaled_dot_product_efficient_attention_clone_1",
    ),
    "copy": (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 4, 64, 64>(...)",
        UNROLLED.format("at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"),
        "void at::native::<unnamed>::multi_tensor_apply_kernel<TensorListMetadata<(int)2>, "
        "UnaryOpFunctor<long, (int)2>, at::native::Copy<long, long>>(T1, T2, T3...)",
        "Memcpy DtoD (Device -> Device)",
        "aten::copy_",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorList<2>, LerpFunctor<float>>(T1)",
        "aten::_fused_adamw_",
    ),
    "other": (
        "saxpy(double *, double *, double *, double, int)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "CUDA graph 4",
        "aten::matmul",
        "aten::view",
        "autograd::engine::evaluate_function: MmBackward0",
    ),
}


def test_category_of_real_names():
    assert {category: [kernel_category(name) for name in names] for category, names in NAMES.items()} == {
        category: [category] * len(NAMES[category]) for category in CATEGORIES
    }


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (NAMES["matmul"][2], "cutlass_80_simt_sgemm_128x64_8x5_nt_align1"),
        (NAMES["elementwise"][0], "vectorized_elementwise_kernel (add)"),
        (
            "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<at::native::"
            "<unnamed>::masked_fill_kernel(at::TensorIterator &, const c10::Scalar &)::[lambda()]>(int, T3)",
            "elementwise_kernel (masked_fill)",
        ),
        (NAMES["copy"][1], "unrolled_elementwise_kernel (direct_copy)"),
        (NAMES["softmax/reduction"][0], "reduce_kernel (Max)"),
        (NAMES["softmax/reduction"][1], "softmax_warp_forward"),
        ("aten::mm", "aten::mm"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short
