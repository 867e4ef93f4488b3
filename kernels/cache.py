"""Object code on disk: shared by processes, bounded, and never trusted when anything about it is unexpected.

A file's name is a digest of the kernel's text, the code generator's own source, and the target. Its content is a magic
word, that digest, the payload's digest, and the payload. It is written beside its place and moved there, so a reader or a
crash never sees half a file. Machine code is run, so the folder must belong to this user and be writable by nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import sys
import tempfile
import time
import warnings
from pathlib import Path

MAGIC = b"AEKC0001"
MAX_BYTES = 256 << 20
MAX_FILES = 4096
TEMP = ".tmp-"
STALE_SECONDS = 3600.0
"""Age from which a half-written file is nobody's."""
_said: set[str] = set()


def folder() -> Path:
    """`ADAPTIVE_EAGER_CACHE_DIR`, or the platform's folder for caches."""
    named = os.environ.get("ADAPTIVE_EAGER_CACHE_DIR")
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "adaptive-eager"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "adaptive-eager" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adaptive-eager"


@functools.cache
def _sources() -> str:
    """Digest of the code generator: its kernels are stale when it changes."""
    h = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        h.update(path.name.encode())
        h.update(path.read_bytes())
    return h.hexdigest()


def key(text: str, target: str) -> str:
    """The name under which a kernel's object code is kept."""
    return hashlib.sha256(f"{text}\x00{target}\x00{_sources()}".encode()).hexdigest()


def say_once(text: str) -> None:
    """Warn, once a process for each text."""
    if text not in _said:
        _said.add(text)
        warnings.warn(
            f"adaptive-eager kernel cache: {text}; kernels are compiled anew",
            RuntimeWarning,
            stacklevel=3,
        )


def _ours(info: os.stat_result) -> bool:
    """Whether only this user can have written what was looked at."""
    if not hasattr(os, "getuid"):
        return True
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _ready(create: bool) -> Path | None:
    try:
        root = folder()
    except RuntimeError as e:  # no home folder
        say_once(str(e))
        return None
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not root.is_dir():
            return None
        if not _ours(root.stat()):
            say_once(f"{root} belongs to somebody else or others may write to it")
            return None
    except OSError as e:
        say_once(f"{root}: {e.strerror or e}")
        return None
    return root


def _blob(path: Path) -> bytes | None:
    """A file's content; the file that is checked is the one that is read, and never a link's target."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(path, flags), "rb") as f:
            if not _ours(os.fstat(f.fileno())):
                say_once(f"{path} belongs to somebody else or others may write to it")
                return None
            blob = f.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a read-only folder still serves
        os.utime(path)
    return blob


def read(name: str) -> bytes | None:
    """The payload kept under a name; None when it is missing, damaged, foreign or of another format."""
    root = _ready(create=False)
    blob = None if root is None else _blob(root / f"{name}.obj")
    if blob is None:
        return None
    key_at, digest_at = len(MAGIC), len(MAGIC) + 32
    payload = blob[digest_at + 32 :]
    good = (
        blob[:key_at] == MAGIC
        and blob[key_at:digest_at] == bytes.fromhex(name)
        and blob[digest_at : digest_at + 32] == hashlib.sha256(payload).digest()
    )
    return payload if good else None


def write(name: str, payload: bytes) -> None:
    """Keep a payload; a full or read-only disk costs speed only."""
    root = _ready(create=True)
    if root is None:
        return
    temp = ""
    try:
        fd, temp = tempfile.mkstemp(dir=root, prefix=TEMP)
        with os.fdopen(fd, "wb") as f:
            f.write(MAGIC + bytes.fromhex(name) + hashlib.sha256(payload).digest() + payload)
        os.replace(temp, root / f"{name}.obj")
    except OSError as e:
        if temp:
            with contextlib.suppress(OSError):
                os.unlink(temp)
        say_once(f"{root}: {e.strerror or e}")
        return
    _trim(root)


_writes = 0


def _trim(root: Path) -> None:
    """Every 64 writes: remove what a crash left half-written, and the longest unused files past the bounds."""
    global _writes
    _writes += 1
    if _writes % 64 != 1:
        return
    entries = []
    for path in root.iterdir():
        with contextlib.suppress(OSError):  # another process trims too
            info = path.stat()
            if path.name.startswith(TEMP) and info.st_mtime < time.time() - STALE_SECONDS:
                path.unlink()
            elif path.suffix == ".obj":
                entries.append((info.st_mtime, info.st_size, path))
    entries.sort()
    size = sum(e[1] for e in entries)
    for at, (_, nbytes, path) in enumerate(entries):
        if size <= MAX_BYTES and len(entries) - at <= MAX_FILES:
            break
        size -= nbytes
        with contextlib.suppress(OSError):
            path.unlink()
