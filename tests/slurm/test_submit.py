"""`workbook submit`, `workbook status` and the job scripts on a real Slurm, with small notebooks."""

import json
import time
from pathlib import Path

import pytest
from job_projects import job_project, touching
from notebook_projects import code

pytestmark = pytest.mark.slurm


def submit(cluster, project: Path, *words: object) -> dict[str, str]:
    """Submits, and returns the jobs' ids by name."""
    lines = cluster.run("workbook", "submit", "notebooks", *words, cwd=project).stdout.splitlines()
    return {line.split()[1]: line.split()[0] for line in lines if line[0].isdigit()}


def alone(cluster, project: Path, name: str, *words: object) -> str:
    """Submits one notebook, and returns the job's id."""
    (job,) = submit(cluster, project, "--notebooks", name, "--no-writeup", *words).values()
    return job


def shown(cluster, project: Path) -> dict[str, list[str]]:
    """State and last column of `workbook status` by the jobs' names."""
    lines = cluster.run("workbook", "status", cwd=project).stdout.splitlines()
    rows = [line.split(maxsplit=3) for line in lines if line.startswith("  ")]
    return {row[1]: row[2:] for row in rows if row[0].isdigit()}


def record(project: Path, notebook: str) -> dict:
    """What the notebook's record in runs/smoke says."""
    return json.loads((project / "runs" / "smoke" / "notebooks" / f"{notebook}.json").read_text())


def moment(project: Path, notebook: str) -> int:
    """When the notebook ran."""
    return int((project / "runs" / "smoke" / f"{notebook}.txt").read_text())


def waiting(name: str) -> list:
    """A notebook that says that it runs, and then takes longer than any test."""
    return touching(name, code("time.sleep(3600)"))


def test_a_chain_runs_in_order_and_ends_with_the_writeup(cluster, tmp_path):
    project = job_project(tmp_path / "a project's folder")
    jobs = submit(cluster, project)
    assert list(jobs) == ["02_train", "03_generate", "04_benchmark", "writeup"]
    assert cluster.info(jobs["03_generate"])["Dependency"].startswith(f"afterok:{jobs['02_train']}")
    assert [cluster.wait(job) for job in jobs.values()] == ["COMPLETED"] * 4
    assert moment(project, "03_generate") > moment(project, "02_train")
    assert (project / "runs" / "smoke" / "writeup").stat().st_mtime_ns > moment(project, "04_benchmark")
    assert {tuple(row) for row in shown(cluster, project).values()} == {("completed",)}


def test_a_failing_notebook_fails_its_job_and_the_writeup_reports_it(cluster, tmp_path):
    failing = touching("02_train", "## Where it breaks", code("1 / 0"))
    project = job_project(
        tmp_path / "project", _02_train=failing, _03_generate=touching("03_generate"), _04_nsys=touching("04_nsys")
    )
    jobs = submit(cluster, project)
    assert cluster.wait(jobs["writeup"])
    assert cluster.info(jobs["02_train"])["ExitCode"] == "1:0"
    assert "ZeroDivisionError: division by zero" in cluster.log(jobs["02_train"])
    assert cluster.state(jobs["03_generate"]) == "CANCELLED"
    assert not (project / "runs" / "smoke" / "03_generate.txt").exists()
    assert cluster.state(jobs["04_nsys"]) == "COMPLETED"
    assert "02_train" in cluster.log(jobs["writeup"])
    rows = shown(cluster, project)
    assert [rows[name][0] for name in jobs] == ["failed", "cancelled", "completed", "failed"]
    assert str(project / "runs" / "smoke" / "jobs" / "02_train-") in rows["02_train"][1]


