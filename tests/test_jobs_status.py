"""lmcore jobs, from files made by hand and a squeue that says what it is told; tests/slurm/ has the real one."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import pytest
from filelock import FileLock
from job_projects import command
from notebook_projects import code, parameters

from lmcore.cli.jobs import jobs as jobs_command
from lmcore.errors import UserError
from lmcore.files import write_json
from lmcore.workbook.jobs import status
from lmcore.workbook.jobs.log import append, local_jobs_run, tail_lines
from lmcore.workbook.jobs.slurm import ask_slurm
from lmcore.workbook.jobs.status import as_json, as_text, read_notebooks, read_runs, runs_folders, status_of
from lmcore.workbook.parameters import find_project

HOST = socket.gethostname()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "runs" / "gpu").mkdir(parents=True)
    return tmp_path / "runs" / "gpu"


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Makes squeue print these lines, or fail with these words."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def answer(*lines, error="", sacct=""):
        command(
            programs,
            "squeue",
            "\n".join(f"echo '{line}'" for line in lines) + f"\necho '{error}' >&2; exit {int(bool(error))}",
        )
        command(programs, "sacct", f"echo '{sacct}'" if sacct else "exit 1")
        return programs

    return answer


def submit(out, id, name="workbook", kind="workbook", **values):
    append(out, id, name, "submitted", kind=kind, **values)


def say(out, id, *words, ago=100.0, name="workbook"):
    """Appends lines of a job to the log, the first so many seconds ago, the others a second apart."""
    with open(out / "jobs.log", "a") as file:
        for number, line in enumerate(words):
            time_utc = datetime.fromtimestamp(time.time() - ago + number, UTC).isoformat(timespec="seconds")
            file.write(f"{time_utc} {id} {name} {line}\n")


def train_run(folder, step=300, steps=5000, started=0, state="running", **status):
    """A run with a line every 10 steps, which take 2 seconds, the last one written just now."""
    write_json(folder / "config.json", {"steps": steps})
    write_json(folder / "status.json", {"state": state, "step": started, **status})
    lines = [{"step": n, "seconds": n / 5, "train_loss": 2.5} for n in range(10, step + 1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def notebook(out, name, state="running", done=2, cells=5, **fields):
    """A notebook of which papermill has executed so many cells."""
    made = [nbformat.v4.new_markdown_cell("# Title\n## Learning rates"), parameters()]
    made += [code(str(number)) for number in range(cells - 1)]
    for number, cell in enumerate(made[1:], 1):
        cell.metadata.papermill = {"status": "completed" if number <= done else "pending"}
    made.insert(2, code("scale = 'gpu'", "injected-parameters"))
    (out / "notebooks").mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made), out / "notebooks" / f"{name}.ipynb")
    write_json(out / "notebooks" / f"{name}.json", {"name": name, "state": state, **fields})


def one(out, **options):
    (row,), fault = status_of([out], **options)
    return row, fault


def test_a_running_job_says_what_it_does(out, slurm):
    slurm("17|RUNNING|None|2026-01-01T10:00:00")
    submit(out, "17")
    say(out, "17", "running host=n0 restart=0", "requeued", "running host=n1 restart=1")
    notebook(out, "02_train", job="17")
    notebook(out, "01_build", state="done", job="17")
    train_run(out / "runs" / "best", step=3000, started=1000, job="17")
    row, fault = one(out)
    assert (fault, row.tail, row.log) == (None, [], str(out / "jobs" / "workbook-17.log"))
    assert (row.id, row.name, row.state, row.attempts) == ("17", "workbook", "running", 2)
    assert row.doing == "02_train, cell 3/5; best: step 3,000/5,000, loss 2.500, 5 steps/s"
    assert row.seconds_left == pytest.approx(400, abs=5)


def test_a_run_belongs_to_the_job_that_trains_it(out, slurm):
    slurm("17|RUNNING|None|N/A", "18|RUNNING|None|N/A")
    submit(out, "17", "02_train", "notebook")
    submit(out, "18", "04_benchmark", "notebook")
    notebook(out, "02_train", job="17")
    notebook(out, "04_benchmark", job="18")
    train_run(out / "runs" / "best", job="17")
    train_run(out / "runs" / "of_nobody")
    train, benchmark = status_of([out])[0]
    assert train.doing.startswith("02_train, cell 3/5; best: step 300/5,000")
    assert (benchmark.doing, benchmark.seconds_left) == ("04_benchmark, cell 3/5", None)


def test_the_time_left_is_unknown_rather_than_guessed(out):
    train_run(out / "runs" / "one_line", step=1010, started=1000)
    train_run(out / "runs" / "silent", step=1000)
    os.utime(out / "runs" / "silent" / "metrics.jsonl", (time.time() - 1000,) * 2)
    train_run(out / "runs" / "no_config", step=1000)
    (out / "runs" / "no_config" / "config.json").unlink()
    runs = {run.words.partition(":")[0]: run for run in read_runs(out)}
    assert [runs[name].seconds_left for name in ("one_line", "silent", "no_config")] == [None, None, None]
    assert runs["silent"].words.endswith("nothing new for 0:16:40")
    assert runs["no_config"].words == "no_config: step 1,000, loss 2.500, 5 steps/s"


def test_the_runs_of_a_sweep_are_counted(out, slurm):
    slurm("17|RUNNING|None|N/A")
    submit(out, "17")
    folder = out / "runs" / "rates"
    write_json(folder / "sweep.json", {"a": {}, "b": {}, "c": {}})
    train_run(folder / "a", state="complete", started=5000)
    train_run(folder / "b", job="17")
    assert one(out)[0].doing == "b (rates 1/3 done): step 300/5,000, loss 2.500, 5 steps/s"
    train_run(folder / "c", step=10, job="17")
    assert one(out)[0].doing.endswith("; 1 more run")


RUNNING = "running host=n1 restart=0"
STATES = {
    "waits for nodes": ("PENDING|Resources|2026-01-01T10:00:00", [], "pending",
                        "It waits: Resources; expected to start 2026-01-01T10:00:00."),
    "waits for a job": ("PENDING|Dependency|N/A", [], "pending", "It waits for job 3: Dependency."),
    "waits to resume": ("PENDING|BeginTime|N/A", [RUNNING, "requeued"], "requeued", "It waits: BeginTime."),
    "cancelled": ("CANCELLED|None|N/A", [RUNNING], "cancelled", ""),
    "its node failed": ("NODE_FAIL|None|N/A", [RUNNING], "node fail", ""),
    "forgotten, done": (None, [RUNNING, "exit code=0"], "completed", ""),
    "forgotten, failed": (None, [RUNNING, "exit code=1"], "failed", "It ended with exit code 1."),
    "forgotten, stopped": (None, [RUNNING, "exit code=75"], "stopped", "It ended with exit code 75."),
    "forgotten, given up": (None, [RUNNING, "gave-up", "exit code=75"], "gave up",
                            "It made no progress in several attempts, and was not requeued again."),
    "forgotten while it ran": (None, [RUNNING], "lost",
                               "It was running on n1 when it last wrote, and nobody knows it any more."),
    "forgotten while it waited": (None, [RUNNING, "requeued"], "requeued", ""),
    "forgotten before it ran": (None, [], "not run", "It never started, and Slurm does not know it any more."),
}  # fmt: skip
"""What squeue says, what the job wrote, and what is shown: the state, and why."""


@pytest.mark.parametrize(("queued", "lines", "state", "note"), STATES.values(), ids=STATES)
def test_the_state_is_slurms_word_or_else_the_jobs_own(out, slurm, queued, lines, state, note):
    if queued:
        slurm(f"17|{queued}")
    else:
        slurm(error="slurm_load_jobs error: Invalid job id specified")
    submit(out, "17", after="3")
    say(out, "17", *lines)
    row, fault = one(out)
    assert (row.state, row.attempts, row.is_active, fault) == (state, int(bool(lines)), False, None)
    assert (row.notes or [""])[0] == note


def test_the_accounting_is_asked_for_what_the_controller_forgot(out, slurm):
    slurm("17|RUNNING|None|N/A", sacct="18|CANCELLED by 1000")
    submit(out, "17")
    submit(out, "18")
    assert [row.state for row in status_of([out])[0]] == ["running", "cancelled"]


def test_without_slurm_the_files_are_read(out, no_slurm):
    submit(out, "17")
    say(out, "17", RUNNING)
    row, fault = one(out)
    assert row.state == "running"
    assert fault.startswith("Slurm does not answer (squeue cannot be started here: No such file")
    assert fault in as_text([row], fault).splitlines()[0]
    value = json.loads(as_json([row], fault))
    assert (value["slurm"], value["jobs"][0]["id"], value["jobs"][0]["seconds_left"]) == (fault, "17", None)


def test_a_controller_that_does_not_answer_is_one_sentence(out, slurm, monkeypatch):
    programs = slurm(error="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    submit(out, "17")
    row, fault = one(out)
    assert row.state == "unknown"
    assert fault.startswith("Slurm does not answer (squeue: slurm_load_jobs error: Unable to contact")
    command(programs, "squeue", "exec sleep 60")
    monkeypatch.setattr("lmcore.workbook.jobs.slurm.SECONDS_TO_ANSWER", 0.2)
    assert ask_slurm(["1"])[1].startswith("Slurm does not answer (squeue: no answer within 0.2 s): the states are what")


def test_a_failed_job_shows_the_last_line_of_its_log(out, slurm):
    slurm("17|FAILED|NonZeroExitCode|N/A")
    submit(out, "17")
    say(out, "17", RUNNING, "exit code=1")
    notebook(out, "02_train", state="failed", cell=3, job="17", error="ValueError: no")
    (out / "jobs").mkdir()
    log = "one\nbar 1%\rbar 100%\n\x1b[31mNotebook 02_train failed\x1b[0m\n\n"
    (out / "jobs" / "workbook-17.log").write_text(log)
    row, _ = one(out)
    assert (row.doing, row.tail) == ("02_train failed at cell 3/5", ["Notebook 02_train failed"])
    assert one(out, tail=0)[0].tail == []
    assert one(out, tail=9)[0].tail == ["one", "bar 100%", "Notebook 02_train failed"]
    text = as_text([row], None)
    assert "    | Notebook 02_train failed" in text
    assert "It ended with exit code 1." in text


def test_an_array_is_one_row_and_one_for_each_failed_task(out, slurm):
    slurm(
        "17_0|COMPLETED|None|N/A",
        "17_1|FAILED|NonZeroExitCode|N/A",
        "17_3|RUNNING|None|N/A",
        "17_4|PENDING|JobArrayTaskLimit|N/A",
        "17_5|PENDING|JobArrayTaskLimit|N/A",
    )
    submit(out, "17", "sweep", "sweep", tasks="0-5")
    for task in (0, 2):  # 60 and 70 seconds
        say(out, f"17_{task}", RUNNING, ago=200)
        say(out, f"17_{task}", "exit code=0", ago=140 - 5 * task)
    say(out, "17_1", RUNNING, "exit code=1")
    (out / "jobs").mkdir()
    (out / "jobs" / "sweep-17_1.log").write_text("lmcore: no such data\n")
    say(out, "17_3", RUNNING)
    train_run(out / "runs" / "lr_1", job="17_3")
    whole, failed = status_of([out])[0]
    assert whole.tasks == {"completed": 2, "failed": 1, "running": 1, "pending": 2}
    assert (whole.id, whole.state, whole.notes) == ("17", "running", ["It waits: JobArrayTaskLimit."])
    assert whole.doing.startswith("2/6 tasks done, 2 pending, 1 failed, 1 running, lr_1: step 300/5,000")
    assert whole.seconds_left == pytest.approx(3 * 65, abs=5)
    assert (failed.id, failed.state, failed.tail) == ("17_1", "failed", ["lmcore: no such data"])
    assert failed.log == str(out / "jobs" / "sweep-17_1.log")


def test_a_job_submitted_by_hand_is_shown(out, slurm, tmp_path, monkeypatch):
    slurm("99|RUNNING|None|N/A")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lmcore-workbook-99.log").write_text("hello\n")
    say(out, "99", RUNNING, name="lmcore-workbook")
    say(out, "98_1", RUNNING, "exit code=3")
    job, array, task = status_of([out], tail=1)[0]
    assert (array.id, array.tasks, task.id) == ("98", {"failed": 1}, "98_1")
    assert (job.name, job.state, job.tail) == ("lmcore-workbook", "running", ["hello"])
    assert "submitted by hand" in job.notes[0]


def test_damaged_and_foreign_files_are_rows_or_nothing(out, slurm):
    slurm("17|RUNNING|None|N/A")
    submit(out, "17")
    say(out, "17", RUNNING)
    with open(out / "jobs.log", "ab") as file:
        file.write(b"\x00\xffrunn\n2026 22 x\n2026 23 x what\n2026 24 x submitted tasks=1-,a after\n")
    (out / "notebooks").mkdir()
    (out / "notebooks" / "02_train.json").write_text("[1, 2")
    notebook(out, "03_generate", job="17")
    (out / "notebooks" / "03_generate.ipynb").write_text('{"cells": [')
    for name, content in {"a": "[", "b": "[]", "c": '{"state": 3, "step": "x"}'}.items():
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / "status.json").write_text(content)
    train_run(out / "runs" / "d", job="17")
    with open(out / "runs" / "d" / "metrics.jsonl", "a") as file:
        file.write('{"step": 310, "tra')
    rows = {row.id: row for row in status_of([out])[0]}
    assert {id: row.state for id, row in rows.items()} == {"17": "running", "24": "not run"}
    assert rows["17"].doing == "03_generate; d: step 300/5,000, loss 2.500, 5 steps/s"


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content cut off, with a flipped bit, with a piece missing, or with a value of another type."""
    start = chance.randrange(len(content))
    flipped = bytes([content[start] ^ 1 << chance.randrange(8)])
    value = chance.choice([*re.finditer(rb"(?<=: )[^,\n}]+", content), None])
    other = chance.choice([b"null", b"[]", b"{}", b'"x"', b"-1", b"1e999", b"NaN", b"true", b"[1]"])
    replaced = content[: value.start()] + other + content[value.end() :] if value else b""
    cut, shorter = content[:start], content[:start] + content[start + chance.randrange(50) :]
    return chance.choice([cut, content[:start] + flipped + content[start + 1 :], shorter, replaced])


