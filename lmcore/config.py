"""Every setting of the library: frozen dataclasses that refuse what they do not know, and the named model sizes."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeVar

from lmcore.errors import UserError, require, require_path, require_positive, require_seed

Config = TypeVar("Config", bound=Any)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Transformer language model (CSE599-O A1 section 3).

    The defaults are the handout's TinyStories model. The switches below `norm_eps` serve the ablations of
    section 7.3 and the training recipes, the last two the measurements of CS336 A2; all are off by default.
    """

    vocab_size: int = 10_000
    context_length: int = 256
    d_model: int = 512
    num_layers: int = 4
    num_heads: int = 16
    d_ff: int = 1344
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by as many heads of queries (Ainslie et al. 2023); None: `num_heads`."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    norm: Literal["pre", "post", "none"] = "pre"
    position: Literal["rope", "sinusoidal", "none"] = "rope"
    ffn: Literal["swiglu", "silu"] = "swiglu"
    qk_norm: bool = False
    """RMSNorm of each query and key over the features of its head, before RoPE (Henry et al. 2020)."""
    parallel: bool = False
    """Both sublayers read one norm of the block's input, and their sum is added once (Wang and Komatsuzaki 2021)."""
    tie_embeddings: bool = False
    dropout: float = 0.0
    embedding_init_std: float | None = None
    """Standard deviation of the token embedding; None: 1 (section 3.4.1), or d_model**-0.5 when tied to the output."""
    attention: Literal["plain", "sdpa", "flash"] = "plain"
    """plain: the definition, which materializes the scores; flash: our FlashAttention-2; sdpa: PyTorch's kernels."""
    checkpoint_every: int | None = None
    """Gradient checkpointing (Chen et al. 2016): only the input of every so many blocks is kept, and the blocks are
    computed again in the backward pass; None: off. The explicit step recomputes parts of each block, whatever the
    number."""

    def __post_init__(self):
        sizes = "vocab_size context_length d_model num_layers num_heads d_ff"
        check_fields(self, positive=f"{sizes} num_kv_heads rope_theta norm_eps embedding_init_std checkpoint_every")
        require(self.d_model % self.num_heads == 0, f"num_heads={self.num_heads} must divide d_model={self.d_model}.")
        shared = self.num_heads % self.kv_heads == 0
        require(shared, f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}.")
        features = {"rope": self.d_k, "sinusoidal": self.d_model}.get(self.position, 0)  # of a head, or of the model
        require(features % 2 == 0, f"position={self.position} needs an even number of features, not {features}.")
        require(not self.parallel or self.norm == "pre", f"Parallel blocks are pre-norm, not norm={self.norm}.")
        require(0 <= self.dropout < 1, f"dropout must be in [0, 1), not {self.dropout}.")

    @property
    def d_k(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads


SHAPES = {  # d_model, d_ff, num_layers, num_heads
    "tinystories": (512, 1344, 4, 16),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7b": (2560, 10240, 32, 32),
    "10b": (4608, 12288, 50, 36),
    "8b": (4096, 11008, 34, 32),
    "2.35b": (3200, 25600, 8, 4),  # few, wide layers of as many parameters as xl: large matmuls
    "laptop": (256, 704, 4, 8),
    "smoke": (64, 192, 2, 4),
}
MODEL_SIZES = {name: dict(d_model=d, d_ff=f, num_layers=n, num_heads=h) for name, (d, f, n, h) in SHAPES.items()}
"""Named sizes; `model_config(name, ...)` completes one with vocabulary, context length and switches."""


def model_config(size: str, **overrides: Any) -> ModelConfig:
    """The named size as a `ModelConfig`, with fields replaced by `overrides`. Raises `UserError` on unknown names."""
    require(size in MODEL_SIZES, f"There is no model size {size!r}; choose one of {', '.join(MODEL_SIZES)}.")
    return from_dict(ModelConfig, MODEL_SIZES[size] | overrides)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule (sections 4.3 to 4.5)."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    learning_rate: float = 1e-3
    """Maximum of the cosine schedule, reached after `warmup_steps`."""
    min_learning_rate: float = 0.0
    warmup_steps: int = 100
    cosine_steps: int | None = None
    """Step at which the cosine reaches its minimum; None: the last step of the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norms: bool = False
    """Whether the weights of norms decay, too, not only matrices."""
    max_grad_norm: float | None = 1.0
    """Gradients above this l2 norm are scaled down to it; None: never."""

    def __post_init__(self):
        check_fields(self, positive="learning_rate eps max_grad_norm", not_negative="warmup_steps weight_decay")
        least, most, warmup, cosine = self.min_learning_rate, self.learning_rate, self.warmup_steps, self.cosine_steps
        require(0 <= least <= most, f"min_learning_rate must be from 0 to learning_rate ({most}), not {least}.")
        require(cosine is None or cosine > warmup, f"cosine_steps ({cosine}) must be above warmup_steps ({warmup}).")
        shares = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(shares, f"betas must be two numbers in [0, 1), not {self.betas}.")


@dataclass(frozen=True)
class TrainConfig:
    """One training run: what, on which data, how long, and what is written down."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: str = "data/embedded"
    """Folder of a prepared corpus; or a source of `lmcore data prepare`, which the command prepares first."""
    init_from: str | None = None
    """Run folder whose best weights the run begins with, such as an imported model; None: drawn at random."""
    teacher: str | None = None
    """A complete run with this tokenizer and at least this context: its best weights predict every next token, and this
    is learned beside the tokens (knowledge distillation, Hinton et al. 2015). Every rank holds all of it."""
    teacher_share: float = 0.6
    """Weight of the teacher's probabilities in what is learned; the tokens have the rest."""
    batch_size: int = 32
    steps: int = 5000
    sampling: Literal["random", "epoch"] = "random"
    """random: windows at uniform offsets (section 5.1); epoch: every token once per pass, in a new order each time."""
    seed: int = 0
    log_interval: int = 10
    eval_interval: int = 500
    eval_batch_size: int = 128
    eval_tokens: int | None = None
    """The first tokens of the validation text, which an evaluation during the run reads; None: all of it."""
    eval_details: bool = False
    """Whether an evaluation measures next-token accuracy, too."""
    evaluate_on: Literal["valid", "dev"] = "valid"
    """dev: the last training documents, on which settings are chosen; the run then trains on those before them."""
    z_loss: float = 0.0
    """Weight of the mean of log(Z)^2 beside the loss, Z the softmax's normalizer (Chowdhery et al. 2022, section 5)."""
    checkpoint_interval: int = 500
    keep_checkpoints: int = 2
    """Latest checkpoints kept, besides the weights of the lowest validation loss."""
    checkpoints: Literal["whole", "sharded"] = "whole"
    """whole: one file; sharded: a folder to which each process writes its part. Both load on any number of them."""
    keep_weights: bool = True
    """False: of a complete run only the metrics stay, as for a sweep of many runs."""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """What gets every metrics line, too; each is an extra of its name. If it fails, a run continues with a warning."""
    device: str = "auto"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    ops: Literal["plain", "fused"] = "plain"
    """plain: PyTorch's operations and autograd; fused: our kernels in an explicit step, where they cover the run."""
    compile: bool = False
    """torch.compile, for what runs as plain operations."""
    strategy: Literal["none", "ddp", "zero1", "fsdp", "torch-ddp", "torch-fsdp2"] = "none"
    """How torchrun's processes divide the work: ours, or PyTorch's. Each has a part of the batch; zero1 divides the
    optimizer's state, too, and fsdp the weights; ops=fused covers ddp and, with AdamW, zero1 and fsdp."""
    deterministic: bool = False

    def __post_init__(self):
        counts = "batch_size steps log_interval eval_interval eval_batch_size eval_tokens checkpoint_interval"
        check_fields(self, positive=f"{counts} keep_checkpoints", not_negative="z_loss")
        fewest, few = self.model.context_length, f"eval_tokens={self.eval_tokens} is less than a window of the model"
        require(self.eval_tokens is None or self.eval_tokens >= fewest, f"{few}, {fewest} tokens.")
        require_path("data", self.data)
        require_seed(self.seed)
        require(0 <= self.teacher_share <= 1, f"teacher_share must be from 0 to 1, not {self.teacher_share}.")
        sharded, ours = self.strategy in ("fsdp", "torch-fsdp2"), self.strategy == "fsdp"
        every = self.model.checkpoint_every
        obstacles = {
            "optimizer.name=muon, which needs whole matrices": sharded and self.optimizer.name == "muon",
            "precision=fp16, whose loss scaling needs whole gradients": sharded and self.precision == "fp16",
            "compile with ops=plain": ours and self.compile and self.ops == "plain",
            f"model.checkpoint_every={every} with ops=plain": ours and every is not None and self.ops == "plain",
        }
        for obstacle, present in obstacles.items():
            require(not present, f"strategy={self.strategy} does not cover {obstacle}; choose another --strategy.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.model.context_length


@dataclass(frozen=True)
class GenerateConfig:
    """Decoding (section 6). Temperature 0 is greedy; `top_k` None and `top_p` 1 keep the whole distribution."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    kv_cache: bool = True
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 are mixed precision by autocast; bf16 is also a type of the fused decoder's weights."""
    ops: Literal["plain", "fused"] = "plain"
    """plain: the model as it is; fused: our decoding kernels with a static cache, where they cover the model."""

    def __post_init__(self):
        check_fields(self, positive="max_new_tokens top_k", not_negative="temperature")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}.")
        require_seed(self.seed)


@dataclass(frozen=True)
class CorpusConfig:
    """How a source becomes training and validation documents."""

    valid: str | None = None
    """File of validation documents, for a source that is one file or a folder without one."""
    valid_fraction: float = 0.1
    """Share of the documents, the last ones, held out when there is no validation file."""
    seed: int = 0
    """Seed of the embedded stories."""
    num_documents: int = 20_000
    """Training documents of the embedded corpus; `valid_fraction` times as many more are its validation split."""
    field: str = "text"
    """Field of the records (`.jsonl`, `.parquet`) that holds the text."""
    download_folder: str = "data/downloads"

    def __post_init__(self):
        check_fields(self, positive="num_documents")
        require(0 < self.valid_fraction < 1, f"valid_fraction must be between 0 and 1, not {self.valid_fraction}.")


def check_fields(config: Any, positive: str = "", not_negative: str = "") -> None:
    """Raises `UserError` if a field holds a number that is not finite or a choice that its `Literal` does not have, or
    unless the fields that `positive` and `not_negative` name, separated by spaces, are so; None is allowed."""
    hints = typing.get_type_hints(type(config))
    for name, hint in hints.items():
        value = getattr(config, name)
        parts = (hint, *typing.get_args(hint))
        choices = [each for part in parts if typing.get_origin(part) is Literal for each in typing.get_args(part)]
        for item in value if isinstance(value, tuple) else (value,):
            require(not isinstance(item, float) or math.isfinite(item), f"{name} must be a finite number, not {item}.")
            require(not choices or item in choices, f"{name} must be one of {', '.join(choices)}, not {item!r}.")
    for name in positive.split():
        value = getattr(config, name)
        if hints[name] in (int, int | None) and value is not None:
            require_positive(name, value)
        require(value is None or value > 0, f"{name} must be positive, not {value}.")
    for name in not_negative.split():
        require(getattr(config, name) >= 0, f"{name} must not be negative, not {getattr(config, name)}.")


def _require_fields(kind: type, names: Iterable[str]) -> None:
    """Raises `UserError` unless all names are of fields of the config `kind`."""
    fields = [f.name for f in dataclasses.fields(kind)]
    for name in set(names).difference(fields):
        near = difflib.get_close_matches(str(name), fields, n=1)
        meant = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(fields)}."
        raise UserError(f"{kind.__name__} has no field {name}; {meant}")


