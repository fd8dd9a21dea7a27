"""The job scripts as they are, as they are rendered, and the plans that they are rendered for."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from job_projects import job_project
from notebook_projects import code, parameters

from lmcore.errors import UserError
from lmcore.workbook.jobs.plan import Job, plan_notebook, plan_workbook, ranges
from lmcore.workbook.jobs.scripts import MARK, render
from lmcore.workbook.jobs.site import Site, load_site

FOLDER = Path(__file__).parents[1] / "papermill_jobs"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
PROJECT = FOLDER.parent


def header(script: str) -> dict[str, str]:
    """Options of a script's #SBATCH lines."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


def require_shellcheck() -> str:
    """Path of shellcheck; the test is skipped where there is none."""
    found = shutil.which("shellcheck")
    if found is None:
        pytest.skip("shellcheck is not installed")
    return found


def workbook_of(project: Path, **options: object) -> dict[str, Job]:
    """The planned jobs of a small project's workbook by name."""
    jobs = plan_workbook(project, "smoke", "embedded", project / "runs" / "smoke", **options)
    return {job.name: job for job in jobs}


@pytest.fixture
def project(tmp_path) -> Path:
    return job_project(tmp_path / "project")


def test_the_plain_scripts_pass_shellcheck():
    checked = subprocess.run(
        [require_shellcheck(), "job.sh", *(script.name for script in SCRIPTS)],
        cwd=FOLDER, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.stdout + checked.stderr == ""


@pytest.mark.parametrize("site", ["site.yaml", "sites/hyak.yaml", "sites/lab.yaml"])
def test_the_rendered_scripts_pass_shellcheck(tmp_path, site):
    out = tmp_path / "it's out"
    settings = load_site(FOLDER / site, ["02_train"])
    jobs = plan_workbook(PROJECT, "smoke", "embedded", out, parameters=["workers=1", "prompts=['One day']"])
    files = []
    for job in jobs:
        files.append(tmp_path / f"{job.name}.sbatch")
        files[-1].write_text(render(PROJECT, job, settings.for_job(job.kind, job.name), out))
    # SC1090, SC1091: files that are found when the job runs
    command = [require_shellcheck(), "--exclude=SC1090,SC1091", *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.stdout + checked.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_plain_script_is_ready_for_sbatch(script):
    text = script.read_text(encoding="utf-8")
    options = header(text)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK)
    assert text.count(MARK) == 1
    assert {"job-name", "output", "time", "requeue", "signal"} <= set(options)
    assert options["open-mode"] == "append"
    needs_gpu = script.stem in ("workbook", "notebook", "sweep")
    assert options.get("gres") == ("gpu:1" if needs_gpu else None)
    assert options["signal"] == "B:USR1@120"
    first = next(index for index, line in enumerate(text.splitlines()) if not line.startswith("#") and line)
    assert all(not line.startswith("#SBATCH") for line in text.splitlines()[first:])  # sbatch would not see it


def test_a_chain_waits_for_what_it_needs_and_the_writeup_for_all(project):
    jobs = workbook_of(project)
    assert list(jobs) == ["02_train", "03_generate", "04_benchmark", "writeup"]
    assert {name: job.after_ok for name, job in jobs.items() if job.after_ok} == {"03_generate": ("02_train",)}
    assert {name: job.after_any for name, job in jobs.items() if job.after_any} == {
        "writeup": ("02_train", "03_generate", "04_benchmark")
    }


def test_a_notebook_waits_for_none_that_is_not_submitted(project):
    assert workbook_of(project, notebooks=["03"])["03_generate"].after_ok == ()
    (alone,) = plan_notebook(project, "smoke", "embedded", project / "runs", "03")
    assert (alone.after_ok, alone.notebooks) == ((), ("03_generate",))


def test_each_notebook_gets_the_parameters_that_it_declares(tmp_path):
    own = parameters('scale = "smoke"\ndata = "embedded"\nout = "../runs"\nwidth = 1')
    project = job_project(tmp_path / "project", _01_a=[parameters(), code("1")], _02_b=[own, code("1")])
    jobs = workbook_of(project, parameters=["steps=7", "width=2", "rates=[0.5, 1.0]"])
    assert jobs["01_a"].arguments == ("--parameters", "steps=7", "rates=[0.5, 1.0]")
    assert jobs["02_b"].arguments == ("--parameters", "width=2")
    (all_in_one,) = workbook_of(project, parameters=["steps=7", "width=2"], one_job=True).values()
    assert all_in_one.arguments == ("--parameters", "steps=7", "width=2")
    assert all_in_one.notebooks == ("01_a", "02_b")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"notebooks": ["09"]}, "There is no notebook '09'"),
        ({"notebooks": [""]}, "There is no notebook ''"),
        ({"parameters": ["steps={[]: 1}"]}, "steps"),
        ({"parameters": ["stepz=1"]}, "No notebook has a parameter 'stepz'"),
        ({"parameters": ["steps"]}, "A parameter is given as name=value"),
        ({"parameters": ["steps='many'"]}, "steps"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_planned(project, options, sentence):
    with pytest.raises(UserError, match=sentence):
        workbook_of(project, **options)


def test_data_that_is_not_there_is_refused_and_a_path_becomes_absolute(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no file or folder stories"):
        plan_notebook(project, "smoke", "stories", project / "runs", "02")
    (tmp_path / "stories").write_text("Once.")
    (job,) = plan_notebook(project, "smoke", "stories", project / "runs", "02")
    assert job.variables["DATA"] == str(tmp_path / "stories")


@pytest.mark.parametrize(
    ("numbers", "short"), [([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7, 8, 9], "0,2-3,7-9"), ([], "")]
)
def test_indices_are_written_in_ranges(numbers, short):
    assert ranges(numbers) == short
    assert Job("s", "sweep", "sweep.sbatch", tasks=tuple(numbers), concurrency=2).array == f"{short}%2"


def test_the_site_goes_before_the_plain_script_and_what_it_does_not_name_stays(project):
    job = workbook_of(project)["03_generate"]
    site = Site(partition="gpu", gpus="a40:2", time="10:00", signal_seconds=60, extra=("--mail-type=END",))
    options = header(render(project, job, site, project / "runs"))
    assert options == {
        "job-name": "03_generate",
        "output": str(project / "runs" / "jobs" / "03_generate-%j.log"),
        "open-mode": "append",
        "requeue": "",
        "signal": "B:USR1@60",
        "time": "10:00",
        "kill-on-invalid-dep": "yes",
        "partition": "gpu",
        "gpus": "a40:2",
        "mail-type": "END",
    }


def test_an_array_has_a_log_for_each_task(project):
    job = Job("lr", "sweep", "sweep.sbatch", tasks=(0, 1, 5), concurrency=2)
    options = header(render(project, job, Site(), project / "100% mine"))
    assert options["array"] == "0-1,5%2"
    assert options["output"] == str(project / "100%% mine" / "jobs" / "lr-%A_%a.log")


def test_variables_setup_and_arguments_reach_the_command_whatever_is_in_them(tmp_path):
    """The rendered script is run, with a stand-in for lmcore that prints what it gets."""
    project = job_project(tmp_path / "it's a $project")
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "lmcore").write_text('#!/bin/bash\nprintf "%s\\n" "$WORDS" "$MODULE" "$@"\n')
    (bin / "lmcore").chmod(0o755)
    out = tmp_path / 'out "quoted" `here`'
    job = plan_notebook(project, "smoke", "embedded", out, "02", ["rates=[0.5, 1.0]"])[0]
    setup = ("test -z $NOT_SET_ANYWHERE", "export MODULE='loaded it'", f"PATH={shlex.quote(str(bin))}:$PATH")
    script = tmp_path / "job.sbatch"
    script.write_text(
        render(project, job, Site(setup=setup, environment={"WORDS": "a 'b' $c"}, signal_seconds=60), out)
    )
    done = subprocess.run(["bash", script], cwd="/", capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "a 'b' $c", "loaded it", "workbook", "--resume", "--no-writeup", "--scale", "smoke", "--data", "embedded",
        "--out", str(out), "--stop-seconds", "50", "--notebooks", "02_train", "--parameters", "rates=[0.5, 1.0]",
    ]  # fmt: skip


def test_a_script_without_its_mark_is_refused(project):
    file = project / "papermill_jobs" / "notebook.sbatch"
    file.write_text(file.read_text().replace(MARK, "# settings"))
    with pytest.raises(UserError, match="must have the line '# lmcore submit: settings' once"):
        render(project, workbook_of(project)["02_train"], Site(), project / "runs")
    file.unlink()
    with pytest.raises(UserError, match=r"There is no file .*notebook\.sbatch"):
        render(project, workbook_of(project)["02_train"], Site(), project / "runs")


def test_a_scale_is_no_path(project):
    (project / "papermill_jobs" / "other.yaml").write_text("common: {}\n")
    with pytest.raises(UserError, match=r"There is no scale '\.\./other'"):
        plan_workbook(project, "../other", "embedded", project / "runs" / "x")


@pytest.mark.parametrize("limit", ["2", "1:30"])
def test_a_limit_that_ends_with_the_warning_is_refused(project, limit):
    """The job would be told to save itself as it starts, and be queued again in vain."""
    with pytest.raises(UserError, match=f"02_train: a time limit of {limit} is over before the warning 120 s"):
        render(project, workbook_of(project)["02_train"], Site(time=limit), project / "runs")
    assert "--time=3" in render(project, workbook_of(project)["02_train"], Site(time="3"), project / "runs")


@pytest.mark.parametrize("name", ["back\\slash", "two\nlines"])
def test_folders_that_slurm_cannot_write_a_log_to_are_refused(project, name):
    with pytest.raises(UserError, match="Slurm cannot write to") as refused:
        render(project, workbook_of(project)["02_train"], Site(), project / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("sweep", "out"), [("rates", None), ("my sweeps/rates.yaml", None), ("rates", "runs/other")])
def test_a_sweep_by_hand_goes_where_lmcore_sweep_run_puts_it(project, tmp_path, sweep, out):
    (tmp_path / "lmcore").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "lmcore").chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM") and key != "OUT"}
    variables = clean | {"SWEEP": sweep, "PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"OUT": out} if out else {})
    wanted = out or "runs/sweeps/rates"

    def words(script: str, **more: str) -> list[str]:
        command = ["bash", f"papermill_jobs/{script}"]
        done = subprocess.run(command, cwd=project, env=variables | more, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert words("sweep.sbatch", SLURM_ARRAY_TASK_ID="2") == ["sweep", "run", sweep, "--out", wanted, "--task", "2"]
    assert words("sweep-table.sbatch") == ["sweep", "table", wanted]
