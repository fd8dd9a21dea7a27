"""Files that were cut off, changed by a bit or lost: found, and repaired or refused in a sentence."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_bench import Bench, Tally, ended
from file_faults import AtSteps

from lmcore.config import replace
from lmcore.run import RunFolder

CUTS, FLIPS = 12, 25


@pytest.fixture(scope="module")
def stopped(bench: Bench) -> RunFolder:
    """A run that ended after two thirds, with checkpoints of its steps 9 and 12."""
    run = bench.new()
    process = bench.start(run, AtSteps(last=13))
    assert ended(process) == -signal.SIGKILL, bench.said(run)
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


Damage = Callable[[Path, random.Random], None]


@pytest.mark.parametrize(("damage", "times", "kind"), [(cut, CUTS, "truncated"), (flip, FLIPS, "with a flipped bit")])
def test_newest_checkpoint(bench: Bench, stopped, tally: Tally, rng, tries, damage: Damage, times: int, kind: str):
    for _ in range(tries(times)):
        run = bench.copy(stopped)
        newest, _ = run.checkpoints()
        damage(newest, rng)
        with tally.fault(f"newest checkpoint {kind}"):
            said = bench.finish(run)
            assert "lmcore:" not in said, said
            if "resuming from step 12" not in said:  # a bit of padding may not matter
                assert f"{newest.name} is" in said
                assert "The checkpoint before it is tried" in said
                assert "resuming from step 9" in said
                assert newest.with_suffix(".damaged").exists()
            bench.require_same(run)
        bench.forget(run)


@pytest.mark.parametrize("damage", [cut, flip])
def test_every_checkpoint(bench: Bench, stopped, tally: Tally, rng, tries, damage: Damage):
    for _ in range(tries(CUTS)):
        run = bench.copy(stopped)
        whole = {path: path.read_bytes() for path in run.checkpoints()}
        for path in whole:
            damage(path, rng)
        with tally.fault("every checkpoint damaged") as fault:
            there = files(run)
            said = bench.finish(run)
            if "No checkpoint in" in said:
                fault.refused = True
                assert one_sentence(said)
                after = files(run)
                kept = [path for path in there if path.suffix in (".pt", ".safetensors", ".jsonl")]
                assert [after[path] for path in kept] == [there[path] for path in kept]
                for path, content in whole.items():  # as the sentence says
                    path.write_bytes(content)
                bench.finish(run)
            bench.require_same(run)
        bench.forget(run)


@pytest.mark.parametrize("damage", [cut, lose, half_line])
@pytest.mark.parametrize("ended", [False, True], ids=["stopped", "complete"])
def test_metrics(bench: Bench, stopped, tally: Tally, rng, tries, damage: Damage, ended: bool):
    """What is lost is said: a stopped run continues, a complete one is refused until the file is put back."""
    for _ in range(1 if damage is lose else tries(CUTS)):
        run = bench.copy(bench.straight if ended else stopped)
        before = run.metrics_file.read_bytes()
        damage(run.metrics_file, rng)
        with tally.fault(f"metrics of a {'complete' if ended else 'stopped'} run damaged") as fault:
            said = bench.finish(run)
            if "lmcore:" in said:
                fault.refused = ended
                assert one_sentence(said)
                run.metrics_file.write_bytes(before)
                bench.finish(run)
            if "has lost lines" in said:
                fault.refused = True
                assert len(run.metrics_lines()) < len(bench.straight.metrics_lines())
                assert run.status()["state"] == "complete"
            else:
                bench.require_same(run)
        bench.forget(run)


@pytest.mark.parametrize("damage", [cut, lose])
@pytest.mark.parametrize("name", ["status.json", "config.json", "environment.json"])
def test_notes(bench: Bench, stopped, tally: Tally, rng, tries, damage: Damage, name: str):
    for number in range(1 if damage is lose else tries(CUTS)):
        run = bench.copy(bench.straight if number % 2 else stopped)
        try_damage(bench, run, tally, rng, run.path / name, damage, "made with other settings")


@pytest.mark.parametrize("damage", [cut, flip, lose])
@pytest.mark.parametrize("name", ["best.safetensors", "last.safetensors"])
def test_weights(bench: Bench, stopped, tally: Tally, rng, tries, damage: Damage, name: str):
    for number in range(tries(CUTS)):
        run = bench.copy(bench.straight if number % 2 or name.startswith("last") else stopped)
        try_damage(bench, run, tally, rng, run.checkpoint_folder / name, damage)


def try_damage(bench: Bench, run: RunFolder, tally: Tally, rng, path: Path, damage: Damage, *words: str) -> None:
    """Damages a file of a run, which is repaired, or refused in a sentence that has its name or other words."""
    before = path.read_bytes()
    damage(path, rng)
    with tally.fault(f"{path.name} damaged") as fault:
        said = bench.finish(run)
        if "lmcore:" in said:
            fault.refused = True
            assert one_sentence(said)
            assert any(word in said for word in (path.name, *words))
            path.write_bytes(before)
            bench.finish(run)
        bench.require_same(run)
    assert run.config() == replace(bench.config)
    bench.forget(run)


def files(run: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def one_sentence(said: str) -> bool:
    """Whether a refusal is one line that ends in a full stop, without a traceback."""
    refusals = [line for line in said.splitlines() if line.startswith("lmcore:")]
    return len(refusals) == 1 and refusals[0].endswith(".") and "Traceback" not in said