def test_no_damage_is_a_traceback(out, no_slurm):
    submit(out, "17")
    submit(out, "18", "sweep", "sweep", tasks="0-1")
    for id, end in {"17": [], "18_0": ["exit code=1"], "18_1": []}.items():
        say(out, id, RUNNING, *end)
    notebook(out, "02_train", job="17")
    train_run(out / "runs" / "rates" / "a", step=100, job="17")
    write_json(out / "runs" / "rates" / "sweep.json", {"a": {}, "b": {}})
    chance, files = random.Random(0), [path for path in sorted(out.rglob("*")) if path.is_file()]
    for _ in range(500):
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged(content, chance))
        rows, fault = status_of([out], tail=1)
        assert json.loads(as_json(rows, fault))
        assert as_text(rows, fault) or not rows
        path.write_bytes(content)


CELLS = [[3], [{"cell_type": "code", "metadata": {"papermill": 7}}], {"a": 1}, [{"cell_type": "code", "metadata": []}]]
LINES = ['{"step": 30, "seconds": Infinity, "train_loss": NaN}', '{"step": 30, "seconds": "x"}', '{"step": true}', "7"]


@pytest.mark.parametrize(("cells", "line"), [*zip([*CELLS, None, None], [*LINES, "{}", '{"step": 3}'], strict=True)])
def test_foreign_notebooks_and_metrics_are_no_traceback(out, cells, line):
    notebook(out, "a")
    (out / "notebooks" / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert [work.words for work in read_notebooks(out)] == ["a"]
    train_run(out / "runs" / "a", step=20)
    with open(out / "runs" / "a" / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    assert read_runs(out)[0].words.startswith("a: step 20/5,000")


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(100_000)))
    lines = tail_lines(tmp_path / "metrics.jsonl")
    assert (lines[-1], lines[0][0]) == ('{"step": 99999}', "{")
    assert 1000 < len(lines) < 50_000