def test_a_script_can_be_submitted_by_hand(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    script, words = project / "papermill_jobs" / "workbook.sbatch", ("--no-writeup", "--parameters", "steps=9")
    job = cluster.sbatch(script, *words, cwd=project / "papermill_jobs", NOTEBOOKS="02 04", OUT="runs/hand $a 'b'")
    assert cluster.wait(job) == "COMPLETED", cluster.log(job)
    made = project / "runs" / "hand $a 'b'" / "notebooks"
    assert {path.stem for path in made.glob("*.json")} == {"02_train", "04_benchmark"}
    assert json.loads((made / "02_train.json").read_text())["parameters"]["steps"] == 9
    assert (project / "papermill_jobs" / f"workbook-{job}.log").is_file()


def test_a_script_away_from_the_project_or_without_lmcore_says_so(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    script = project / "papermill_jobs" / "workbook.sbatch"
    away = cluster.sbatch(script, cwd=tmp_path)
    without = cluster.sbatch(script, options=["--export=PATH=/usr/bin:/bin"], cwd=project)
    for job, sentence in ((away, "There is no papermill_jobs/job.sh here"), (without, "It is not installed here")):
        assert cluster.wait(job) == "FAILED"
        assert cluster.info(job)["ExitCode"] == "2:0"
        assert cluster.log(job).startswith(f"lmcore: {sentence}")


def test_a_second_submission_is_refused_until_the_jobs_have_ended(cluster, tmp_path):
    project = job_project(tmp_path / "project", _02_train=waiting("02_train"))
    jobs = submit(cluster, project)
    refused = cluster.run("workbook", "submit", "notebooks", cwd=project, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "are still queued or running (" in refused.stderr
    rows = shown(cluster, project)
    assert (rows["02_train"][0], rows["writeup"]) == ("running", ["pending", "Dependency"])
    cluster.run("scancel", *jobs.values())
    assert [cluster.wait(job) for job in jobs.values()] == ["CANCELLED"] * 2


def test_scancel_keeps_the_notebook_so_far(cluster, tmp_path):
    project = job_project(tmp_path / "project", _02_train=waiting("02_train"))
    job = alone(cluster, project, "02")
    cluster.wait_until((project / "runs" / "smoke" / "02_train.txt").exists, "the notebook ran", job=job)
    cluster.run("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    cluster.wait_until(lambda: record(project, "02_train")["state"] == "stopped", "it was stopped", job=job)
    saved = json.loads((project / "runs" / "smoke" / "notebooks" / "02_train.ipynb").read_text())
    assert any(cell.get("execution_count") for cell in saved["cells"])
    time.sleep(2)
    assert cluster.state(job) == "CANCELLED"


def test_usr1_requeues_a_job_that_got_somewhere_and_gives_up_on_one_that_does_not(cluster, tmp_path):
    """The first stop is in vain, the second is not, the third and the fourth are."""
    started = code("from pathlib import Path\nPath(out, f'{time.time_ns()}.start').touch()")
    project = job_project(tmp_path / "project", _02_train=touching("02_train", started, code("time.sleep(3600)")))
    (project / "papermill_jobs" / "site.yaml").write_text("attempts_without_progress: 2\n")
    job = alone(cluster, project, "02")
    out = project / "runs" / "smoke"
    checkpoint = out / "runs" / "base" / "checkpoints" / "step_00000010.pt"
    for attempt in range(1, 5):
        cluster.wait_until(lambda n=attempt: len(list(out.glob("*.start"))) == n, f"start {attempt}", job=job)
        if attempt == 2:  # what training would have left
            checkpoint.parent.mkdir(parents=True)
            checkpoint.touch()
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "FAILED"
    assert cluster.info(job)["Restarts"] == "3"
    assert "stopped 2 times in a row with nothing new saved" in cluster.log(job)


def test_whatever_is_in_a_path_an_option_or_a_value_reaches_the_job(cluster, tmp_path):
    """Spaces, quotes, $ and % in OUT, DATA and parameters."""
    project = job_project(tmp_path / "a $2 project")
    text = tmp_path / 'it\'s $HOME "data".txt'
    text.write_text("Once.<|endoftext|>" * 20)
    out = tmp_path / 'it\'s $HOME "out" 100%j'
    setup = ["export FIRST='a  b'", 'echo "$FIRST $SECOND" >setup.txt']
    site = {"setup": setup, "environment": {"SECOND": "$c"}, "time": "1-2:30:00", "memory": "100M"}
    (project / "papermill_jobs" / "site.yaml").write_text(json.dumps(site))  # which is YAML, too
    words = ["--out", out, "--data", text, "--parameters", "rates=[0.5, 1.0]"]
    job = alone(cluster, project, "04", *words)
    shown = cluster.run("scontrol", "show", "job", job).stdout
    assert "TimeLimit=1-02:30:00" in shown
    assert "MinMemoryNode=100M" in shown
    assert cluster.wait(job) == "COMPLETED", cluster.log(job)
    made = json.loads((out / "notebooks" / "04_benchmark.json").read_text())
    assert (made["data"], made["parameters"]["rates"]) == (str(text), [0.5, 1.0])
    assert (project / "setup.txt").read_text() == "a  b $c\n"
    assert (out / "jobs" / f"04_benchmark-{job}.log").is_file()


def test_what_slurm_has_forgotten_has_ended(forgetful, tmp_path):
    """As on sites without accounting: the last line of the log says how."""
    project = job_project(tmp_path / "project", _04_benchmark=touching("04_benchmark", code("1 / 0")))
    job = alone(forgetful, project, "04")

    def known() -> list[str]:
        return forgetful.run("squeue", "--states=all", "--noheader", "--format=%i").stdout.split()

    forgetful.wait_until(lambda: job not in known(), "Slurm forgot the job", 400)
    state, words = shown(forgetful, project)["04_benchmark"]
    assert state == "ended"
    assert "division by zero" in words
    assert "04_benchmark" in submit(forgetful, project, "--notebooks", "04", "--no-writeup")


def test_doctor_names_the_partitions(cluster, tmp_path):
    facts = json.loads(cluster.run("lmcore", "doctor", "--json", cwd=tmp_path).stdout)
    assert facts["slurm"].endswith("GPUs in main (gpu:2), spot (gpu:2)")
