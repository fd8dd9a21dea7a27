"""Export and import against transformers, tokenizers and gguf themselves, on models that are made here at random."""

import json
import math
import os
import random
import sys
import unicodedata
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save
from tokenizer_reference import BYTES

from lmcore import cli
from lmcore.checkpoint import load_model
from lmcore.config import GenerateConfig, ModelConfig, replace
from lmcore.errors import EXIT_USER_ERROR, UserError
from lmcore.exchange.folders import export_model, import_model
from lmcore.generate import generate_text
from lmcore.model import TransformerLM
from lmcore.run import RunFolder
from lmcore.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from lmcore.train import train

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
transformers = pytest.importorskip("transformers")

CLOSE = {"atol": 1e-5, "rtol": 0}
SMALL = ModelConfig(vocab_size=257, context_length=96, d_model=32, num_layers=2, num_heads=4, d_ff=48)
SPECIAL = [END_OF_TEXT, "<|a|>", "<|a|><|b|>", "<|日本|>", "< x >"]


def built(config: ModelConfig, seed: int = 0) -> TransformerLM:
    """A model with gains that differ from one."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def llama(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes):
    """A random model of transformers, saved in `folder`; the model in float32."""
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 96}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.normal_(std=0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)


def tokens(vocab_size: int = 257) -> torch.Tensor:
    return torch.randint(vocab_size, (2, 96), generator=torch.Generator().manual_seed(2))


def hard_text(size: int, seed: int = 0) -> str:
    """Mixed scripts, runs of white space, combining and joined characters, and special tokens, whole and in part."""
    draw, parts, length = random.Random(seed), [], 0
    spaces = [*" \n\t\x0b\x1c\x1f\x85\u00a0\u2003\u2028\u3000\u200b", "  ", "\n\n", "\r\n"]
    known = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    words = [
        "naïve",
        "日本語",
        "слово",
        "मानक",
        "١٢٣",
        "½²Ⅷ",
        "don't",
        "WE'LL",
        "'re",
        "''ve",
        "👩🏽‍🚀",
        "👨‍👩‍👧️",
        "2026",
    ]
    words += [*SPECIAL, "<|endof", "text|>", "<|a|", "<|b|>", "|>"]
    while length < size:
        space = "".join(draw.choices(spaces, k=draw.randrange(5)))
        marks = "".join(chr(draw.randrange(0x300, 0x370)) for _ in range(draw.randrange(3)))
        parts.append("".join([draw.choice(words), marks, space, *draw.choices(known, k=draw.randrange(3))]))
        length += len(parts[-1].encode())
    return "".join(parts)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Trained on a part of the hard text, so that its merges matter there."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(hard_text(150_000), encoding="utf-8", newline="")
    return Tokenizer(*train_bpe(path, 900, SPECIAL), SPECIAL)


SHAPES = {
    "many heads": SMALL,
    "grouped": replace(SMALL, num_heads=8, num_kv_heads=2, norm_eps=1e-3, rope_theta=500.0),
    "one head of keys, tied": replace(SMALL, num_kv_heads=1, tie_embeddings=True),
    "padded vocabulary": replace(SMALL, vocab_size=320, dropout=0.1, attention="sdpa"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_and_writes_the_same(shape, tmp_path):
    model = built(SHAPES[shape]).eval()
    export_model(model, BYTES, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = tokens(model.config.vocab_size)
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(model, ids), **CLOSE)
    codec = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for prompt in ("Once upon a time", "§", END_OF_TEXT):
        written = theirs.generate(**codec(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)
        ours = generate_text(model, BYTES, [prompt], GenerateConfig(max_new_tokens=60, temperature=0))[0]
        assert codec.decode(written[0], skip_special_tokens=True) == (prompt + ours.text).removeprefix(END_OF_TEXT)


def test_ids_are_equal_on_hard_text(tokenizer, tmp_path):
    text = hard_text(1_000_000, seed=1)
    export_model(built(replace(SMALL, vocab_size=900)), tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs(text).input_ids
    assert ids == tokenizer.encode(text)
    assert theirs.decode(ids) == text
    assert [theirs.convert_tokens_to_ids(token) for token in SPECIAL] == list(tokenizer.special_ids.values())
    assert Tokenizer.load(tmp_path / "out").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("norm=post", {"norm": "post"}), ("norm=none", {"norm": "none"}), ("ffn=silu", {"ffn": "silu"}),
        ("position=sinusoidal", {"position": "sinusoidal"}), ("position=none", {"position": "none"}),
        ("qk_norm", {"qk_norm": True}), ("parallel blocks", {"parallel": True}), (r"lmcore\[gguf\]", {}),
    ],
)  # fmt: skip
def test_what_llama_cannot_express_is_refused_by_name(name, changes, tmp_path, monkeypatch):
    """As is GGUF without its package."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=name):
        export_model(built(replace(SMALL, **changes)), BYTES, tmp_path / "out", gguf=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", ["grouped", "one head of keys, tied"])
def test_gguf_has_the_metadata_tokenizer_and_tensors(shape, tokenizer, tmp_path):
    """Also, llama.cpp's order of rows is what its converter makes of transformers' weights."""
    gguf = pytest.importorskip("gguf")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = replace(SHAPES[shape], vocab_size=920)
    model, out = built(config).eval(), tmp_path / "out"
    export_model(model, tokenizer, out, gguf=True)
    reader = gguf.GGUFReader(out / "model.gguf")
    found = {name: field.contents() for name, field in reader.fields.items()}
    wanted = {
        "context_length": 96, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48, "vocab_size":
        config.vocab_size, "attention.head_count": config.num_heads, "attention.head_count_kv": config.kv_heads,
        "rope.dimension_count": config.d_k,
    }  # fmt: skip
    assert {name: found[f"llama.{name}"] for name in wanted} == wanted
    assert found["llama.rope.freq_base"] == config.rope_theta
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.norm_eps)
    assert found["general.architecture"] == "llama"
    assert len(found["tokenizer.ggml.tokens"]) == len(found["tokenizer.ggml.token_type"]) == config.vocab_size
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eot_id
    tensors, exported = {t.name: torch.tensor(t.data) for t in reader.tensors}, load_file(out / "model.safetensors")
    assert len(tensors) == len(exported) == len(list(model.parameters()))
    for name, heads in (("q", config.num_heads), ("k", config.kv_heads)):
        theirs = exported[f"model.layers.1.self_attn.{name}_proj.weight"]
        permuted = theirs.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(theirs.shape)  # LlamaModel.permute there
        assert torch.equal(tensors[f"blk.1.attn_{name}.weight"], permuted)
    theirs = transformers.LlamaForCausalLM.from_pretrained(out).eval()
    read = load_gguf_checkpoint(out / "model.gguf", return_tensors=True, model_to_load=theirs)["tensors"]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    theirs.load_state_dict(read, strict=not config.tie_embeddings)
    torch.testing.assert_close(logits_of(theirs, tokens()), logits_of(model, tokens()), **CLOSE)
    text = hard_text(20_000, seed=3)
    codec = transformers.AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    assert codec(text).input_ids == tokenizer.encode(text)


