"""GGUF, the file of llama.cpp: one file of metadata, tokenizer and tensors (github.com/ggml-org/ggml, docs/gguf.md)."""

from pathlib import Path

from torch import Tensor

from lmcore.config import ModelConfig
from lmcore.errors import UserError
from lmcore.exchange.llama import GGUF, weight_names
from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.files import to_printable


def write_gguf(config: ModelConfig, state: dict[str, Tensor], tokenizer: Tokenizer, path: Path) -> None:
    """Writes our weights (W_q and W_k with the rows that they have) and the tokenizer as a Llama in float32.

    Raises `UserError` without the package gguf.
    """
    try:
        from gguf import GGUFWriter, LlamaFileType, TokenType
    except ImportError:
        raise UserError("GGUF files need the extra gguf: pip install 'lmcore[gguf]'.") from None
    c, writer = config, GGUFWriter(path, "llama")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_rope_dimension_count(c.d_k)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_file_type(LlamaFileType.ALL_F32)
    tokens = {token_id: (f"[PAD{token_id}]", TokenType.UNUSED) for token_id in range(c.vocab_size)}
    tokens |= {token_id: (to_printable(token), TokenType.NORMAL) for token_id, token in tokenizer.vocab.items()}
    tokens |= {token_id: (token, TokenType.CONTROL) for token, token_id in tokenizer.special_ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens.values()])
    writer.add_token_types([kind for _, kind in tokens.values()])
    writer.add_token_merges([f"{to_printable(left)} {to_printable(right)}" for left, right in tokenizer.merges])
    writer.add_bos_token_id(tokenizer.eot_id)
    writer.add_eos_token_id(tokenizer.eot_id)
    writer.add_add_bos_token(False)
    for ours, theirs in weight_names(c, GGUF):
        writer.add_tensor(theirs, state[ours].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
