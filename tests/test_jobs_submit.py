"""`workbook submit`: what is asked of Slurm, and what it does where Slurm refuses."""

from pathlib import Path

import pytest
from job_projects import command, job_project
from notebook_projects import code, parameters

from lmcore.errors import UserError
from workbook.cli import main
from workbook.jobs import load_site
from workbook.record import read_records

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


def refusal(capsys, *arguments: object) -> str:
    """The sentence with which the command refuses: one line, code 2, nothing on standard output."""
    assert main(["submit", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_workbook_is_a_chain_that_ends_with_the_writeup(slurm, project, monkeypatch, capsys):
    monkeypatch.setenv("NOTEBOOKS", "02 03 04")  # as make hands it on
    assert main(["submit", "--out", "runs/it"]) == 0
    out = project / "runs" / "it"
    names = ["02_train", "03_generate", "04_benchmark", "writeup"]
    told = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:4]]
    assert told == [[str(id), name] for id, name in enumerate(names, 101)]
    calls = slurm.called("sbatch")
    assert calls[1] == (
        "--parsable --dependency=singleton,afterok:101 --kill-on-invalid-dep=yes --job-name=03_generate.it "
        f"--output={out}/jobs/03_generate-%j.log --export=ALL papermill_jobs/workbook.sbatch --no-writeup"
    )
    assert " --dependency=singleton,afterany:101:102:103 " in calls[3]
    assert calls[3].endswith(" papermill_jobs/writeup.sbatch")
    variables = {"SCALE=smoke", "DATA=embedded", f"OUT={out}", "NOTEBOOKS=03_generate"}
    assert variables <= {*slurm.environment("03_generate")}
    assert [(record.name, record.state) for record in read_records(out)] == [(name, "not run") for name in names[:3]]


def test_each_notebook_gets_the_parameters_that_it_declares(slurm, tmp_path, monkeypatch):
    own = parameters('scale = "smoke"\ndata = "embedded"\nout = "../runs"\nwidth = 1')
    monkeypatch.chdir(job_project(tmp_path / "project", _01_a=[parameters(), code("1")], _02_b=[own, code("1")]))
    assert main(["submit", "--no-writeup", "--parameters", "steps=7", "width=2", "rates=[0.5, 1.0]"]) == 0
    first, second = slurm.called("sbatch")
    assert first.endswith(" --no-writeup --parameters steps=7 rates=[0.5, 1.0]")
    assert second.endswith(" --no-writeup --parameters width=2")


WRONG = {
    "- account": "must be a mapping, not",
    "setup: [module load cuda]": "setup must hold plain text",
    "jobs: {writeup: {time: []}}": "jobs, writeup: time must hold plain text",
    "account: [": "cannot be read as YAML",
}


@pytest.mark.parametrize("text", WRONG)
def test_sites_are_checked(tmp_path, text):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=WRONG[text]):
        load_site(tmp_path / "site.yaml")


def test_the_answer_of_sbatch(slurm, project, monkeypatch, capsys):
    """An id is found in any line; an answer without one is one sentence."""
    monkeypatch.setenv("ANSWER", "Welcome to 3\\nSubmitted batch job %s\\nBye")
    assert main(["submit", "--notebooks", "04", "--no-writeup", "--out", "runs/it"]) == 0
    assert capsys.readouterr().out.startswith("101  04_benchmark\n")
    monkeypatch.setenv("ANSWER", "Submitted")
    assert "sbatch gave no job id" in refusal(capsys)


SITE = """
account: lab
gres: gpu:a40:1
time: 12:00:00
qos:
mail-type: END,FAIL
setup: |
  a
  b c
environment: {NAME: $c, STOP_SECONDS: 50}
signal: B:USR1@60
jobs: {02_train: {mem: 64G, time: 1-0}, writeup: {gres: none}}
"""


def test_what_the_site_wants_goes_before_the_scripts_own_options(slurm, project, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(SITE)
    assert main(["submit", "--site", str(site), "--notebooks", "02"]) == 0
    train, writeup = slurm.called("sbatch")
    wanted = "--account=lab --gres=gpu:a40:1 --time=1-0 --mail-type=END,FAIL --signal=B:USR1@60 --mem=64G"
    assert f" {wanted} papermill_jobs/workbook.sbatch " in train
    assert " --gres=none " in writeup
    environment = slurm.environment("02_train")
    assert {f"OUT={project}/runs/smoke", "NAME=$c", "STOP_SECONDS=50"} <= {*environment}
    assert "LMCORE_SETUP=a\nb c" in "\n".join(environment)


def test_what_sbatch_refuses_cancels_the_jobs_before_it(slurm, project, monkeypatch, capsys):
    monkeypatch.setenv("REFUSED", "04_benchmark")
    said = refusal(capsys)
    assert said.startswith("workbook: sbatch: Batch job submission failed: Invalid partition name specified. What your")
    assert slurm.called("scancel") == ["101 102"]


def test_a_job_that_submits_does_not_pass_its_own_variables_on(slurm, project, monkeypatch):
    """sbatch hands on its environment, and a task's number would give the new jobs another name."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_MEM_PER_CPU", "MASTER_ADDR", "SLURM_CONF"):
        monkeypatch.setenv(name, "of the job around")
    assert main(["submit", "--notebooks", "04", "--no-writeup"]) == 0
    handed_on = [line for line in slurm.environment("04_benchmark") if "of the job around" in line]
    assert handed_on == ["SLURM_CONF=of the job around"]


def test_without_slurm_there_is_a_sentence(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    assert "There is no sbatch here; without Slurm, --local runs the notebooks." in refusal(capsys)
    assert main(["submit", "--dry-run"]) == 0
    assert "'--dependency=singleton,afterok:<02_train>'" in capsys.readouterr().out
    assert not (project / "runs").exists()
