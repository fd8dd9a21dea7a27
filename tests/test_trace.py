"""Traces: exports read exactly as independent SQL and plain loops count, and every way in which a join goes wrong."""

import json
import sqlite3

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nsys_exports import (
    AUTOGRAD,
    DUPLICATED,
    FORWARD_BACKWARD,
    MAIN,
    PROCESS,
    WHOLE_GRAPHS,
    SmallExport,
    rows,
    sample,
)

from lmcore.errors import UserError
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.torch_trace import CPU_TOOL, CUDA_TOOL, operator_rows, read_torch_trace
from lmcore.profiling.nsys.trace import (
    busy_table,
    copy_table,
    instances,
    kernel_table,
    kernels_in,
    kind_table,
    occupied,
)
from lmcore.profiling.nsys.trim import trim_export

KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


@pytest.fixture(scope="module")
def real():
    return read_export(sample(FORWARD_BACKWARD))


def counted_by_hand(path, name: str, same_thread: bool) -> dict[str, tuple[int, int]]:
    """Calls and nanoseconds by kernel name of a range: three nested loops over the tables, without a join."""
    ranges = rows(path, f"SELECT start, end, globalTid FROM NVTX_EVENTS WHERE text = '{name}' AND eventType = 59")
    calls = {(tid >> 24, number): (start, tid) for tid, number, start in rows(
        path, f"SELECT globalTid, correlationId, start FROM {RUNTIME} ORDER BY start DESC"
    )}  # fmt: skip
    names = dict(rows(path, "SELECT id, value FROM StringIds"))
    found: dict[str, tuple[int, int]] = {}
    sql = f"SELECT globalPid, correlationId, end - start, demangledName FROM {KERNEL}"
    for pid, number, duration, kernel in rows(path, sql):
        at, thread = calls[pid >> 24, number]
        if any(start <= at <= end and (not same_thread or thread == tid) for start, end, tid in ranges):
            count, total = found.get(names[kernel], (0, 0))
            found[names[kernel]] = (count + 1, total + duration)
    return found


@pytest.mark.parametrize("scope", ["process", "thread"])
@pytest.mark.parametrize("name", ["Forward", "Backward", "Warm-up Step 2", "Benchmark Forward Only"])
def test_kernels_of_a_real_training_program(real, name, scope):
    table = kernel_table(real, name, scope)
    by_hand = counted_by_hand(sample(FORWARD_BACKWARD), name, scope == "thread")
    assert len(table) == len(by_hand) > 5
    for row in table.itertuples():
        assert (row.calls, round(row.total_seconds * 1e9)) == by_hand[row.name]
    assert table["total_seconds"].is_monotonic_decreasing
    assert table["share"].sum() == pytest.approx(1)


def test_backward_is_launched_by_the_autograd_thread(real):
    assert len(kernels_in(real, "Backward", "thread")) == 507
    assert len(kernels_in(real, "Backward")) == 6642


def test_real_counts_by_sql(real):
    path = sample(FORWARD_BACKWARD)
    assert [(len(real.kernels), int(real.kernels["duration"].sum()))] == rows(
        path, f"SELECT COUNT(*), SUM(end - start) FROM {KERNEL}"
    )
    copies = real.copies.groupby("operation")["bytes"].agg(["size", "sum"])
    assert copies.loc["Host-to-Device"].tolist() == [142, 515124224]
    assert copies.loc["Device-to-Device"].tolist() == [130, 940032000]
    assert copies.loc["Memset", "size"] == 1510
    assert (real.kernels["launched_at"] > 0).all()
    assert real.tool == "Nsight Systems 2025.1.3"


def test_real_ranges_nest(real):
    paths = real.ranges["path"].value_counts()
    assert paths["Run Benchmark/Benchmark Forward Only/Forward"] == 10
    assert len(instances(real, "Warm-up Step */Forward")) == 5
    assert len(instances(real, "Forward")) == 15
    whole = kernel_table(real, "Run Benchmark")
    assert whole["calls"].sum() == len(kernels_in(real, "Run Benchmark")) == len(real.kernels)


