"""`lmcore submit`: what it prints, and what it does where Slurm refuses or is silent (tests/slurm has a real one)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_projects import command, job_project

from lmcore.cli import main
from lmcore.workbook.jobs import slurm as slurm_commands
from lmcore.workbook.jobs.log import own_state, read_log
from lmcore.workbook.jobs.sweep_definition import load_definition

PROJECT = Path(__file__).parents[1]
SBATCH = """cd "$(dirname "$0")/.."
for word; do if [[ $word == --job-name=* ]]; then name=${word#*=}; fi; done
if [[ $name == "$REFUSED" ]]; then
  echo "sbatch: error: invalid partition specified: nowhere" >&2
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
env >environment-$name
number=$(($(cat number 2>/dev/null || echo 100) + 1))
echo $number >number
echo "$number|PENDING|None|N/A|$name" >>queue
echo "$number;cluster"
"""


class Slurm:
    """Stand-ins for Slurm's commands, for answers that a real one gives only in trouble."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.queue = folder / "queue"
        self.command("sbatch", SBATCH)
        self.command("squeue", f"cat '{self.queue}' 2>/dev/null || true")
        self.command("scancel", "true")
        self.command("scontrol", "echo 'MaxArraySize            = 4'")

    def command(self, name: str, script: str) -> None:
        """Makes one of the commands do something else."""
        command(self.bin, name, script)

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
    return made


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    made = job_project(tmp_path / "project")
    monkeypatch.chdir(made)
    return made


def refusal(capsys, *arguments: str) -> str:
    """The sentence with which the command refuses: one line, code 2, nothing on standard output."""
    assert main(["submit", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.removeprefix("lmcore: ").strip()


def test_it_prints_a_line_for_each_job_and_how_to_watch_them(slurm, project, capsys):
    assert main(["submit", "workbook", "--out", "runs/it"]) == 0
    out = project / "runs" / "it"
    assert capsys.readouterr().out.splitlines() == [
        f"101  02_train      {out}/jobs/02_train-101.log",
        f"102  03_generate   {out}/jobs/03_generate-102.log, after 101",
        f"103  04_benchmark  {out}/jobs/04_benchmark-103.log",
        f"104  writeup       {out}/jobs/writeup-104.log, after 101, 102, 103",
        f"To watch them: lmcore jobs {out}",
    ]
    calls = slurm.called("sbatch")
    assert calls[1] == (
        f"--parsable --export=ALL --signal=B:USR1@120 --job-name=03_generate --output={out}/jobs/03_generate-%j.log "
        "--dependency=afterok:101 --kill-on-invalid-dep=yes papermill_jobs/notebook.sbatch"
    )
    assert calls[3].endswith(" --dependency=afterany:101:102:103 papermill_jobs/writeup.sbatch")
    assert {"SCALE=smoke", "DATA=embedded", f"OUT={out}", "NOTEBOOKS=03_generate"} <= {
        *slurm.environment("03_generate")
    }
    jobs = read_log(out)
    assert [job.id for job in jobs] == ["101", "102", "103", "104"]
    assert [(job.name, job.kind, job.after) for job in jobs][1] == ("03_generate", "notebook", ["101"])
    planned = json.loads((out / "workbook.json").read_text())
    assert planned["notebooks"] == ["02_train", "03_generate", "04_benchmark"]


@pytest.mark.parametrize("site", ["site.yaml", "sites/hyak.yaml", "sites/lab.yaml"])
def test_a_dry_run_fits_a_screen_and_does_nothing(slurm, monkeypatch, capsys, tmp_path, site):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("USER", "me")
    words = ["--site", f"papermill_jobs/{site}", "--time", "30", "--out", str(tmp_path / "out")]
    assert main(["submit", "workbook", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") <= 24
    assert "NOTEBOOKS=01_build sbatch" in said
    assert "'--dependency=afterok:<02_train>'" in said
    assert f"OUT={tmp_path / 'out'}" in said
    assert said.count("--time=30") == 1  # of all jobs
    assert subprocess.run(["bash", "-n", "-c", said], check=False).returncode == 0
    assert not slurm.called("sbatch")
    assert not (tmp_path / "out").exists()


def test_the_sites_scratch_folder_holds_the_results(slurm, project, tmp_path, capsys):
    site = tmp_path / "site.yaml"
    site.write_text(f"scratch: {tmp_path}/scratch\nsetup: [a, 'b c']\njobs:\n  02_train: {{memory: 64G}}\n")
    assert main(["submit", "notebook", "02", "--site", str(site)]) == 0
    assert " --mem=64G " in slurm.called("sbatch")[0]
    assert f"OUT={tmp_path}/scratch/runs/smoke" in slurm.environment("02_train")
    assert "LMCORE_SETUP=a\nb c\n" in (tmp_path / "environment-02_train").read_text()


def test_two_submissions_at_once_make_one_chain(slurm, project, capsys):
    """Both would find the queue empty, if they did not wait for each other."""
    slurm.command("sbatch", "sleep 0.2\n" + SBATCH)
    words = [sys.executable, "-m", "lmcore", "submit", "workbook"]
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(process.wait(timeout=120) for process in both) == [0, 2]
    assert len(slurm.called("sbatch")) == 4
    said = refusal(capsys, "workbook")
    assert "still queued or running (101, 102, 103, 104): wait for them, cancel them with scancel, or" in said
    assert main(["submit", "workbook", "--again"]) == 0
    assert len(slurm.called("sbatch")) == 8


def test_jobs_that_have_ended_or_that_slurm_has_forgotten_are_no_obstacle(slurm, project, capsys):
    assert main(["submit", "notebook", "02"]) == 0
    slurm.queue.write_text("101|FAILED|NonZeroExitCode|N/A|02_train\n")
    assert main(["submit", "notebook", "02"]) == 0
    slurm.command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert main(["submit", "notebook", "02"]) == 0
    capsys.readouterr()
    slurm.command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    said = refusal(capsys, "notebook", "02")
    assert said.startswith("It is unknown whether jobs of")
    assert "Unable to contact slurm controller" in said
    assert len(slurm.called("sbatch")) == 3


def test_what_sbatch_refuses_cancels_the_jobs_before_it(slurm, project, monkeypatch, capsys):
    monkeypatch.setenv("REFUSED", "04_benchmark")
    assert refusal(capsys, "workbook") == (
        "sbatch: invalid partition specified: nowhere; Batch job submission failed: Invalid partition name specified. "
        "What your cluster wants stands in papermill_jobs/site.yaml, or in the file after --site; sinfo -s lists "
        "partitions. The jobs before it are cancelled: 101, 102."
    )
    out = project / "runs" / "smoke"
    assert slurm.called("scancel") == ["101 102"]
    assert [own_state(job.lines[job.id]) for job in read_log(out)] == ["cancelled", "cancelled"]
    assert not (out / "workbook.json").exists()


def test_jobs_that_cannot_be_cancelled_are_named_and_stay_in_the_log(slurm, project, monkeypatch, capsys):
    monkeypatch.setenv("REFUSED", "04_benchmark")
    slurm.command("scancel", "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1")
    said = refusal(capsys, "workbook")
    assert said.endswith("The jobs 101, 102 could not be cancelled: scancel: Unable to contact slurm controller.")
    assert [(job.id, job.lines) for job in read_log(project / "runs" / "smoke")] == [("101", {}), ("102", {})]


def test_an_answer_that_is_none_is_one_sentence(slurm, project, monkeypatch, capsys):
    slurm.command("sbatch", "echo Submitted")
    assert "sbatch gave no job id" in refusal(capsys, "notebook", "02")
    monkeypatch.setattr(slurm_commands, "SECONDS_TO_ANSWER", 0.5)
    slurm.command("sbatch", "exec sleep 60")
    assert refusal(capsys, "notebook", "02") == "sbatch: no answer within 0.5 s."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["workbook", "--scale", "../other"], "There is no scale '../other'"),
        (["workbook", "--notebooks", ""], "There is no notebook ''"),
        (["workbook", "--parameters", "steps={[]: 1}"], "steps"),
        (["workbook", "--time", "00:00:00", "--dry-run"], "time must be above 0, not '00:00:00'"),
        (["notebook", "0"], "'0' names 3 notebooks"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_submitted(slurm, project, capsys, arguments, sentence):
    """More of it on a real Slurm."""
    assert sentence in refusal(capsys, *arguments)
    assert not slurm.called("sbatch")
    assert not (project / "runs").exists()


def test_a_damaged_plan_is_refused_before_anything_is_submitted(slurm, project, capsys):
    file = project / "runs" / "smoke" / "workbook.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    said = refusal(capsys, "workbook")
    assert said.startswith(f"{file} cannot be read as JSON")
    assert said.endswith("remove it and run the workbook again, which keeps what is done.")
    assert not slurm.called("sbatch")


def test_a_job_that_submits_does_not_pass_its_own_numbers_on(slurm, project, monkeypatch):
    """sbatch hands on its environment, and a task's number would give the new jobs another name."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID", "SLURM_STEP_NODELIST", "MASTER_ADDR", "LMCORE_JOB_NAME"):
        monkeypatch.setenv(name, "of the job around")
    monkeypatch.setenv("SLURM_CLUSTERS", "here")
    assert main(["submit", "notebook", "04"]) == 0
    handed_on = slurm.environment("04_benchmark")
    assert "SLURM_CLUSTERS=here" in handed_on
    assert not [line for line in handed_on if "of the job around" in line]


# Sweeps

SWEEP = """
name: tiny
kind: benchmark
base: {warmup_steps: 1, steps: 1, device: cpu, mode: forward}
vary: {size: [smoke, laptop]}
"""


def test_a_sweep_is_an_array_over_its_definition_as_it_was_and_a_table(slurm, project, capsys):
    sweeps = project / "papermill_jobs" / "sweeps"
    sweeps.mkdir()
    (sweeps / "tiny.yaml").write_text(SWEEP)
    assert main(["submit", "sweep", "tiny", "--concurrency", "1", "--set", "context_length=8,16"]) == 0
    out = project / "runs" / "sweeps" / "tiny"
    assert capsys.readouterr().out.splitlines() == [
        f"101  tiny        {out}/jobs/tiny-101_*.log, 4 tasks",
        f"102  tiny-table  {out}/jobs/tiny-table-102.log, after 101",
        f"To watch them: lmcore jobs {out}",
    ]
    assert slurm.called("sbatch")[0].endswith(" --array=0-3%1 papermill_jobs/sweep.sbatch")
    (frozen,) = (out / "jobs").glob("tiny-*.yaml")
    assert f"SWEEP={frozen}" in slurm.environment("tiny")
    wanted = load_definition("tiny", ["context_length=8,16"])
    assert load_definition(frozen) == load_definition(out / "sweep.yaml") == wanted
    array, table = read_log(out)
    assert array.task_ids == ["101_0", "101_1", "101_2", "101_3"]
    assert (array.kind, table.kind, table.after) == ("sweep", "sweep-table", ["101"])
    # a task's number is a place in the definition: tasks that wait must not find another one there
    before = frozen.read_bytes()
    (sweeps / "tiny.yaml").write_text(SWEEP.replace("[smoke, laptop]", "[laptop, smoke]"))
    assert main(["submit", "sweep", "tiny", "--set", "context_length=8,16", "--again"]) == 0
    assert frozen.read_bytes() == before
    (second,) = set((out / "jobs").glob("tiny-*.yaml")) - {frozen}
    assert f"SWEEP={second}" in slurm.environment("tiny")


def test_an_array_larger_than_the_clusters_is_refused(slurm, project, capsys):
    (project / "tiny.yaml").write_text(SWEEP)
    said = refusal(capsys, "sweep", "tiny.yaml", "--set", "size=smoke,laptop,tinystories,small,medium")
    assert said.startswith("tiny has tasks up to number 4, but this cluster's arrays end at 3 (MaxArraySize)")
    assert not slurm.called("sbatch")
    assert not (project / "runs").exists()


def test_what_is_finished_is_left_out_and_where_all_is_nothing_is_submitted(slurm, project, capsys):
    (project / "tiny.yaml").write_text(SWEEP)
    out = project / "out"
    chosen = ["tiny.yaml", "--out", str(out), "--set", "size=smoke"]
    assert main(["sweep", "run", "--task", "1", *chosen, "context_length=8,16"]) == 0
    assert main(["submit", "sweep", *chosen, "context_length=8,16"]) == 0
    assert read_log(out)[0].task_ids == ["101_0"]
    capsys.readouterr()
    slurm.queue.unlink()
    assert main(["submit", "sweep", *chosen, "context_length=16"]) == 0
    assert capsys.readouterr().out.startswith(f"All of {out} is finished")
    assert len(slurm.called("sbatch")) == 2
