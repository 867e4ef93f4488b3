"""Bugs to plant, and a search for each: `python -m tests.mutation.planted NAME` exits 0 when a generated program finds it.

The search is the conformance package's own: programs against the CPU and between modes, from a seed, without shrinking. `none` plants
nothing, and must not be found.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

PROGRAMS = 400
"""Of each of two kinds; a planted bug has to show within them."""


def alias_edge() -> None:
    """A read through a view no longer keeps a node out of a group that writes the slot through another."""
    from adaptive_eager import plan

    right = plan.fits

    def wrong(g, item):
        kept, g.writes = g.writes, {}
        try:
            return right(g, item)
        finally:
            g.writes = kept

    plan.fits = wrong


def in_place_order() -> None:
    """The first launch that writes a slot in place runs before the one that still reads its old contents."""
    from adaptive_eager import plan

    right = plan.grouped

    def wrong(nodes):
        groups = right(nodes)
        for k in range(len(groups) - 1):
            a, b = groups[k], groups[k + 1]
            ours = {s for i in b.items for s, _ in i.stores if s in i.node.ins}
            if ours & a.reads.keys() and not a.writes.keys() & b.touches():
                groups[k], groups[k + 1] = b, a
                break
        return groups

    plan.grouped = wrong
    for module in list(sys.modules.values()):
        if getattr(module, "grouped", None) is right:
            module.grouped = wrong


def bf16_rounding() -> None:
    """bfloat16 stores cut the lower bits off."""
    from adaptive_eager.kernels import lanes

    def wrong(self, x):
        return self.b.bitcast(x.v, self.like(x.v.type, lanes.I32))

    for c in vars(lanes).values():
        if isinstance(c, type) and "_rounded" in vars(c):
            c._rounded = wrong


def stale_key() -> None:
    """A call is known again by everything but the dtype it asks for."""
    from adaptive_eager.record import TAPE

    right = type(TAPE).call_key

    def wrong(self, *args):
        key = right(self, *args)
        return key and tuple(k for k in key if not isinstance(k, torch.dtype))

    type(TAPE).call_key = wrong


def none() -> None:
    """The control."""


PLANTS = {f.__name__: f for f in (alias_edge, in_place_order, bf16_rounding, stale_key, none)}


def search() -> str:
    """The first failure's text, or nothing."""
    from adaptive_eager.testing import assert_same_program, programs

    for exact in (True, False):

        @seed(7)
        @settings(
            max_examples=PROGRAMS,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(exact=exact))
        def run(program):
            assert_same_program(program, "neuron")

        try:
            run()
        except Exception as e:  # a planted bug may crash as well
            return f"{type(e).__name__}: {e}"
    return ""


def main() -> int:
    """0 if the bug that the first argument names was found; `none` found nothing."""
    warnings.simplefilter("ignore")
    name = sys.argv[1]
    PLANTS[name]()
    begin = time.monotonic()
    found = search()
    print(f"{name}: {'found' if found else 'nothing'} after {time.monotonic() - begin:.0f} s")
    print(found)
    return 0 if bool(found) != (name == "none") else 1


if __name__ == "__main__":
    sys.exit(main())
