"""Nsight Systems: found where it hides, run with the right flags, its failures told apart; profiles of workloads."""

import contextlib
import json
import os
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from nsys_exports import AUTOGRAD, H200, SmallExport

from lmcore.cli import main
from lmcore.cli.nsys import profile_lines
from lmcore.errors import UserError
from lmcore.profiling.cases import workload_config
from lmcore.profiling.nsys import profile as kernel_profile
from lmcore.profiling.nsys import tool as nsys
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.profile import profile_with_nsys, profile_workload, summary
from lmcore.profiling.nsys.tool import export_report, find_nsys, load_trace, run_under_nsys
from lmcore.profiling.workload import no_span

FAKE = """#!{python}
import pathlib, shutil, subprocess, sys
arguments = sys.argv[1:]
options = dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
if arguments == ["--version"]:
    print("NVIDIA Nsight Systems version {version}-123456789v0")
elif arguments[0] == "profile":
    program = arguments[next(i for i, word in enumerate(arguments) if i and not word.startswith("--")):]
    code = subprocess.run(program).returncode
    report = pathlib.Path(options["--output"])
    {after}
    sys.exit(code)
elif arguments[0] == "export":
    {export}
"""


def fake_nsys(path: Path, version="2025.3.1.90", after="report.touch()", export="pass") -> str:
    """A program that answers as nsys does: `after` the profiled program, and to `export`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(python=sys.executable, version=version, after=after, export=export))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """A machine without nsys."""
    nsys.nsys_version.cache_clear()
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(nsys, "PLACES", [])


@pytest.fixture
def copying(tmp_path, monkeypatch) -> str:
    """A fake, which the variable NSYS names, that exports a real record."""
    path = fake_nsys(tmp_path / "nsys", export=f"shutil.copy({str(H200)!r}, options['--output'])")
    monkeypatch.setenv("NSYS", path)
    return path


def test_found_on_the_path_and_by_the_variable(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"No Nsight Systems \(nsys\) runs here.*install Nsight Systems"):
        find_nsys()
    on_path = fake_nsys(tmp_path / "bin" / "nsys")
    assert (find_nsys(), nsys.nsys_version(on_path)) == (on_path, "2025.3.1")
    other = fake_nsys(tmp_path / "elsewhere" / "nsys")
    monkeypatch.setenv("NSYS", other)
    assert find_nsys() == other
    for value, words in ((str(tmp_path / "no"), "names .*no, which does not run"), ("off", "off")):
        monkeypatch.setenv("NSYS", value)
        with pytest.raises(UserError, match=words):
            find_nsys()


def test_found_in_folders_the_newest_first(tmp_path, monkeypatch):
    for version in ("2025.9.1", "2025.10.1", "2024.2.0"):
        fake_nsys(tmp_path / "nsight-compute" / version / "host" / "target-linux-x64" / "nsys")
    monkeypatch.setattr(nsys, "PLACES", [str(tmp_path / "nsight-compute/*/host/target-linux-*/nsys")])
    assert "/2025.10.1/" in find_nsys()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("pass", r"made no report: the capture range never fired, as the program did not call torch\.cuda\.profiler"),
        ("raise SystemExit('it broke')", r"made no report: it ended with code 1 \(it broke\); see .*nsys\.log"),
    ],
)
def test_no_report(tmp_path, code, sentence):
    with pytest.raises(UserError, match=sentence):
        run_under_nsys(fake_nsys(tmp_path / "nsys", after="pass"), [sys.executable, "-c", code], tmp_path / "run")


def test_time_is_limited_and_no_process_stays(tmp_path, copying):
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(UserError, match="ended after 1 s"):
        run_under_nsys(copying, [sys.executable, "-c", code], tmp_path / "run", timeout=1)
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):  # it has not begun, or has ended
        program = psutil.Process(int(mark.read_text()))
        while program.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began < 20, "the profiled program went on"
            time.sleep(0.1)


def test_reports_are_exported_and_other_files_refused(tmp_path, copying):
    report = tmp_path / "other.nsys-rep"
    report.touch()
    assert len(load_trace(report).kernels) == len(load_trace(H200).kernels) == 1398
    tool = fake_nsys(tmp_path / "old" / "nsys", "2022.1.1", export="sys.exit('Bad magic')")
    with pytest.raises(UserError, match=r"nsys 2022\.1\.1 cannot read .* newer version.* nsys said: Bad magic"):
        export_report(tool, report)
    for name, words in (("notes.txt", "is neither"), ("none.nsys-rep", "There is no file")):
        with pytest.raises(UserError, match=words):
            load_trace(tmp_path / name)


class Recording:
    """Notes what runs inside and outside of the recording."""

    def __init__(self):
        self.on = False
        self.names: dict[bool, list[str]] = {False: [], True: []}

    def __enter__(self):
        self.on = True

    def __exit__(self, *_):
        self.on = False

    def span(self, name):
        if name in ("warm-up", "inference", "training step"):
            self.names[self.on].append(name)
        return no_span(name)


def passes_of(mode):
    """Outermost ranges outside and inside the recording of the passes."""
    recording = Recording()
    config = workload_config("smoke", 16, device="cpu", warmup_steps=2, steps=3, mode=mode)
    kernel_profile.run_passes(config, recording.span, recording)
    return recording.names[False], recording.names[True]


def test_warm_ups_are_outside_the_recording():
    assert passes_of("train_step") == (["warm-up"] * 4, ["inference"] * 3 + ["training step"] * 3)
    assert passes_of("forward") == (["warm-up"] * 2, ["inference"] * 3)


def test_a_workload_under_nsys(tmp_path, copying):
    """The whole way with a fake nsys: config, program, report, export, trace."""
    config = workload_config("smoke", 16, mode="forward", device="cpu", warmup_steps=0, steps=1)
    assert profile_with_nsys(config, tmp_path / "case").tool == "Nsight Systems 2025.3.2"
    there = {path.name for path in (tmp_path / "case").iterdir()}
    assert there >= {"profile.nsys-rep", "profile.sqlite", "config.json"}


def test_a_workload_by_torch_where_nsys_fails(tmp_path, monkeypatch, copying):
    """There is a report, but the program ended early, as where the inference does not fit."""
    monkeypatch.setattr(kernel_profile, "select_device", lambda name: (torch.device("cuda"), "a test"))

    def run(nsys, program, folder):
        (folder / "nsys.log").write_text("CUDA out of memory")
        return H200

    monkeypatch.setattr(kernel_profile, "run_under_nsys", run)
    config = workload_config("smoke", 16, mode="forward", device="cpu", warmup_steps=0, steps=1)
    result = profile_workload(config, tmp_path / "case")
    assert result["tool"] == "torch.profiler (CPU operators)"
    assert "torch.profiler instead of Nsight Systems: The program under nsys ended before it was" in result["notes"][0]
    assert "CUDA out of memory" in result["notes"][0]


def test_summary_by_range(tmp_path):
    """Two inference passes, whose kernels take 7 + 7 and 8 + 8 ns, and a training step."""
    export = SmallExport()
    for number, at in enumerate((0, 1000)):
        for name, begin, end in (("inference", 0, 900), ("forward", 10, 100), (f"block {number}", 20, 90)):
            export.range(name, at + begin, at + end)
        for index, kernel in enumerate(("ampere_sgemm", "reduce")):
            begin = at + 40 + 10 * index
            export.launch(2 * number + index, begin, begin + 100, begin + 107 + number, kernel)
    for name, begin, end in (("training step", 2000, 2900), ("backward", 2200, 2400), ("optimizer", 2450, 2500)):
        export.range(name, begin, end)
    export.launch(90, 2300, 2500, 2600, "ampere_sgemm", AUTOGRAD)
    export.launch(91, 2460, 2650, 2660, "vectorized_elementwise_kernel")
    trace = read_export(export.write(tmp_path / "small.sqlite"))
    found = summary(trace, "inference")
    paths = ["inference", "inference/forward", "inference/forward/block *"]
    assert [row["path"] for row in found["ranges"]] == paths
    times = [found["ranges"][0][name] for name in ("busy_seconds", "seconds", "idle_seconds")]
    assert times == pytest.approx([15e-9, 900e-9, 2.5e-9])
    each = [(row["name"], row["category"], row["calls"]) for row in of_path(found["kernels"], "inference")]
    assert each == [("ampere_sgemm", "matmul", 1), ("reduce", "softmax/reduction", 1)]
    training = summary(trace, "training step")
    (backward,) = of_path(training["ranges"], "training step/backward")
    assert backward["busy_seconds"] == pytest.approx(100e-9)
    assert of_path(training["categories"], "training step/optimizer")[0]["category"] == "optimizer"


def of_path(rows, path):
    return [row for row in rows if row["path"] == path]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """A real profile of the smallest model by torch.profiler."""
    folder = tmp_path_factory.mktemp("profile")
    config = workload_config("smoke", 32, mode="train_step", device="cpu", warmup_steps=1, steps=2)
    return profile_workload(config, folder), folder


def test_profile_on_the_cpu(on_cpu):
    """Matmuls of a forward pass: seven of each of two blocks (Q, K, V, O, three of SwiGLU) and the output; two bmm."""
    result, folder = on_cpu
    assert result["tool"] == "torch.profiler (CPU operators)"
    assert "the CPU's operators" in result["notes"][0]
    assert (folder / "profile.json.gz").stat().st_size > 0
    for part, top in (("inference", "inference"), ("training", "training step")):
        ranges = {row["path"]: row for row in result[part]["ranges"]}
        assert ranges[f"{top}/forward/block *"]["instances"] == 2
        forward = ranges[f"{top}/forward"]
        assert 0 < forward["busy_seconds"] <= forward["gpu_seconds"] <= forward["seconds"]
    assert matmuls(result["inference"], "inference/forward") == 7 * 2 + 1 + 2 * 2
    assert matmuls(result["training"], "training step/backward") == 2 * (7 * 2 + 1 + 2 * 2)
    json.dumps(result, allow_nan=False)


def matmuls(found, path):
    return next(row["calls"] for row in of_path(found["categories"], path) if row["category"] == "matmul")


def test_command_reads_reports(capsys, tmp_path):
    assert main(["nsys", "--report", str(H200), "--top", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1,398 kernels, 22 copies, 100 ranges" in out
    assert "vectorized_elementwise_kernel (Mul) optimizer 126 0.3028 6.725" in out
    assert "whole record 34.18 33.74 4.529 29.21" in out
    assert "training step/optimizer 2 2.31" in out
    for options, sentence in (
        (["--report", str(H200), "--range", "no"], "There is no range 'no'; there are inference"),
        (["--range", "forward"], "--range needs a --report"),
        (["--report", str(tmp_path / "none.sqlite")], "There is no file"),
    ):
        assert main(["nsys", *options]) == 2
        assert sentence in capsys.readouterr().err


def test_command_shows_profiles(on_cpu):
    record = {"outcome": "complete", "reason": None, "result": on_cpu[0]}
    assert "training step/optimizer" in "\n".join(profile_lines(record, 5))
    assert profile_lines({"outcome": "out of memory", "reason": "9 GiB"}, 5) == ["out of memory: 9 GiB"]


@pytest.mark.gpu
def test_kernels_of_torch_profiler_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS", "off")
    monkeypatch.setenv("PATH", os.defpath)
    config = workload_config("smoke", 32, mode="train_step", warmup_steps=2, steps=2)
    result = profile_workload(config, tmp_path)
    assert result["tool"] == "torch.profiler (CUDA)"
    assert "switched off by NSYS=off" in result["notes"][0]
    products, training = 9 * 2 + 1, result["training"]  # a product split along its inner dimension has two kernels
    assert matmuls(training, "training step/forward") >= products
    assert matmuls(training, "training step/backward") >= 2 * products
    assert of_path(training["categories"], "training step/optimizer")[0]["category"] == "optimizer"
