"""`workbook submit`: what is asked of Slurm, what it does where Slurm refuses, and the same jobs without Slurm."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from job_projects import SWEEP, command, job_project
from notebook_projects import code, parameters

from lmcore.config import to_dict
from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.run import RunFolder
from workbook.cli import main
from workbook.jobs import slurm as slurm_commands
from workbook.jobs.site import load_site
from workbook.jobs.submit import Chain, Job, submitted
from workbook.jobs.sweeps import sweep_runs
from workbook.record import read_records
from workbook.report.results import read_results
from workbook.sweep import work

PROJECT = Path(__file__).parents[1]
SBATCH = """cd "$(dirname "$0")/.."
for word; do if [[ $word == --job-name=* ]]; then name=${word#*=}; fi; done
if [[ $name == "$REFUSED" ]]; then
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
env >environment-$name
number=$(($(cat number 2>/dev/null || echo 100) + 1))
echo $number >number
echo $number >>queue
printf "$ANSWER\\n" $number
"""


class Slurm:
    """Stand-ins for Slurm's commands, for answers that a real one gives only in trouble."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.queue = folder / "queue"
        command(self.bin, "sbatch", SBATCH)
        command(self.bin, "squeue", f"cat '{self.queue}' 2>/dev/null || true")
        command(self.bin, "scancel", "true")

    def called(self, name: str) -> list[str]:
        """The arguments of each call of a command."""
        calls = self.bin / f"{name}.called"
        return calls.read_text().splitlines() if calls.exists() else []

    def environment(self, job: str) -> list[str]:
        """The variables with which a job was submitted."""
        return (self.folder / f"environment-{job}").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Slurm:
    made = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setenv("ANSWER", "%s;cluster")  # of a federation
    return made


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    made = job_project(tmp_path / "project")
    monkeypatch.chdir(made)
    return made


def refusal(capsys, *arguments: object) -> str:
    """The sentence with which the command refuses: one line, code 2, nothing on standard output."""
    assert main(["submit", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_workbook_is_a_chain_that_ends_with_the_writeup(slurm, project, capsys):
    assert main(["submit", "notebooks", "--out", "runs/it"]) == 0
    out = project / "runs" / "it"
    names = ["02_train", "03_generate", "04_benchmark", "writeup"]
    told = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:4]]
    assert told == [[str(id), name] for id, name in enumerate(names, 101)]
    calls = slurm.called("sbatch")
    assert calls[1] == (
        f"--parsable --job-name=03_generate --output={out}/jobs/03_generate-%j.log --export=ALL --signal=B:USR1@120 "
        "--dependency=afterok:101 --kill-on-invalid-dep=yes papermill_jobs/workbook.sbatch --no-writeup"
    )
    assert " --dependency=afterany:101:102:103 " in calls[3]
    assert calls[3].endswith(" papermill_jobs/writeup.sbatch")
    variables = {"SCALE=smoke", "DATA=embedded", f"OUT={out}", "NOTEBOOKS=03_generate"}
    assert variables <= {*slurm.environment("03_generate")}
    assert [*submitted(out).values()] == ["101", "102", "103", "104"]
    assert [(record.name, record.state) for record in read_records(out)] == [(name, "not run") for name in names[:3]]
    assert "still queued or running (101, 102, 103, 104)" in refusal(capsys, "notebooks", "--out", "runs/it")
    slurm.queue.unlink()
    assert main(["submit", "notebooks", "--out", "runs/it"]) == 0


def test_each_notebook_gets_the_parameters_that_it_declares(slurm, tmp_path, monkeypatch):
    own = parameters('scale = "smoke"\ndata = "embedded"\nout = "../runs"\nwidth = 1')
    monkeypatch.chdir(job_project(tmp_path / "project", _01_a=[parameters(), code("1")], _02_b=[own, code("1")]))
    assert main(["submit", "notebooks", "--no-writeup", "--parameters", "steps=7", "width=2", "rates=[0.5, 1.0]"]) == 0
    first, second = slurm.called("sbatch")
    assert first.endswith(" --no-writeup --parameters steps=7 rates=[0.5, 1.0]")
    assert second.endswith(" --no-writeup --parameters width=2")


WRONG = {
    "- account": "must be a mapping, not",
    "setup: [module load cuda]": "setup must hold plain text",
    "signal_seconds: 2 minutes": "signal_seconds must be a whole number above 0",
    "jobs: {writeup: {time: []}}": "jobs, writeup: time must hold plain text",
    "account: [": "cannot be read as YAML",
}


@pytest.mark.parametrize("text", WRONG)
def test_sites_are_checked(tmp_path, text):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=WRONG[text]):
        load_site(tmp_path / "site.yaml")


