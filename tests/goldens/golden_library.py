"""Everything of the library that the goldens call: where a module or a function has moved, this file alone changes."""
# ruff: noqa: F401

import types

import lmcore.checkpoint
import lmcore.data
import lmcore.functional
import lmcore.generate
import lmcore.model
import lmcore.optimizer
import lmcore.sampling
import lmcore.tokenizer
from lmcore.accounting import forward_flops, num_parameters, training_flops
from lmcore.checkpoint import digest, load_model, read_checkpoint, read_weights, restore, save_weights
from lmcore.cli.application import main as command
from lmcore.config import (
    MODEL_SIZES,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    from_dict,
    model_config,
    replace,
    to_dict,
)
from lmcore.data import CorpusConfig, batch_at_step, entropy_per_document, load_gpt2, open_data, prepare, story_text
from lmcore.device import select_device
from lmcore.errors import UserError
from lmcore.files import read_json
from lmcore.model import TransformerLM
from lmcore.profiling.memory.predicted import predicted_peak
from lmcore.profiling.memory.snapshot import history_of
from lmcore.profiling.memory.timeline import summary
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.trace import busy_table, copy_table, kernel_table, kind_table
from lmcore.profiling.runner import is_of
from lmcore.profiling.workload import workload_config
from lmcore.provenance import environment
from lmcore.recipes import RECIPES
from lmcore.run import RunFolder
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.train import train, training_step
from lmcore.workbook.report.benchmark import answers as benchmark_answers
from lmcore.workbook.report.benchmark import mixed_precision, optimizations, roofline, warmups
from lmcore.workbook.report.benchmark import study as study_answers
from lmcore.workbook.report.memory import answers as memory_answers
from lmcore.workbook.report.memory import kept, peak_answers
from lmcore.workbook.report.memory import sizes as memory_sizes
from lmcore.workbook.report.memory import tables as memory_tables
from lmcore.workbook.report.memory.timeline_html import timeline_data
from lmcore.workbook.report.nsys import answers as nsys_answers
from lmcore.workbook.report.nsys import kernels as nsys_kernels
from lmcore.workbook.report.nsys import pitfalls as nsys_pitfalls
from lmcore.workbook.report.nsys import shares as nsys_shares
from lmcore.workbook.report.reference import results_block
from lmcore.workbook.report.reference_measurements import measurements_block
from lmcore.workbook.report.speed import comparison, read_speed, speed_block
from lmcore.workbook.report.survival import faults_block
from lmcore.workbook.report.tables import read_results

HANDOUT: dict[str, types.ModuleType] = {
    **dict.fromkeys(("train_bpe", "Tokenizer"), lmcore.tokenizer),
    **dict.fromkeys(("softmax", "silu", "scaled_dot_product_attention", "cross_entropy"), lmcore.functional),
    **dict.fromkeys(("Linear", "Embedding", "RMSNorm", "SwiGLU", "RotaryPositionalEmbedding"), lmcore.model),
    **dict.fromkeys(("CausalMultiHeadSelfAttention", "TransformerBlock", "TransformerLM"), lmcore.model),
    **dict.fromkeys(("SGD", "AdamW", "get_lr_cosine_schedule", "gradient_clipping"), lmcore.optimizer),
    **dict.fromkeys(("save_checkpoint", "load_checkpoint"), lmcore.checkpoint),
    "get_batch": lmcore.data,
    "next_token_distribution": lmcore.sampling,
    **dict.fromkeys(("generate", "generate_text"), lmcore.generate),
}
"""What the handouts ask for by name, and where it is."""

handout = types.SimpleNamespace(**{name: getattr(module, name) for name, module in HANDOUT.items()})
