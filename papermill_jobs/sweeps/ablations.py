"""What each part of the model and of its training is worth: one is taken away or replaced (CSE599-O A1 section 7.3)."""

from typing import Any

from lmcore.config import TrainConfig, replace

CHANGES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "no_norm": {"model__norm": "none"},  # problem layer_norm_ablation: diverges, or learns worse
    "no_norm_low_rate": {"model__norm": "none", "optimizer__learning_rate": 1e-4},
    "post_norm": {"model__norm": "post"},  # problem pre_norm_ablation
    "no_position": {"model__position": "none"},  # problem no_pos_emb
    "sinusoidal": {"model__position": "sinusoidal"},
    "tied_embeddings": {"model__tie_embeddings": True},
    "narrow_initialization": {"model__embedding_init_std": 0.02},
    "dropout": {"model__dropout": 0.1},
    "no_weight_decay": {"optimizer__weight_decay": 0.0},
    "no_warmup": {"optimizer__warmup_steps": 0},
    "no_clipping": {"optimizer__max_grad_norm": None},
    "epochs": {"sampling": "epoch"},  # every token once per pass, rather than windows at random
    "muon": {"optimizer__name": "muon", "optimizer__learning_rate": 5e-3},
    "sgd": {"optimizer__name": "sgd", "optimizer__learning_rate": 0.1},
}


def runs(base: TrainConfig) -> dict[str, TrainConfig]:
    found = {name: replace(base, **changes) for name, changes in CHANGES.items()}
    # problem swiglu_ablation: two matrices of 4 d_model, as many parameters
    return found | {"silu": replace(base, model__ffn="silu", model__d_ff=4 * base.model.d_model)}
