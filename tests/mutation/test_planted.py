"""The generated programs find planted bugs: a suite that could not fail would pass here as well."""

import os
import subprocess
import sys

import pytest

from .planted import PLANTS


@pytest.mark.parametrize("name", PLANTS)
def test_planted(name, tmp_path):
    """Each in a process and a cache of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mutation.planted", name],
        env=os.environ | {"ADAPTIVE_EAGER_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
