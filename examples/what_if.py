"""What a Trainium would do with a few lines of eager code, and what other chips would.

python examples/what_if.py
"""

import torch
import torch.nn.functional as F

from adaptive_eager import TRN2, neuron_eager


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A residual block on rows of 8192 elements."""
    y = F.layer_norm(x, x.shape[-1:])
    z = F.silu(y + x) * F.gelu(y)
    return x + F.softmax(z * w, -1)


runs = {}
for mode in ("eager", "adaptive"):
    torch.manual_seed(0)
    with neuron_eager(mode) as session:
        x, w = torch.randn(2048, 8192), torch.ones(8192)
        for _ in range(3):
            x = block(x, w)
        print(f"{mode}: mean {x.mean().item():.6f}")
    runs[mode] = session

print(f"\nOne kernel an op\n{runs['eager'].simulated}")
print(f"\nFused\n{runs['adaptive'].simulated}")

print("\nThe same run on other chips, without running it again")
less = TRN2.replace(name="TRN2, a quarter of the SBUF", sbuf_bytes=TRN2.sbuf_bytes // 4)
slow = TRN2.replace(name="TRN2, HBM at half speed", hbm_bytes_per_ns=TRN2.hbm_bytes_per_ns / 2)
for chip in (TRN2, "TRN2-LNC1", "TRN3", less, slow):
    t = runs["adaptive"].retime(chip)
    moved = (t.hbm_read + t.hbm_written) / 1e6
    print(
        f"  {t.spec.name:28}{t.ns / 1e3:10,.0f} µs{t.launches:5} launches{moved:10,.0f} MB of HBM"
    )

print("\nWhere the time goes")
spans = sorted(runs["adaptive"].timeline(), key=lambda s: -s.ns)[:4]
for span in spans:
    ops = [op.removeprefix("aten.") for op, _ in span.item.ops]
    where = span.item.ops[-1][1].rpartition("/")[2]
    print(f"  {span.ns / 1e3:8,.0f} µs  {span.item.kind:8} {where:16} {', '.join(ops[:7])} ...")
