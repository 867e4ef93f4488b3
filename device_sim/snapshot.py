"""The allocator's state and history in the form that PyTorch's memory visualiser reads.

`pickle.dump(snapshot(hbm), file)` opens at pytorch.org/memory_viz and in `torch.cuda._memory_viz`.
"""

from __future__ import annotations

from typing import Any

from adaptive_eager.device_sim.blocks import Site
from adaptive_eager.device_sim.hbm import HBM


def frames(site: Site | None) -> list[dict[str, Any]]:
    """A site as a stack of one frame; ops are named as functions."""
    if site is None:
        return []
    op, where = site
    path, _, line = where.rpartition(":")
    number = line.split(" ")[0]  # "12 (backward)"
    known = number.isdigit()
    return [
        {
            "name": op,
            "filename": path if known else where,
            "line": int(number) if known else 0,
        }
    ]


def snapshot(hbm: HBM, device: int = 0) -> dict[str, Any]:
    """Segments with their blocks, and the history as a trace. Addresses are absolute, sizes bytes."""
    segments = []
    for segment in hbm.layout():
        blocks: list[dict[str, Any]] = []
        sums = {"active": 0, "allocated": 0, "asked": 0}
        for b in segment.blocks:
            if b.live is None:
                state = "inactive"
            else:
                state = "active_pending_free" if b.live.waits else "active_allocated"
                sums["allocated"] += b.size
                sums["asked"] += b.live.asked
                sums["active"] += 0 if b.live.waits else b.size
            blocks.append({
                "address": hbm.base + b.offset,
                "size": b.size,
                "requested_size": b.live.asked if b.live else 0,
                "state": state,
                "frames": frames(b.live.site if b.live else None),
            })  # fmt: skip
        segments.append({
            "device": device,
            "address": hbm.base + segment.start,
            "total_size": segment.size,
            "allocated_size": sums["allocated"],
            "active_size": sums["active"],
            "requested_size": sums["asked"],
            "stream": segment.stream,
            "segment_type": segment.kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        })  # fmt: skip
    trace = [
        {
            "action": e.action,
            ("device_free" if e.action == "oom" else "addr"): e.address,
            "size": e.size,
            "stream": e.stream,
            "time_us": e.time_us,
            "frames": frames(e.site),
        }
        for e in hbm.history()
    ]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device)]
    return {
        "segments": segments,
        "device_traces": [*traces, trace],
        "allocator_settings": {"max_split_size": hbm.max_split_bytes or -1},
    }