def test_the_answer_of_sbatch(slurm, project, monkeypatch, capsys):
    """An id is found in any line; an answer without one, or none at all, is one sentence."""
    monkeypatch.setenv("ANSWER", "Welcome to 3\\nSubmitted batch job %s\\nBye")
    assert main(["submit", "notebooks", "--notebooks", "04", "--no-writeup", "--out", "runs/it"]) == 0
    assert submitted(project / "runs" / "it") == {"04_benchmark": "101"}
    capsys.readouterr()
    monkeypatch.setenv("ANSWER", "Submitted")
    assert "sbatch gave no job id" in refusal(capsys, "notebooks")
    monkeypatch.setattr(slurm_commands, "SECONDS_TO_ANSWER", 0.5)
    command(slurm.bin, "sbatch", "exec sleep 60")
    assert "sbatch: no answer within 0.5 s." in refusal(capsys, "notebooks")


SITE = """
account: lab
gres: gpu:a40:1
time: 12:00:00
qos:
mail-type: END,FAIL
setup: |
  a
  b c
environment: {NAME: $c}
signal_seconds: 60
jobs: {02_train: {mem: 64G, time: 1-0}, writeup: {gres: none}}
"""


def test_what_the_site_wants_goes_before_the_scripts_own_options(slurm, project, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(SITE)
    assert main(["submit", "notebooks", "--site", str(site), "--notebooks", "02", "--time", "30"]) == 0
    train, writeup = slurm.called("sbatch")
    wanted = "--account=lab --gres=gpu:a40:1 --time=1-0 --mail-type=END,FAIL --mem=64G --signal=B:USR1@60 --time=30"
    assert f" {wanted} papermill_jobs/workbook.sbatch " in train
    assert " --gres=none " in writeup
    environment = slurm.environment("02_train")
    assert {f"OUT={project}/runs/smoke", "NAME=$c", "STOP_SECONDS=50", "ATTEMPTS=3"} <= {*environment}
    assert "LMCORE_SETUP=a\nb c" in "\n".join(environment)


def test_what_sbatch_refuses_cancels_the_jobs_before_it(slurm, project, monkeypatch, capsys):
    monkeypatch.setenv("REFUSED", "04_benchmark")
    said = refusal(capsys, "notebooks")
    assert said.startswith("workbook: sbatch: Batch job submission failed: Invalid partition name specified. What your")
    assert slurm.called("scancel") == ["101 102"]
    assert not submitted(project / "runs" / "smoke")


def test_a_job_that_submits_does_not_pass_its_own_variables_on(slurm, project, monkeypatch):
    """sbatch hands on its environment, and a task's number would give the new jobs another name."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_MEM_PER_CPU", "MASTER_ADDR", "SLURM_CONF"):
        monkeypatch.setenv(name, "of the job around")
    assert main(["submit", "notebooks", "--notebooks", "04", "--no-writeup"]) == 0
    handed_on = [line for line in slurm.environment("04_benchmark") if "of the job around" in line]
    assert handed_on == ["SLURM_CONF=of the job around"]


# ---- training runs and sweeps


def test_what_a_training_run_asks_of_slurm(tmp_path, capsys):
    run, site = tmp_path / "run", tmp_path / "site.yaml"
    site.write_text("gres: gpu:a40:1\nmem: 32G\njobs: {train: {time: '02:00:00'}}\n")
    words = ["submit", "train", "--run", run, "--strategy", "fsdp", "--gpus", 8, "--nodes", 2, "--site", site]
    words = [*map(str, words), "--dry-run"]
    assert main([*words, "--batch-size", "64"]) == 0
    said = capsys.readouterr().out.split()
    wanted = {"--gres=gpu:a40:8", "--nodes=2", "--ntasks-per-node=8", "--mem=32G", "--time=02:00:00", f"RUN={run}"}
    assert wanted <= {*said}
    assert said[-1] == "papermill_jobs/train.sbatch"
    assert not run.exists()
    assert main([*words, "--device", "cpu"]) == 0
    assert "--gres=none" in capsys.readouterr().out


REFUSED = [
    (("--gpus", 2), "2 processes need a way to divide the work: add --strategy ddp, zero1 or fsdp."),
    (("--gpus", 2, "--nodes", 3, "--strategy", "ddp"), "batch_size (32) must divide by 6 processes."),
    (("--gpus", 0), "--gpus and --nodes must be at least 1."),
    (("--out", "elsewhere"), "A training run has one folder, --run; --out is for other jobs."),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_a_training_run_that_cannot_be_is_refused_before_it_is_submitted(tmp_path, capsys, words, sentence):
    assert sentence in refusal(capsys, "train", "--run", tmp_path / "run", *words, "--dry-run")


def test_a_sweep_is_an_array_over_what_is_unfinished_and_a_table(slurm, project, embedded_data, capsys):
    (project / "rates.py").write_text(SWEEP.format(rates=[0.01, 1e30, 0.02]))  # the second diverges
    sweep = ["submit", "sweep", "rates.py", "--data", str(embedded_data), "--recipe", "smoke", "--steps", "4"]
    assert main([*sweep, "--concurrency", "2"]) == 0
    out = project / "runs" / "sweeps" / "rates"
    array, table = slurm.called("sbatch")
    assert array.endswith(" --array=0,1,2%2 papermill_jobs/sweep.sbatch")
    assert table.endswith(" --dependency=afterany:101 --kill-on-invalid-dep=yes papermill_jobs/sweep-table.sbatch")
    assert f" --output={out}/jobs/rates-%A_%a.log " in array
    work(out, task=1)
    assert RunFolder(out / "lr_1e+30").status()["state"] == "diverged"
    assert not (out / "lr_0.01" / "status.json").exists()
    slurm.queue.unlink()
    assert main(sweep) == 0
    assert slurm.called("sbatch")[2].endswith(" --array=0,2 papermill_jobs/sweep.sbatch")
    work(out)
    assert main(["sweep", "table", str(out)]) == 0
    table, _, _ = read_results(out / "results" / "rates.json")
    assert list(table["name"]) == ["lr_0.01", "lr_1e+30", "lr_0.02"]
    assert list(table["outcome"]) == ["complete", "diverged", "complete"]
    assert (out / "results" / "rates_curves.json").is_file()
    capsys.readouterr()
    assert main(sweep) == 0
    assert capsys.readouterr().out == f"All of {out} is finished.\n"


@pytest.mark.parametrize("file", [*PROJECT.glob("papermill_jobs/sweeps/*.py")], ids=lambda file: file.stem)
def test_the_sweeps_of_the_project_make_configurations(file, embedded_data):
    for recipe in ("smoke", "handout"):
        runs = sweep_runs(file, embedded_data, recipe, 20)
        assert len({json.dumps(to_dict(config)) for config in runs.values()}) == len(runs) > 5


# ---- the same jobs without Slurm


def script(project: Path, name: str, line: str, **fields: object) -> Job:
    """A job that runs this line under `supervise`."""
    text = f". papermill_jobs/job.sh\nsupervise bash -c {shlex.quote(line)}\n"
    (project / "papermill_jobs" / f"{name}.sbatch").write_text(f"#!/bin/bash\nset -euo pipefail\n{text}")
    return Job(name, name, {}, **fields)


def run_here(project: Path, *jobs: Job) -> int:
    return Chain(project, project / "runs" / "it's out", {}, jobs).run_here()


def test_jobs_run_here_in_their_order_and_a_failure_leaves_out_what_needs_it(project, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_ID", "99")  # a session of Slurm's around it is no business of these jobs
    jobs = [
        script(project, "array", 'echo "${SLURM_JOB_ID:-alone}"; exit 1', array="0,3"),
        script(project, "table", "echo table >>order", after=("array",), even_if_failed=True),
        script(project, "needs", "echo needs >>order", after=("array",)),
        script(project, "judge", "echo judge >>order", after=("needs",)),
        script(project, "other", "echo other >>order"),
    ]
    assert run_here(project, *jobs) == 1
    assert (project / "order").read_text() == "table\nother\n"
    assert (project / "runs" / "it's out" / "jobs" / "array-local.log").read_text() == "alone\n"
    said = capfd.readouterr().out
    assert "array: ended with code 1" in said
    assert "judge: not run" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_stops_the_job_that_runs_in_order_and_the_rest_is_left_undone(project, number, capfd):
    trap = f"trap 'touch saved; exit 75' TERM; kill -{number:d} {os.getpid()}"
    first = script(project, "first", f"{trap}; while :; do sleep 0.1; done")
    second = script(project, "second", "touch second")
    assert run_here(project, first, second) == EXIT_INTERRUPTED
    assert (project / "saved").exists()
    assert not (project / "second").exists()
    assert "the same command resumes" in capfd.readouterr().err


def test_a_training_run_here_has_a_process_for_each_gpu(project, tmp_path, monkeypatch):
    """The settings are those of the moment of submission."""
    bin = tmp_path / "bin"
    bin.mkdir()
    called = command(bin, "torchrun", "")
    (project / "papermill_jobs" / "site.yaml").write_text(f"setup: PATH={bin}:$PATH\n")
    words = ["--run", "run", "--batch-size", "4", "--device", "cpu", "--gpus", "2", "--strategy", "zero1", "--local"]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert main(["submit", "train", *words]) == 0
    settings = project / "run" / "jobs" / "config.json"
    assert called.read_text() == (
        f"--standalone --nproc-per-node 2 -m -- lmcore train --run {project / 'run'} --config {settings}\n"
    )
    assert json.loads(settings.read_text())["batch_size"] == 4
