"""metrics.jsonl: one JSON object a line, each with a checksum that covers the lines before it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import SEAL, atomic_write, sealed, unsealed


class MetricsFile:
    """The metrics of one run: read by anyone, written by the process that holds the run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._written: list[str] | None = None  # the lines' texts, known from the first append on

    def lines(self) -> list[dict[str, Any]]:
        """The lines without their checksums; a last line that was cut off by a crash is left out.

        Raises `UserError` naming the first line that is not what was written.
        """
        return [value for value, _ in self._read()]

    def _read(self) -> list[tuple[dict[str, Any], str]]:
        if not self.path.is_file():
            return []
        texts = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        values, previous = [], ""
        for number, text in enumerate(texts, 1):
            whole = text.endswith("\n")
            value = _parsed(text)
            plain = unsealed(value, previous) if isinstance(value, dict) and "step" in value else None
            if plain is None:
                require(
                    not whole and number == len(texts),
                    f"{self.path} line {number} is damaged: it is not the JSON object with a step that was written "
                    f"there; lmcore train on {self.path.parent} takes the lines from its last checkpoint, else mend or "
                    "remove that line.",
                )
                break
            values.append((plain, text if whole else text + "\n"))
            previous = value.get(SEAL, "")
        return values

    def append(self, line: dict[str, Any]) -> None:
        """Adds one line. Raises `UserError` if it cannot be written, as on a full disk."""
        written = self._open()
        previous = json.loads(written[-1]).get(SEAL, "") if written else ""
        text = json.dumps(sealed(line, previous)) + "\n"
        self._write(lambda: _append(self.path, text))
        written.append(text)

    def text(self) -> str:
        """All lines as they were written by this process and those before it; a checkpoint keeps them."""
        return "".join(self._open())

    def keep_until(self, step: int) -> None:
        """Drops the lines after `step`, which a resumed run will write again."""
        self._replace("".join(text for line, text in self._read() if line["step"] <= step))

    def restore(self, text: str) -> bool:
        """Makes `text`, what `text()` once gave, the whole content; returns whether it was still there, undamaged."""
        content = text.encode()
        sound = self.path.read_bytes().startswith(content) if self.path.is_file() else not content
        self._replace(text)
        return sound

    def flush(self) -> None:
        """Brings the lines to the disk. Raises `UserError` if that fails."""
        if self.path.is_file():
            self._write(lambda: _append(self.path, "", sync=True))

    def _open(self) -> list[str]:
        if self._written is None:
            self._written = [text for _, text in self._read()]
        return self._written

    def _replace(self, text: str) -> None:
        with atomic_write(self.path, "w") as file:
            file.write(text)
        self._written = None

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise UserError(
                f"Cannot write {self.path}: {error.strerror or error}; the same command goes on from the last "
                "checkpoint."
            ) from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _append(path: Path, text: str, sync: bool = False) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
