"""Programmatic dependent launch (CUDA programming guide, section 4.5): a kernel begins before the one in front ends."""

import torch


def early(device: torch.device) -> bool:
    """Whether kernels on this device can begin before the one in front of them has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, overlap: bool) -> dict[str, bool]:
    """Triton's launch options for a kernel that may (`overlap`) begin early; such a kernel waits by `gdc_wait`."""
    return {"launch_pdl": True} if overlap and early(device) else {}
