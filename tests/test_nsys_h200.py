"""An export of our own from an H200: two layers, two inference passes and two training steps, in tests/data.

Counted again in plain SQL and from what the model is known to launch.
"""

import sqlite3
from pathlib import Path

import pytest

from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.trace import busy_table, instances, kernel_table, kernels_in, kind_table

EXPORT = Path(__file__).parent / "data" / "h200_two_layers_nsys2025.3.sqlite"
LAYERS = STEPS = 2

LAUNCHED_INSIDE = """
    WITH launches AS (SELECT DISTINCT correlationId, globalTid & 0xFFFFFFFFFF000000 AS pid, globalTid, MIN(start) AS at
                      FROM CUPTI_ACTIVITY_KIND_RUNTIME GROUP BY 1, 2)
    SELECT COUNT(*), SUM(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN launches l ON l.correlationId = k.correlationId AND l.pid = k.globalPid
    WHERE EXISTS (SELECT 1 FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
                  WHERE COALESCE(n.text, s.value) = ? AND l.at BETWEEN n.start AND n.end
                  AND (? = 'process' OR n.globalTid = l.globalTid))
"""


@pytest.fixture(scope="module")
def trace():
    return read_export(EXPORT)


@pytest.fixture(scope="module")
def sql():
    with sqlite3.connect(f"file:{EXPORT}?mode=ro", uri=True) as connection:
        yield connection


@pytest.mark.parametrize("scope", ["process", "thread"])
@pytest.mark.parametrize("name", ["inference", "training step", "backward", "optimizer", "computing softmax"])
def test_kernels_of_a_range_are_those_of_plain_sql(trace, sql, name, scope):
    count, nanoseconds = sql.execute(LAUNCHED_INSIDE, (name, scope)).fetchone()
    kernels = kernels_in(trace, name, scope)
    assert (len(kernels), int(kernels["duration"].sum())) == (count, nanoseconds or 0)


def test_most_backward_kernels_come_from_another_thread(trace):
    whole, own = (len(kernels_in(trace, "backward", scope)) for scope in ("process", "thread"))
    assert own < whole / 10


def test_ranges_are_those_of_the_model(trace):
    assert len(instances(trace, "inference")) == len(instances(trace, "training step")) == STEPS
    for part in ("computing attention scores", "computing softmax", "final matmul", "ffn"):
        assert len(instances(trace, part)) == 2 * STEPS * LAYERS  # in inference and in training
    assert len(instances(trace, "training step/forward/block */ffn")) == STEPS * LAYERS


def test_matmuls_are_as_many_as_the_model_multiplies(trace):
    """Nine products in each block and the output layer; each has two more in the backward pass.

    A product split along its inner dimension has a second kernel that adds the parts.
    """
    products = 9 * LAYERS + 1

    def matmuls(name):
        kernels = kernels_in(trace, name)
        kernels = kernels[(kernels["kind"] == "matmul") & ~kernels["name"].str.contains("splitKreduce|split_k_kernel")]
        return len(kernels) / STEPS

    assert matmuls("inference") == products
    assert matmuls("training step/forward") == products
    assert matmuls("training step/backward") == 2 * products
    assert matmuls("optimizer") == 0


def test_the_optimizer_has_its_kind_by_range(trace):
    kinds = kind_table(trace, "optimizer")
    assert kinds["kind"].tolist() == ["optimizer"]
    assert "optimizer" not in kind_table(trace, "backward")["kind"].tolist()


def test_tables_add_up(trace):
    table, kinds = kernel_table(trace, "training step"), kind_table(trace, "training step")
    assert table["share"].sum() == pytest.approx(1)
    assert kinds["share"].sum() == pytest.approx(1)
    busy = busy_table(trace, "training step")
    assert (busy["busy_seconds"] + busy["idle_seconds"]).tolist() == pytest.approx(busy["gpu_seconds"].tolist())
    assert busy["busy_seconds"].sum() <= kinds["total_seconds"].sum() + 1e-9


def test_the_export_names_no_user_place_or_environment(sql):
    tables = {name for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not tables & {"TARGET_INFO_SYSTEM_ENV", "PROCESSES", "ThreadNames", "META_DATA_CAPTURE"}
    content = EXPORT.read_bytes()
    assert len(content) < 500_000
    assert all(word not in content for word in (b"/home/", b"/root", b"/opt/", b"/tmp/", b"PATH=", b"HOSTNAME"))
