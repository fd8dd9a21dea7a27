"""Profiles for tests, in the form of `lmcore.profiling.nsys.profile.profile_workload`, with numbers made up."""

from lmcore.accounting import forward_flops_by_component
from lmcore.config import to_dict
from lmcore.profiling.timing import MODEL_COLUMNS
from lmcore.profiling.workload import workload_config

GPU, CPU = "Nsight Systems 2025.3.1", "torch.profiler (CPU operators)"
GEMM = ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(T1::Params)", "sgemm_256x128_tn", "matmul")
GEMM_NT = ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x5_nt>(T1::Params)", "sgemm_128x128_nt", "matmul")
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
    "vectorized_elementwise_kernel (Mul)",
    "elementwise",
)
SUM = ("void at::native::reduce_kernel<512, 1, sum>", "reduce_kernel (sum)", "softmax/reduction")
ADAM = (
    "void at::native::vectorized_elementwise_kernel<4, AddFunctor>",
    "vectorized_elementwise_kernel (Add)",
    "optimizer",
)
COPY = ("void at::native::elementwise_kernel<128, 4, direct_copy>", "elementwise_kernel (direct_copy)", "copy")
OPERATORS = {
    GEMM: ("aten::mm", "aten::mm", "matmul"),
    GEMM_NT: ("aten::bmm", "aten::bmm", "matmul"),
    MUL: ("aten::mul", "aten::mul", "elementwise"),
    SUM: ("aten::sum", "aten::sum", "softmax/reduction"),
    ADAM: ("aten::add_", "aten::add_", "optimizer"),
    COPY: ("aten::copy_", "aten::copy_", "copy"),
}


def entry(work: dict, instances: int, gpu: bool = True, idle: float = 0.02, wait: bool = False) -> dict:
    """A range's summary from {kernel: (calls, seconds)} of one instance."""
    busy = sum(seconds for _, seconds in work.values())
    whole = busy * (1 + idle)
    kinds: dict = {}
    for (_, _, kind), (calls, seconds) in work.items():
        before = kinds.get(kind, (0, 0.0))
        kinds[kind] = (before[0] + calls, before[1] + seconds)
    names = {kernel: kernel if gpu else OPERATORS[kernel] for kernel in work}
    return {
        "instances": instances,
        "seconds": (whole * 1.01 if wait or not gpu else 0.3 * whole),
        "gpu_seconds": whole,
        "busy_seconds": busy,
        "idle_seconds": whole - busy,
        "kinds": [
            {"kind": kind, "calls": calls, "total_seconds": seconds, "share": seconds / busy}
            for kind, (calls, seconds) in kinds.items()
        ],
        "kernels": [
            {
                "name": names[kernel][0],
                "short_name": names[kernel][1],
                "kind": kernel[2],
                "calls": calls * instances,
                "calls_per_instance": calls,
                "total_seconds": seconds * instances,
                "mean_seconds": seconds / calls,
                "share": seconds / busy,
            }
            for kernel, (calls, seconds) in sorted(work.items(), key=lambda item: -item[1][1])
        ],
    }


def record(
    size: str = "small",
    context: int = 256,
    precision: str = "fp32",
    tool: str = GPU,
    outcome: str = "complete",
    training: str | None = "complete",
    speed: float = 30e12,
    slow: float = 3e12,
    idle: float = 0.02,
    backward_top=GEMM,
    steps: int = 3,
) -> dict:
    """A cell's record. `speed`: FLOP/s of matmuls; `slow`: bytes/s of the rest."""
    passes = "train_step" if training else "forward"
    config = workload_config(size, context, precision=precision, passes=passes, steps=steps)
    whole = {
        "cell": f"{size}-{context}-{precision}",
        "config": to_dict(config),
        "outcome": outcome,
        "reason": None if outcome == "complete" else "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "seconds": 1.0,
        "environment": {"device": "Chip A" if tool == GPU else "CPU", "torch": "2.11"},
        "result": None,
    }
    if outcome != "complete":
        return whole
    done = training == "complete"
    return whole | {
        "result": {
            "tool": tool,
            "inference": summary(config, "inference", tool == GPU, speed, slow, idle, backward_top),
            "training": summary(config, "training step", tool == GPU, speed, slow, idle, backward_top)
            if done
            else None,
            "training_outcome": training,
            "training_reason": "CUDA out of memory." if training == "out of memory" else None,
            "timeline": {
                "inference": timeline(config, "inference"),
                "training": timeline(config, "training step") if done else None,
            },
            "notes": [],
        }
    }


