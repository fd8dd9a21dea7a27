"""`lmcore submit` and the job scripts on a real Slurm, with small notebooks."""

import json
import time
from pathlib import Path

import pytest
from job_projects import job_project, states, touching
from notebook_projects import code

from lmcore.workbook.jobs.log import read_log

pytestmark = pytest.mark.slurm


def submit(cluster, project: Path, *words: object) -> dict[str, str]:
    """Submits, and returns the jobs' ids by name."""
    lines = cluster.run("lmcore", "submit", *words, cwd=project).stdout.splitlines()
    return {line.split()[1]: line.split()[0] for line in lines if line[0].isdigit()}


def record(project: Path, notebook: str) -> dict:
    """What the notebook's record in runs/smoke says."""
    return json.loads((project / "runs" / "smoke" / "notebooks" / f"{notebook}.json").read_text())


def said(project: Path, job: str) -> list[str]:
    """The states of which the job itself wrote a line."""
    return states(project / "runs" / "smoke", job)


def moment(project: Path, notebook: str) -> int:
    """When the notebook ran."""
    return int((project / "runs" / "smoke" / f"{notebook}.txt").read_text())


def waiting(name: str) -> list:
    """A notebook that says that it runs, and then takes longer than any test."""
    return touching(name, code("time.sleep(3600)"))


def test_a_chain_runs_in_order_and_ends_with_the_writeup(cluster, tmp_path):
    project = job_project(tmp_path / "a project's folder")
    jobs = submit(cluster, project, "workbook")
    assert list(jobs) == ["02_train", "03_generate", "04_benchmark", "writeup"]
    assert cluster.info(jobs["03_generate"])["Dependency"].startswith(f"afterok:{jobs['02_train']}")
    assert [cluster.wait(job) for job in jobs.values()] == ["COMPLETED"] * 4
    assert moment(project, "03_generate") > moment(project, "02_train")
    out = project / "runs" / "smoke"
    assert (out / "writeup" / "answers.html").stat().st_mtime_ns > moment(project, "04_benchmark")
    for name, job in jobs.items():
        log = out / "jobs" / f"{name}-{job}.log"
        assert log.read_text().endswith(f"{out}/writeup/answers.pdf\n" if name == "writeup" else "s\n")
        assert said(project, job) == ["running", "exit"]


def test_a_failing_notebook_fails_its_job_and_the_writeup_reports_it(cluster, tmp_path):
    failing = touching("02_train", "## Where it breaks", code("1 / 0"))
    project = job_project(
        tmp_path / "project", _02_train=failing, _03_generate=touching("03_generate"), _04_nsys=touching("04_nsys")
    )
    jobs = submit(cluster, project, "workbook")
    assert cluster.wait(jobs["writeup"])
    assert cluster.state(jobs["02_train"]) == "FAILED"
    assert cluster.info(jobs["02_train"])["ExitCode"] == "1:0"
    assert "ZeroDivisionError: division by zero" in cluster.log(jobs["02_train"])
    assert "ZeroDivisionError" in (project / "runs" / "smoke" / "notebooks" / "02_train.ipynb").read_text()
    assert cluster.state(jobs["03_generate"]) == "CANCELLED"
    assert not (project / "runs" / "smoke" / "03_generate.txt").exists()
    assert cluster.state(jobs["04_nsys"]) == "COMPLETED"
    page = (project / "runs" / "smoke" / "writeup" / "answers.html").read_text()
    assert "division by zero" in page
    assert "03_generate" in page
    assert "02_train" in cluster.log(jobs["writeup"])


