"""How the ranks of a training run divide the work: `--strategy`, in one place for the loop and for checkpoints.

=============  =======  =========  ===============  ===================================
name           weights  gradients  optimizer state  made of
=============  =======  =========  ===============  ===================================
`ddp`          all      all        all              `BucketedDDP`
`zero1`        all      all        divided          `BucketedDDP`, `ShardedOptimizer`
`fsdp`         divided  divided    divided          `FSDP`
`torch-ddp`    all      all        all              PyTorch's `DistributedDataParallel`
`torch-fsdp2`  divided  divided    divided          PyTorch's `fully_shard`
=============  =======  =========  ===============  ===================================
"""

import math
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lmcore.alone import Alone, OneRank
from lmcore.checkpoint import restore
from lmcore.config import TrainConfig
from lmcore.distributed.ddp import BucketedDDP, broadcast_state
from lmcore.distributed.fsdp import FSDP
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, gradient_norm

BUCKET_MB = 25
"""Size of the buckets of `ddp` and `zero1`, PyTorch's own."""


class Divided(Alone):
    """What all of them share: whole states are put together for a checkpoint, and taken apart from one.

    Gathered tensors go to the CPU one by one, so that no GPU needs room for all.
    """

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row, as DTensors want them."""
        return init_device_mesh(self.model.lm_head.weight.device.type, (dist.get_world_size(),))

    def whole(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """All of a parameter, or of a moment of one, of which this rank may have a part. Every rank calls it."""
        stored = self.stored(tensor.detach(), parameter)
        return stored.full_tensor() if isinstance(stored, DTensor) else tensor

    def kept(self, tensor: Any, parameter: Tensor, ranks: OneRank) -> Any:
        """The whole of a tensor on rank 0, on the CPU if it was gathered, and nothing elsewhere."""
        whole = self.whole(tensor, parameter) if isinstance(tensor, Tensor) else tensor
        if not ranks.is_first:
            return None
        return whole if whole is tensor else whole.cpu()

    def part(self, whole: Any, parameter: Tensor) -> Any:
        """What this rank keeps of a whole tensor."""
        like = self.stored(parameter.detach(), parameter)
        if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
            return whole
        return distribute_tensor(whole.to(like.device), self.mesh, [Shard(0)], src_data_rank=None)

    def weights(self, ranks: OneRank) -> dict[str, Any]:
        held = self.model.state_dict(keep_vars=True)
        return {name: self.kept(tensor.detach(), tensor, ranks) for name, tensor in held.items()}

    def moments(self, optimizer: Optimizer, ranks: OneRank) -> dict[str, Any]:
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_dict(ranks.gather_on_first)
        whole, order = optimizer.state_dict(), parameters_of(optimizer)
        state = whole["state"].items()
        moments = {i: {k: self.kept(v, order[i], ranks) for k, v in values.items()} for i, values in state}
        return whole | {"state": moments}

    def load(self, content: dict[str, Any], optimizer: Optimizer, name: str) -> int:
        held, order = self.model.state_dict(keep_vars=True), parameters_of(optimizer)
        weights = {key: self.part(t, held[key]) if key in held else t for key, t in content["model"].items()}
        state = content["optimizer"]["state"].items()
        moments = {i: {k: self.part(v, order[i]) for k, v in values.items()} for i, values in state if i < len(order)}
        parts = {"model": weights, "optimizer": content["optimizer"] | {"state": moments}}
        return restore(content | parts, self.model, optimizer, name)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters in the order in which the optimizer's state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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

    def finish(self) -> None:
        self.fsdp.finish_gradient_synchronization()

    def clip(self) -> Tensor:
        return self.fsdp.clip_gradients(self.config.optimizer.max_grad_norm or math.inf)

    def stored(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        rows = self.fsdp.rows.get(parameter)
        if rows is None or tensor.shape != parameter.shape:
            return tensor
        own, shape = min(len(tensor), max(0, rows - dist.get_rank() * len(tensor))), (rows, *tensor.shape[1:])
        return DTensor.from_local(
            tensor[:own], self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )

    def part(self, whole: Any, parameter: Tensor) -> Any:
        part = super().part(whole, parameter)
        if not isinstance(part, DTensor):
            return part
        padded = whole.new_zeros(parameter.shape)  # our last ranks' parts end in rows of zeros
        padded[: len(part.to_local())] = part.to_local()
        return padded


class TorchFSDP2(Divided):
    """PyTorch's `fully_shard`: each block is gathered as one, and all that is outside of the blocks."""

    def __init__(self, model: TransformerLM, config: TrainConfig):
        super().__init__(model, config)
        broadcast_state(model)
        reduced = torch.bfloat16 if config.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32 if reduced else None)
        for part in (*model.layers, model):
            fully_shard(part, mesh=self.mesh, mp_policy=policy)

    def clip(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = gradient_norm(gradients).full_tensor()
        scale = torch.clamp((self.config.optimizer.max_grad_norm or math.inf) / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm


STRATEGIES: dict[str, type[Alone]] = {
    "none": Alone, "ddp": DDP, "zero1": ZeRO1, "fsdp": OurFSDP, "torch-ddp": TorchDDP, "torch-fsdp2": TorchFSDP2,
}  # fmt: skip
"""By the name of `TrainConfig.strategy`."""
