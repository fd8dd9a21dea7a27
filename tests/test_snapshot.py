"""Allocation histories: replaying events, reading CUDA snapshots, and what they sum up to."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lmcore.errors import UserError
from lmcore.profiling.memory.snapshot import (
    NO_FRAME,
    Allocation,
    Event,
    History,
    Stage,
    counted_states,
    history_of,
    read_snapshot,
    replay,
    source_of,
    state_after,
)
from lmcore.profiling.memory.timeline import (
    CATEGORIES,
    LARGEST,
    RECTANGLES,
    TIMELINE_POINTS,
    bytes_by_state,
    summary,
)

MODEL = Path(__file__).parents[1] / "lmcore" / "model.py"


def frame(filename, line=1, name="f"):
    return {"filename": filename, "line": line, "name": name}


def entry(action, address, size, time=0, frames=()):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": list(frames)}


def freed(address, size, time=0):
    return [entry("free_requested", address, size, time), entry("free_completed", address, size, time)]


def block(address, size, requested, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


@pytest.fixture
def snapshot():
    """Before: 1000 bytes at 0x100 (stay) and 2000 at 0x500 (freed). 300 come and stay, 700 come and go."""
    trace = [
        entry("segment_alloc", 0x1000, 2_097_152, 5),
        entry("alloc", 0x1000, 300, 10, [frame("/somewhere/lmcore/model.py", 10**6, "forward")]),
        *freed(0x500, 2000, 20),
        entry("alloc", 0x2000, 700, 30),
        *freed(0x2000, 700, 50),
        {"action": "oom", "size": 10**12, "device_free": 5, "stream": 0, "frames": [], "time_us": 60},
        entry("snapshot", 0, 0, 70),
    ]
    segments = [
        {
            "device": 0,
            "address": 0x100,
            "total_size": 4096,
            "blocks": [block(0x100, 1024, 1000), block(0x500, 3072, 0, "inactive")],
        },
        {"device": 0, "address": 0x1000, "total_size": 2_097_152, "blocks": [block(0x1000, 512, 300)]},
        {"device": 1, "address": 0x9000, "total_size": 512, "blocks": [block(0x9000, 512, 512)]},
    ]
    return {"device_traces": [trace, []], "segments": segments}


def found(history):
    return [(a.address, a.bytes, a.first, a.last) for a in history.allocations]


def test_a_cuda_snapshot_gives_every_allocation_and_what_was_there_before(snapshot):
    history = history_of(snapshot)
    assert found(history) == [(0x100, 1000, 0, 5), (0x500, 2000, 0, 2), (0x1000, 300, 1, 5), (0x2000, 700, 3, 4)]
    assert np.allclose(history.seconds, [0, 0, 10e-6, 20e-6, 40e-6])
    assert history.allocations[2].source == "lmcore/model.py:1000000 forward"
    said = summary(history)
    assert (said["before_bytes"], said["peak_bytes"], said["after_bytes"]) == (3000, 3300, 1300)
    assert said["categories"][-1] == "unknown"
    assert said["peak_by_category"]["unknown"] == 3300
    assert said["peak_event"] == 1
    assert said["peak_stage"] is None


def test_blocks_without_addresses_follow_each_other(snapshot):
    for segment in snapshot["segments"]:
        for one in segment["blocks"]:
            del one["address"]
    assert (0x100, 1000, 0, 5) in found(history_of(snapshot))


def test_times_are_counted_where_a_record_has_none(snapshot):
    for one in snapshot["device_traces"][0]:
        one.pop("time_us")
    assert np.allclose(history_of(snapshot).seconds, [0, 0, 1e-6, 2e-6, 3e-6])


def test_another_device_has_another_history(snapshot):
    snapshot["device_traces"][1] = [entry("alloc", 0x9000, 512, 1), entry("alloc", 0x9200, 100, 2)]
    assert found(history_of(snapshot, 1)) == [(0x9000, 512, 1, 3), (0x9200, 100, 2, 3)]


def test_a_moment_is_found_from_what_is_still_to_come(snapshot):
    told = counted_states(snapshot["device_traces"][0])
    assert told == ([1, 3], [2, 4])
    assert state_after(2, 2, told) == 0  # before everything, even where a full record forgot more
    assert state_after(5, 4, told) == 0
    assert state_after(1, 2, told) == 1
    assert state_after(1, 1, told) == 2
    assert state_after(0, 1, told) == 3
    assert state_after(0, 0, told) == 4


def test_replay_uses_addresses_again():
    events = [Event(1, 10, 0.0), Event(1, -10, 0.1), Event(1, 20, 0.2), Event(1, 30, 0.3)]
    assert [(a.bytes, a.first, a.last) for a in replay(events)] == [(10, 1, 2), (20, 3, 4), (30, 4, 5)]


def test_replay_matches_a_simulation():
    generator = np.random.default_rng(0)
    alive = {int(address): 100 + int(address) for address in range(5)}
    standing, events, totals = [Event(a, b, 0.0) for a, b in alive.items()], [], [sum(alive.values())]
    for _ in range(500):
        address = int(generator.integers(0, 40))
        if address in alive:
            events.append(Event(address, -alive.pop(address), 0.0))
        else:
            alive[address] = int(generator.integers(1, 1000))
            events.append(Event(address, alive[address], 0.0))
        totals.append(sum(alive.values()))
    touched = {event.address for event in events}
    history = History("t", replay(events, standing), tuple(range(501)))
    assert bytes_by_state(history, ["unknown"])[0].tolist() == totals
    # what is freed first needs no telling
    untold = replay(events, [event for event in standing if event.address not in touched])
    assert [(a.address, a.bytes, a.first, a.last) for a in untold] == found(history)


def line_of(text):
    return next(i for i, line in enumerate(MODEL.read_text().splitlines(), start=1) if text in line)


def test_sources_are_lines_of_lmcore_first():
    line = line_of("return x @ self.weight.T")
    torch_frame = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1, "_call_impl")
    ours = frame("/home/u/lmcore/lmcore/model.py", line, "forward")
    outer = frame("/home/u/lmcore/lmcore/train.py", 1, "train")
    backward = frame("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector)")
    assert source_of([torch_frame, ours, outer]) == f"lmcore/model.py:{line} Linear.forward"
    assert source_of([backward, ours]) == f"lmcore/model.py:{line} Linear.forward"
    assert source_of([torch_frame, frame("/a/b/script.py", 7, "main")]) == "b/script.py:7 main"
    assert source_of([torch_frame, backward]) == "MulBackward0"
    assert source_of([frame("/home/u/lmcore/.venv/lib/site-packages/torch/optim/adam.py", 3, "step")]) == NO_FRAME
    assert source_of([]) == NO_FRAME


def test_a_snapshot_file_is_read_and_others_are_refused(tmp_path, snapshot):
    good = tmp_path / "good.pickle"
    good.write_bytes(pickle.dumps(snapshot))
    assert read_snapshot(good) == snapshot
    for name, content in (
        ("text", b"hello"),
        ("empty", b""),
        ("list", pickle.dumps([1])),
        ("half", pickle.dumps(snapshot)[:-20]),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is no memory snapshot"):
            read_snapshot(path)
    with pytest.raises(UserError, match=r"Cannot read .*nothing"):
        read_snapshot(tmp_path / "nothing")


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    path = tmp_path / "bad.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [], "segments": [], "x": Harm()}))
    with pytest.raises(UserError, match="no memory snapshot"):
        read_snapshot(path)
    assert not (tmp_path / "harm").exists()


def test_snapshots_without_history_or_of_another_format_are_refused(snapshot):
    with pytest.raises(UserError, match="no history"):
        history_of({"device_traces": [[], []], "segments": []})
    del snapshot["device_traces"][0][1]["addr"]
    with pytest.raises(UserError, match=r"damaged.*addr"):
        history_of(snapshot)


@pytest.fixture
def long_history():
    """10,000 states of a walk with one needle, in two stages."""
    generator = np.random.default_rng(1)
    allocations = [Allocation(0, 5_000, 0, 10_000, "w", "parameters")]
    for state in range(1, 10_000):
        last = int(min(10_000, state + generator.integers(1, 300)))
        category = CATEGORIES[int(generator.integers(3, 6))]
        allocations.append(Allocation(state, int(generator.integers(1, 100)), state, last, "s", category, "forward"))
    allocations.append(Allocation(10**6, 10**6, 777, 778, "needle", "temporary", "forward"))
    stages = (Stage("forward", 0, 4_000), Stage("backward", 4_001, 9_999))
    return History("t", tuple(allocations), tuple(i / 1000 for i in range(10_000)), stages)


def test_the_timeline_is_short_and_keeps_peaks(long_history):
    said = summary(long_history)
    timeline = said["timeline"]
    total = np.sum(list(timeline["bytes"].values()), axis=0)
    assert len(total) == len(timeline["seconds"]) == len(timeline["event"]) <= TIMELINE_POINTS
    exact = bytes_by_state(long_history, CATEGORIES).sum(axis=0)
    assert total.max() == exact.max() == said["peak_bytes"]
    assert said["peak_event"] == 777
    assert total.tolist() == exact[timeline["event"]].tolist()
    assert timeline["event"][0] == 0
    assert timeline["event"][-1] == 9_999
    for row, (first, last) in zip(said["stages"], ((0, 4_000), (4_001, 9_999)), strict=True):
        inside = [i for i, event in enumerate(timeline["event"]) if first <= event <= last]
        assert row["peak_bytes"] == exact[first : last + 1].max() == total[inside].max()
        assert (row["start_bytes"], row["end_bytes"]) == (exact[first], exact[last])
        assert sum(row["peak_by_category"].values()) == row["peak_bytes"]
    assert said["peak_stage"] == "forward"
    assert sum(said["peak_by_category"].values()) == said["peak_bytes"]


def test_a_short_timeline_has_the_outline_of_the_whole(long_history):
    """Near each state one is kept that is as high, and one that is as low."""
    timeline = summary(long_history)["timeline"]
    event, total = np.array(timeline["event"]), np.sum(list(timeline["bytes"].values()), axis=0)
    exact = bytes_by_state(long_history, CATEGORIES).sum(axis=0)
    width = 2 * len(exact) // TIMELINE_POINTS + 2
    for state, value in enumerate(exact):
        near = total[np.searchsorted(event, state - width) : np.searchsorted(event, state + width, side="right")]
        assert near.min() <= value <= near.max()


def test_the_largest_are_grouped_and_ordered(long_history):
    said = summary(long_history)
    rows = said["largest"]
    assert len(rows) == LARGEST
    assert rows[0]["source"] == "needle"
    assert rows[0]["seconds"] == pytest.approx(0.001)
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    assert all(row["total_bytes"] == row["bytes"] * row["count"] for row in rows)
    assert said["standing"][0]["kept"] == 1
    assert len(said["allocations"]) == RECTANGLES + 1
    assert said["allocations_total"] == 10_001
    assert said["allocations"][0]["source"] == "parameters (1 allocation)"
    assert said["allocations_smallest_bytes"] == min(row["bytes"] for row in said["allocations"])
