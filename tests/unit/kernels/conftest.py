"""Kernel tests run on torch's OpenMP pool where there is one, as launches do."""

from pathlib import Path

import pytest
import torch
from adaptive_eager.kernels import pool


@pytest.fixture(autouse=True, scope="session")
def openmp():
    """Threads for launches that ask for them."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pool.use_gomp(str(path))
