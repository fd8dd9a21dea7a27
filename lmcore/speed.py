"""Which kernels a device runs, and how fast a configuration trains on it."""

import torch

from lmcore.config import TrainConfig
from lmcore.device import reproducible, select_device
from lmcore.fast.kernels import attention, dispatch
from lmcore.metrics import Meter
from lmcore.model import TransformerLM
from lmcore.step import training_step


def kernels(device: torch.device) -> str:
    """Which kernels run on this device, and why."""
    if not dispatch.runs_triton(device):
        lacking = "PyTorch is built for ROCm" if torch.version.hip else "Triton is missing"
        return f"plain operations, because {lacking if device.type == 'cuda' else 'there is no CUDA GPU'}"
    capability = "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    if dispatch.is_hopper(device) and attention.hopper_kernels():
        return f"Hopper's, attention in Gluon, because the GPU has {capability}"
    return f"portable ones in Triton, because the GPU has {capability}; Hopper's need 9.0 and a matching Gluon"


def training_speed(config: TrainConfig) -> str:
    """Tokens per second, MFU where the peak is known, and the step that takes random tokens as `lmcore train` would."""
    from lmcore.profiling.timing import measured_columns, timed_steps  # with pandas, which `kernels` does without

    device, _ = select_device(config.device)
    with reproducible(config, device):
        step, uncovered = training_step(TransformerLM(config.model).to(device), config)
        shape = (2, config.batch_size, config.model.context_length)
        batch = torch.randint(config.model.vocab_size, shape, device=device)
        timed = timed_steps(lambda _: [step(*batch, 0.0) for _ in range(5)], device, 1, 3, graphed=True)
    rate, meter = 5 / measured_columns([timed], None)["wall_median"], Meter(config, device)
    mfu = f", MFU {rate * meter.flops_per_step / meter.peak_flops:.1%}" if meter.peak_flops else ""
    by = f"plain step: fused does not cover {uncovered}" if uncovered else f"{config.ops} step, as the recipe says"
    return f"{rate * config.tokens_per_step:,.0f} tokens per second{mfu}, by the {by}"