def differing(first: Mapping[str, Any], second: Mapping[str, Any], places: Sequence[str] = ("there", "here")) -> str:
    """In words, the keys with different values, at most eight: "steps (12 there, 13 here)"; empty if there are none."""
    pairs = {key: (first.get(key, "absent"), second.get(key, "absent")) for key in {**second, **first}}
    words = [f"{key} ({a} {places[0]}, {b} {places[1]})" for key, (a, b) in pairs.items() if a != b]
    return ", ".join(words[:8]) + (", …" if len(words) > 8 else "")


to_dict = dataclasses.asdict
"""A config as nested plain dictionaries, ready for JSON or YAML."""


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """Builds the config `kind` from (nested) dictionaries. Raises `UserError` on an unknown key or a wrong type."""
    require(isinstance(values, dict), f"{kind.__name__} needs a mapping of fields, not {values!r}.")
    _require_fields(kind, values)
    hints = typing.get_type_hints(kind)
    return kind(**{key: _coerce(hints[key], value, f"{kind.__name__}.{key}") for key, value in values.items()})


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type `hint`, where JSON or YAML has changed it (tuples to lists, floats to ints)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _coerce(next(a for a in arguments if a is not type(None)), value, name)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{name} must be a list, not {value!r}.")
        return tuple(_coerce(arguments[0], item, name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(str(value))  # inf where it is too large, not an OverflowError
    if hint in (int, float, str, bool):
        require(type(value) is hint, f"{name} must be of type {hint.__name__}, not {value!r}.")
    return value


def replace(config: Config, **changes: Any) -> Config:
    """A copy with fields changed; `section__field` reaches into a nested config (`optimizer__learning_rate=1e-3`)."""
    nested, flat = {}, {}  # type: dict[str, dict[str, Any]], dict[str, Any]
    for key, value in changes.items():
        section, _, name = key.partition("__")
        (nested.setdefault(section, {}) if name else flat)[name or key] = value
    _require_fields(type(config), [*flat, *nested])
    flat |= {section: replace(getattr(config, section), **values) for section, values in nested.items()}
    return dataclasses.replace(config, **flat)


def named(entry: Any) -> Any:
    """An entry of a table of names, or what its path "module:name" leads to, imported only by those who ask for it."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)
