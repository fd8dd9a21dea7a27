"""What commands print of other programs' files: control characters never reach a terminal."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from nsys_exports import SmallExport

from lmcore.cli import main
from lmcore.cli.output import printable

HOSTILE = "gemm\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202e"
SHOWN = r"gemm\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202e"
"""The same, written by hand."""


def export(path) -> None:
    written = SmallExport()
    written.range(HOSTILE, 0, 100)
    written.launch(1, 10, 20, 60, HOSTILE)
    written.write(path)


def trace(path) -> None:
    event = {"ph": "X", "pid": 1, "tid": 1, "name": HOSTILE}
    events = [event | {"cat": "user_annotation", "ts": 0, "dur": 100}, event | {"cat": "cpu_op", "ts": 10, "dur": 20}]
    path.write_text(json.dumps({"traceEvents": events}))


def snapshot(path) -> None:
    frames = [{"filename": f"/a/{HOSTILE}.py", "line": 3, "name": f"{HOSTILE}\n9 GB  1  weights"}]
    event = {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1, "frames": frames}
    path.write_bytes(pickle.dumps({"device_traces": [[event]], "segments": []}))


@pytest.mark.fault("terminal escapes in a profile", "survived")
@pytest.mark.parametrize(
    ("write", "name", "command"),
    [
        (export, "e.sqlite", ["nsys", "--report"]),
        (trace, "t.json", ["nsys", "--report"]),
        (snapshot, "s.pickle", ["memory", "--snapshot"]),
    ],
)
def test_names_of_kernels_ranges_and_frames(tmp_path, capsys, write, name, command):
    write(tmp_path / name)
    assert main([*command, str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert SHOWN in out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert not any(line.startswith("9 GB") for line in out.splitlines())  # a name adds no row to a table


def test_a_text_itself_is_exact_but_on_a_terminal():
    """What is generated may be kept in a file."""
    source = """from lmcore.cli.output import printing_safely, text_output
with printing_safely():
    print("a\\x1b[2J\\rb", file=text_output())"""
    words = [sys.executable, "-c", source]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout == b"a\x1b[2J\rb\n"
    master, terminal = os.openpty()
    subprocess.run(words, stdout=terminal, check=True)
    os.close(terminal)
    assert os.read(master, 1 << 12) == b"a\\x1b[2J\\rb\r\n"
    os.close(master)


def test_printable():
    assert printable("tab\tline\nß漢") == "tab\tline\nß漢"
    assert printable("tab\tline\n\x00\x85", kept="") == r"tab\tline\n\x00\x85"
