"""Opens a hand-in's archives safely: no path outside, no link, no bomb."""

import shutil
import stat
import zipfile
from pathlib import Path, PurePosixPath

from lmcore.errors import UserError, require

MOST_BYTES, MOST_FILES = 500_000_000, 20_000
"""What one hand-in may hold, unpacked."""


def unpack(handin: Path, folder: Path) -> None:
    """Unpacks the hand-in, a folder of archives and PDFs or one archive of these, into `folder`.

    Raises `UserError` with a sentence where an archive is damaged, too large, or would write outside of the folder.
    """
    if handin.is_file():
        _extract(handin, folder)
    else:
        for file in sorted(handin.iterdir()):
            require(not file.is_symlink(), f"{file.name} is a link.")
            if file.suffix == ".zip":
                _extract(file, folder)
            elif file.is_file():
                shutil.copy(file, folder / file.name)
    for inner in sorted(folder.glob("*.zip")):
        _extract(inner, folder)
    inside = [path for path in folder.iterdir() if path.is_dir()]
    if not (folder / "results").is_dir() and len(inside) == 1:  # one folder around everything
        for path in sorted(inside[0].glob("*")):
            path.rename(folder / path.name)
        for inner in sorted(folder.glob("*.zip")):
            _extract(inner, folder)


def _extract(file: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            require(
                size <= MOST_BYTES and len(members) <= MOST_FILES,
                f"{file.name} would unpack to {size / 1e6:,.0f} MB in {len(members):,} files.",
            )
            for member in members:
                path = PurePosixPath(member.filename.replace("\\", "/"))
                outside = path.is_absolute() or ".." in path.parts or ":" in member.filename
                require(not outside, f"{file.name} would write outside of its folder, to {member.filename!r}.")
                link = stat.S_ISLNK(member.external_attr >> 16)
                require(not link, f"{file.name} holds a link, {member.filename!r}.")
                archive.extract(member, folder)  # which stops at the size that the archive says
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file.name} is not a whole archive ({error}).") from None
