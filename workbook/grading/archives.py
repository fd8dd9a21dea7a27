"""Opens a hand-in's archives safely: no path outside, no link, no bomb."""

import shutil
import stat
import zipfile
from pathlib import Path, PurePosixPath

from lmcore.errors import UserError, require

MOST_BYTES, BLOCK = 500_000_000, 4096
"""What one hand-in may hold, unpacked; no file takes less than a block."""


def unpack(handin: Path, folder: Path) -> Path:
    """Unpacks the hand-in, a folder or an archive of what `make handin` wrote, into `folder`; returns its own folder.

    Raises `UserError` with a sentence where an archive is damaged, too large, or would write outside of the folder.
    """
    if handin.is_dir():
        for path in handin.rglob("*"):
            require(not path.is_symlink(), f"{path.name} is a link.")
        shutil.copytree(handin, folder, dirs_exist_ok=True)
    else:
        shutil.copy(handin, folder)
    left = MOST_BYTES
    while found := [path for path in (*folder.glob("*.zip"), *folder.glob("*/*.zip")) if path.parent.name != "code"]:
        left -= _extract(found[0], left)
        found[0].unlink()
    return next((path.parent for path in (folder / "results", *folder.glob("*/results")) if path.is_dir()), folder)


def _extract(file: Path, most_bytes: int) -> int:
    """Extracts an archive beside itself; returns the bytes that its files take."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = sum(max(member.file_size, BLOCK) for member in members)
            require(size <= most_bytes, f"{file.name} would unpack to {size / 1e6:,.0f} MB.")
            for member in members:
                name, path = member.filename, PurePosixPath(member.filename.replace("\\", "/"))
                outside = path.is_absolute() or ".." in path.parts or ":" in name
                require(not outside, f"{file.name} would write outside of its folder, to {name!r}.")
                require(not stat.S_ISLNK(member.external_attr >> 16), f"{file.name} holds a link, {name!r}.")
            archive.extractall(file.parent)  # which stops at the sizes that the archive says
            return size
    except UserError:
        raise
    except Exception as error:  # of the many that zipfile raises, from BadZipFile to zlib's
        raise UserError(f"{file.name} is not a whole archive ({error}).") from None
