"""What torch has to be told about neuron tensors, since no hook exists for it. Each patch has its reason, and a test that
says when it is no longer needed (tests/upstream).
"""

from __future__ import annotations

from adaptive_eager.tensor import NeuronTensor


def install() -> None:
    """Apply all. Idempotent."""
    _foreach()


def _foreach() -> None:
    """Optimizers and gradient clipping take their list-at-a-time form only for parameters of exactly torch's own types,
    though the device is on their list. For neuron tensors it saves most of an optimizer step's recording."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        known = getattr(module, "_foreach_supported_types", None)
        if isinstance(known, list) and NeuronTensor not in known:
            known.append(NeuronTensor)