def test_doubled_runtime_rows_do_not_double_the_time():
    path = sample(DUPLICATED)
    naive = rows(path, f"SELECT SUM(k.end - k.start) FROM {KERNEL} k JOIN {RUNTIME} r USING (correlationId)")[0][0]
    trace = read_export(path)
    (row,) = kernel_table(trace, "saxpy").to_dict("records")
    assert (row["calls"], row["calls_per_instance"]) == (5, 1)
    assert round(row["total_seconds"] * 1e9) == 88573480 == naive / 2
    assert set(instances(trace, "MPI_Send")["name"]) == {"MPI_Send"}, "a name behind textId"
    assert trace.tool == "Nsight Systems 2022.2.1"
    assert trace.copies["operation"].value_counts().to_dict() == {"Host-to-Device": 10, "Device-to-Host": 5}


def test_launches_of_whole_graphs():
    path = sample(WHOLE_GRAPHS)
    trace = read_export(path)
    graphs = trace.kernels[trace.kernels["graph"]]
    assert [(len(graphs), int(graphs["duration"].sum()))] == rows(
        path, "SELECT COUNT(*), SUM(end - start) FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    )
    assert graphs["name"].unique().tolist() == ["CUDA graph 4"]
    assert len(trace.kernels) - len(graphs) == rows(path, f"SELECT COUNT(*) FROM {KERNEL}")[0][0]
    with pytest.raises(UserError, match="no range 'forward'; the trace has no ranges"):
        kernels_in(trace, "forward")


@pytest.fixture
def export() -> SmallExport:
    return SmallExport()


def test_the_same_correlation_id_in_two_processes(export, tmp_path):
    other = 9 << 24
    export.range("mine", 0, 100)
    export.range("theirs", 200, 300, other | 1)
    export.launch(1, 10, 20, 50, "a")
    export.call(1, 210, other | 1)
    export.kernel(1, 220, 230, "b", other)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert kernels_in(trace, "mine")["name"].tolist() == ["a"]
    assert kernels_in(trace, "theirs")["name"].tolist() == ["b"]


def test_launch_is_the_outer_of_two_calls(export, tmp_path):
    export.range("step", 10, 20)
    export.call(1, 12)
    export.call(1, 9)  # the outer call began before the range
    export.kernel(1, 30, 40)
    export.launch(2, 11, 40, 45)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert kernels_in(trace, "step")["start"].tolist() == [40]


def test_kernels_without_a_launch_belong_to_no_range(export, tmp_path):
    export.range("step", 0, 100)
    export.kernel(5, 10, 20)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert len(trace.kernels) == 1
    assert len(kernels_in(trace, "step")) == 0
    assert kernel_table(trace, "step").empty
    assert kind_table(trace, "step").empty
    assert busy_table(trace, "step")["busy_seconds"].tolist() == [0]


def test_work_counts_where_it_was_launched_not_where_it_ran(export, tmp_path):
    export.range("forward", 0, 10)
    export.range("backward", 11, 20)
    export.launch(1, 5, 12, 500)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert len(kernels_in(trace, "forward")) == 1
    assert len(kernels_in(trace, "backward")) == 0


def test_ranges_within_ranges_of_their_name_count_once(export, tmp_path):
    export.range("norm", 0, 100)
    export.range("norm", 10, 20)
    export.launch(1, 15, 30, 40)
    export.launch(2, 50, 60, 70)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert instances(trace, "norm")["start"].tolist() == [0]
    assert kernel_table(trace, "norm")["calls"].tolist() == [2]
    assert instances(trace, "norm/norm")["start"].tolist() == [10]


def test_each_thread_keeps_its_own_where_both_have_a_range(export, tmp_path):
    export.range("step", 0, 100, MAIN)
    export.range("step", 10, 90, AUTOGRAD)
    export.launch(1, 20, 30, 40, "main")
    export.launch(2, 30, 40, 50, "second", AUTOGRAD)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    for scope in ("process", "thread"):
        found = kernels_in(trace, "step", scope)
        assert len(found) == 2
        assert found["instance"].nunique() == 2


def test_ranges_of_the_autograd_thread_lie_in_the_backward_pass(export, tmp_path):
    export.range("forward", 0, 10)
    export.range("block 0", 1, 9)
    export.range("backward", 20, 50)
    export.range("block 0", 25, 35, AUTOGRAD)
    export.launch(1, 30, 31, 32, thread=AUTOGRAD)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert trace.ranges["path"].tolist() == ["forward", "forward/block 0", "backward", "backward/block 0"]
    assert len(kernels_in(trace, "backward/block 0")) == 1
    assert len(kernels_in(trace, "forward/block 0")) == 0


def test_the_optimizer_is_told_by_its_range(export, tmp_path):
    export.range("training step", 0, 100)
    export.range("optimizer", 50, 90)
    export.launch(1, 10, 20, 30, "ampere_sgemm")
    export.launch(2, 60, 70, 75, "ampere_sgemm")
    export.call(3, 61)
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", 80, 82, 0, 7, 3, PROCESS, 64, 8)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    kinds = kind_table(trace, "training step").set_index("kind")
    assert kinds["calls"].to_dict() == {"matmul": 1, "optimizer": 2}
    assert kinds["total_seconds"].tolist() == pytest.approx([10e-9, 7e-9])


def test_ranges_still_open_and_marks_are_left_out(export, tmp_path):
    export.range("open", 0, None)
    export.add("NVTX_EVENTS", 5, 5, 34, "a mark", MAIN, None)
    export.range("named by id", 1, 9, registered=True)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert trace.ranges["name"].tolist() == ["named by id"]
    assert trace.kernels.empty
    assert kernels_in(trace, "named by id").empty


def test_a_graph_whose_nodes_were_traced_counts_once(export, tmp_path):
    export.range("replay", 0, 100)
    export.call(1, 10)
    export.kernel(1, 20, 30, "gemm", node=4)
    export.kernel(1, 30, 45, "gemm", node=5)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 20, 45, 0, 7, 1, PROCESS, 2, 3)
    export.call(2, 11)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 50, 60, 0, 7, 2, PROCESS, 2, 3)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    assert trace.kernels["graph"].all()
    assert kernel_table(trace, "replay").set_index("name")["calls"].to_dict() == {"gemm": 2, "CUDA graph 2": 1}