def test_one_job_makes_the_whole_workbook(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    jobs = submit(cluster, project, "workbook", "--one-job")
    assert list(jobs) == ["workbook"]
    assert cluster.wait(jobs["workbook"]) == "COMPLETED"
    assert moment(project, "02_train") < moment(project, "03_generate") < moment(project, "04_benchmark")
    assert (project / "runs" / "smoke" / "writeup" / "answers.html").exists()


@pytest.mark.parametrize("folder", [".", "papermill_jobs"])
def test_a_script_can_be_submitted_by_hand(cluster, tmp_path, folder):
    project = job_project(tmp_path / "project")
    script = project / "papermill_jobs" / "notebook.sbatch"
    job = cluster.sbatch(script, "--parameters", "steps=9", cwd=project / folder, NOTEBOOKS="02", OUT="runs/hand")
    assert cluster.wait(job) == "COMPLETED"
    made = json.loads((project / "runs" / "hand" / "notebooks" / "02_train.json").read_text())
    assert (made["state"], made["parameters"]["steps"]) == ("done", 9)
    lines = (project / folder / f"notebook-{job}.log").read_text().splitlines()
    assert lines[-1].startswith("02_train: done")  # Jupyter may note before it that it interrupts a kernel that ends


def test_a_script_away_from_the_project_says_so(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = cluster.sbatch(project / "papermill_jobs" / "workbook.sbatch", cwd=elsewhere)
    assert cluster.wait(job) == "FAILED"
    assert cluster.info(job)["ExitCode"] == "2:0"
    assert cluster.log(job) == (
        "lmcore: There is no papermill_jobs/job.sh here: sbatch this from the project's folder.\n"
    )


def test_a_script_without_lmcore_says_so(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    script = project / "papermill_jobs" / "workbook.sbatch"
    job = cluster.sbatch(script, options=["--export=PATH=/usr/bin:/bin"], cwd=project)
    assert cluster.wait(job) == "FAILED"
    assert cluster.info(job)["ExitCode"] == "2:0"
    assert cluster.log(job).startswith("lmcore: It is not installed here: activate its environment before sbatch")
    assert cluster.log(job).count("\n") == 1


def test_a_second_submission_is_refused_until_the_jobs_have_ended(cluster, tmp_path):
    project = job_project(tmp_path / "project", _02_train=waiting("02_train"))
    jobs = submit(cluster, project, "workbook")
    refused = cluster.run("lmcore", "submit", "workbook", cwd=project, check=False)
    assert refused.returncode == 2
    assert f"are still queued or running ({jobs['02_train']}, {jobs['writeup']})" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""
    cluster.run("scancel", *jobs.values())
    assert [cluster.wait(job) for job in jobs.values()] == ["CANCELLED"] * 2
    cluster.wait_until(lambda: submit_works(cluster, project), "the folder could be submitted again")


def submit_works(cluster, project: Path) -> bool:
    """Submits and cancels again; False while the cancelled jobs are still being cleaned up."""
    done = cluster.run("lmcore", "submit", "workbook", cwd=project, check=False)
    if done.returncode == 2:
        assert "are still queued or running" in done.stderr
        return False
    cluster.run("scancel", *(line.split()[0] for line in done.stdout.splitlines() if line[0].isdigit()))
    return done.returncode == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "nowhere/stories"], "There is no file or folder nowhere/stories"),
        (["--scale", "huge"], "There is no scale 'huge'"),
        (["--notebooks", "07"], "There is no notebook '07'"),
        (["--parameters", "stepz=1"], "No notebook has a parameter 'stepz'"),
        (["--time", "soon"], "time must be minutes"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_submitted(cluster, tmp_path, words, sentence):
    project = job_project(tmp_path / "project")
    listed = ["squeue", "--noheader", "--states=all", "--format=%i"]
    before = set(cluster.run(*listed).stdout.split())
    refused = cluster.run("lmcore", "submit", "workbook", *words, cwd=project, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert set(cluster.run(*listed).stdout.split()) == before
    assert not (project / "runs").exists()


def test_what_sbatch_refuses_cancels_the_jobs_before_it(cluster, tmp_path):
    project = job_project(tmp_path / "project", _02_train=waiting("02_train"), _04_nsys=touching("04_nsys"))
    (project / "papermill_jobs" / "site.yaml").write_text("jobs:\n  04_nsys: {partition: nowhere}\n")
    refused = cluster.run("lmcore", "submit", "workbook", cwd=project, check=False)
    assert refused.returncode == 2
    assert "invalid partition specified: nowhere" in refused.stderr
    assert refused.stderr.count("\n") == 1
    cancelled = refused.stderr.strip().rpartition(" ")[2].rstrip(".")
    assert "The jobs before it are cancelled" in refused.stderr
    assert cluster.wait(cancelled) == "CANCELLED"
    assert "cancelled" in said(project, cancelled)  # it may have started in the meantime


def test_a_dependency_that_sbatch_refuses_is_reported(cluster, tmp_path):
    """(One on a job that Slurm does not know, or no longer, counts as fulfilled there.)"""
    project = job_project(tmp_path / "project")
    (project / "papermill_jobs" / "site.yaml").write_text("extra: ['--dependency=afterok:none']\n")
    refused = cluster.run("lmcore", "submit", "notebook", "04", cwd=project, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "sbatch: Batch job submission failed: Job dependency problem." in refused.stderr
    assert not (project / "runs" / "smoke" / "jobs.log").exists()


def test_scancel_keeps_the_notebook_so_far(cluster, tmp_path):
    project = job_project(tmp_path / "project", _02_train=waiting("02_train"))
    job = submit(cluster, project, "notebook", "02")["02_train"]
    cluster.wait_until((project / "runs" / "smoke" / "02_train.txt").exists, "the notebook ran", job=job)
    cluster.run("scancel", job)
    assert cluster.wait(job) == "CANCELLED"
    cluster.wait_until(lambda: record(project, "02_train")["state"] == "stopped", "it was stopped", job=job)
    saved = json.loads((project / "runs" / "smoke" / "notebooks" / "02_train.ipynb").read_text())
    assert any(cell.get("execution_count") for cell in saved["cells"])
    assert "requeued" not in said(project, job)
    time.sleep(2)
    assert cluster.state(job) == "CANCELLED"


def test_usr1_requeues_a_job_that_got_somewhere_and_gives_up_on_one_that_does_not(cluster, tmp_path):
    """The first stop is in vain, the second is not, the third and the fourth are."""
    started = code("from pathlib import Path\nPath(out, f'{time.time_ns()}.start').touch()")
    project = job_project(tmp_path / "project", _02_train=touching("02_train", started, code("time.sleep(3600)")))
    site = project / "papermill_jobs" / "site.yaml"
    site.write_text("attempts_without_progress: 2\n")
    job = submit(cluster, project, "notebook", "02")["02_train"]
    out = project / "runs" / "smoke"
    checkpoint = out / "runs" / "base" / "checkpoints" / "step_00000010.pt"
    for attempt in range(1, 5):
        cluster.wait_until(lambda n=attempt: len(list(out.glob("*.start"))) == n, f"start {attempt}", job=job)
        if attempt == 2:  # what training would have left
            checkpoint.parent.mkdir(parents=True)
            checkpoint.touch()
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        if attempt < 4:
            cluster.wait_until(lambda n=attempt: said(project, job).count("requeued") == n, "requeued", job=job)
    assert cluster.wait(job) == "FAILED"
    assert said(project, job) == ["running", "requeued"] * 3 + ["running", "gave-up", "exit"]
    assert cluster.info(job)["Restarts"] == "3"
    assert "stopped 2 times in a row with nothing new saved" in cluster.log(job)


def test_an_early_signal_is_not_lost(cluster, tmp_path):
    """It comes while Python still starts, and would end it: the job is queued again all the same."""
    project = job_project(tmp_path / "project")
    job = submit(cluster, project, "notebook", "02")["02_train"]
    cluster.wait_until(lambda: said(project, job), "it started", job=job)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "COMPLETED"
    assert said(project, job) == ["running", "requeued", "running", "exit"]


def test_a_preempted_job_saves_itself_and_goes_on_later(cluster, tmp_path):
    """A partition of lower priority loses its nodes to the other one: USR1, then 20 s to be gone."""
    first = "if not Path(out, 'first').exists():\n    Path(out, 'first').touch()\n    time.sleep(3600)"
    project = job_project(tmp_path / "project", _02_train=touching("02_train", code(first)))
    (project / "papermill_jobs" / "site.yaml").write_text("partition: spot\n")
    job = submit(cluster, project, "notebook", "02")["02_train"]
    cluster.wait_until((project / "runs" / "smoke" / "first").exists, "the notebook ran", job=job)
    other = cluster.sbatch("#!/bin/bash\nsleep 1\n", options=["--nodes=3", "--exclusive", "--partition=main"])
    assert cluster.wait(other) == "COMPLETED"
    assert cluster.wait(job) == "COMPLETED"
    assert said(project, job) == ["running", "requeued", "running", "exit"]
    assert record(project, "02_train")["state"] == "done"


def test_options_with_spaces_and_signs_reach_slurm_whole(cluster, tmp_path):
    project = job_project(tmp_path / "a project")
    site = project / "papermill_jobs" / "site.yaml"
    site.write_text("extra: [--hold]\ntime: 1-2:30:00\nmemory: 100M\n")
    job = submit(cluster, project, "notebook", "04")["04_benchmark"]
    shown = cluster.run("scontrol", "show", "job", job).stdout
    cluster.run("scancel", job)
    assert "JobHeldUser" in shown
    assert "TimeLimit=1-02:30:00" in shown
    assert "MinMemoryNode=100M" in shown
    assert f"StdOut={project}/runs/smoke/jobs/04_benchmark-{job}.log\n" in shown
    site.write_text("constraint: a100|h200\n")
    refused = cluster.run("lmcore", "submit", "notebook", "04", "--again", cwd=project, check=False)
    assert refused.returncode == 2
    assert "Invalid feature specification" in refused.stderr


def test_whatever_is_in_a_path_or_a_value_reaches_the_notebook(cluster, tmp_path):
    """Spaces, quotes, $ and % in OUT, DATA and parameters; by hand, OUT is relative to the project."""
    project = job_project(tmp_path / "a $2 project")
    text = tmp_path / 'it\'s $HOME "data".txt'
    text.write_text("Once.<|endoftext|>" * 20)
    out = tmp_path / 'it\'s $HOME "out" 100%j'
    words = ["--out", out, "--data", text, "--parameters", "rates=[0.5, 1.0]"]
    setup = ["export FIRST='a  b'", 'echo "$FIRST $SECOND" >setup.txt']
    site = json.dumps({"setup": setup, "environment": {"SECOND": "$c"}})  # which is YAML, too
    (project / "papermill_jobs" / "site.yaml").write_text(site)
    done = cluster.run("lmcore", "submit", "notebook", "04", *words, cwd=project)
    job = done.stdout.split()[0]
    assert cluster.wait(job) == "COMPLETED"
    made = json.loads((out / "notebooks" / "04_benchmark.json").read_text())
    assert (made["data"], made["parameters"]["rates"]) == (str(text), [0.5, 1.0])
    assert (project / "setup.txt").read_text() == "a  b $c\n"
    assert "04_benchmark: done" in (out / "jobs" / f"04_benchmark-{job}.log").read_text()
    script = project / "papermill_jobs" / "notebook.sbatch"
    by_hand = cluster.sbatch(script, cwd=project, OUT="runs/$a 'b'", DATA=text, NOTEBOOKS="02 04")
    assert cluster.wait(by_hand) == "COMPLETED"
    assert {path.stem for path in (project / "runs" / "$a 'b'" / "notebooks").glob("*.json")} == {
        "02_train", "04_benchmark",
    }  # fmt: skip


def test_a_task_that_submits_a_job_does_not_give_it_its_own_name(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    submits = f"#!/bin/bash\ncd {project}\nlmcore submit notebook 04\n"
    array = cluster.sbatch(submits, options=["--array=3"])
    assert cluster.wait(array) == "COMPLETED"
    (job,) = (job.id for job in read_log(project / "runs" / "smoke"))
    assert cluster.wait(job) == "COMPLETED"
    assert said(project, job) == ["running", "exit"]


def test_an_array_beyond_the_clusters_size_is_refused(cluster, tmp_path):
    project = job_project(tmp_path / "project")
    numbers = ", ".join(map(str, range(1002)))
    (project / "many.yaml").write_text(
        f"name: many\nkind: benchmark\nbase: {{size: smoke, mode: forward}}\nvary: {{seed: [{numbers}]}}\n"
    )
    refused = cluster.run("lmcore", "submit", "sweep", "many.yaml", cwd=project, check=False)
    assert refused.returncode == 2
    assert "many has tasks up to number 1001, but this cluster's arrays end at 1000" in refused.stderr
    assert not (project / "runs").exists()
