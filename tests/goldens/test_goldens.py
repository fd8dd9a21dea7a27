"""Behaviour that was frozen at 36acd2f: what is computed now is what was written then (README.md in this folder)."""

import copy
import json
import re
from pathlib import Path

import golden_parts
import golden_runs
import pytest
from golden_parts import HERE, OWN_EXPORT, PARTS, RANGES, committed, computed

ABSENT = object()


def differences(there, here, place: str = "") -> list[str]:
    """In words, every place at which two values of plain data differ; floats may in their last digit."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        pairs = [(f"{place} / {key}", there.get(key, ABSENT), here.get(key, ABSENT)) for key in keys]
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = [(f"{place} [{number}]", *pair) for number, pair in enumerate(zip(there, here, strict=True))]
    else:
        same = there == pytest.approx(here, rel=1e-9) if type(there) is type(here) is float else there == here
        then, now = ("nothing" if value is ABSENT else repr(value) for value in (there, here))
        return [] if same else [f"{place.removeprefix(' / ')}: {then} then, {now} now"]
    return [found for where, a, b in pairs for found in differences(a, b, where)]


def require_same(there, here, part: str) -> None:
    found = differences(there, here)
    more = f"\n… and {len(found) - 20} more" if len(found) > 20 else ""
    how = f"If it was meant: python tests/goldens/make.py {part}, and the commit says why."
    assert not found, f"{part}:\n" + "\n".join(found[:20]) + more + f"\n{how}"


@pytest.mark.parametrize("part", ["architecture", "batches", "corpora", "grammar", "memory", "options", "signatures"])
def test_values_are_as_they_were(part):
    require_same(committed(part), computed(part), part)


def test_tokenizers_are_as_they_were():
    there, here = committed("tokenizers"), computed("tokenizers")
    if "gpt2" not in here:
        there.pop("gpt2")  # its files are not here
    require_same(there, here, "tokenizers")


def test_batches_are_told_apart():
    found = committed("batches")
    assert len({tuple(starts) for starts in found.values()}) == len(found)


def test_bad_input_is_answered_as_it_was():
    """A sentence may gain words; exit codes stay, and no line of the table is lost."""
    there, here = committed("refusals"), computed("refusals")
    assert len(there) >= 150
    assert all(answer["exit code"] == 2 and len(answer["says"]) == 1 for answer in there.values())
    require_same(there, here, "refusals")


@pytest.mark.parametrize("name", RANGES)
def test_profiles_are_read_as_they_were(name, monkeypatch):
    if name not in {path.name for path in golden_parts.exports()}:
        pytest.skip(f"no real export {name} here: set LMCORE_TEST_NSYS to its folder")
    monkeypatch.setattr(golden_parts, "RANGES", {name: RANGES[name]})
    require_same({name: committed("nsys")[name]}, computed("nsys"), "nsys")


@pytest.fixture(scope="module")
def suites(collected_here):
    """What this run has collected, if that is everything; else pytest is asked."""
    there, here = committed("suites"), golden_parts.suites(collected_here)
    whole = set(there["slurm"] + there["faults"]) <= set(collected_here)
    return here if whole else computed("suites")


@pytest.mark.parametrize("suite", ["slurm", "faults"])
def test_no_test_of_a_long_suite_has_disappeared(suites, suite):
    missing = sorted(set(committed("suites")[suite]) - set(suites[suite]))
    assert not missing, f"tests that were collected at the goldens' commit and are not now: {', '.join(missing)}"


def test_every_kind_of_fault_is_still_tried(suites):
    there = committed("suites")
    assert sum(tried for tried, *_ in there["kinds"].values()) == 655
    patterns = [re.escape(kind).replace(r"\*", ".*") for kind in suites["counted"]]
    untried = [kind for kind in there["kinds"] if not any(re.fullmatch(pattern, kind) for pattern in patterns)]
    assert not untried, f"no test counts {untried}"
    fewer = {name: count for name, count in there["numbers"].items() if suites["numbers"].get(name, 0) < count}
    assert not fewer, f"tried less often than at the goldens' commit, or under another name: {fewer}"


def test_the_committed_report_of_the_faults_has_all_kinds(suites):
    """Kills that hit a save or not depend on the moment; all others are counted exactly."""
    there, here = committed("suites")["kinds"], suites["kinds"]
    for kind, (tried, *_, lost) in there.items():
        assert kind in here
        assert here[kind][-1] == lost == 0
        if "random moment" not in kind:
            assert here[kind][0] >= tried, kind


@pytest.mark.parametrize("part", PARTS)
def test_a_golden_says_what_wrote_it(part):
    source = json.loads((HERE / f"{part}.json").read_text(encoding="utf-8"))["written_at"]
    assert re.fullmatch(r"[0-9a-f]{40}", source["git_commit"])
    assert source["torch"]


def test_a_difference_is_found_and_named():
    there = {"a": [1, 2.0], "b": {"c": "x"}}
    here = copy.deepcopy(there)
    assert differences(there, here) == []
    here["a"][1], here["b"]["d"] = 2.5, None
    assert differences(there, here) == ["a [1]: 2.0 then, 2.5 now", "b / d: nothing then, None now"]
    assert differences([1], [1, 2]) == [": [1] then, [1, 2] now"]


def test_the_goldens_are_small():
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert size < 1_500_000
    assert Path(golden_runs.FOLDER).is_dir()
    assert OWN_EXPORT in committed("nsys")
