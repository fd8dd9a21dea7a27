"""Files that were cut off, changed by a bit or lost: found, and repaired or refused in a sentence."""

import random
import signal
from pathlib import Path

import pytest
from fault_bench import AtSteps, Bench, ended, refusal

from lmcore.run import RunFolder


@pytest.fixture(scope="module")
def stopped(bench: Bench) -> RunFolder:
    """A run that ended after two thirds, with checkpoints of its steps 9 and 12."""
    run = bench.new()
    assert ended(bench.start(run, AtSteps(last=13))) == -signal.SIGKILL, bench.said(run)
    assert [path.name for path in run.checkpoints()] == ["step_00000012.pt", "step_00000009.pt"]
    return run


def cut(path: Path, rng: random.Random) -> None:
    """Truncates a file, at its very beginning and end more often than elsewhere."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice((0, len(content) - 1, rng.randrange(len(content))))])


def flip(path: Path, rng: random.Random) -> None:
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def lose(path: Path, rng: random.Random) -> None:
    """Removes a file."""
    path.unlink()


def half_line(path: Path, rng: random.Random) -> None:
    """Adds the beginning of a line, or half of the last line with the next one's beginning."""
    text = path.read_text()
    line = text.splitlines()[-1]
    path.write_text(text + line[: rng.randrange(1, len(line))] + rng.choice(("", "\n")))


def files(run: RunFolder) -> dict[Path, bytes]:
    """What a refusal leaves as it is."""
    kept = (path for path in run.path.rglob("*") if path.suffix in (".pt", ".safetensors", ".jsonl"))
    return {path: path.read_bytes() for path in kept}


@pytest.mark.parametrize(
    ("kind", "names", "damages", "count"),
    [
        ("newest checkpoint truncated", "checkpoints/*12.pt", [cut], 12),
        ("newest checkpoint with a flipped bit", "checkpoints/*12.pt", [flip], 25),
        ("every checkpoint damaged", "checkpoints/*.pt", [cut, flip], 24),
        ("metrics of a stopped run damaged", "metrics.jsonl", [cut, half_line, lose], 25),
        ("metrics of a complete run damaged", "metrics.jsonl", [cut, half_line, lose], 25),
        *((f"{name} damaged", name, [cut, lose], 13) for name in ("status.json", "config.json", "environment.json")),
        *((f"{name} damaged", f"*/{name}", [cut, flip, lose], 36) for name in ("best.safetensors", "last.safetensors")),
    ],
)
def test_damage(bench: Bench, stopped, fault, rng, tries, kind: str, names: str, damages: list, count: int):
    """The run is repaired, or refused in one sentence and then resumes once the file is back; lost lines are said."""
    for number in range(tries(count)):
        either = kind.endswith(".json damaged") or "best" in kind
        run = bench.copy(bench.straight if ("complete" in kind or "last" in kind, number % 2)[either] else stopped)
        before = {path: path.read_bytes() for path in run.path.glob(names)}
        for path in before:
            damages[number % len(damages)](path, rng)
        there = files(run)
        with fault(kind) as it:
            said = bench.finish(run)
            if "lmcore:" in said:
                assert not kind.startswith("newest"), said
                it.refused, sentence = True, refusal(said)
                words = ("No checkpoint in", "made with other settings", *(path.name for path in before))
                assert any(word in sentence for word in words), sentence
                assert files(run) == there
                for path, content in before.items():
                    path.write_bytes(content)
                bench.finish(run)
            elif kind.startswith("newest") and "resuming from step 12" not in said:  # a bit of padding may not matter
                assert "step_00000012.pt is" in said
                assert "The checkpoint before it is tried" in said
                assert "resuming from step 9" in said
                assert (run.checkpoint_folder / "step_00000012.damaged").exists()
            if "has lost lines" in said:
                it.refused = True
                assert len(run.metrics_lines()) < len(bench.straight.metrics_lines())
                assert run.status()["state"] == "complete"
            else:
                bench.require_same(run)