def test_a_local_job_is_looked_for_among_the_processes(out, no_slurm):
    for id in ("local-1", "local-2"):
        submit(out, id)
        say(out, id, f"running host={HOST} restart=0")
    variables = os.environ | {"LMCORE_JOB_ID": "local-1", "OUT": str(out)}
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], env=variables, stdin=-1, stdout=-1)
    try:
        child.stdout.readline()
        rows, fault = status_of([out])
    finally:
        child.communicate()
    assert fault is None  # Slurm has nothing to do with them
    assert [row.state for row in rows] == ["running", "lost"]


def test_local_jobs_that_wait_and_those_that_nobody_runs(out, no_slurm):
    submit(out, "local-1")
    assert one(out)[0].state == "not run"
    with FileLock(out / "jobs" / ".local.lock"):
        source = "import sys\nfrom pathlib import Path\nfrom lmcore.workbook.jobs.status import status_of\n"
        source += "print(status_of([Path(sys.argv[1])])[0][0].state)"
        done = subprocess.run([sys.executable, "-c", source, out], capture_output=True, text=True, check=True)
    assert done.stdout == "pending\n"
    assert not local_jobs_run(out)


def test_the_runs_of_a_project_of_a_scratch_folder_or_of_the_checkout(tmp_path, monkeypatch):
    """Outside of a project `lmcore submit` submits the checkout's notebooks."""
    monkeypatch.chdir(tmp_path)
    assert runs_folders()[0] == find_project() / "runs"
    (tmp_path / "runs").mkdir()
    assert runs_folders() == [Path("runs")]
    project = tmp_path / "project"
    (project / "papermill_jobs" / "parameters").mkdir(parents=True)
    (project / "notebooks").mkdir()
    monkeypatch.chdir(project / "papermill_jobs")
    assert runs_folders() == [project / "runs"]
    site = project / "papermill_jobs" / "site.yaml"
    site.write_text(f"scratch: {tmp_path}/scratch\njobs:\n  02_train: {{time: '1:00:00'}}\n")
    assert runs_folders() == [project / "runs", tmp_path / "scratch" / "runs"]
    site.write_text("scratch: [\n")
    assert runs_folders() == [project / "runs"]


