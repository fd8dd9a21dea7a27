"""papermill_jobs/submit.sh: what is asked of Slurm, and what it does where Slurm refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from job_projects import command, job_project

SBATCH = """cd "$(dirname "$0")/.."
for word; do if [[ $word == --job-name=* ]]; then name=${word#*=}; name=${name%%.*}; fi; done
if [[ $name == "$REFUSED" ]]; then
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
env >environment-$name
number=$(($(cat number 2>/dev/null || echo 100) + 1))
echo $number >number
printf "$ANSWER\\n" $number
"""


class Slurm:
    """Stand-ins for Slurm's commands, for answers that a real one gives only in trouble."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        command(self.bin, "sbatch", SBATCH)
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


def submit(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    words, environment = ["papermill_jobs/submit.sh", *arguments], os.environ | variables
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def refusal(**variables: str) -> str:
    """The sentence with which the script refuses: its last line, code 2, nothing on standard output."""
    done = submit(**variables)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1]


def test_a_workbook_is_a_chain_that_ends_with_the_writeup(slurm, project):
    told = submit("--parameters", "steps=7", OUT="runs/it", NOTEBOOKS="03 02\n04 02_train", DATA="hf:a/b").stdout
    out = project / "runs" / "it"
    names = ["02_train", "03_generate", "04_benchmark", "writeup"]
    assert [line.split() for line in told.splitlines()] == [[str(id), name] for id, name in enumerate(names, 101)]
    calls = slurm.called("sbatch")
    assert calls[1] == (
        "--parsable --dependency=singleton,afterok:101 --kill-on-invalid-dep=yes --job-name=03_generate.it "
        f"--output={out}/jobs/03_generate-%j.log papermill_jobs/workbook.sbatch --no-writeup --parameters steps=7"
    )
    assert " --dependency=singleton --kill" in calls[2]
    assert " --dependency=singleton,afterany:101:102:103 " in calls[3]
    assert calls[3].endswith(" papermill_jobs/writeup.sbatch")
    variables = {"SCALE=smoke", "DATA=hf:a/b", f"OUT={out}", "NOTEBOOKS=03_generate"}
    assert variables <= {*slurm.environment("03_generate")}


SITE = """
options=(--account=lab --gres=gpu:a40:1 --time=12:00:00 --signal=B:USR1@60)
export NAME='$c' LMCORE_SETUP='a
b c'
options_of=([02_train]="--mem=64G --time=1-0" [writeup]=--gres=none)
"""


def test_what_the_site_wants_goes_before_the_scripts_own_options(slurm, project, tmp_path):
    (site := tmp_path / "my site.sh").write_text(SITE)
    assert submit(SITE=str(site), NOTEBOOKS="02").returncode == 0
    train, writeup = slurm.called("sbatch")
    wanted = "--account=lab --gres=gpu:a40:1 --time=12:00:00 --signal=B:USR1@60 --mem=64G --time=1-0"
    assert f" {wanted} papermill_jobs/workbook.sbatch " in train
    assert " --gres=gpu:a40:1 --time=12:00:00 --signal=B:USR1@60 --gres=none papermill_jobs/writeup.sbatch" in writeup
    environment = slurm.environment("02_train")
    assert {f"OUT={project}/runs/smoke", "NAME=$c"} <= {*environment}
    assert "LMCORE_SETUP=a\nb c" in "\n".join(environment)


def test_what_sbatch_refuses_cancels_the_jobs_before_it(slurm, project):
    done = submit(REFUSED="04_benchmark")
    assert done.returncode == 2
    assert (
        "Invalid partition name specified\nlmcore: sbatch refused 04_benchmark; what your cluster wants" in done.stderr
    )
    assert slurm.called("scancel") == ["101 102"]


def test_a_job_that_submits_does_not_pass_its_own_variables_on(slurm, project, monkeypatch):
    """sbatch hands on its environment, and a task's number would give the new jobs another name."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_MEM_PER_CPU", "MASTER_ADDR", "SLURM_CONF"):
        monkeypatch.setenv(name, "of the job around")
    assert submit(NOTEBOOKS="04", WRITEUP="no").returncode == 0
    handed_on = [line for line in slurm.environment("04_benchmark") if "of the job around" in line]
    assert handed_on == ["SLURM_CONF=of the job around"]


def test_what_is_wrong_is_a_sentence(slurm, project, monkeypatch):
    assert refusal(SCALE="big") == "lmcore: There is no scale big: papermill_jobs/parameters has no such folder."
    assert refusal(NOTEBOOKS="02 44") == "lmcore: There is no notebook 44 in notebooks/."
    assert refusal(NOTEBOOKS=" ") == "lmcore: NOTEBOOKS names no notebook."
    assert refusal(SITE="x.sh") == f"lmcore: There is no {project}/x.sh."
    assert refusal(ANSWER="Submitted") == "lmcore: sbatch gave no job id for 02_train."
    assert submit(NOTEBOOKS="02", ANSWER="Welcome to 3\\n%s\\nBye").stdout.startswith("102  02_train\n")
    (slurm.bin / "sbatch").unlink()
    for tool in ("bash", "basename", "dirname", "realpath", "sort", "grep"):
        (slurm.bin / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(slurm.bin))
    assert refusal().startswith("lmcore: There is no sbatch here; without Slurm, `workbook run`")
    assert "singleton\\,afterok:\\<02_train\\>" in submit(DRY_RUN="1", OUT="new").stdout
    assert not (project / "new").exists()
