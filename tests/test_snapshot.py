"""Allocation histories: replaying events, reading CUDA snapshots, and what they sum up to."""

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmcore.errors import UserError
from lmcore.profiling.memory import snapshot as module
from lmcore.profiling.memory.snapshot import Event, History, histories_of, history_of, read_snapshot, replay
from lmcore.profiling.memory.timeline import CATEGORIES, LARGEST, TIMELINE_POINTS, levels, summary

MODEL = Path(__file__).parents[1] / "lmcore" / "model.py"


def frame(filename, line=1, name="f"):
    return {"filename": filename, "line": line, "name": name}


def entry(action, address, size, time=0, frames=()):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": list(frames)}


def freed(address, size, time=0):
    return [entry("free_requested", address, size, time), entry("free_completed", address, size, time)]


def segment(device, address, *blocks):
    keys = ("address", "size", "requested_size", "state")
    return {"device": device, "address": address, "blocks": [dict(zip(keys, one, strict=True)) for one in blocks]}


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
        segment(0, 0x100, (0x100, 1024, 1000, "active_allocated"), (0x500, 3072, 0, "inactive")),
        segment(0, 0x1000, (0x1000, 512, 300, "active_allocated")),
        segment(1, 0x9000, (0x9000, 512, 512, "active_allocated")),
    ]
    return {"device_traces": [trace, []], "segments": segments}


def told(allocations, *columns):
    return [*allocations[[*columns, "bytes", "first", "last"]].itertuples(index=False, name=None)]


def test_a_cuda_snapshot_gives_every_allocation_and_what_was_there_before(snapshot):
    history, other = histories_of(snapshot).values()
    assert told(other.allocations, "address") == [(0x9000, 512, 0, 1)]  # the other device's
    expected = [(0x100, 1000, 0, 5), (0x500, 2000, 0, 2), (0x1000, 300, 1, 5), (0x2000, 700, 3, 4)]
    assert told(history.allocations, "address") == expected
    assert np.allclose(history.seconds, [0, 0, 10e-6, 20e-6, 40e-6])
    assert history.allocations["source"][2] == "lmcore/model.py:1000000 forward"
    said = summary(history)
    assert (said["before_bytes"], said["peak_bytes"], said["after_bytes"]) == (3000, 3300, 1300)
    assert (said["categories"], said["peak_by_category"]) == (["unknown"], {"unknown": 3300})
    assert (said["peak_event"], said["peak_stage"]) == (1, None)


def test_replay_matches_a_simulation():
    missing = [Event(1, size) for size in (10, -10, 20, 30)]  # where a free is missing, the next allocation ends it
    assert told(replay(missing)) == [(10, 1, 2), (20, 3, 4), (30, 4, 5)]
    generator = np.random.default_rng(0)
    alive = {int(address): 100 + int(address) for address in range(5)}
    standing, events, totals = [Event(*item) for item in alive.items()], [], [sum(alive.values())]
    for _ in range(500):
        address = int(generator.integers(0, 40))
        if address in alive:
            events.append(Event(address, -alive.pop(address)))
        else:
            alive[address] = int(generator.integers(1, 1000))
            events.append(Event(address, alive[address]))
        totals.append(sum(alive.values()))
    history = History("t", replay(events, standing), range(501))
    assert levels(history)["unknown"].tolist() == totals
    # what is freed first needs no telling
    touched = {event.address for event in events}
    untold = replay(events, [event for event in standing if event.address not in touched])
    pd.testing.assert_frame_equal(untold, history.allocations)