def test_the_table_fits_its_width(out, slurm):
    slurm("17|PENDING|Resources|N/A")
    submit(out, "17", "a" * 30)
    submit(out, "1" * 20, after="17")
    rows, _ = status_of([out])
    rows[0].doing = "word " * 60
    lines = as_text(rows, None).splitlines()
    assert max(len(line) for line in lines if "log:" not in line) <= status.WIDTH
    assert lines[1].split() == ["JOB", "NAME", "STATE", "TRIES", "LEFT", "DOING"]


def test_the_command_finds_the_folders(out, slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert jobs_command() == 0
    assert "lmcore submit workbook" in capsys.readouterr().out  # there are no jobs
    slurm("17|RUNNING|None|N/A")
    for folder in (out, tmp_path / "runs" / "sweeps" / "rates"):
        submit(folder, "17")
    assert jobs_command() == 0
    assert re.findall("(.*)\nJOB", capsys.readouterr().out) == ["runs/gpu", "runs/sweeps/rates"]
    assert jobs_command((out,), json=True) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["state"] == "running"
    with pytest.raises(UserError, match="No job was submitted for"):
        jobs_command((tmp_path / "runs" / "smoke",))


def test_it_does_not_wait_for_torch():
    source = "import sys, lmcore.workbook.jobs.status\nprint({'torch', 'pandas', 'nbformat'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:00:05"), (3753, "1:02:33"), (183600, "2-3:00:00")])
def test_durations(seconds, text):
    assert status.in_words(seconds) == text
