"""Tables and sentences of notebook 01: resource accounting in words, every number from `lmcore.accounting`."""

import math
from collections.abc import Mapping

import pandas as pd

from lmcore import accounting
from lmcore.config import ModelConfig, replace
from lmcore.workbook.report.answers import (
    format_bytes,
    format_count,
    format_percent,
    format_significant,
    join_words,
    scientific,
)

COMPONENTS = {
    "token_embeddings": "token embedding",
    "attention": "attention",
    "ffn": "feed-forward network",
    "norms": "norms",
    "lm_head": "output layer",
    "qkv_proj": "Q, K, V projections",
    "scores": "attention scores",
    "weighted_sum": "weighted sum of values",
    "output_proj": "output projection",
}
"""Names of the components of `lmcore.accounting` for readers."""

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
}


def flop_shares(configs: Mapping[str, ModelConfig]) -> pd.DataFrame:
    """Share of a forward pass's FLOPs over the whole context: a row for each config, a column for each component."""
    rows = {}
    for label, config in configs.items():
        flops = accounting.forward_flops_by_component(config)
        rows[label] = {COMPONENTS[name]: value / sum(flops.values()) for name, value in flops.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def shares_table(configs: Mapping[str, ModelConfig]) -> str:
    """`flop_shares` as a Markdown table of percentages, with the total FLOPs of each config."""
    table = flop_shares(configs).map(format_percent)
    table.insert(0, "FLOPs", [scientific(accounting.forward_flops(config)) for config in configs.values()])
    return table.T.to_markdown()


def parameters_answer(config: ModelConfig) -> str:
    """transformer_accounting (a): parameters and bytes, and what they would be without the gate."""
    counts = accounting.parameter_counts(config)
    total = sum(counts.values())
    largest = max(counts, key=counts.__getitem__)
    plain = accounting.num_parameters(_plain(config))
    return (
        f"The model has **{total:,}** trainable parameters ({format_count(total)}), "
        f"{format_percent(counts[largest] / total)} of them in the {COMPONENTS[largest]}; in float32, at 4 bytes each, "
        f"loading it takes **{format_bytes(4 * total)}** ({format_significant(4 * total / 2**30)} GiB). "
        f"With d_ff = {config.d_ff:,} kept but two matrices instead of SwiGLU's three in the feed-forward network, "
        f"as *adamwAccounting* assumes, it would have {format_count(plain)} parameters and take "
        f"{format_bytes(4 * plain)}."
    )


def multiplies_table(config: ModelConfig) -> str:
    """transformer_accounting (b): every matrix product with its shapes, and the total."""
    rows = []
    for multiply in accounting.matrix_multiplies(config):
        rows.append(
            {
                "component": COMPONENTS[multiply.component],
                "product": f"`{multiply.product}`",
                "shapes": f"({multiply.rows:,} × {multiply.inner:,}) · ({multiply.inner:,} × {multiply.columns:,})",
                "times": f"{multiply.count:,}",
                "FLOPs": scientific(multiply.flops),
            }
        )
    total = accounting.forward_flops(config)
    symbols = accounting.symbolic(config)
    algebra = accounting.latex(accounting.forward_flops(symbols))
    table = pd.DataFrame(rows).to_markdown(index=False, colalign=("left", "left", "left", "right", "right"))
    return (
        f"One sequence of {config.context_length:,} tokens takes **{total:,}** FLOPs ({scientific(total)}):\n\n{table}"
        f"\n\nA product of an $m \\times n$ with an $n \\times p$ matrix counts $2mnp$; in letters (T positions, "
        f"L layers, D = d_model, F = d_ff, V = vocabulary) the sum is ${algebra}$. Scores and weighted sums are "
        f"counted in full, although the causal mask discards about half of them."
    )


def largest_answer(config: ModelConfig) -> str:
    """transformer_accounting (c): which parts need the most FLOPs."""
    shares = flop_shares({"": config}).iloc[0].sort_values(ascending=False)
    named = [f"the {name} ({format_percent(share)})" for name, share in shares.items()]
    with_length = shares["attention scores"] + shares["weighted sum of values"]
    return (
        f"Most FLOPs go to {named[0]}, followed by {join_words(named[1:4])}. Together, the projections and the "
        f"feed-forward network make up {format_percent(_per_token_share(shares))}; the two products whose cost grows "
        f"with the square of the length make up {format_percent(with_length)} at {config.context_length:,} tokens."
    )


def trend_answer(configs: Mapping[str, ModelConfig]) -> str:
    """transformer_accounting (d): shares by size, and which rise, fall or do neither as the model grows."""
    shares = flop_shares(configs)
    steps = shares.diff().iloc[1:]
    rising = [_change(name, shares[name]) for name in shares if (steps[name] > 0).all()]
    falling = [_change(name, shares[name]) for name in shares if (steps[name] < 0).all()]
    mixed = [_change(name, shares[name]) for name in shares if not (steps[name] > 0).all() | (steps[name] < 0).all()]
    clauses = []
    if rising:
        clauses.append(f"proportionally more goes to the {join_words(rising)}")
    if falling:
        clauses.append(f"less to the {join_words(falling)}")
    if mixed:
        clauses.append(f"with no single direction for the {join_words(mixed)}")
    labels = list(configs)
    return (
        f"{shares_table(configs)}\n\nFrom {labels[0]} to {labels[-1]}, {', '.join(clauses)}. Per token, the "
        f"projections and the feed-forward network grow with $L D^2$, the attention products with $L D T$ and the "
        f"output layer with $D V$ alone, so width shifts the sum towards the first."
    )


def context_answer(short: ModelConfig, long: ModelConfig) -> str:
    """transformer_accounting (e): what a longer context changes."""
    before, after = accounting.forward_flops(short), accounting.forward_flops(long)
    shares = flop_shares({"short": short, "long": long})
    pairs = shares["attention scores"] + shares["weighted sum of values"]
    ffn = shares["feed-forward network"]
    return (
        f"A forward pass over {long.context_length:,} instead of {short.context_length:,} tokens, "
        f"{long.context_length / short.context_length:g} times as many, takes {scientific(after)} "
        f"instead of {scientific(before)} FLOPs: **{format_significant(after / before)} times** as many. Scores and "
        f"weighted sums, quadratic in the length, go from {format_percent(pairs['short'])} to "
        f"{format_percent(pairs['long'])} of the total, and the feed-forward network from "
        f"{format_percent(ffn['short'])} to {format_percent(ffn['long'])}."
    )


def depth_sentence(streams: Mapping[str, pd.Series], deeper: pd.Series) -> str:
    """How large the residual stream gets: RMS by layer of several models, and of a deeper one without norms."""
    layers = len(deeper) - 1
    sizes = [f"{_size(stream.iloc[-1])} with {label}" for label, stream in streams.items()]
    blocks = len(next(iter(streams.values()))) - 1
    overflow = next((layer for layer, size in enumerate(deeper) if not math.isfinite(size)), None)
    text = f"After {blocks} blocks the stream has size {join_words(sizes)}"
    if overflow is None:
        return f"{text}; after {layers} blocks without norms it has {_size(deeper.iloc[-1])}."
    return f"{text}; at {layers} layers without norms it overflows float32 in block {overflow}."


def memory_algebra(config: ModelConfig) -> str:
    """adamwAccounting (a): bytes by kind in letters, for d_ff = 4 d_model and float32."""
    symbols = accounting.symbolic(config, d_ff_per_d_model=4)
    memory = accounting.adamw_memory(symbols, accounting.batch_symbol())
    rows = [{"kind": KINDS[kind], "bytes": f"${accounting.latex(value)}$"} for kind, value in memory.items()]
    total = accounting.latex(sum(memory.values()))
    rows.append({"kind": "**total**", "bytes": f"${total}$"})
    values = accounting.activation_counts(symbols, accounting.batch_symbol())
    parts = [
        {"component": _activation_name(name), "values": f"${accounting.latex(value)}$"}
        for name, value in values.items()
        if value != 0
    ]
    letters = join_words([f"{letter} = {meaning}" for letter, meaning in accounting.SYMBOLS.items() if letter != "F"])
    return (
        f"With 4 bytes a value ({letters}):\n\n{pd.DataFrame(rows).to_markdown(index=False)}\n\n"
        "Gradients are as large as the parameters, and AdamW keeps two moments of each parameter. The total is the "
        "peak as if every gradient were there before the first activation is freed. The activations are the outputs "
        f"of the components that the handout lists:\n\n{pd.DataFrame(parts).to_markdown(index=False)}"
    )


def batch_answer(config: ModelConfig, memory_bytes: float) -> str:
    """adamwAccounting (b): memory as a line in the batch size, and the largest batch that fits."""
    fixed = sum(accounting.adamw_memory(config, 0).values())
    slope = sum(accounting.adamw_memory(config, 1).values()) - fixed
    largest = accounting.max_batch_size(config, memory_bytes)
    at_most = sum(accounting.adamw_memory(config, largest).values())
    gated = accounting.max_batch_size(_gated(config), memory_bytes)
    limit = format_bytes(memory_bytes, 2)
    fits = (
        f"The largest batch within {limit} is **{largest}**, which takes {format_bytes(at_most)}"
        if largest
        else f"Not even one sequence fits into {limit}"
    )
    return (
        f"$\\text{{memory}} = {format_significant(slope / 1e9, 4)}\\ \\text{{GB}} \\cdot \\text{{batch\\_size}} + "
        f"{format_significant(fixed / 1e9, 4)}\\ \\text{{GB}}$. {fits}; with the gated network of our own model it is "
        f"{gated}."
    )


def adamw_flops_answer(config: ModelConfig, batch_size: int) -> str:
    """adamwAccounting (c): FLOPs of the optimizer's step, line by line, and next to those of the gradients."""
    lines = [{"line of Algorithm 1": f"${line}$", "FLOPs": flops} for line, flops in accounting.ADAMW_FLOPS.items()]
    per_parameter = sum(accounting.ADAMW_FLOPS.values())
    algebra = accounting.latex(accounting.adamw_step_flops(accounting.symbolic(config, d_ff_per_d_model=4)))
    step, gradient = accounting.adamw_step_flops(config), accounting.training_flops(config, batch_size)
    return (
        f"**{per_parameter} per parameter**, ${algebra}$ in all, which is {scientific(step)} for this model:\n\n"
        f"{pd.DataFrame(lines).to_markdown(index=False)}\n\nEvery line is elementwise; square roots and divisions "
        f"count as one, and products of scalars such as $\\alpha\\lambda$ are made once and not counted. Beside the "
        f"{scientific(gradient)} FLOPs of forward and backward pass at batch size {batch_size:,} that is "
        f"{format_percent(step / gradient, 2)}."
    )


def days_answer(config: ModelConfig, batch_size: int, steps: int, peak_flops: float, mfu: float) -> str:
    """adamwAccounting (d): days of training at a given MFU."""
    days = accounting.training_days(config, batch_size, steps, peak_flops, mfu)
    gated = accounting.training_days(_gated(config), batch_size, steps, peak_flops, mfu)
    forward = accounting.forward_flops(config, batch_size)
    return (
        f"**{days:,.0f} days** ({format_significant(days / 365.25, 3)} years). A forward pass over {batch_size:,} "
        f"sequences takes {scientific(forward)} FLOPs and the backward pass twice that: each product $Y = XW$ has "
        f"two of its size there, for the gradients of $X$ and $W$. That is {scientific(3 * forward)} a step and "
        f"{scientific(3 * forward * steps)} for {steps:,} steps, at {format_percent(mfu, 2)} of "
        f"{format_significant(peak_flops / 1e12)} TFLOP/s. With our gated network it would be {gated:,.0f} days."
    )


def _size(value: float) -> str:
    if not math.isfinite(value):
        return "beyond float32"
    return scientific(value) if value >= 1e4 else format_significant(value)


def _change(name: str, shares: pd.Series) -> str:
    return f"{name} ({format_percent(shares.iloc[0])} → {format_percent(shares.iloc[-1])})"


def _per_token_share(shares: pd.Series) -> float:
    return shares[["Q, K, V projections", "output projection", "feed-forward network"]].sum()


def _activation_name(name: str) -> str:
    others = {"softmax": "softmax of the scores", "cross_entropy": "cross-entropy on the logits"}
    return others.get(name) or COMPONENTS[name]


def _plain(config: ModelConfig) -> ModelConfig:
    return replace(config, ffn="silu")


def _gated(config: ModelConfig) -> ModelConfig:
    return replace(config, ffn="swiglu")
