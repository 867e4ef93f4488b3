"""Settings shared by all tests."""

import os
from pathlib import Path

import hypothesis

# Compiling is most of the suite's time: kernels are kept between runs, in this checkout.
os.environ.setdefault(
    "ADAPTIVE_EAGER_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "kernels")
)

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=int(os.environ.get("AE_EXAMPLES", "60")),
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("default")
