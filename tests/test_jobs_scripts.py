"""The job scripts as they stand, which jobs there are, and with what options and variables they are submitted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from job_projects import command, job_project
from notebook_projects import code, parameters

from lmcore.errors import UserError
from lmcore.workbook.jobs.dependencies import Job, chain_of, notebook_jobs
from lmcore.workbook.jobs.log import numbers, ranges
from lmcore.workbook.jobs.site import Site
from lmcore.workbook.jobs.submit import environment

FOLDER = Path(__file__).parents[1] / "papermill_jobs"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
PLAIN = Site()


def workbook_of(project: Path, **options: object) -> dict[str, Job]:
    """The jobs of a small project's workbook by name."""
    jobs = notebook_jobs(project, project / "runs" / "smoke", "smoke", "embedded", **options)
    return {job.name: job for job in jobs}


def options_of(project: Path, job: Job, site: Site = PLAIN, out: str = "runs") -> list[str]:
    """Options with which the job is submitted."""
    (ready,) = chain_of(project, project / out, [job], site).jobs
    common = ["--export=ALL", *site.options()]
    return [word for word in ready.options if word not in common] + job.dependency({n: f"<{n}>" for n in job.after})


@pytest.fixture
def project(tmp_path) -> Path:
    return job_project(tmp_path / "project")


def test_the_scripts_pass_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    words = ["shellcheck", "job.sh", *(script.name for script in SCRIPTS)]
    checked = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert checked.stdout + checked.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_and_ready_for_sbatch(script):
    text = script.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert text.startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK)
    assert text.count("\n") <= 30
    assert {"job-name", "output", "time"} <= set(options)
    needs_gpu = script.stem in ("workbook", "notebook", "sweep", "papermill", "train")
    assert options.get("gres") == ("gpu:1" if needs_gpu else None)
    if script.stem != "papermill":
        assert (options["requeue"], options["open-mode"], options["signal"]) == ("", "append", "B:USR1@120")
    first = next(index for index, line in enumerate(text.splitlines()) if not line.startswith("#") and line)
    assert all(not line.startswith("#SBATCH") for line in text.splitlines()[first:])  # sbatch would not see it


COMPUTED = ["SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_NODEID", "GPUS"]
COMPUTED += ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"]


