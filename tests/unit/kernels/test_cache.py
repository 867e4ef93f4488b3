"""The disk cache: shared, bounded, and never trusted when anything is unexpected."""

import os
import subprocess
import sys
import warnings

import pytest
from adaptive_eager.kernels import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTIVE_EAGER_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_said", set())
    return tmp_path / "kernels"


def test_what_is_written_is_read_back(folder):
    """A payload comes back under its name, and only under that name."""
    a, b = cache.key("a", "cpu"), cache.key("b", "cpu")
    cache.write(a, b"code")
    assert cache.read(a) == b"code"
    assert cache.read(b) is None
    assert (folder.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("damage", ["truncate", "flip", "magic", "empty", "other key"])
def test_damaged_files_are_ignored(folder, damage):
    """A file that is cut, changed, of another format or of another kernel is no cache hit."""
    name = cache.key("kernel", "cpu")
    cache.write(name, b"code" * 100)
    path = folder / f"{name}.obj"
    blob = path.read_bytes()
    bad = {
        "truncate": blob[:-1], "flip": blob[:-1] + bytes([blob[-1] ^ 1]), "magic": b"XXXX0000" + blob[8:], "empty": b"",
        "other key": blob[:8] + bytes(32) + blob[40:],
    }[damage]  # fmt: skip
    path.write_bytes(bad)
    assert cache.read(name) is None
    cache.write(name, b"new")
    assert cache.read(name) == b"new"


def test_a_folder_others_may_write_to_is_not_used(folder):
    """Machine code is run, so a group- or world-writable folder is refused, with one warning."""
    name = cache.key("kernel", "cpu")
    cache.write(name, b"code")
    folder.chmod(0o777)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert cache.read(name) is None
        assert cache.read(name) is None
    assert len(seen) == 1 and "others may write" in str(seen[0].message)


def test_a_place_that_cannot_be_written_costs_speed_only(tmp_path, monkeypatch):
    """Where the folder can't be made, writing warns once and reading finds nothing."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("ADAPTIVE_EAGER_CACHE_DIR", str(blocker / "kernels"))
    monkeypatch.setattr(cache, "_said", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        cache.write(cache.key("kernel", "cpu"), b"code")
        cache.write(cache.key("kernel", "cpu"), b"code")
    assert len(seen) == 1
    assert cache.read(cache.key("kernel", "cpu")) is None


def test_bounds(folder, monkeypatch):
    """Past its bounds the cache drops what was used longest ago."""
    monkeypatch.setattr(cache, "MAX_FILES", 5)
    names = [cache.key(str(k), "cpu") for k in range(12)]
    for k, name in enumerate(names):
        cache.write(name, b"code")
        os.utime(folder / f"{name}.obj", (k, k))
    cache._trim.__globals__["_writes"] = 0
    cache._trim(folder)
    left = {p.stem for p in folder.glob("*.obj")}
    assert left == set(names[-5:])


SCRIPT = """
import torch, sys
from adaptive_eager.kernels import launch
x = torch.ones(100, device="neuron")
y = ((x * 2 + 1).exp().sum()).item()
print(y.hex(), launch.stats.compiled, launch.stats.from_disk)
"""


def run(folder):
    env = {**os.environ, "ADAPTIVE_EAGER_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_share_kernels(folder):
    """Two processes at once both succeed; a later one compiles nothing and gets the same bits."""
    outs = [p.communicate(timeout=120)[0].split() for p in [run(folder), run(folder)]]
    third = run(folder).communicate(timeout=120)[0].split()
    assert {o[0] for o in [*outs, third]} == {third[0]}
    assert third[1] == "0" and int(third[2]) > 0
    assert not list(folder.glob(".tmp-*"))


def test_links_are_not_followed(folder, tmp_path):
    """A link under a kernel's name is no cache hit, whatever it points to."""
    name = cache.key("kernel", "cpu")
    cache.write(name, b"code")
    (folder / f"{name}.obj").rename(tmp_path / "elsewhere")
    (folder / f"{name}.obj").symlink_to(tmp_path / "elsewhere")
    assert cache.read(name) is None
    cache.write(name, b"new")
    assert cache.read(name) == b"new"


def test_a_read_only_folder_still_serves(folder, monkeypatch):
    """Reading needs no write access: the time stamp is a courtesy."""
    name = cache.key("kernel", "cpu")
    cache.write(name, b"code")

    def refuse(*_args, **_kwargs):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.read(name) == b"code"


def test_what_a_crash_left_is_swept(folder, monkeypatch):
    """Half-written files of dead processes go; one that may be in use stays."""
    monkeypatch.setattr(cache, "_writes", 0)
    folder.mkdir()
    folder.chmod(0o700)
    old, young = folder / f"{cache.TEMP}old", folder / f"{cache.TEMP}young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.write(cache.key("kernel", "cpu"), b"code")
    assert not old.exists() and young.exists()
