"""Numbers that no change of the code may move: batches, corpora, stories, and the losses of small runs.

Integers and digests are exact. Losses were computed on another processor and hold within the rounding of twelve steps;
an error in a step changes their second digit.
"""

import hashlib
from itertools import islice

import numpy as np
import pytest

from lmcore.config import CorpusConfig, ModelConfig, OptimizerConfig, TrainConfig, replace
from lmcore.data import open_data, prepare
from lmcore.data.batches import batch_at_step
from lmcore.data.grammar import entropy_per_document, stories
from lmcore.run import RunFolder
from lmcore.train import train

CONFIG = TrainConfig(
    model=ModelConfig(vocab_size=260, context_length=16, d_model=8, num_layers=2, num_heads=2, d_ff=16),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
    batch_size=4,
    steps=12,
    log_interval=2,
    eval_interval=3,
    eval_batch_size=64,
    checkpoint_interval=6,
    device="cpu",
)
SWITCHES = {
    "optimizer__name": "sgd", "model__norm": "post", "model__position": "sinusoidal", "model__ffn": "silu",
    "model__dropout": 0.1, "model__attention": "sdpa", "model__checkpoint_every": 1,
}  # fmt: skip
LOSSES = [  # settings; training loss of steps 1 and 2; training and validation loss of the last step
    ({}, 5.589019536972046, 5.369315147399902, 5.384023666381836),
    ({"ops": "fused", "model__attention": "flash"}, 5.589019536972046, 5.369315147399902, 5.384024143218994),
    ({"model__tie_embeddings": True, "sampling": "epoch"}, 6.031096696853638, 5.520870208740234, 5.545266628265381),
    ({"optimizer__name": "muon"}, 5.59010124206543, 5.440230846405029, 5.448162078857422),
    ({"precision": "fp16"}, 5.589006662368774, 5.369442939758301, 5.384156703948975),
    (SWITCHES, 5.616304874420166, 5.573818922042847, 5.5837860107421875),
]
BATCHES = [  # sampling, seed, step; first tokens of the windows, in a text whose token i is i
    ("random", 0, 0, [5090, 3811, 3058, 1614]),
    ("random", 5, 1000, [3511, 2590, 3451, 293]),
    ("epoch", 0, 1, [1806, 3966, 446, 5630]),
    ("epoch", 5, 1000, [3488, 2784, 4272, 5104]),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "data"
    return prepare("embedded", "bpe:260", folder, CorpusConfig(num_documents=30), progress=False).folder


@pytest.mark.parametrize(("changes", "first", "last", "valid"), LOSSES)
def test_losses(corpus, tmp_path, changes, first, last, valid):
    assert train(replace(CONFIG, data=str(corpus), **changes), tmp_path).state == "complete"
    lines = RunFolder(tmp_path).metrics_lines()
    found = [lines[0]["train_loss"], lines[-1]["train_loss"], lines[-1]["valid_loss"]]
    assert found == pytest.approx([first, last, valid], rel=2e-3 if "precision" in changes else 2e-5)


@pytest.mark.parametrize(("sampling", "seed", "step", "first"), BATCHES)
def test_batches(sampling, seed, step, first):
    config = replace(CONFIG, sampling=sampling, seed=seed)
    inputs, targets = batch_at_step(np.arange(6000, dtype=np.uint16), config, step, "cpu")
    assert inputs[:, 0].tolist() == first
    assert (targets == inputs + 1).all()


def test_a_corpus_and_the_stories_it_is_made_of(tmp_path):
    data = prepare("embedded", "bpe:260", tmp_path, CorpusConfig(num_documents=60), progress=False)
    assert data.fingerprint == open_data(tmp_path).fingerprint
    assert data.fingerprint == "09390dba9b279f99c6e997293333ca9bdad391df3774be848f23e40ce6c1c0e0"
    assert entropy_per_document() == pytest.approx(28.0038094062, abs=1e-9)
    text = "".join(f"{story}\n<|endoftext|>\n" for story in islice(stories(0), 20))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "4d8a0fa59170d09932acd60c785c6b2b758b175e5b8eacf257532132cd129de6"
    )
