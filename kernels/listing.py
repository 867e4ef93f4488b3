"""A kernel's loop nest as text a person can read: what code generation emits, without the machine."""

from __future__ import annotations

from adaptive_eager.kernels.ir import Inst, Kernel
from adaptive_eager.kernels.schedule import Loop, Schedule

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
          "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}  # fmt: skip


def _expr(i: Inst) -> str:
    args = [f"v{a}" for a in i.args]
    if i.op in _INFIX:
        return f"{args[0]} {_INFIX[i.op]} {args[1]}"
    match i.op:
        case "const":
            return f"{i.attr!r}"
        case "scalar":
            return f"scalar{i.attr}"
        case "iota":
            return "col" if i.attr == "inner" else f"index{i.attr}"
        case "cast":
            return f"{i.dtype}({args[0]})"
        case "round":
            return f"round_{i.attr}({args[0]})"
        case "select":
            return f"{args[1]} if {args[0]} else {args[2]}"
    return f"{i.op}({', '.join(args)})"


def _load(kernel: Kernel, i: Inst) -> str:
    assert isinstance(i.attr, int)
    inner = kernel.operands[i.attr].inner
    return f"p{i.attr}[row]" if inner == "zero" else f"p{i.attr}[row, col]"


def listing(kernel: Kernel, s: Schedule) -> str:
    """The loops, stages, loads and stores of a kernel; v<n> is instruction n of its loop IR."""
    insts = kernel.insts
    params = [
        f"p{n}: {o.dtype}{'' if o.inner == 'unit' else ' (' + o.inner + ')'}"
        for n, o in enumerate(kernel.operands)
    ]
    params += [f"scalar{n}: {t}" for n, t in enumerate(kernel.scalars)]
    out = [f"def kernel({', '.join(params)}):"]

    def put(depth: int, text: str) -> None:
        out.append("    " * depth + text)

    for n in s.uniform:
        put(1, f"v{n} = {_expr(insts[n])}")
    put(
        1,
        f"for row in rows:  # {kernel.outer} outer dim{'s' if kernel.outer > 1 else ''}, in tasks shared by threads",
    )
    for depth, loop in enumerate(s.loops):
        for n in s.row[depth]:
            i = insts[n]
            if i.op not in ("sum", "rmax", "rmin", "prod"):
                put(2, f"v{n} = {_load(kernel, i) if i.op == 'load' else _expr(i)}")
        if not loop.empty():
            _loop(kernel, loop, put)
    for n in s.row_totals:
        put(2, f"v{n} += v{insts[n].args[0]}")
    for n in s.row_stores:
        put(2, f"p{insts[n].attr}[row] = v{insts[n].args[0]}")
    if s.totals:
        put(
            1,
            f"# once all rows are done, over tasks in order: {', '.join(f'v{n}' for n in s.totals)}",
        )
        for n in (*s.single, *s.column):
            i = insts[n]
            where = "[col]" if n in s.column else "[0]"
            if i.op == "store":
                put(1, f"p{i.attr}{where} = v{i.args[0]}")
            else:
                put(1, f"v{n} = {f'p{i.attr}{where}' if i.op == 'fload' else _expr(i)}")
    if len(out) == 1:
        put(1, "pass")
    return "\n".join(out)


def _loop(kernel: Kernel, loop: Loop, put: object) -> None:
    assert callable(put)
    insts = kernel.insts
    put(2, "for col in columns:  # 32 lanes a block, the last one masked")
    for n in loop.needs:
        i = insts[n]
        text = (
            f"tile{n}[col]"
            if n in loop.from_tile
            else _load(kernel, i)
            if i.op == "load"
            else _expr(i)
        )
        put(3, f"v{n} = {text}")
        if n in loop.to_tile:
            put(3, f"tile{n}[col] = v{n}")
    for n in loop.reduces:
        put(3, f"v{n} = {insts[n].op} over columns of v{insts[n].args[0]}")
    for n in loop.totals:
        put(3, f"v{n}[col] += v{insts[n].args[0]}")
    for n in loop.stores:
        put(3, f"p{insts[n].attr}[row, col] = v{insts[n].args[0]}")
