import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from plant import Bug, read_bugs

ROOT = Path(__file__).parents[2]
BUGS = read_bugs()


@cache
def functions_of(file: Path) -> set[str]:
    """Names of the functions and classes at the top of a file. Raises `OSError` without the file."""
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if hasattr(node, "name")}


def test_there_are_many_and_each_has_a_name_of_its_own():
    assert len(BUGS) >= 40
    assert sum(bug.notebook is not None for bug in BUGS) >= 10
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_applies_and_names_tests_that_exist(bug: Bug):
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    assert bug.new != bug.old
    patched = bug.patched(text)
    if bug.file.endswith(".py"):
        ast.parse(patched)
    assert bug.breaks.endswith(".")
    assert bug.tests
    assert bug.notebook is None or (ROOT / bug.notebook).is_file()
    for test in bug.tests:
        file, _, function = test.partition("::")
        known = functions_of(ROOT / file)
        assert not function or function.partition("[")[0] in known, f"{file} has no {function}"


EXAMPLE = """
- {name: seen, breaks: x., file: sums.py, old: 'a + b', new: 'a - b', tests: [test_sums.py]}
- {name: unseen, breaks: x., file: sums.py, old: 'a * b', new: 'a / b', tests: [test_sums.py::test_add]}
- {name: gone, breaks: x., file: sums.py, old: 'a % b', new: 'a / b', tests: [test_sums.py]}
- {name: broken, breaks: x., file: sums.py, old: 'import math', new: 'import maths', tests: [test_sums.py]}
"""


def test_the_script_tells_caught_from_not_caught(tmp_path):
    """In a repository of its own: only a failing test is a catch, and the working tree stays as it is."""
    sums = "import math\n\n\ndef add(a, b):\n    return a + b\n\n\ndef product(a, b):\n    return a * b\n"
    (tmp_path / "sums.py").write_text(sums)
    (tmp_path / "test_sums.py").write_text("import sums\n\n\ndef test_add():\n    assert sums.add(1, 2) == 3\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -q -m sums"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "sums.py").write_text("not committed")
    (tmp_path / "bugs.yaml").write_text(EXAMPLE)
    call = "plant.main([], Path(sys.argv[1]), Path(sys.argv[1]) / 'bugs.yaml', preloaded=['pytest'])"
    code = f"import sys; from pathlib import Path; import plant; sys.exit({call})"  # where no lmcore is imported
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT / "tests/planted_bugs", capture_output=True)
    said = done.stdout.decode()
    for name, result in {"seen": "caught", "unseen": "NOT CAUGHT", "gone": "does not apply", "broken": "ERROR"}.items():
        assert re.search(rf"^{result} +[\d.]+ s  {name}  ", said, re.MULTILINE), said
    assert (done.returncode, (tmp_path / "sums.py").read_text()) == (1, "not committed")
