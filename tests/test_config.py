"""Configs refuse what they do not know, survive JSON, and change by copies."""

import dataclasses
import json
import math

import pytest

from lmcore.config import (
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    from_dict,
    model_config,
    replace,
    to_dict,
)
from lmcore.errors import UserError


def test_defaults_are_the_handouts():
    assert model_config("tinystories") == ModelConfig()
    config = ModelConfig()
    assert (config.d_model, config.d_ff, config.num_layers, config.num_heads) == (512, 1344, 4, 16)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (10_000, 256, 10_000.0)
    assert (config.norm, config.position, config.ffn) == ("pre", "rope", "swiglu")
    assert (config.tie_embeddings, config.dropout) == (False, 0.0)


CHANGED = replace(TrainConfig(), steps=7, model__d_model=64, optimizer__betas=(0.8, 0.9))


@pytest.mark.parametrize("config", [ModelConfig(), OptimizerConfig(), TrainConfig(), GenerateConfig(), CHANGED])
def test_configs_survive_json_and_are_frozen(config):
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_are_finite(number):
    for kind in (ModelConfig, OptimizerConfig, GenerateConfig):
        for name in (field.name for field in dataclasses.fields(kind) if "float" in str(field.type)):
            with pytest.raises(UserError, match=f"^{name} must (not )?be .*{number}"):
                kind(**{name: (number, 0.5) if name == "betas" else number})


def test_replace_reaches_into_sections_and_whole_numbers_serve_as_floats():
    config = TrainConfig()
    changed = replace(config, seed=5, optimizer__learning_rate=3e-4, model__norm="post")
    assert (changed.seed, changed.optimizer.learning_rate, changed.model.norm) == (5, 3e-4, "post")
    assert config == TrainConfig()
    assert replace(config, batch_size=32, model__context_length=256).tokens_per_step == 8192
    ones = from_dict(OptimizerConfig, {"learning_rate": 1, "max_grad_norm": None})
    assert isinstance(ones.learning_rate, float)
    assert ones.max_grad_norm is None


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: ModelConfig(d_model=15, num_heads=5), r"position=rope needs an even number of features, not 3\.$"),
        (lambda: ModelConfig(d_model=15, num_heads=5, position="sinusoidal"), r"an even number of features, not 15\.$"),
        (lambda: ModelConfig(num_layers=2.0), r"num_layers must be a positive whole number, not 2\.0\.$"),
        (lambda: ModelConfig(norm="layer"), r"norm must be one of pre, post, none, not 'layer'\.$"),
        (lambda: model_config("giant"), r"no model size 'giant'; choose one of tinystories, small"),
        (lambda: GenerateConfig(seed=2**63), "seed must be a whole number from 0 to"),
        (lambda: from_dict(ModelConfig, {"rope_theta": 10**400}), "rope_theta must be a finite number"),
        (lambda: from_dict(TrainConfig, {"model": {"depth": 2}}), "ModelConfig has no field depth; its fields are"),
        (lambda: from_dict(TrainConfig, {"steps": "10"}), r"TrainConfig\.steps must be of type int, not '10'\.$"),
        (lambda: from_dict(TrainConfig, {"model": 3}), r"ModelConfig needs a mapping of fields, not 3\.$"),
        (lambda: from_dict(OptimizerConfig, {"betas": [0.9, "x"]}), "betas must be of type float, not 'x'"),
        (lambda: replace(TrainConfig(), modell__d_model=1), r"TrainConfig has no field modell; did you mean model\?$"),
    ],
)
def test_bad_values_get_one_sentence(build, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        build()
    assert "\n" not in str(error.value)
