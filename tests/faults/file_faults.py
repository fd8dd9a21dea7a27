"""Operations on a run's files, each of which can be the last one of a process."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AtSteps:
    """Called in a process: every step takes so many `seconds` more; SIGKILL after step `last`."""

    seconds: float = 0.0
    last: int | None = None

    def __call__(self) -> None:
        from lmcore.train import AsyncMetrics

        push = AsyncMetrics.push

        def push_and_wait(metrics: AsyncMetrics, step: int, *values: Any) -> None:
            push(metrics, step, *values)
            time.sleep(self.seconds)
            if step == self.last:
                die()

        AsyncMetrics.push = push_and_wait


@dataclass
class Operations:
    """Called in a process: counts what it does to files below `folder`; SIGKILL at number `victim`, else a record."""

    folder: Path
    victim: int | None = None
    record: Path | None = None
    count: int = 0

    def __call__(self) -> None:
        import lmcore.files
        import lmcore.run

        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self.happens("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = fsync
        lmcore.files.open = lmcore.run.open = lambda *a, **k: Halved(open(*a, **k), self)  # noqa: SIM115 (its caller closes it)
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR):
                self.happens("open", os.fsdecode(arguments[0]))
        elif event in ("os.rename", "os.remove", "os.mkdir"):
            self.happens(event.removeprefix("os."), os.fsdecode(arguments[0]))

    def happens(self, what: str, path: str, now: bool = True) -> bool:
        """Notes an operation; returns whether it is the one to die in, after dying of it if that is to be `now`."""
        if not path.startswith(str(self.folder)):
            return False
        self.count += 1
        if self.record is not None:
            with open(self.record, "a", encoding="utf-8") as file:  # outside the folder, so not counted itself
                file.write(json.dumps([what, plain_name(path)]) + "\n")
        if now and self.count == self.victim:
            die()
        return self.count == self.victim


class Halved:
    """A file whose writes can end in their middle."""

    def __init__(self, file: Any, operations: Operations):
        self.file, self.operations = file, operations

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        if self.operations.happens("write", str(self.file.name), now=False):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)


def die() -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def plain_name(path: str) -> str:
    """File name without what differs between two runs: the temporary part."""
    name = Path(path).name
    return name.removeprefix(".").rsplit(".", 2)[0] if name.endswith(".tmp") else name
