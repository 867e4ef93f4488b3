"""Object code on disk: shared by processes, bounded, and never trusted when anything about it is unexpected.

A file's name is a digest of the kernel's text, the code generator's own source, and the target. Its content is a magic
word, that digest, the payload's digest, and the payload. It is written beside its place and moved there, so a reader or a
crash never sees half a file. Machine code is run, so the folder must belong to this user and be writable by nobody else.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path

MAGIC = b"AEKC0001"
MAX_BYTES = 256 << 20
MAX_FILES = 4096
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


def _ours(path: Path) -> bool:
    """Whether only this user can have written here."""
    if not hasattr(os, "getuid"):
        return True
    info = path.stat()
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _ready(create: bool) -> Path | None:
    root = folder()
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not root.is_dir():
            return None
        if not _ours(root):
            say_once(f"{root} belongs to somebody else or others may write to it")
            return None
    except OSError as e:
        say_once(f"{root}: {e.strerror or e}")
        return None
    return root


def read(name: str) -> bytes | None:
    """The payload kept under a name; None when it is missing, damaged, foreign or of another format."""
    root = _ready(create=False)
    if root is None:
        return None
    path = root / f"{name}.obj"
    try:
        if not _ours(path):
            say_once(f"{path} belongs to somebody else or others may write to it")
            return None
        blob = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    head = len(MAGIC) + 64
    if (
        blob[: len(MAGIC)] != MAGIC
        or blob[len(MAGIC) : head] != bytes.fromhex(name) + blob[head - 32 : head]
    ):
        return None
    payload = blob[head:]
    return payload if hashlib.sha256(payload).digest() == blob[head - 32 : head] else None


def write(name: str, payload: bytes) -> None:
    """Keep a payload; a full or read-only disk costs speed only."""
    root = _ready(create=True)
    if root is None:
        return
    temp = ""
    try:
        fd, temp = tempfile.mkstemp(dir=root, prefix=".tmp-")
        with os.fdopen(fd, "wb") as f:
            f.write(MAGIC + bytes.fromhex(name) + hashlib.sha256(payload).digest() + payload)
        os.replace(temp, root / f"{name}.obj")
    except OSError as e:
        say_once(f"{root}: {e.strerror or e}")
        if temp and os.path.exists(temp):
            os.unlink(temp)
        return
    _trim(root)


_writes = 0


def _trim(root: Path) -> None:
    """Every 64 writes: remove the longest unused files past the bounds."""
    global _writes
    _writes += 1
    if _writes % 64 != 1:
        return
    entries = []
    for path in root.glob("*.obj"):
        try:
            info = path.stat()
        except OSError:
            continue
        entries.append((info.st_mtime, info.st_size, path))
    entries.sort()
    size = sum(e[1] for e in entries)
    while entries and (size > MAX_BYTES or len(entries) > MAX_FILES):
        _, nbytes, path = entries.pop(0)
        size -= nbytes
        path.unlink(missing_ok=True)
