"""Settings shared by all tests.

Generated programs are the same in every run, so that a red CI can be repeated. `HYPOTHESIS_PROFILE=explore` looks for
new ones; `AE_EXAMPLES` sets how many.
"""

import os
from pathlib import Path

import hypothesis

# Compiling is most of the suite's time: kernels are kept between runs, in this checkout.
os.environ.setdefault(
    "ADAPTIVE_EAGER_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "kernels")
)

for name, examples, same in (("ci", 60, True), ("explore", 1000, False)):
    hypothesis.settings.register_profile(
        name,
        deadline=None,  # the first run of a kernel compiles it
        max_examples=int(os.environ.get("AE_EXAMPLES", examples)),
        derandomize=same,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
