"""Small model configurations of any shape, for Hypothesis."""

from hypothesis import strategies as st

from lmcore.config import ModelConfig


@st.composite
def model_configs(draw, attention: tuple[str, ...] = ("plain",)) -> ModelConfig:
    """A small model of any shape and with any switches, and one of the `attention` kernels."""
    num_heads = draw(st.integers(1, 4))
    norm = draw(st.sampled_from(["pre", "post", "none"]))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 70)),
        context_length=draw(st.integers(2, 20)),
        d_model=num_heads * 2 * draw(st.integers(1, 6)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from([None, *(n for n in range(1, num_heads + 1) if num_heads % n == 0)])),
        d_ff=draw(st.integers(1, 50)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        norm=norm,
        position=draw(st.sampled_from(["rope", "sinusoidal", "none"])),
        ffn=draw(st.sampled_from(["swiglu", "silu"])),
        tie_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        qk_norm=draw(st.booleans()),
        parallel=norm == "pre" and draw(st.booleans()),
        attention=draw(st.sampled_from(attention)),
    )
