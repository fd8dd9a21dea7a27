"""`lmcore jobs` and `lmcore doctor` against a real Slurm: every state as it comes."""

import json
from pathlib import Path

import pytest
from job_projects import job_project, touching
from notebook_projects import code

from lmcore.workbook.jobs.log import append, output_file

pytestmark = pytest.mark.slurm

TRAIN = """
from lmcore.config import replace
from lmcore.data import open_data
from lmcore.recipes import recipe
from lmcore.workbook.sweep import run_or_reuse

data = open_data(open("../corpus.txt").read())
config = replace(recipe("smoke", str(data.folder), data.vocab_size), steps=1_000_000, log_interval=5, device="cpu")
"""
"""A cell that prepares a run of more steps than any test waits for."""


@pytest.fixture
def project(tmp_path, embedded_data) -> Path:
    """A project whose notebooks train for ever, need that, fail, and succeed."""
    made = job_project(
        tmp_path / "project",
        _02_train=touching("02_train", code(TRAIN), code('run_or_reuse(config, Path(out, "runs", "long"))'), code("1")),
        _03_generate=touching("03_generate"),
        _04_benchmark=touching("04_benchmark", code("1 / 0")),
        _05_nsys=touching("05_nsys"),
    )
    (made / "corpus.txt").write_text(str(embedded_data))
    return made


def shown(cluster, project: Path, *outs: str) -> dict[str, dict]:
    """What `lmcore jobs --json` says, by the jobs' names (ids for tasks of arrays)."""
    answer = json.loads(cluster.run("lmcore", "jobs", *outs, "--json", cwd=project).stdout)
    assert answer["slurm"] is None
    return {row["id"] if "_" in row["id"] else row["name"]: row for row in answer["jobs"]}


def test_every_state_of_a_chain(cluster, project):
    said = cluster.run("lmcore", "submit", "workbook", cwd=project).stdout.splitlines()
    ids = {line.split()[1]: line.split()[0] for line in said if line[0].isdigit()}
    train = ids["02_train"]
    cluster.wait(ids["04_benchmark"], "FAILED")
    cluster.wait(ids["05_nsys"], "COMPLETED")

    def trains(attempts: int) -> bool:
        row = shown(cluster, project)["02_train"]
        return row["attempts"] == attempts and row["seconds_left"] is not None

    cluster.wait_until(lambda: trains(1), "the training was shown with the time left", job=train)
    rows = shown(cluster, project)
    assert {name: row["id"] for name, row in rows.items()} == ids
    assert {name: row["state"] for name, row in rows.items()} == {
        "02_train": "running",
        "03_generate": "pending",
        "04_benchmark": "failed",
        "05_nsys": "completed",
        "writeup": "pending",
    }
    assert rows["02_train"]["doing"].startswith("02_train, cell 4/5; long: step ")
    assert "/1,000,000, loss " in rows["02_train"]["doing"]
    assert rows["03_generate"]["notes"] == [f"It waits for job {train}: Dependency."]
    assert rows["04_benchmark"]["doing"] == "04_benchmark failed at cell 3/3"
    assert "It ended with exit code 1." in rows["04_benchmark"]["notes"]
    assert "ZeroDivisionError" in " ".join(rows["04_benchmark"]["tail"])
    assert rows["05_nsys"]["tail"] == []
    table = cluster.run("lmcore", "jobs", cwd=project).stdout
    assert "runs/smoke" in table
    assert f"log: {project / 'runs' / 'smoke' / 'jobs' / f'02_train-{train}.log'}" in table

    step = json.loads((project / "runs/smoke/runs/long/metrics.jsonl").read_text().splitlines()[-1])["step"]
    cluster.run("scancel", "--batch", "--signal=USR1", train)
    seen = set()

    def goes_on() -> bool:
        row = shown(cluster, project)["02_train"]
        seen.add(row["state"])
        return row["state"] == "running" and trains(2)

    cluster.wait_until(goes_on, "the training went on in a second attempt", job=train)
    assert seen <= {"running", "completing", "requeued"}
    assert "requeued" in seen
    row = shown(cluster, project)["02_train"]
    assert int(row["doing"].partition("long: step ")[2].partition("/")[0].replace(",", "")) > step

    cluster.run("scancel", *ids.values())
    cluster.wait(train, "CANCELLED")
    cluster.wait_until(lambda: shown(cluster, project)["02_train"]["state"] == "cancelled", "it was shown as cancelled")
    assert shown(cluster, project)["05_nsys"]["state"] == "completed"


