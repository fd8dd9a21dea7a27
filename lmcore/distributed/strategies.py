"""How the ranks of a training run divide the work: `--strategy`, in one place for the loop and for checkpoints.

| name          | weights | gradients | optimizer state | made of                                    |
|---------------|---------|-----------|-----------------|--------------------------------------------|
| `ddp`         | all     | all       | all             | `BucketedDDP`                              |
| `zero1`       | all     | all       | divided         | `BucketedDDP`, `ShardedOptimizer`          |
| `fsdp`        | divided | divided   | divided         | `FSDP`                                     |
| `torch-ddp`   | all     | all       | all             | PyTorch's `DistributedDataParallel`        |
| `torch-fsdp2` | divided | divided   | divided         | PyTorch's `fully_shard`                    |
"""

import math
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lmcore.alone import Alone
from lmcore.config import TrainConfig
from lmcore.distributed.ddp import BucketedDDP, broadcast_state
from lmcore.distributed.fsdp import FSDP
from lmcore.distributed.sharded_checkpoint import load_whole, whole_moments, whole_weights
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.distributed.world import World
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, gradient_norm

BUCKET_MB = 25
"""Size of the buckets of `ddp` and `zero1`, PyTorch's own."""


class Divided(Alone):
    """What all of them share: states are put together for a checkpoint, and taken apart from one."""

    def weights(self, ranks: World) -> dict[str, Any]:
        return whole_weights(self, ranks)

    def moments(self, optimizer: Optimizer, ranks: World) -> dict[str, Any]:
        return whole_moments(self, optimizer, ranks)

    def load(self, content: dict[str, Any], optimizer: Optimizer, name: str) -> int:
        return load_whole(self, optimizer, content, name)


class DDP(Divided):
    """Our data parallelism with buckets."""

    def __init__(self, model: TransformerLM, config: TrainConfig):
        super().__init__(model, config)
        self.ddp = BucketedDDP(model, BUCKET_MB)

    def finish(self) -> None:
        self.ddp.finish_gradient_synchronization()


class ZeRO1(DDP):
    """The same, and each rank has the optimizer state of a part of the parameters (ZeRO stage 1)."""

    def optimizer(self) -> Optimizer:
        return build_optimizer(self.model, self.config.optimizer, make=ShardedOptimizer)


class TorchDDP(Divided):
    """PyTorch's data parallelism, which averages while the backward pass continues."""

    def __init__(self, model: TransformerLM, config: TrainConfig):
        super().__init__(model, config)
        device = model.lm_head.weight.device
        ids = [device.index] if device.type == "cuda" else None
        self.module = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )


class OurFSDP(Divided):
    """Our fully sharded data parallelism; in bf16 the matrices travel as such, and the residual stream is float32."""

    def __init__(self, model: TransformerLM, config: TrainConfig):
        super().__init__(model, config)
        dtype = torch.bfloat16 if config.precision == "bf16" else None
        self.module = self.fsdp = FSDP(model, dtype)
        if dtype is not None:
            model.token_embeddings.register_forward_hook(lambda _, __, output: output.float())

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row, as stored tensors want them."""
        return init_device_mesh(self.model.lm_head.weight.device.type, (self.fsdp.size,))

    def finish(self) -> None:
        self.fsdp.finish_gradient_synchronization()

    def clip(self) -> Tensor:
        return self.fsdp.clip_gradients(self.config.optimizer.max_grad_norm or math.inf)

    def whole(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        return self.fsdp.whole(tensor, parameter)

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        rows = self.fsdp.rows.get(parameter)
        if rows is None or whole.shape != (rows, parameter.shape[1]):
            return whole
        own = whole[dist.get_rank() * len(parameter) :][: len(parameter)]
        padded = whole.new_zeros(parameter.shape)
        padded[: len(own)] = own
        return padded

    def stored(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        rows = self.fsdp.rows.get(parameter)
        if rows is None or tensor.shape != parameter.shape:
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        own, shape = min(len(tensor), max(0, rows - dist.get_rank() * len(tensor))), self.shape(parameter)
        return DTensor.from_local(
            tensor.detach()[:own], self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
        )

    def shape(self, parameter: Tensor) -> torch.Size:
        return torch.Size((self.fsdp.rows.get(parameter, len(parameter)), *parameter.shape[1:]))


class TorchFSDP2(Divided):
    """PyTorch's `fully_shard`: each block is gathered as one, and all that is outside of the blocks."""

    def __init__(self, model: TransformerLM, config: TrainConfig):
        super().__init__(model, config)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        broadcast_state(model)
        reduced = torch.bfloat16 if config.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32 if reduced else None)
        mesh = init_device_mesh(model.lm_head.weight.device.type, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def clip(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = gradient_norm(gradients).full_tensor()
        scale = torch.clamp((self.config.optimizer.max_grad_norm or math.inf) / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm

    def whole(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        if not hasattr(parameter, "full_tensor") or whole.shape != parameter.shape:
            return whole
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


STRATEGIES: dict[str, type[Alone]] = {
    "none": Alone, "ddp": DDP, "zero1": ZeRO1, "fsdp": OurFSDP, "torch-ddp": TorchDDP, "torch-fsdp2": TorchFSDP2,
}  # fmt: skip
"""By the name of `TrainConfig.strategy`."""
