"""Training on several processes: collectives from sends and receives, data parallelism, and sharding (CS336 A2).

From naive to overlapped, each step a small change to the last, and each equal to one process on the same global batch.
Every function and class takes the process group `group`; None is the group of all ranks.
"""
# ruff: noqa: F401

from lmcore.distributed.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lmcore.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from lmcore.distributed.fsdp import FSDP
from lmcore.distributed.ranks import Ranks
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
