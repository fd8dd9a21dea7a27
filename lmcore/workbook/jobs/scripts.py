"""The plain scripts of papermill_jobs/ with a site's options, and with everything fixed that a job depends on."""

import re
import shlex
import sys
from pathlib import Path

from lmcore.errors import require
from lmcore.workbook.jobs.plan import Job
from lmcore.workbook.jobs.site import Site, seconds_of_limit

MARK = "# lmcore submit: settings"
"""The line of a plain script that the settings replace."""

OPTION = re.compile(r"#SBATCH\s+--([\w-]+)(?:[=\s]\s*(.*?))?\s*")


def log_pattern(job: Job, out: Path) -> str:
    """Absolute path of the job's log, in which %j, %A and %a stand for job, array and task; %% for a per cent sign."""
    folder = str(out / "jobs").replace("%", "%%")
    return f"{folder}/{job.name}-{'%j' if job.tasks is None else '%A_%a'}.log"


def render(project: Path, job: Job, site: Site, out: Path) -> str:
    """The script of one job. Raises `UserError` if the plain one is missing or has lost the line for the settings."""
    for path in (project, out):  # Slurm takes a backslash in a log's name away, and ends a line at its end
        require(
            not {"\\", "\n"} & set(str(path)),
            f"Slurm cannot write to {str(path)!r}; choose a folder without \\ and line breaks.",
        )
    plain = project / "papermill_jobs" / job.script
    require(plain.is_file(), f"There is no file {plain}; take it from the project's repository.")
    lines = plain.read_text(encoding="utf-8").splitlines()
    require(lines.count(MARK) == 1, f"{plain} must have the line {MARK!r} once: the settings of a job go there.")
    header = [line for line in lines if line.startswith("#SBATCH")]
    require(bool(header), f"{plain} has no #SBATCH lines; take it from the project's repository.")
    first = lines.index(header[0])
    body = [line for line in lines[first:] if not line.startswith("#SBATCH")]
    mark = body.index(MARK)
    made = f"# Made by lmcore submit from {plain.name}; the job has a copy of its own."
    text = [
        lines[0],
        made,
        *lines[1:first],
        *directives(read_options(plain, header), job, site, out),
        *body[:mark],
        *settings(project, job, site),
        *body[mark + 1 :],
    ]
    return "\n".join(text) + "\n"


def read_options(plain: Path, header: list[str]) -> dict[str, str]:
    """The options of #SBATCH lines by long name; a switch has the value ""."""
    options = {}
    for line in header:
        found = OPTION.fullmatch(line)
        require(found is not None, f"{plain}: {line!r} must be written as #SBATCH --option=value.")
        options[found[1]] = " ".join(shlex.split(found[2] or ""))
    return options


def directives(options: dict[str, str], job: Job, site: Site, out: Path) -> list[str]:
    """#SBATCH lines: those of the plain script, then the job's own and the site's in place of them."""
    chosen: dict[str, str | None] = {**options, "job-name": job.name, "output": log_pattern(job, out)}
    chosen |= {"array": job.array} | site.options()
    limit = seconds_of_limit(chosen["time"] or "")
    require(
        limit is None or limit > site.signal_seconds,
        f"{job.name}: a time limit of {chosen['time']} is over before the warning {site.signal_seconds} s ahead of it "
        "is of use; give a longer --time, or set a smaller signal_seconds in site.yaml.",
    )
    if job.after_ok:
        chosen["kill-on-invalid-dep"] = "yes"  # else it would wait for ever
    lines = [
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
        for name, value in chosen.items()
        if value is not None
    ]
    return [*lines, *(f"#SBATCH {option}" for option in site.extra)]


def settings(project: Path, job: Job, site: Site) -> list[str]:
    """Lines of shell that fix what the job depends on, and the site's setup."""
    variables = {
        "LMCORE_PROJECT": str(project),
        "ATTEMPTS": str(site.attempts_without_progress),
        "STOP_SECONDS": str(max(site.signal_seconds * 5 // 6, 1)),  # the rest is for the notebook, and to queue again
        **job.variables,
        **site.environment,
    }
    lines = ["# Settings of this job, fixed when it was submitted."]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    program = Path(sys.executable).parent / "lmcore"
    if program.exists():  # the environment that submits; the site's setup goes before it
        lines.append(f"export PATH={shlex.quote(str(program.parent))}:$PATH")
    if site.setup:
        lines += ["set +u  # what modules and conda run may use variables that are not set", *site.setup, "set -u"]
    if job.arguments:
        lines.append(f'set -- {shlex.join(job.arguments)} "$@"')
    return lines
