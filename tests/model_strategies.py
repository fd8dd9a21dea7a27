"""Small model configurations of any shape, for Hypothesis."""

from hypothesis import strategies as st

from lmcore.config import ModelConfig


@st.composite
def model_configs(draw, switches: list[dict]) -> ModelConfig:
    """A small model of any shape, with one of the `switches`."""
    num_heads = draw(st.integers(1, 4))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 70)),
        context_length=draw(st.integers(2, 20)),
        d_model=num_heads * 2 * draw(st.integers(1, 6)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        d_ff=draw(st.integers(1, 50)),
        **draw(st.sampled_from(switches)),
    )
