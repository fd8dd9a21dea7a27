"""submit.sh and the job scripts on a real Slurm, with small notebooks."""

from pathlib import Path

import pytest
from job_projects import job_project, touching
from notebook_projects import code

from lmcore.files import read_json

pytestmark = pytest.mark.slurm


def submit(cluster, project: Path, *words: object, **variables: object) -> dict[str, str]:
    """Submits, and returns the jobs' ids by name."""
    values = [f"{name}={value}" for name, value in variables.items()]
    lines = cluster.run("env", *values, "papermill_jobs/submit.sh", *words, cwd=project).stdout.splitlines()
    return {line.split()[1]: line.split()[0] for line in lines if line[0].isdigit()}


def alone(cluster, project: Path, name: str, *words: object, **variables: object) -> str:
    """Submits one notebook, and returns the job's id."""
    (job,) = submit(cluster, project, *words, NOTEBOOKS=name, WRITEUP="no", **variables).values()
    return job


def test_a_failing_notebook_fails_its_job_and_the_writeup_reports_it(cluster, tmp_path):
    failing = touching("02_train", "## Where it breaks", code("1 / 0"))
    others = {f"_{name}": touching(name) for name in ("03_generate", "04_nsys")}
    project = job_project(tmp_path / "project's", _02_train=failing, **others)
    jobs = submit(cluster, project)
    assert cluster.wait(jobs["writeup"])
    assert cluster.info(jobs["02_train"])["ExitCode"] == "1:0"
    assert "ZeroDivisionError: division by zero" in cluster.log(jobs["02_train"])
    assert not (project / "runs" / "smoke" / "03_generate.txt").exists()
    assert "02_train" in cluster.log(jobs["writeup"])
    assert [cluster.state(id) for id in jobs.values()] == ["FAILED", "CANCELLED", "COMPLETED", "FAILED"]


def test_submitted_twice_then_cancelled(cluster, tmp_path):
    """The second submission waits for the first; scancel keeps the notebook so far."""
    project = job_project(tmp_path / "project", _02_train=touching("02_train", code("time.sleep(3600)")))
    jobs, out = submit(cluster, project), project / "runs" / "smoke"
    job, record = jobs["02_train"], out / "notebooks" / "02_train.json"
    cluster.wait_until((out / "02_train.txt").exists, "the notebook ran", job=job)
    second = submit(cluster, project)
    for waiting in (jobs["writeup"], *second.values()):
        cluster.wait_until(lambda id=waiting: cluster.info(id)["Reason"] == "Dependency", "it waits", job=waiting)
    cluster.run("scancel", *second.values(), *jobs.values())
    assert [cluster.wait(each) for each in jobs.values()] == ["CANCELLED"] * 2
    cluster.wait_until(lambda: read_json(record)["state"] == "stopped", "it was stopped", job=job)
    assert any(cell.get("execution_count") for cell in read_json(record.with_suffix(".ipynb"))["cells"])
    assert cluster.state(job) == "CANCELLED"


def test_usr1_requeues_a_job_that_got_somewhere_and_gives_up_on_one_that_does_not(cluster, tmp_path):
    started = code("from pathlib import Path\nPath(out, f'{time.time_ns()}.start').touch()")
    saved = code("Path(out, 'runs', 'base', 'checkpoints', 'step_10').mkdir(parents=True, exist_ok=True)")  # once
    project = job_project(
        tmp_path / "project", _02_train=touching("02_train", saved, started, code("time.sleep(3600)"))
    )
    out = project / "runs" / "smoke"
    job = alone(cluster, project, "02")
    for attempt in (1, 2):
        cluster.wait_until(lambda n=attempt: len(list(out.glob("*.start"))) == n, f"start {attempt}", job=job)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "FAILED"
    assert cluster.info(job)["Restarts"] == "1"
    assert "stopped with nothing new saved" in cluster.log(job)


def test_whatever_is_in_a_path_an_option_or_a_value_reaches_the_job(cluster, tmp_path):
    """Spaces, quotes, $ and % in OUT, DATA and parameters."""
    project = job_project(tmp_path / "a $2 project")
    text = tmp_path / 'it\'s $HOME "data".txt'
    text.write_text("Once.<|endoftext|>" * 20)
    out = tmp_path / 'it\'s $HOME "out" 100%j'
    site = project / "papermill_jobs" / "site.sh"
    setup = "export SECOND='$c' LMCORE_SETUP='export FIRST=\"a  b\"\necho \"$FIRST $SECOND\" >setup.txt'"
    site.write_text(f"options=(--time=1-2:30:00 --mem=100M)\n{setup}\n")
    job = alone(cluster, project, "04", "--parameters", "rates=[0.5, 1.0]", OUT=out, DATA=text)
    shown = cluster.run("scontrol", "show", "job", job).stdout
    assert "TimeLimit=1-02:30:00" in shown
    assert "MinMemoryNode=100M" in shown
    assert cluster.wait(job) == "COMPLETED", cluster.log(job)
    made = read_json(out / "notebooks" / "04_benchmark.json")
    assert (made["data"], made["parameters"]["rates"]) == (str(text), [0.5, 1.0])
    assert (project / "setup.txt").read_text() == "a  b $c\n"
    assert (out / "jobs" / f"04_benchmark-{job}.log").is_file()