def test_sources_are_lines_of_lmcore_first():
    line = 1 + (MODEL.read_text().splitlines().index("        return x @ self.weight.T"))
    torch_frame = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1, "_call_impl")
    ours, outer = (frame(f"/home/u/lmcore/lmcore/{name}.py", line, "forward") for name in ("model", "train"))
    backward = frame("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector)")
    for frames, source in (
        ([torch_frame, ours, outer], f"lmcore/model.py:{line} Linear.forward"),
        ([backward, ours], f"lmcore/model.py:{line} Linear.forward"),
        ([torch_frame, frame("/a/b/script.py", 7, "main")], "b/script.py:7 main"),
        ([torch_frame, frame("<ipython-input-3-ab>", 4, "<module>"), backward], "<ipython-input-3-ab>:4 <module>"),
        ([torch_frame, backward], "MulBackward0"),
        ([torch_frame], module.NO_FRAME),
    ):
        assert module.source_of(frames) == source


@pytest.mark.parametrize("content", [b"hello", b"", pickle.dumps([1]), pickle.dumps({"device_traces": []})[:-20]])
def test_other_files_are_refused(tmp_path, content):
    """That nothing in them is executed is tested with all readers."""
    (tmp_path / "s.pickle").write_bytes(content)
    with pytest.raises(UserError, match=r"s\.pickle is not a memory snapshot"):
        read_snapshot(tmp_path / "s.pickle")
    with pytest.raises(UserError, match=r"Cannot read .*nothing"):
        read_snapshot(tmp_path / "nothing")
    with pytest.raises(UserError, match="no history"):
        history_of({"device_traces": [[], []], "segments": []})


@pytest.mark.fault("file of another program that is damaged", "refused_in_words")
@pytest.mark.parametrize("change", [{"addr": None}, {"size": "big"}, {"size": 1 << 60}, {"action": None}], ids=str)
def test_damaged_snapshots_are_refused(snapshot, change):
    first = snapshot["device_traces"][0]
    first[1] = {key: value for key, value in (first[1] | change).items() if value is not None}
    with pytest.raises(UserError, match="damaged"):
        history_of(snapshot)


@pytest.fixture(scope="module")
def long_history():
    """10,000 states of a walk with one needle, in two stages."""
    generator = np.random.default_rng(1)
    rows = [(5_000, 0, 10_000, "w", "parameters", None), (10**6, 777, 778, "needle", "temporary", "forward")]
    for state in range(1, 10_000):
        last = int(min(10_000, state + generator.integers(1, 300)))
        category = CATEGORIES[int(generator.integers(3, 6))]
        rows.append((int(generator.integers(1, 100)), state, last, "s", category, "forward"))
    allocations = pd.DataFrame(rows, columns=["bytes", "first", "last", "source", "category", "stage"])
    stages = {"forward": (0, 4_000), "backward": (4_001, 9_999)}
    return History("t", allocations, [i / 1000 for i in range(10_000)], stages)


def test_the_timeline_is_short_keeps_peaks_and_has_the_outline_of_the_whole(long_history):
    """Near each state one is kept that is as high, and one that is as low."""
    said, exact = summary(long_history), levels(long_history).sum(axis=1).to_numpy()
    timeline, largest = said["timeline"], said["largest"]
    event, total = np.array(timeline["event"]), np.sum(list(timeline["bytes"].values()), axis=0)
    assert len(total) == len(timeline["seconds"]) == len(event) <= TIMELINE_POINTS
    assert total.max() == exact.max() == said["peak_bytes"] == sum(said["peak_by_category"].values())
    assert (said["peak_event"], said["peak_stage"]) == (777, "forward")
    assert total.tolist() == exact[event].tolist()
    for row, (first, last) in zip(said["stages"], long_history.stages.values(), strict=True):
        assert row["peak_bytes"] == exact[first : last + 1].max()
        assert (row["start_bytes"], row["end_bytes"]) == (exact[first], exact[last])
    assert (len(largest), largest[0]["source"]) == (LARGEST, "needle")
    assert [row["bytes"] for row in largest] == sorted((row["bytes"] for row in largest), reverse=True)
    width = 2 * len(exact) // TIMELINE_POINTS + 2
    for state, value in enumerate(exact):
        near = total[np.searchsorted(event, state - width) : np.searchsorted(event, state + width, side="right")]
        assert near.min() <= value <= near.max()
