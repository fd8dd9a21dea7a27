"""Traces: exports read exactly as independent SQL and plain loops count, and every way in which a join goes wrong."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nsys_exports import AUTOGRAD, H200, MAIN, PROCESS, SmallExport, rows

from lmcore.cli import main
from lmcore.errors import UserError
from lmcore.profiling.nsys.export import DEVICES, GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, RUNTIME, read_export
from lmcore.profiling.nsys.torch_trace import CPU_TOOL, CUDA_TOOL, read_torch_trace, trace_of
from lmcore.profiling.nsys.trace import busy_table, instances, kernels_in, occupied, totals, work_in


def table(trace, range, part: str) -> pd.DataFrame:
    """Kernels or copies of a range by name, or all its work by category."""
    _, work = work_in(trace, range)
    keep = {"kernels": work["bytes"] < 0, "copies": work["bytes"] >= 0, "category": work["bytes"] >= -1}[part]
    return totals(work[keep], ["category" if part == "category" else "name"])


def counted_by_hand(path, name: str) -> dict[str, tuple[int, int]]:
    """Calls and nanoseconds by kernel name of a range: three nested loops over the tables, without a join."""
    names = dict(rows(path, "SELECT id, value FROM StringIds"))
    marks = rows(path, f"SELECT start, end, COALESCE(text, textId) FROM {NVTX} WHERE eventType = 59")
    ranges = [mark[:2] for mark in marks if names.get(mark[2], mark[2]) == name]
    sql = f"SELECT globalTid, correlationId, start FROM {RUNTIME} ORDER BY start DESC"
    calls = {(thread >> 24, number): start for thread, number, start in rows(path, sql)}
    found: dict[str, tuple[int, int]] = {}
    sql = f"SELECT globalPid, correlationId, end - start, demangledName FROM {KERNEL}"
    for pid, number, duration, kernel in rows(path, sql):
        if any(start <= calls[pid >> 24, number] <= end for start, end in ranges):
            count, total = found.get(names[kernel], (0, 0))
            found[names[kernel]] = (count + 1, total + duration)
    return found


@pytest.mark.parametrize("name", ["training step", "optimizer", "computing softmax"])
def test_kernels_of_a_real_training_program(name):
    kernels = table(read_export(H200), name, "kernels")
    found = {row.name: (row.calls, round(row.total_seconds * 1e9)) for row in kernels.itertuples()}
    assert found == counted_by_hand(H200, name) != {}
    assert kernels["total_seconds"].is_monotonic_decreasing
    assert kernels["share"].sum() == pytest.approx(1)


@pytest.fixture
def export() -> SmallExport:
    return SmallExport()


@pytest.fixture
def read(export, tmp_path):
    """Writes the export of the test and reads it."""
    return lambda: read_export(export.write(tmp_path / "e.sqlite"))


OTHER = 9 << 24 | 1
BIG_MAIN, BIG_OTHER = (1 << 60) | MAIN, (1 << 60) | AUTOGRAD
"""Threads whose ids are others as floating-point numbers, which a join with gaps makes of them."""


@pytest.mark.parametrize(
    ("ranges", "launches", "expected"),
    [
        pytest.param(
            [("mine", 0, 100), ("theirs", 200, 300, OTHER)], [("a", 10), ("b", 210, OTHER, 0)],
            {"mine": "a", "theirs": "b"}, id="one correlation id in two processes",
        ),
        pytest.param(
            [("forward", 0, 10), ("backward", 11, 1000)], [("a", 5)],
            {"forward": "a", "backward": ""}, id="launched in one, run in another",
        ),
        pytest.param(
            [("step", 10, 20)], [("a", 12, MAIN, 0), ("b", 9, MAIN, 0), ("c", 11)], {"step": "c"},
            id="by the outer of two calls with one number",
        ),
        pytest.param(
            [("norm", 0, 100), ("norm", 10, 20)], [("a", 15), ("b", 50)],
            {"norm": "ab", "norm/norm": "a"}, id="within one of its name",
        ),
        pytest.param(
            [("forward", 0, 10), ("block 0", 1, 9), ("backward", 20, 50), ("block 0", 25, 35, AUTOGRAD)],
            [("a", 30, AUTOGRAD)],
            {"backward/block 0": "a", "forward/block 0": "", "backward": "a"},
            id="on the autograd thread in the backward pass",
        ),
        pytest.param(
            [("step", 0, 100, BIG_MAIN), ("step", 0, 100, BIG_OTHER)],
            [("a", 10, BIG_MAIN), ("b", 11, BIG_OTHER), ("c", None, BIG_MAIN)],
            {"step": "a|b"}, id="thread ids beside missing launches",
        ),
    ],
)  # fmt: skip
def test_a_kernel_belongs_to_the_range_that_launched_it(export, read, ranges, launches, expected):
    """`expected`: kernels by range; those of several instances with | between."""
    for each in ranges:
        export.range(*each)
    for index, launch in enumerate(launches):
        name, at, thread, number = (*launch, *(MAIN, index)[len(launch) - 2 :])
        if at is not None:
            export.call(number, at, thread)
        export.kernel(number, 500 + index, 501 + index, name, thread & ~0xFFFFFF)
    trace = read()
    assert len(trace.kernels) == len(launches)
    for name, kernels in expected.items():
        found = kernels_in(trace, name)
        by_instance = ["".join(found.loc[found["instance"] == id, "name"]) for id in instances(trace, name)["id"]]
        assert "|".join(by_instance) == kernels, name


def report(capsys, path: Path, *options: str) -> str:
    assert main(["nsys", "--report", str(path), *options]) == 0
    return capsys.readouterr().out


def test_kernels_without_a_launch_belong_to_no_range(export, read, tmp_path, capsys):
    """They are counted aloud, and a range that lacks them is not shown as idle."""
    export.range("step", 0, 100)
    export.kernel(5, 10, 20)
    trace = read()
    assert len(trace.kernels) == 1
    assert len(kernels_in(trace, "step")) == len(table(trace, "step", "category")) == 0
    assert busy_table(trace, "step")["busy_seconds"].tolist() == [0]
    assert trace.notes[0].startswith("1 of 1 kernels and copies have no launch")  # there is no table RUNTIME
    export.launch(6, 200, 210, 220)
    export.add(MEMCPY, 80, 82, 8, PROCESS, 64, 8)
    out = report(capsys, export.write(tmp_path / "e.sqlite"))
    assert "\n2 of 3 kernels and copies have no launch in the record: they count in no range" in out
    assert out.endswith("\n0 of 2 kernels were launched inside of ranges.\n")
    out = report(capsys, tmp_path / "e.sqlite", "--range", "step")
    assert out.splitlines()[-1].split() == ["step", "0.0001", "–", "–", "–"]


def test_a_range_that_is_open_when_the_record_ends_lasts_until_then(export, read):
    long_ago = 1_763_800_000_123_456_789  # too long for floating-point numbers
    for number in range(2):
        export.range(f"step {number}", long_ago + number, None)
    export.range("forward", long_ago + 10, long_ago + 20)
    export.launch(1, long_ago + 15, long_ago + 500, long_ago + 601)
    trace = read()
    assert (trace.ranges["end"] - long_ago).tolist() == [601, 601, 20]
    assert trace.ranges["path"].tolist()[2] == "step 0/step 1/forward"
    assert len(kernels_in(trace, "step 0")) == 1
    assert trace.notes == ("2 of 3 ranges were open when the record ended and count up to its end: step *.",)


def test_devices_are_busy_and_idle_each_for_itself(export, read, tmp_path, capsys):
    """Two GPUs take turns, each idle half of the time."""
    export.range("step", 0, 50)
    for number in range(4):
        export.launch(number, number, 100 * number, 100 * (number + 1), device=number % 2)
    trace = read()
    for name in ("step", None):
        times = busy_table(trace, name)[["device", "gpu_seconds", "busy_seconds", "idle_seconds"]] * [1, 1e9, 1e9, 1e9]
        assert times.round().to_numpy().tolist() == [[0, 300, 200, 100], [1, 300, 200, 100]]
    assert table(trace, "step", "kernels")["total_seconds"].tolist() == pytest.approx([400e-9])
    out = report(capsys, tmp_path / "e.sqlite", "--range", "step")
    assert "\n2 devices: busy and idle times are of each" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("step")] == [["step", "0"], ["step", "1"]]


def test_processes_that_each_see_one_gpu_have_different_devices(export, read):
    """With CUDA_VISIBLE_DEVICES both call theirs 0; the table of devices tells which it is."""
    for process, gpu in ((7, 3), (9, 5)):
        export.add(DEVICES, gpu, 0, process)
        export.launch(1, 10, 20, 30, thread=process << 24 | 1)
        export.call(2, 11, process << 24 | 1)
        export.add(MEMCPY, 40, 45, 2, process << 24, 64, 8)
        export.add(MEMSET, 46, 47, 2, process << 24, 64)
    assert sorted(read().work["device"]) == [3, 3, 3, 5, 5, 5]
    assert read().copies["name"].tolist() == ["Device-to-Device", "Device-to-Device", "Memset", "Memset"]


def test_what_ends_before_it_begins_is_left_out_aloud(export, read):
    export.range("step", 0, 100)
    export.range("step", 300, 200)
    export.launch(1, 10, 60, 40)
    export.launch(2, 11, 70, 80)
    trace = read()
    assert trace.work["duration"].tolist() == [10]
    assert trace.ranges["start"].tolist() == [0]
    assert re.match("1 of 2 kernels and copies and 1 of 2 ranges end before they begin and are left", trace.notes[0])


def test_ranges_that_differ_in_numbers_are_one_line_and_a_long_table_ends(export, tmp_path, capsys):
    """As `torch.autograd.profiler.emit_nvtx` names the operators."""
    for number in range(300):
        export.range(f"aten::gt, op_id = {number}", 10 * number, 10 * number + 5)
    export.launch(1, 2, 3, 4)
    path = export.write(tmp_path / "e.sqlite")
    assert ["aten::gt,", "op_id", "=", "*", "300", "5e-06"] in map(str.split, report(capsys, path).splitlines())
    lines = report(capsys, path, "--range", "aten::gt, op_id = *").splitlines()
    assert len([line for line in lines if line.startswith("aten::gt")]) == 100
    assert "… and 200 more" in lines


def test_a_graph_whose_nodes_were_traced_counts_once(export, read):
    export.range("replay", 0, 100)
    export.call(1, 10)
    export.kernel(1, 20, 30, "gemm", node=4)
    export.kernel(1, 30, 45, "gemm", node=5)
    export.add(GRAPH, 20, 45, 7, 1, PROCESS, 2)
    export.call(2, 11)
    export.add(GRAPH, 50, 60, 7, 2, PROCESS, 2)
    assert kernels_in(read(), "replay")["name"].value_counts().to_dict() == {"gemm": 2, "CUDA graph 2": 1}


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12),
    st.sampled_from([0, 1_763_800_000_123_456_789]),  # nanoseconds since 1970 are too long for floating-point numbers
)
def test_union_of_intervals(intervals, begin):
    rows = [(instance, begin + start, begin + start + length) for start, length, instance in intervals]
    found = occupied(pd.DataFrame(rows, columns=["instance", "start", "end"]))
    for instance in found.index:
        own = [(start, start + length) for start, length, other in intervals if other == instance]
        ticks = {tick for start, end in own for tick in range(start, end)}
        assert found.loc[instance].tolist() == [max(ticks) + 1 - min(ticks), len(ticks)]


@pytest.mark.fault("file of another program that is damaged", "refused_in_words")
@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: None, "There is no file"),
        (lambda path: path.touch(), "e.sqlite is empty"),
        (lambda path: path.write_text("kernels, many of them; " * 100), "cannot be read as an SQLite export"),
        (lambda path: rows(path, "CREATE TABLE songs (title)"), "not one that Nsight Systems exported"),
        (lambda path: SmallExport().write(path), "the capture range never fired"),
        (lambda path: rows(small(path), f"ALTER TABLE {KERNEL} DROP COLUMN correlationId"), r"2025.3.1 \(no such col"),
        (lambda path: rows(small(path), f"UPDATE {KERNEL} SET start = 'early'"), "of Nsight Systems 2025.3.1"),
        (lambda path: rows(small(path), f"UPDATE {NVTX} SET start = NULL"), "of Nsight Systems 2025.3.1"),
    ],
)
def test_what_is_no_export_is_refused_in_a_sentence(tmp_path, write, sentence):
    write(tmp_path / "e.sqlite")
    with pytest.raises(UserError, match=sentence):
        read_export(tmp_path / "e.sqlite")


def small(path: Path) -> Path:
    export = SmallExport()
    export.range("step", 0, 10)
    export.launch(1, 5, 10, 20)
    return export.write(path)


def lasting(category: str, name: str, ts: float, dur: float, tid: int = 1, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 77, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def read_events(path: Path, events: list) -> object:
    path.write_text(json.dumps({"traceEvents": events}))
    return read_torch_trace(path)


OLDER = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
"""Names of categories until PyTorch 1.11."""


@pytest.mark.parametrize("names", [{}, OLDER], ids=["today", "older"])
def test_records_of_torch_profiler_on_cuda(tmp_path, names):
    """The same tables from the events that Kineto writes for a GPU."""
    events = [
        lasting("user_annotation", "training step", 100.0, 50.0),
        lasting("user_annotation", "backward", 110.0, 20.0),
        lasting("user_annotation", "Optimizer.step#AdamW.step", 140.0, 5.0),
        lasting("gpu_user_annotation", "backward", 200.0, 20.0),
        lasting("cpu_op", "aten::mm", 111.0, 8.0, tid=2),
        lasting("cuda_runtime", "cudaLaunchKernel", 112.5, 1.0, tid=2, correlation=5),
        lasting("cuda_driver", "cuLaunchKernel", 112.75, 0.5, tid=2, correlation=5),
        lasting("kernel", "ampere_sgemm_128x64_tn", 300.125, 10.25, tid=7, device=0, stream=7, correlation=5),
        lasting("kernel", "ampere_sgemm_128x64_tn", 290, 1, tid=7, device=0, stream=7, correlation=4),
        lasting("cuda_runtime", "cudaMemcpyAsync", 141.0, 1.0, correlation=6),
        lasting("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 320.0, 2.0, tid=7, correlation=6, bytes=4096),
        {"ph": "M", "name": "process_name", "pid": 77},
    ]  # fmt: skip
    renamed = [event | {"cat": names.get(event.get("cat"), event.get("cat"))} for event in events]
    trace = read_events(tmp_path / "profile.json", renamed)
    assert trace.tool == CUDA_TOOL
    assert trace.notes[0].startswith("1 of 3 kernels and copies have no launch")
    assert trace.ranges["path"].tolist() == ["training step", "training step/backward"]
    (kernel,) = kernels_in(trace, "backward").to_dict("records")
    assert (kernel["category"], kernel["duration"], kernel["launched_at"]) == ("matmul", 10250, 112500)
    copied = table(trace, "training step", "copies").loc[0, ["name", "calls", "bytes", "total_seconds"]]
    assert copied.tolist() == ["Host-to-Device", 1, 4096, pytest.approx(2e-6)]
    assert busy_table(trace, "training step")["idle_seconds"].tolist() == pytest.approx([9.625e-6])


def test_events_that_are_not_known_are_left_out_aloud(tmp_path):
    """And none of those of a real record."""
    known = [lasting("cpu_op", "aten::mm", 1, 2), {"ph": "M"}, {"ph": "s", "cat": "ac2g"}, lasting("Trace", "a", 1, 2)]
    unknown = [lasting("gpu_kernel", "gemm", 1, 2), lasting("kernel", "gemm", 1, 2) | {"ph": "B"}]
    note = "2 of {} events are of categories that are not known and are left out: gpu_kernel, kernel (phase B)."
    trace = read_events(tmp_path / "both.json", known + unknown)
    assert (trace.notes, len(trace.kernels)) == ((note.format(4),), 1)
    with pytest.raises(UserError, match=f"holds no kernel, operator or range: {re.escape(note.format(2))}"):
        read_events(tmp_path / "unknown.json", unknown)
    with torch.profiler.profile(with_stack=True) as profiler, torch.profiler.record_function("forward"):
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "real.json"))
    trace = read_torch_trace(tmp_path / "real.json")
    assert (trace.notes, trace.ranges["name"].tolist()) == ((), ["forward"])


def test_own_time_of_operators():
    """a [0, 100] calls b [10, 40], which calls c [20, 25], and d [50, 60]; e follows; another thread runs beside."""
    spans = [("a", 0, 100), ("b", 10, 30), ("c", 20, 5), ("d", 50, 10), ("e", 100, 7)]
    events = [lasting("cpu_op", name, ts, dur) for name, ts, dur in spans]
    others = lasting("cpu_op", "f", 5, 200, tid=2), lasting("cpu_op", "g", 50, -20)  # impossible
    trace = trace_of([*events, *others])
    assert trace.tool == CPU_TOOL
    own = {"a": 60_000, "b": 25_000, "c": 5_000, "d": 10_000, "e": 7_000, "f": 200_000}
    assert trace.kernels.set_index("name")["duration"].to_dict() == own


@pytest.mark.fault("file of another program that is damaged", "refused_in_words")
@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", "{", "JSONDecodeError"),
        ("a.json", "[" * 100_000, "RecursionError"),
        ("a.json", "{}", "it has no 'traceEvents'"),
        ("a.json", json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}), "has no 'dur'"),
        ("a.json", json.dumps({"traceEvents": [lasting("cpu_op", "a", float("inf"), 1)]}), "OverflowError"),
        ("a.json", json.dumps({"traceEvents": [{"ph": "M"}]}), "holds no kernel, operator or range"),
        ("a.json.gz", "{}", "BadGzipFile"),
    ],
)
def test_records_that_are_none(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}.*{sentence}"):
        read_torch_trace(tmp_path / name)
