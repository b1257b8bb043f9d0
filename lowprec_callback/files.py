"""Files that are whole or not there: a new file is written beside the old one and takes its name when it is complete.

    write_text(Path("runs/mine/report.json"), text)

A disk that fills up in the middle, a crash or Ctrl-C leaves the old file as it was, and no half of a new one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lowprec_callback.failures import in_words

SUFFIX = ".part"
"""Ends the name of a file that is still being written; a dot begins it, so that `ls` and `*` pass it over."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `path` when the block ends well, and vanishes when it does not.

    The new file lies in the folder of the old one, because only inside one file system a rename is one step: a reader
    sees the old file or the new one, never a part. The umask sets its permissions, as for any new file. A symbolic link
    stays, and the file that it leads to is replaced. What is no regular file (a pipe, `/dev/stdout`) has no old content
    to protect and must keep its place, so it is written to directly.

    Raises:
        OSError: it cannot be written. `path` is then as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with path.open("wb") as file:
            yield file
        return
    # Not derived from the file's own name, which may be as long as a name can be.
    beside = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
        # Closed before it is renamed: a network disk may refuse the last bytes only then.
        os.replace(beside, target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file, or leave the old one (see `replacing`).

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole file as UTF-8 with line ends as they are, or leave the old one (see `replacing`).

    Text that is no Unicode (the name of a file, inside an error message) becomes an escape that JSON reads back.

    Raises:
        OSError: it cannot be written.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def why(error: BaseException) -> str:
    """Why a file could not be made, for a sentence: what the system said ("No space left on device"), or the error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else in_words(error)
