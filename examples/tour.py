"""The README's tour."""

import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager

torch.manual_seed(0)
with neuron_eager() as session:
    x = torch.randn(512, 256)  # on `neuron`: the scope's default device
    weight, bias = torch.ones(256), torch.zeros(256)
    torch.neuron.synchronize()
    before = session.stats
    y = F.gelu(F.layer_norm(x, (256,), weight, bias)) + x
    print(
        "pending:", y.shape, y.dtype, "- launches so far:", session.stats.launches - before.launches
    )
    total = y.sum()
    print("value read:", f"{total:.3f}")

after = session.stats
print(
    "launches:",
    after.launches - before.launches,
    "- HBM bytes read:",
    after.hbm_read - before.hbm_read,
)
print(session.segments[1])
print(session.kernels[-2].source)