@pytest.mark.parametrize("value", ["HOME[$(touch ran)0]", "2+$(touch ran)2", "-1", "08", "1\n2"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_value_that_bash_computes_with_is_a_number(tmp_path, name, value):
    """bash runs commands in an arithmetic expression, also where a variable's value is one."""
    (tmp_path / "papermill_jobs").mkdir()
    for script in ("job.sh", "train.sbatch"):
        shutil.copy(FOLDER / script, tmp_path / "papermill_jobs")
    for command_name in ("lmcore", "srun", "torchrun"):
        (tmp_path / command_name).write_text("#!/bin/sh\ntouch began\n")
        (tmp_path / command_name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": "out", "RUN": "run", "CONFIG": "config.json", name: value}
    source = "set -eu; . papermill_jobs/job.sh; "
    own = [["-c", f"{source} supervise lmcore"], ["papermill_jobs/train.sbatch"]]
    for words in (["-c", f"{source} export_rendezvous; lmcore"], *own[: 0 if "STEP" in name else 2]):  # which unset it
        done = subprocess.run(
            ["bash", *words], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(rf"lmcore: {name} must be a whole number, not [^\n]+\.\n", done.stderr)
        assert {"ran", "began"}.isdisjoint(path.name for path in tmp_path.iterdir())


def test_the_shortest_script_is_papermills_own_line(project):
    """It runs a notebook with the parameters of a scale, and those that come after."""
    assert min(SCRIPTS, key=lambda script: script.stat().st_size).stem == "papermill"
    file = project / "papermill_jobs" / "parameters" / "tiny" / "02_train.yaml"
    file.parent.mkdir()
    file.write_text(f"out: {project / 'runs' / 'tiny'}\nsteps: 9\n")
    words = ["bash", "papermill_jobs/papermill.sbatch", "02_train", "tiny", "-p", "rates", "2"]
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    notebook = nbformat.read(project / "notebooks" / "02_train.ipynb", 4)
    notebook.metadata = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
    nbformat.write(notebook, project / "notebooks" / "02_train.ipynb")
    done = subprocess.run(words, cwd=project, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (project / "runs" / "tiny" / "02_train.txt").exists()
    executed = (project / "runs" / "tiny" / "notebooks" / "02_train.ipynb").read_text()
    assert '"steps = 9\\n"' in executed
    assert '"rates = 2\\n"' in executed


def test_a_chain_waits_for_what_it_needs_and_the_writeup_for_all(project):
    jobs = workbook_of(project)
    assert list(jobs) == ["02_train", "03_generate", "04_benchmark", "writeup"]
    assert {name: job.after for name, job in jobs.items() if job.after} == {
        "03_generate": ("02_train",),
        "writeup": ("02_train", "03_generate", "04_benchmark"),
    }
    assert [name for name, job in jobs.items() if job.whatever_happens] == ["writeup"]
    assert workbook_of(project, notebooks=["03"])["03_generate"].after == ()
    (alone,) = workbook_of(project, notebooks=["03"], writeup=False).values()
    assert (alone.name, alone.variables["NOTEBOOKS"]) == ("03_generate", "03_generate")


def test_each_notebook_gets_the_parameters_that_it_declares(tmp_path):
    own = parameters('scale = "smoke"\ndata = "embedded"\nout = "../runs"\nwidth = 1')
    project = job_project(tmp_path / "project", _01_a=[parameters(), code("1")], _02_b=[own, code("1")])
    jobs = workbook_of(project, parameters=["steps=7", "width=2", "rates=[0.5, 1.0]"])
    assert jobs["01_a"].arguments == ("--parameters", "steps=7", "rates=[0.5, 1.0]")
    assert jobs["02_b"].arguments == ("--parameters", "width=2")
    (all_in_one,) = workbook_of(project, parameters=["steps=7", "width=2"], one_job=True).values()
    assert (all_in_one.arguments, all_in_one.variables["NOTEBOOKS"]) == (("--parameters", "steps=7", "width=2"), "")


def test_a_path_to_data_becomes_absolute(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").write_text("<|endoftext|>".join(["Once."] * 3))
    job, _ = notebook_jobs(project, project / "runs", "smoke", "stories", ["02"])
    assert job.variables["DATA"] == str(tmp_path / "stories")


@pytest.mark.parametrize(
    ("tasks", "short"), [([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7, 8, 9], "0,2-3,7-9"), ([], "")]
)
def test_indices_are_written_in_ranges(tasks, short):
    assert ranges(tasks) == short
    assert numbers(short) == tasks


def test_what_a_site_and_a_job_want_is_on_the_command_line(project):
    """Which goes before the script's own lines; of a chain, a job that can never start is cancelled."""
    assert options_of(project, workbook_of(project)["03_generate"]) == [
        "--job-name=03_generate", f"--output={project}/runs/jobs/03_generate-%j.log",
        "--dependency=afterok:<02_train>", "--kill-on-invalid-dep=yes",
    ]  # fmt: skip
    array = Job("lr", "sweep", tasks=(0, 1, 5), concurrency=2)
    assert options_of(project, array, out="100% mine") == [
        "--job-name=lr", f"--output={project}/100%% mine/jobs/lr-%A_%a.log", "--array=0-1,5%2"
    ]  # fmt: skip


def test_variables_setup_and_arguments_reach_the_command_whatever_is_in_them(tmp_path):
    """The script is run, with a stand-in for lmcore that prints what it gets."""
    project, out = job_project(tmp_path / "it's a $project"), tmp_path / 'out "quoted" `here`'
    bin = tmp_path / "bin"
    bin.mkdir()
    command(bin, "lmcore", 'printf "%s\\n" "$WORDS" "$MODULE" "$@"')
    setup = ["test -z $NOT_SET_ANYWHERE", "export MODULE='loaded it'", f"PATH='{bin}':$PATH"]
    site = Site(setup=setup, environment={"WORDS": "a 'b' $c"}, signal_seconds="60")
    jobs = notebook_jobs(project, out, "smoke", "embedded", ["02"], ["rates=[0.5, 1.0]"])
    variables = os.environ | environment(chain_of(project, out, jobs, site).jobs[0])
    words = ["bash", jobs[0].script, *jobs[0].arguments]
    done = subprocess.run(words, cwd=project, env=variables, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "a 'b' $c", "loaded it", "workbook", "--resume", "--no-writeup", "--scale", "smoke", "--data", "embedded",
        "--out", str(out), "--stop-seconds", "50", "--notebooks", "02_train", "--parameters", "rates=[0.5, 1.0]",
    ]  # fmt: skip


def test_what_cannot_be_submitted_is_refused(project):
    job = workbook_of(project)["02_train"]
    for limit in ("2", "1:30"):  # the job would be told to save itself as it starts, and be queued again in vain
        with pytest.raises(UserError, match=f"02_train: a time limit of {limit} is over before the warning 120 s"):
            options_of(project, job, Site(time=limit))
    with pytest.raises(UserError, match=r"a time limit of 04:00:00 is over before the warning 20000 s"):
        options_of(project, job, Site(signal_seconds="20000"))
    assert options_of(project, job, Site(time="3"))
    for name in ("back\\slash", "two\nlines"):
        with pytest.raises(UserError, match="Slurm cannot write to") as refused:
            options_of(project, job, out=name)
        assert "\n" not in str(refused.value)
    (project / "papermill_jobs" / "notebook.sbatch").unlink()
    with pytest.raises(UserError, match=r"There is no file .*notebook\.sbatch"):
        options_of(project, job)


@pytest.mark.parametrize(("sweep", "out"), [("rates", None), ("my sweeps/rates.yaml", None), ("rates", "runs/other")])
def test_a_sweep_by_hand_goes_where_lmcore_sweep_run_puts_it(project, tmp_path, sweep, out):
    command(tmp_path, "lmcore", 'printf "%s\\n" "$@"')
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM") and key != "OUT"}
    variables = clean | {"SWEEP": sweep, "PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"OUT": out} if out else {})
    wanted = out or "runs/sweeps/rates"

    def words(script: str, **more: str) -> list[str]:
        words = ["bash", f"papermill_jobs/{script}"]
        done = subprocess.run(words, cwd=project, env=variables | more, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert words("sweep.sbatch", SLURM_ARRAY_TASK_ID="2") == ["sweep", "run", sweep, "--out", wanted, "--task", "2"]
    assert words("sweep-table.sbatch") == ["sweep", "table", wanted]