def test_what_slurm_has_forgotten_the_job_log_knows(forgetful, tmp_path):
    """Done, failed, never started because of that, and cancelled: the end of each job is told without squeue."""
    project = job_project(
        tmp_path / "project",
        _02_train=touching("02_train", code("1 / 0")),
        _03_generate=touching("03_generate"),
        _04_benchmark=touching("04_benchmark"),
        _05_nsys=touching("05_nsys", code("time.sleep(3600)")),
    )
    said = forgetful.run("lmcore", "submit", "workbook", cwd=project).stdout.splitlines()
    ids = {line.split()[1]: line.split()[0] for line in said if line[0].isdigit()}
    forgetful.wait_until((project / "runs" / "smoke" / "05_nsys.txt").exists, "05_nsys runs", job=ids["05_nsys"])
    forgetful.run("scancel", ids["05_nsys"])

    def known() -> set[str]:
        return set(forgetful.run("squeue", "--states=all", "--noheader", "--format=%i").stdout.split())

    forgetful.wait_until(lambda: not known() & set(ids.values()), "Slurm forgot all jobs", 400)
    rows = shown(forgetful, project)
    assert {name: row["state"] for name, row in rows.items()} == {
        "02_train": "failed",
        "03_generate": "not run",
        "04_benchmark": "completed",
        "05_nsys": "stopped",
        "writeup": "failed",  # it is made, and says that notebooks lack
    }
    assert rows["02_train"]["doing"] == "02_train failed at cell 3/3"
    assert rows["03_generate"]["notes"] == ["It never started, and Slurm does not know it any more."]
    assert "04_benchmark" in forgetful.run("lmcore", "submit", "notebook", "04", cwd=project).stdout


def test_an_array_task_by_task(cluster, tmp_path):
    out = tmp_path / "out"
    (out / "jobs").mkdir(parents=True)
    script = (
        f"#!/bin/bash\nwhile [[ ! -e {tmp_path}/go ]]; do sleep 0.1; done\n"
        'echo "task $SLURM_ARRAY_TASK_ID"\n[[ $SLURM_ARRAY_TASK_ID != 1 ]]\n'
    )
    log = output_file(out, "rates", "%A_%a")
    job = cluster.sbatch(script, options=["--array=0-3%1", "--job-name=rates", f"--output={log}"])
    append(out, job, "rates", "submitted", kind="sweep", tasks="0-3")
    cluster.wait_until(lambda: shown(cluster, tmp_path, str(out))["rates"]["tasks"].get("running") == 1, "it ran")
    row = shown(cluster, tmp_path, str(out))["rates"]
    assert (row["state"], row["tasks"]) == ("running", {"running": 1, "pending": 3})
    assert row["doing"] == "0/4 tasks done, 3 pending, 1 running"
    assert row["notes"] == ["It waits: JobArrayTaskLimit."]
    (tmp_path / "go").touch()
    cluster.wait(job, "FAILED", "COMPLETED")
    cluster.wait_until(
        lambda: shown(cluster, tmp_path, str(out))["rates"]["tasks"] == {"completed": 3, "failed": 1}, "all tasks ended"
    )
    rows = shown(cluster, tmp_path, str(out))
    assert list(rows) == ["rates", f"{job}_1"]
    assert rows["rates"]["doing"] == "3/4 tasks done, 1 failed"
    assert rows[f"{job}_1"]["tail"] == ["task 1"]


def test_a_job_that_waits_for_nodes_and_one_that_slurm_never_had(cluster, tmp_path):
    job = cluster.sbatch("#!/bin/sh\n", options=["--hold", "--job-name=held"])
    for id in (job, "99999999"):
        append(tmp_path, id, f"job{id}", "submitted", kind="workbook")
    rows = shown(cluster, tmp_path, str(tmp_path))
    assert rows[f"job{job}"]["state"] == "pending"
    assert rows[f"job{job}"]["notes"] == ["It waits: JobHeldUser."]
    assert rows["job99999999"]["state"] == "not run"
    cluster.run("scancel", job)


def test_a_controller_that_is_gone_leaves_the_files(cluster, tmp_path):
    append(tmp_path, "1", "old", "submitted", kind="workbook")
    append(tmp_path, "1", "old", "running", host="n1", restart=0)
    text = Path(cluster.environment["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(
        "\n".join("SlurmctldPort=9" if line.startswith("SlurmctldPort=") else line for line in text.splitlines())
        + "\nMessageTimeout=2\n"
    )
    command = ["lmcore", "jobs", tmp_path, "--json"]
    done = cluster.run(*command, SLURM_CONF=tmp_path / "slurm.conf")
    answer = json.loads(done.stdout)
    assert answer["slurm"].startswith("Slurm does not answer (")
    assert answer["jobs"][0]["state"] == "running"
    assert done.stderr == ""


def test_doctor_names_the_partitions(cluster, tmp_path):
    facts = json.loads(cluster.run("lmcore", "doctor", "--json", cwd=tmp_path).stdout)
    (part,) = (part for part in facts["optional"] if part["name"] == "slurm")
    assert part["detail"].endswith(", 2 partitions, GPUs in main (gpu:2) and spot (gpu:2)")