def test_busy_and_idle_time(export, tmp_path):
    export.range("step", 0, 10)
    export.launch(1, 1, 100, 200)
    export.call(2, 2)
    export.kernel(2, 150, 250, stream=9)  # beside the first
    export.launch(3, 3, 400, 500)
    export.call(4, 4)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", 510, 520, 0, 7, 4, PROCESS, 32)
    export.range("step", 20, 30)
    table = busy_table(read_export(export.write(tmp_path / "e.sqlite")), "step")
    assert (table["gpu_seconds"] * 1e9).round().tolist() == [420, 0]
    assert (table["busy_seconds"] * 1e9).round().tolist() == [260, 0]
    assert (table["idle_seconds"] * 1e9).round().tolist() == [160, 0]
    assert (table["seconds"] * 1e9).round().tolist() == [10, 10]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=12))
def test_union_of_intervals(intervals):
    starts = pd.Series([start for start, _ in intervals])
    ends = pd.Series([start + length for start, length in intervals])
    ticks = {tick for start, length in intervals for tick in range(start, start + length)}
    assert occupied(starts, ends) == (max(ends) - min(starts), len(ticks))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from([MAIN, AUTOGRAD])), max_size=8))
def test_every_kernel_belongs_to_one_range_at_most(tmp_path_factory, spans):
    export = SmallExport()
    export.range("outside", 1000, 1001)
    for start, length, thread in spans:
        export.range("r", start, start + length, thread)
    for number in range(40):
        export.launch(number, number, 100 + number, 101 + number, thread=(MAIN, AUTOGRAD)[number % 2])
    trace = read_export(export.write(tmp_path_factory.mktemp("e") / "e.sqlite"))
    if not spans:
        return
    inside = {at for start, length, _ in spans for at in range(start, min(start + length + 1, 40))}
    found = kernels_in(trace, "r")
    assert sorted(found["launched_at"]) == sorted(inside)
    own = {
        at
        for at in range(40)
        if any(start <= at <= start + length and thread == (MAIN, AUTOGRAD)[at % 2] for start, length, thread in spans)
    }
    assert set(kernels_in(trace, "r", "thread")["launched_at"]) == own