def summary(config, top: str, gpu: bool, speed: float, slow: float, idle: float, backward_top) -> dict:
    """Ranges of a pass, folded over the blocks."""
    model, steps = config.model, config.steps
    flops, layers = forward_flops_by_component(model, config.batch_size), model.num_layers
    scores = config.batch_size * model.num_heads * model.context_length**2
    stream = config.tokens_per_step * model.d_model
    elementwise = (20, 4 * 40 * stream / slow)
    attention = {
        "computing attention scores": {
            GEMM_NT: (1, flops["scores"] / layers / speed),
            MUL: (2, 16 * scores / slow),
            COPY: (2, 16 * stream / slow),
        },
        "computing softmax": {MUL: (3, 24 * scores / slow), SUM: (2, 8 * scores / slow)},
        "final matmul": {GEMM_NT: (1, flops["weighted_sum"] / layers / speed)},
    }
    parts = {
        "attention": added(
            *attention.values(), {GEMM: (4, (flops["qkv_proj"] + flops["output_proj"]) / layers / speed)}
        ),
        "ffn": {GEMM: (3, flops["ffn"] / layers / speed), MUL: (2, 12 * stream / slow)},
        "norm": {MUL: elementwise, SUM: (1, 4 * stream / slow)},
    }
    block = added(*parts.values())
    head = {GEMM: (1, flops["lm_head"] / speed)}
    forward = added(times(block, layers), head)
    ranges = {f"{top}/forward": entry(forward, steps, gpu, idle)}
    inside = f"{top}/forward/block *"
    ranges[inside] = entry(block, steps * layers, gpu, idle)
    for name, work in parts.items():
        ranges[f"{inside}/{name}"] = entry(work, steps * layers, gpu, idle)
    for name, work in attention.items():
        ranges[f"{inside}/attention/scaled dot product attention/{name}"] = entry(work, steps * layers, gpu, idle)
    ranges[f"{top}/forward/lm head"] = entry(head, steps, gpu, idle)
    if top == "inference":
        return {"passes": steps, "ranges": {top: entry(forward, steps, gpu, idle, wait=True)} | ranges}
    backward = {backward_top: (2 * forward[GEMM][0], 2.2 * forward[GEMM][1]), MUL: (layers * 30, 3 * forward[MUL][1])}
    phases = {
        "loss": {SUM: (3, 12 * config.tokens_per_step * model.vocab_size / slow)},
        "backward": backward,
        "optimizer": {ADAM: (12 * layers, 28 * 12 * layers * model.d_model**2 / slow)},
    }
    ranges |= {f"{top}/{name}": entry(work, steps, gpu, idle) for name, work in phases.items()}
    return {"passes": steps, "ranges": {top: entry(added(forward, *phases.values()), steps, gpu, idle, True)} | ranges}


def added(*works: dict) -> dict:
    total: dict = {}
    for work in works:
        for kernel, (calls, seconds) in work.items():
            before = total.get(kernel, (0, 0.0))
            total[kernel] = (before[0] + calls, before[1] + seconds)
    return total


def times(work: dict, factor: int) -> dict:
    return {kernel: (calls * factor, seconds * factor) for kernel, (calls, seconds) in work.items()}


def timeline(config, top: str) -> dict:
    """One pass: the CPU launches blocks at half the time that the GPU takes for them."""
    layers, each = config.model.num_layers, 2e-3
    forward = [{"name": top, "path": top, "depth": 0, "start": 0.0, "end": 0.0}]
    forward.append({"name": "forward", "path": f"{top}/forward", "depth": 1, "start": 1e-5, "end": layers * each / 2})
    ranges, work = forward, []
    for block in range(layers):
        start, inside = block * each / 2, f"{top}/forward/block {block}"
        ranges.append({"name": f"block {block}", "path": inside, "depth": 2, "start": start, "end": start + each / 2})
        for number, name in enumerate(("norm", "attention", "norm", "ffn")):
            begin = start + number * each / 8
            end = begin + each / 8.5
            ranges.append({"name": name, "path": f"{inside}/{name}", "depth": 3, "start": begin, "end": end})
        for number, kind in enumerate(("elementwise", "matmul", "softmax/reduction", "copy", "matmul")):
            begin = 1e-4 + block * each + number * each / 5
            work.append(
                {"start": begin, "end": begin + each / 5.5, "kind": kind, "stream": 7, "busy": each / 6, "count": 3}
            )
    end = layers * each
    if top == "training step":
        for name, kinds, launch in (
            ("loss", ("softmax/reduction",), 0.02),
            ("backward", ("matmul", "elementwise"), 1.1),
        ):
            begin = ranges[-1]["end"] if name == "loss" else layers * each * 0.55
            length = layers * each * launch
            ranges.append({"name": name, "path": f"{top}/{name}", "depth": 1, "start": begin, "end": begin + length})
            for number in range(20):
                place = end + number * 0.1 * layers * each
                kind = kinds[number % len(kinds)]
                piece = {"start": place, "end": place + 0.095 * layers * each, "kind": kind}
                work.append(piece | {"stream": 7, "busy": 0.09 * layers * each, "count": 9})
                if name == "loss":
                    break
            end = work[-1]["end"]
        path = f"{top}/optimizer"
        ranges.append({"name": "optimizer", "path": path, "depth": 1, "start": 0.9 * end, "end": end})
        work.append({"start": end, "end": 1.2 * end, "kind": "optimizer", "stream": 7, "busy": 0.2 * end, "count": 400})
        end *= 1.2
    ranges[0]["end"] = end
    return {"seconds": end, "ranges": ranges, "work": work}


def grid(sizes=("small", "large"), contexts=(128, 512), **changes) -> dict:
    """Records of every combination."""
    made = [record(size, context, **changes) for size in sizes for context in contexts]
    return {each["cell"]: each for each in made}


def timings(records: dict, ratio: float = 1.0) -> list[dict]:
    """Rows of a benchmark that takes `ratio` times as long as the profiles."""
    rows = []
    for each in records.values():
        config, result = each["config"], each["result"]
        keys = MODEL_COLUMNS
        seconds = ratio * result["inference"]["ranges"]["inference"]["seconds"] if result else None
        rows.append(
            {key: config[key] for key in ("size", "precision", "batch_size", "compile", "warmup_steps")}
            | {key: config["model"][key] for key in keys}
            | {
                "device": each["environment"]["device"],
                "passes": "forward",
                "outcome": each["outcome"],
                "wall_median": seconds,
                "wall_std": 1e-5,
            }
        )
    return rows