MODELS = {
    "many heads": {},
    "four to one": {"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    "one head of keys": {"num_key_value_heads": 1, "rope_theta": 500.0},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "sharded": {"shard": "20KB"},
    "bfloat16": {"dtype": torch.bfloat16, "num_key_value_heads": 2},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("shape", MODELS)
def test_models_of_transformers_compute_the_same_here(shape, tmp_path):
    """And exported again they have the tensors that they came with."""
    theirs = llama(tmp_path / "in", **MODELS[shape])
    assert (tmp_path / "in" / "model.safetensors.index.json").exists() == (shape == "sharded")
    run = import_model(tmp_path / "in", tmp_path / "run", tokenizer=False)
    model = load_model(run.best_weights)
    torch.testing.assert_close(logits_of(model, tokens()), logits_of(theirs, tokens()), **CLOSE)
    assert model.config == run.config().model
    export_model(model, BYTES, tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in back.items())
    shorter = import_model(tmp_path / "in", tmp_path / "short", context_length=8, tokenizer=False)
    assert shorter.config().model == replace(model.config, context_length=8)


def test_a_configuration_of_transformers_4(tmp_path):
    theirs = llama(tmp_path / "in", rope_theta=500.0)
    values = json.loads((tmp_path / "in" / "config.json").read_text())
    for name in ("rope_parameters", "num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps"):
        del values[name]
    (tmp_path / "in" / "config.json").write_text(json.dumps(values | {"rope_theta": 500, "rope_scaling": None}))
    model = load_model(import_model(tmp_path / "in", tmp_path / "run", tokenizer=False).best_weights)
    torch.testing.assert_close(logits_of(model, tokens()), logits_of(theirs, tokens()), **CLOSE)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder that is imported as it is."""
    folder = tmp_path_factory.mktemp("sound") / "in"
    llama(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type=gpt2"), ({"head_dim": 16}, "head_dim=16"),
        ({"attention_bias": True}, "attention_bias=True"), ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"), ({"quantization_config": {}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling=llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"num_key_value_heads": 3}, "num_kv_heads=3 must"),
        ({"hidden_size": "x"}, "d_model must be"), ({"num_hidden_layers": 10**9}, "lacks the tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "has the tensor model.layers.1"), ({"intermediate_size": 49}, "has the shape"),
    ],
)  # fmt: skip
def test_settings_that_the_model_lacks_are_refused_by_name(changes, message, sound, tmp_path):
    values = json.loads((sound / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    (tmp_path / "model.safetensors").symlink_to(sound / "model.safetensors")
    with pytest.raises(UserError, match=message):
        import_model(tmp_path, tmp_path / "run", tokenizer=False)
    assert not (tmp_path / "run").exists()


def test_damaged_folders_are_refused_in_a_sentence_by_the_command(sound, tmp_path, capsys):
    config, whole = ((sound / name).read_bytes() for name in ("config.json", "model.safetensors"))
    weights = load(whole)
    head = weights.pop("lm_head.weight")
    outside, absent = ({"weight_map": {"lm_head.weight": name}} for name in ("../model.safetensors", "model-2"))
    folder, run = tmp_path / "in", tmp_path / "run"
    for message, files in (
        ("There is no file", None),
        ("There is no file", {}),
        ("must be a JSON object", {"config.json": b"[]"}),
        ("weights are read as safetensors alone", {"config.json": config}),
        ("lacks the tensor lm_head.weight", {"model.safetensors": save(weights)}),
        ("of the type torch.int32", {"model.safetensors": save(weights | {"lm_head.weight": head.int()})}),
        ("is not a whole safetensors file", {"model.safetensors": whole[:-1]}),
        ("files beside it", {"model.safetensors.index.json": json.dumps(outside).encode()}),
        ("model-2", {"model.safetensors.index.json": json.dumps(absent).encode()}),
    ):
        if files is not None:
            folder.mkdir(exist_ok=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
        assert cli.main(["import", str(folder), str(run), "--no-tokenizer"]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
        assert {path.name for path in tmp_path.iterdir()} <= {"in"}
    with pytest.raises(UserError, match="There is no tokenizer"):
        import_model(sound, run)
    run.touch()
    with pytest.raises(UserError, match="is there already"):
        import_model(sound, run, tokenizer=False)
    assert run.stat().st_size == 0


@pytest.fixture(scope="module")
def circle(tmp_path_factory, embedded_data, tiny_run) -> Path:
    """A trained run, its export and what is imported from that, by the commands."""
    folder = tmp_path_factory.mktemp("circle")
    config = replace(tiny_run, model__num_kv_heads=1, model__norm_eps=1e-4)
    assert train(config, folder / "run").state == "complete"
    assert cli.main(["export", str(folder / "run"), str(folder / "out")]) == 0
    assert cli.main(["import", str(folder / "out"), str(folder / "back")]) == 0
    return folder


def test_commands_take_an_imported_model(circle, embedded_data, capsys):
    """It generates and scores as the run that was exported."""

    def said(*words: object, code: int = 0) -> str:
        assert cli.main([str(word) for word in words]) == code
        return "".join(capsys.readouterr())

    for words in (["generate", "--temperature", 0, "--prompt", "A"], ["evaluate", "--data", embedded_data]):
        first, second = (said(words[0], circle / name, *words[1:], "--device", "cpu") for name in ("run", "back"))
        assert first.replace(str(circle / "run"), str(circle / "back")) == second
    measured = said("benchmark", "--run", circle / "back", "--steps", 1, "--mode", "forward", "--out", circle / "cases")
    assert "| 2 × 16 | 16 " in measured
    refused = said("evaluate", circle / "back", code=EXIT_USER_ERROR)
    assert "back/data is not a prepared corpus" in refused
    refused = said("benchmark", "--run", circle / "back", "--size", "small", code=EXIT_USER_ERROR)
    assert "--run has a model of its own" in refused


def test_a_run_begins_with_imported_weights(circle, embedded_data, tmp_path):
    config = replace(RunFolder(circle / "back").config(), data=str(embedded_data), device="cpu", batch_size=4, steps=2)
    config = replace(config, optimizer__learning_rate=1e-9, optimizer__warmup_steps=0)
    result = train(replace(config, model__attention="sdpa"), tmp_path / "tuned")
    assert result.valid_loss == pytest.approx(RunFolder(circle / "run").result().valid_loss, abs=1e-5)
    assert train(replace(config, model__context_length=8), tmp_path / "short").state == "complete"
    for changes, message in (
        ({"model__norm_eps": 1e-5}, r"norm_eps \(0\.0001 there, 1e-05 here\)"),
        ({"init_from": str(tmp_path)}, "There are no weights"),
    ):
        with pytest.raises(UserError, match=message):
            train(replace(config, **changes), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_lm_eval_runs_on_an_export(circle, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    row = {"text": "Once", "more": " upon a"}
    (tmp_path / "rows.json").write_text(json.dumps(row))
    task = {
        "task": "local", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}}, "target_delimiter": "",
        "doc_to_text": "text", "doc_to_target": "more", "metric_list": [{"metric": "perplexity"}],
    }  # fmt: skip
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    arguments = f"pretrained={circle / 'out'},dtype=float32"
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate("hf", arguments, tasks=["local"], device="cpu", task_manager=manager)
    model, tokenizer = load_model(circle / "run/checkpoints/best.safetensors"), RunFolder(circle / "run").tokenizer()
    start, whole = (tokenizer.encode(text) for text in (row["text"], row["text"] + row["more"]))
    logits = logits_of(model, torch.tensor([whole]))[0, len(start) - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(whole[len(start) :]), reduction="sum").item()
    assert found["results"]["local"]["perplexity,none"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tokenizer of the package tokenizers, as a folder of transformers holds it, and the package's own."""
    tokenizers = pytest.importorskip("tokenizers")
    codec = tokenizers.ByteLevelBPETokenizer()
    codec.train_from_iterator([hard_text(100_000, 4)], 700, special_tokens=[END_OF_TEXT, "<|a|>"], show_progress=False)
    folder = tmp_path_factory.mktemp("theirs")
    codec.save_model(str(folder))
    codec.save(str(folder / "tokenizer.json"))
    return folder, codec


def test_tokenizers_of_the_gpt2_type_are_read(theirs, tmp_path):
    folder, codec = theirs
    text = hard_text(100_000, seed=5)
    assert Tokenizer.load(folder).encode(text) == codec.encode(text).ids
    for name in ("vocab.json", "merges.txt"):  # which do not say what is special
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    text = text.replace("<|a|>", "")
    assert Tokenizer.load(tmp_path).encode(text) == codec.encode(text).ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer"), ({"model.type": "Unigram"}, "model.type"),
        ({"post_processor": {"type": "TemplateProcessing"}}, "post_processor"), ({"added_tokens": None}, "not a whole"),
        ({"pre_tokenizer.add_prefix_space": True}, "add_prefix_space"), ({"model": {}}, "not a whole tokenizer.json"),
        ({"pre_tokenizer": {"type": "Sequence"}}, "another pattern"), ({"model.byte_fallback": True}, "byte_fallback"),
        ({"added_tokens.0.lstrip": True}, "lstrip"), ({"added_tokens.0.id": 5}, "same id"),
        ({"model.merges": ["a"]}, "not a whole tokenizer.json"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_refused_by_name(changes, message, theirs, tmp_path):
    content = json.loads((theirs[0] / "tokenizer.json").read_text(encoding="utf-8"))
    for path, value in changes.items():
        *names, last = (int(name) if name.isdecimal() else name for name in path.split("."))
        reduce(getitem, names, content)[last] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)
