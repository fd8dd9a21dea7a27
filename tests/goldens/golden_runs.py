"""The runs whose folders are committed: small, one for each way in which a checkpoint can differ."""

import shutil
from pathlib import Path
from typing import Any

import golden_library as library

HERE = Path(__file__).parent
FOLDER = HERE / "run_folders"
CORPUS = HERE / "corpus"
STEPS, MIDDLE = 12, 6
"""Steps of a run, and the step of its committed checkpoint."""

TIMES = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}
"""Fields of a metrics line that no two runs share."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"ops": "fused", "model__attention": "flash"},
    "tied": {"model__tie_embeddings": True, "sampling": "epoch"},
    "muon": {"optimizer__name": "muon"},
    "fp16": {"precision": "fp16"},
    "switches": {
        "optimizer__name": "sgd",
        "model__norm": "post",
        "model__position": "sinusoidal",
        "model__ffn": "silu",
        "model__dropout": 0.1,
        "model__attention": "sdpa",
        "model__checkpoint_every": 1,
    },
}
"""What each run changes in `base_config`. On a CPU, fused runs compute with the kernels' reference implementations."""


def base_config(data: Path = CORPUS) -> Any:
    """The plain run."""
    return library.TrainConfig(
        model=library.ModelConfig(
            vocab_size=260, context_length=16, d_model=8, num_layers=2, num_heads=2, d_ff=16, rope_theta=10_000.0
        ),
        optimizer=library.OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        data=str(data),
        batch_size=4,
        steps=STEPS,
        log_interval=2,
        eval_interval=MIDDLE // 2,
        eval_batch_size=64,
        checkpoint_interval=MIDDLE,
        keep_checkpoints=2,
        device="cpu",
    )


def prepare_corpus(folder: Path) -> Any:
    """Thirty embedded stories, in bytes and three merges."""
    corpus = library.CorpusConfig(num_documents=30)
    return library.prepare("embedded", "bpe:260", folder, corpus, progress=False)


def write_runs(project: Path) -> None:
    """Writes corpus and run folders anew; paths in them are relative to `project`.

    The last step's checkpoint is left out to save room: nothing reads it in a folder that is complete.
    """
    for folder in (CORPUS, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    prepare_corpus(CORPUS)
    for name, changes in VARIANTS.items():
        config = library.replace(base_config(CORPUS.relative_to(project)), **changes)
        run = library.RunFolder(FOLDER / name)
        assert library.train(config, run).state == "complete"
        run.checkpoint_file(STEPS).unlink()
        (run.path / ".lock").unlink(missing_ok=True)
    for path in (CORPUS / "checked.json", CORPUS / ".lock"):  # of this machine
        path.unlink(missing_ok=True)


def copy_of(name: str, folder: Path) -> Any:
    """A committed run folder, copied to where it may be written to."""
    return library.RunFolder(shutil.copytree(FOLDER / name, folder / name))


def stopped_copy(name: str, folder: Path) -> Any:
    """The same as a process left it that was killed right after the checkpoint of the middle."""
    run = copy_of(name, folder)
    run.status_file.unlink()
    run.last_weights.unlink()
    return run


def config_of(run: Any, corpus: Path) -> Any:
    """The configuration noted in a run folder, with the corpus where it is here."""
    return library.replace(run.config(), data=str(corpus))


def results(run: Any) -> dict[str, Any]:
    """What a run computed, times left out."""
    status = run.status()
    return {
        "status": (status["state"], status["step"], status["valid_loss"], status["best_valid_loss"]),
        "last": library.digest(library.read_weights(run.last_weights)[0]),
        "best": library.digest(library.read_weights(run.best_weights)[0]),
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in run.metrics_lines()],
    }