def test_copies_by_direction(export, tmp_path):
    export.range("step", 0, 10)
    for number, (kind, size) in enumerate([(1, 100), (1, 200), (8, 50), (99, 1)]):
        export.call(number, 1 + number)
        export.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY", 20 * number, 20 * number + 5 + number, 0, 7, number, PROCESS, size, kind
        )
    table = copy_table(read_export(export.write(tmp_path / "e.sqlite")), "step").set_index("operation")
    assert table["bytes"].to_dict() == {"Host-to-Device": 300, "Device-to-Device": 50, "copy of kind 99": 1}
    assert table.loc["Host-to-Device", "total_seconds"] == pytest.approx(11e-9)


def test_unknown_ranges_say_which_exist(export, tmp_path):
    for number in range(3):
        export.range(f"block {number}", number * 10, number * 10 + 5)
    export.range("lm head", 50, 60)
    trace = read_export(export.write(tmp_path / "e.sqlite"))
    with pytest.raises(UserError, match=r"no range 'foward'; there are block \*, lm head\."):
        instances(trace, "foward")
    assert len(instances(trace, "block *")) == 3
    with pytest.raises(UserError, match="process or thread, not 'core'"):
        kernels_in(trace, "lm head", "core")


def test_files_that_are_no_export(export, tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        read_export(tmp_path / "none.sqlite")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(UserError, match=r"empty.sqlite is empty"):
        read_export(tmp_path / "empty.sqlite")
    (tmp_path / "text.sqlite").write_text("kernels, many of them; " * 100)
    with pytest.raises(UserError, match="cannot be read as an SQLite export"):
        read_export(tmp_path / "text.sqlite")
    with sqlite3.connect(tmp_path / "foreign.sqlite") as connection:
        connection.execute("CREATE TABLE songs (title)")
    with pytest.raises(UserError, match="not one that Nsight Systems exported"):
        read_export(tmp_path / "foreign.sqlite")
    with pytest.raises(UserError, match="the capture range never fired"):
        read_export(export.write(tmp_path / "nothing.sqlite"))
    with sqlite3.connect(tmp_path / "nothing.sqlite") as connection:
        connection.execute(f"CREATE TABLE {KERNEL} (start, end, deviceId)")
    with pytest.raises(UserError, match=r"2025\.3\.1, whose table \w+KERNEL has no correlationId"):
        read_export(tmp_path / "nothing.sqlite")


def equal(one, other) -> bool:
    for part in ("kernels", "ranges", "copies"):
        pd.testing.assert_frame_equal(getattr(one, part), getattr(other, part))
    return one.tool == other.tool


@pytest.mark.parametrize("name", [FORWARD_BACKWARD, DUPLICATED, WHOLE_GRAPHS])
def test_trimmed_exports_hold_the_same_trace_and_nothing_private(name, tmp_path):
    source = sample(name)
    small = trim_export(source, tmp_path / "small.sqlite")
    assert equal(read_export(source), read_export(small))
    assert small.stat().st_size < source.stat().st_size / 2
    private = {value for (value,) in rows(source, "SELECT value FROM TARGET_INFO_SYSTEM_ENV")}
    version = "META_DATA_EXPORT" if name != DUPLICATED else "EXPORT_META_DATA"
    paths = rows(
        source, f"SELECT value FROM {version} WHERE name LIKE '%PATH%' OR name IN ('EXPORT_USER','EXPORT_HOST')"
    )
    content = small.read_bytes()
    for secret in private | {value for (value,) in paths}:
        words = str(secret).encode()
        assert len(words) < 5 or words not in content, secret
    with pytest.raises(UserError, match=r"small.sqlite exists"):
        trim_export(source, small)


def test_trimming_to_one_range(tmp_path, real):
    source = sample(FORWARD_BACKWARD)
    small = read_export(trim_export(source, tmp_path / "small.sqlite", ["Warm-up Step 2"]))
    assert small.ranges["path"].tolist() == ["Warm-up Step 2", "Warm-up Step 2/Forward", "Warm-up Step 2/Backward"]
    assert len(small.kernels) == len(kernels_in(real, "Warm-up Step 2"))
    assert kernel_table(small, "Backward").equals(kernel_table(real, "Warm-up Step 2/Backward"))
    with pytest.raises(UserError, match=r"has no range Warm-up Step 9; there are Run Benchmark"):
        trim_export(source, tmp_path / "other.sqlite", ["Warm-up Step 9"])


def event(category: str, name: str, ts: float, dur: float, tid: int = 1, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 77, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def test_records_of_torch_profiler_on_cuda(tmp_path):
    """The same tables from the events that Kineto writes for a GPU."""
    events = [
        event("user_annotation", "training step", 100.0, 50.0),
        event("user_annotation", "backward", 110.0, 20.0),
        event("user_annotation", "Optimizer.step#AdamW.step", 140.0, 5.0),
        event("gpu_user_annotation", "backward", 200.0, 20.0),
        event("cpu_op", "aten::mm", 111.0, 8.0, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 112.5, 1.0, tid=2, correlation=5),
        event("cuda_driver", "cuLaunchKernel", 112.75, 0.5, tid=2, correlation=5),
        event("kernel", "ampere_sgemm_128x64_tn", 300.125, 10.25, tid=7, device=0, stream=7, correlation=5),
        event("cuda_runtime", "cudaMemcpyAsync", 141.0, 1.0, correlation=6),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 320.0, 2.0, tid=7, correlation=6, bytes=4096),
        {"ph": "M", "name": "process_name", "pid": 77},
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_torch_trace(path)
    assert trace.tool == CUDA_TOOL
    assert trace.ranges["path"].tolist() == ["training step", "training step/backward"]
    assert len(kernels_in(trace, "backward", "thread")) == 0
    (kernel,) = kernels_in(trace, "backward").to_dict("records")
    assert (kernel["kind"], kernel["duration"], kernel["launched_at"]) == ("matmul", 10250, 112500)
    assert copy_table(trace, "training step").to_dict("records") == [
        {"operation": "Host-to-Device", "calls": 1, "bytes": 4096, "total_seconds": pytest.approx(2e-6)}
    ]
    assert busy_table(trace, "training step")["idle_seconds"].tolist() == pytest.approx([9.625e-6])


def test_own_time_of_operators():
    """a [0, 100] calls b [10, 40], which calls c [20, 25], and d [50, 60]; e follows; another thread runs beside."""
    spans = [("a", 0, 100), ("b", 10, 30), ("c", 20, 5), ("d", 50, 10), ("e", 100, 7)]
    events = [event("cpu_op", f"aten::{name}", ts, dur) for name, ts, dur in spans]
    events.append(event("cpu_op", "aten::f", 5, 200, tid=2))
    own = {row["name"]: row["duration"] for row in operator_rows(events)}
    assert own == {
        "aten::a": 60_000, "aten::b": 25_000, "aten::c": 5_000, "aten::d": 10_000, "aten::e": 7_000, "aten::f": 200_000,
    }  # fmt: skip


def test_records_that_are_none(tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        read_torch_trace(tmp_path / "none.json")
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", "{}"), ("d.json.gz", "x")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=r"cannot be read as a record of torch\.profiler"):
            read_torch_trace(tmp_path / name)


def test_a_record_without_kernels_is_of_operators(tmp_path):
    path = tmp_path / "profile.json"
    events = [event("user_annotation", "forward", 0, 100), event("cpu_op", "aten::mm", 10, 20)]
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_torch_trace(path)
    assert trace.tool == CPU_TOOL
    assert np.allclose(kernel_table(trace, "forward")["total_seconds"], 20e-6)
