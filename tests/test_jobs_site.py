"""Site settings: what a cluster wants, and what is refused in one sentence."""

from pathlib import Path

import pytest

from lmcore.errors import UserError
from lmcore.workbook.jobs.site import SETTINGS, Site, load_site, seconds_of_limit

SITES = Path(__file__).parents[1] / "papermill_jobs"
NOTEBOOKS = sorted(path.stem for path in (SITES.parent / "notebooks").glob("*.ipynb"))


def site_of(folder: Path, text: str, names: tuple[str, ...] = ("02_train",)) -> Site:
    """The settings of a file with this text."""
    file = folder / "site.yaml"
    file.write_text(text, encoding="utf-8")
    return load_site(file, names)


def test_values_stay_as_they_are_written(tmp_path):
    """YAML itself reads 12:30:00 as 45000, which sbatch would take for minutes, and off as false."""
    text = "time: 12:30:00\nqos: off\naccount: 007\ngpus: a40:2\nmemory: 32G\nconstraint: a100|h200\nextra: ['-w n1']\n"
    assert site_of(tmp_path, text).options() == [
        "--account=007", "--qos=off", "--gres=gpu:a40:2", "--mem=32G", "--time=12:30:00", "--constraint=a100|h200",
        "--signal=B:USR1@120", "-w", "n1",
    ]  # fmt: skip


def test_an_empty_file_and_empty_values_change_nothing(tmp_path):
    assert site_of(tmp_path, "# nothing\n") == Site()
    assert site_of(tmp_path, "account:\nsetup:\njobs:\npartition: null\n") == Site()


@pytest.mark.parametrize("gpus", ["0", "a40:0"])
def test_no_gpu_leaves_no_request_for_one(gpus):
    assert Site(gpus=gpus).options() == ["--gres=none", "--signal=B:USR1@120"]


def test_jobs_have_values_of_their_own_by_kind_then_by_name(tmp_path):
    jobs = "jobs:\n  notebook: {time: 120, gpus: 4}\n  02_train: {time: 240}\n  writeup: {gpus: 0}\n"
    site = site_of(tmp_path, "gres: gpu:1\ntime: 60\n" + jobs)
    assert site.for_job("sweep", "lr")["time"] == "60"
    assert site.for_job("notebook", "01_build")["time"] == "120"
    train = site.for_job("notebook", "02_train")
    assert (train["time"], train["gpus"], "gres" in train) == ("240", "4", False)
    assert "--gres=none" in site.for_job("writeup", "writeup").options()


def test_scratch_is_the_folder_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB", "/gscratch/lab")
    assert Site(scratch="$LAB/me").folder(tmp_path) == Path("/gscratch/lab/me")
    assert Site(scratch="scratch").folder(tmp_path) == tmp_path / "scratch"
    assert Site().folder(tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"\$NOWHERE_AT_ALL/me names a variable that is not set"):
        Site(scratch="$NOWHERE_AT_ALL/me").folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("acount: lab", "there is no setting 'acount'; there are account, partition"),
        ("- account", "must be a mapping"),
        ("account: [a, b]", "account must be a plain value"),
        ("account: {a: b}", "account must be a plain value"),
        ("cpus_per_task: many", "cpus_per_task must be a whole number from 1 to 65535, not 'many'"),
        ("cpus_per_task: 0", "cpus_per_task must be a whole number from 1"),
        ("signal_seconds: 100000", "signal_seconds must be a whole number from 1 to 65535"),
        ("attempts_without_progress: 0", "attempts_without_progress must be a whole number from 1"),
        ("gpus: two", "gpus must be a number or kind:number, not 'two'"),
        ("gpus: 1\ngres: gpu:1", "gpus and gres ask for the same thing"),
        ("time: an hour", "time must be minutes"),
        ("time: 0-0:00:00", "time must be above 0, not '0-0:00:00'"),
        ("setup: module load cuda", "setup must be a list of lines"),
        ("extra: [mail-type=END]", "extra: 'mail-type=END' is not an option of sbatch"),
        ("extra: ['--comment=\"a']", "has a quote that is not closed"),
        ("environment: [A=b]", "environment must be a mapping"),
        ("environment: {A-B: c}", "environment: 'A-B' is not a variable's name"),
        ("environment: {A: [1]}", "environment must hold plain values, not ['1']"),
        ("jobs: {wrietup: {gpus: 0}}", "jobs: there is no job 'wrietup'; there are workbook, notebook"),
        ("jobs: {writeup: {gpu: 0}}", "there is no setting 'gpu'"),
        ("jobs: {writeup: {scratch: /tmp}}", "jobs: writeup cannot have its own scratch"),
        ("jobs: {02_train: 4}", "jobs: 02_train must be a mapping of settings"),
        ("jobs: {writeup: }", "jobs: writeup must be a mapping of settings"),
        ("environment: {OUT: /tmp}", "environment: OUT is set by lmcore submit itself"),
        ("environment: {PATH: '/opt:$PATH'}", "change PATH in setup"),
        ("extra: [--output=x.log]", "extra: '--output=x.log' is set by lmcore submit itself"),
        ("extra: ['-a 0-3']", "extra: '-a 0-3' is set by lmcore submit itself"),
        ("extra: [--no-requeue]", "extra: '--no-requeue' is set by lmcore submit itself"),
        ("account: 'lab", "cannot be read as YAML"),
    ],
)
def test_wrong_settings_are_one_sentence_that_names_file_and_field(tmp_path, text, sentence):
    with pytest.raises(UserError) as refused:
        site_of(tmp_path, text)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "site.yaml"))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"There is no file .*hyak\.yaml"):
        load_site(tmp_path / "hyak.yaml")


@pytest.mark.parametrize("file", ["site.yaml", "sites/hyak.yaml", "sites/lab.yaml"])
def test_the_sites_that_come_with_the_project_are_sound(file):
    site = load_site(SITES / file, NOTEBOOKS)
    assert "--gres=none" in site.for_job("writeup", "writeup").options()


def test_every_setting_is_explained_in_site_yaml():
    text = (SITES / "site.yaml").read_text(encoding="utf-8")
    assert [name for name in SETTINGS if f"{name}:" not in text] == []


def test_the_commented_settings_of_site_yaml_are_sound(tmp_path):
    """What stands there behind # is what a person uncomments."""
    lines = (SITES / "site.yaml").read_text(encoding="utf-8").splitlines()
    settings = [line.removeprefix("# ") for line in lines[4:]]
    chosen = "\n".join(line for line in settings if not line.startswith("gres:"))
    site = site_of(tmp_path, chosen)
    assert site["setup"][-1] == "conda activate lmcore"
    assert site["account"] == "mylab"
    assert site["extra"] == ["--mail-type=END,FAIL"]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("2", 120), ("2:30", 150), ("1:00:00", 3600), ("1-2", 93_600), ("1-2:30", 95_400), ("1-2:30:10", 95_410),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of_limit(time) == seconds
