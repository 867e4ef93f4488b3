"""Reductions and row ops: sums, means, norms, softmax, cross entropy, and their backwards.

An op here is traced over rows: elem values, row reductions of them, and what follows. Which dims are reduced decides the
form: the last ones ("row"), all but the last ("col"), everything ("all"). Other patterns go to the library.

Note [Sums]
Sums of floats accumulate in f64 in a fixed order and are rounded once. Means divide in f64 before that rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adaptive_eager import lower
from adaptive_eager.kernels.build import (
    Builder,
    Val,
    column_totals,
    fn,
    row_max,
    row_min,
    row_sum,
    total,
    where,
)
from adaptive_eager.lower import Body, IndexMap
from adaptive_eager.meta import Meta
from adaptive_eager.ops.pointwise import value_dtype
from adaptive_eager.tape import Recipe, S, T

aten = torch.ops.aten
Lowering = Callable[[Recipe, tuple[torch.Tensor, ...]], Body | None]


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Enter a lowering into the table under overload names of aten."""

    def enter(f: Lowering) -> Lowering:
        for name in names:
            packet, overload = name.split(".")
            op = getattr(getattr(aten, packet, None), overload, None)
            if op is not None:
                lower.KEEP.append(op)
                lower.NATIVE[id(op)] = f
        return f

    return enter


# -- iteration spaces -------------------------------------------------------------------------


class Rows:
    """The space of ops over rows: a shape whose last `k` dims are one row.

    dims: outer sizes other than 1, then the columns. `elem` and `row` lay operands over it and return None where strides
    forbid it.
    """

    def __init__(self, shape: Sequence[int], k: int) -> None:
        self.shape = tuple(shape)
        self.k = k
        self.cut = len(self.shape) - k
        self.outer = [d for d in range(self.cut) if self.shape[d] != 1]
        self.cols = math.prod(self.shape[self.cut :])
        self.dims = (*[self.shape[d] for d in self.outer], self.cols)
        self.rows = math.prod(self.shape[: self.cut])

    def elem(self, m: Meta) -> IndexMap | None:
        """An operand with a value at each point, broadcast where its dims are 1 or missing."""
        pad = len(self.shape) - len(m.shape)
        stride = [
            0 if d < pad or m.shape[d - pad] == 1 else m.stride[d - pad]
            for d in range(len(self.shape))
        ]
        inner = [
            (self.shape[d], stride[d])
            for d in range(self.cut, len(self.shape))
            if self.shape[d] != 1
        ]
        step = inner[-1][1] if inner else 1
        run = step
        for size, s in reversed(inner):
            if s != run:
                return None
            run = s * size
        strides = (*[stride[d] for d in self.outer], step)
        return IndexMap("e", m.offset, strides)

    def row(self, m: Meta) -> IndexMap:
        """An operand with one value for each row, its reduced dims kept as 1 or dropped."""
        return IndexMap("r", m.offset, (*[m.stride[d] for d in self.outer], 0))


def reduced_dims(ndim: int, dims: Any) -> list[int]:
    """Dims as non-negative ints; None and [] mean all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    return sorted({d % max(ndim, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])})


def pattern(shape: Sequence[int], dims: Sequence[int]) -> tuple[str, int] | None:
    """("row", k trailing dims), ("col", k trailing dims kept), ("all", 0), or None: how a reduction lies in memory."""
    n = len(shape)
    reduced = {d for d in dims if shape[d] != 1}
    kept = {d for d in range(n) if d not in dims and shape[d] != 1}
    if not kept:
        return ("all", 0)
    if not reduced:
        return None
    if min(reduced) > max(kept):
        return ("row", n - min(reduced))
    if max(reduced) < min(kept):
        return ("col", n - min(kept))
    return None


def reduction(
    r: Recipe,
    dims: Any,
    combine: Callable[[Builder, Val, Val], Val],
    kind: str,
    out: Meta,
    pre: Callable[[Val], Val],
    dtype: str,
) -> Body | None:
    """A single reduction of operand 0. combine(builder, reduced, count as f64) gives the result from the reduced value."""
    m = r.ins[0]
    if m.tname is None or out.tname is None or len(m.shape) == 0:
        return None
    found = pattern(m.shape, reduced_dims(len(m.shape), dims))
    if found is None:
        return None
    form, k = found
    reduce = {"sum": row_sum, "max": row_max, "min": row_min}[kind]
    if form == "all":
        if kind != "sum" or not m.contiguous:
            return None
        n = m.numel
        ins = (IndexMap("e", m.offset, (1,)),)

        def build_all(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
            assert v[0] is not None
            return [
                combine(b, total(row_sum(pre(v[0].to(dtype)))), s[-1].to("f64")).to(out.tname or "")
            ]

        return Body("all", (n,), ins, ((0, IndexMap("f", out.offset, (0,))),), build_all, (n,))
    space = Rows(m.shape, k)
    x = space.elem(m)
    if x is None:
        return None
    if form == "row":

        def build_row(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
            assert v[0] is not None
            return [combine(b, reduce(pre(v[0].to(dtype))), s[-1].to("f64")).to(out.tname or "")]

        return Body(
            "row", space.dims, (x,), ((0, _row_out(space, m, out)),), build_row, (space.cols,)
        )
    if kind != "sum" or space.rows == 1:
        return None

    def build_col(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        return [combine(b, column_totals(pre(v[0].to(dtype))), s[-1].to("f64")).to(out.tname or "")]

    target = IndexMap("c", out.offset, (*[0] * (len(space.dims) - 1), 1))
    return Body("col", space.dims, (x,), ((0, target),), build_col, (space.rows,))


def _row_out(space: Rows, m: Meta, out: Meta) -> IndexMap:
    """The map of a reduction's result, with or without its reduced dims."""
    if len(out.shape) == len(m.shape):
        return space.row(out)
    kept = [d for d in range(len(m.shape)) if d < space.cut]
    strides = dict(zip(kept, out.stride, strict=False))
    return IndexMap("r", out.offset, (*[strides[d] for d in space.outer], 0))


def argument(r: Recipe, k: int, name: str, default: Any = None) -> Any:
    """The k-th positional argument of a recipe, or a keyword, or its default."""
    return r.args[k] if k < len(r.args) else r.kwargs.get(name, default)


# -- sums, means, extrema ---------------------------------------------------------------------


@lowers("sum.dim_IntList", "sum.default", "mean.dim", "mean.default")
def sums(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """sum and mean over dims."""
    plain = str(r.func).endswith(".default")
    dims = None if plain else argument(r, 1, "dim")
    out = r.outs[0]
    mean = r.name == "mean"
    if out.tname is None or (mean and not out.dtype.is_floating_point):
        return None
    cd = value_dtype(out.dtype)
    assert cd is not None
    if cd not in ("f32", "f64", "i64"):
        return None
    if mean:
        return reduction(r, dims, lambda b, s, n: s / n, "sum", out, lambda x: x, cd)
    return reduction(r, dims, lambda b, s, n: s, "sum", out, lambda x: x, cd)


@lowers("amax.default", "amin.default", "max.default", "min.default")
def extrema(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """amax and amin over trailing dims."""
    cd = value_dtype(r.ins[0].dtype)
    if cd is None or cd == "bool":
        return None
    kind = "max" if "max" in r.name else "min"
    return reduction(r, argument(r, 1, "dim"), lambda b, s, n: s, kind, r.outs[0], lambda x: x, cd)


lower.LITERAL_NUMBERS.add(id(aten.linalg_vector_norm.default))  # the order is part of the op


@lowers("linalg_vector_norm.default")
def vector_norm(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """The 2-norm: sqrt of the sum of squares, in f64 until the end."""
    p = argument(r, 1, "ord", 2)
    if isinstance(p, S) or p != 2 or argument(r, 4, "dtype") is not None:
        return None
    cd = value_dtype(r.ins[0].dtype)
    if cd not in ("f32", "f64"):
        return None
    return reduction(
        r,
        argument(r, 2, "dim"),
        lambda b, s, n: fn("sqrt", s),
        "sum",
        r.outs[0],
        lambda x: x.to("f64") * x.to("f64"),
        cd,
    )


@lowers("var.correction")
def variance(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Variance over trailing dims in two passes."""
    m, out = r.ins[0], r.outs[0]
    correction = argument(r, 3, "correction")
    if (
        correction is not None
        and not isinstance(correction, (int, float))
        or value_dtype(m.dtype) not in ("f32", "f64")
        or not m.shape
    ):
        return None
    found = pattern(m.shape, reduced_dims(len(m.shape), argument(r, 1, "dim")))
    if found is None or found[0] != "row":
        return None
    space = Rows(m.shape, found[1])
    x = space.elem(m)
    cd = value_dtype(m.dtype)
    if x is None or cd is None:
        return None
    lost = 1.0 if correction is None else float(correction)
    if space.cols <= lost:
        return None

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        e = v[0].to("f64")
        n = s[-1].to("f64")
        d = e - row_sum(e) / n
        return [(row_sum(d * d) / (n - lost)).to(out.tname or "")]

    return Body("row", space.dims, (x,), ((0, _row_out(space, m, out)),), build, (space.cols,))


# -- softmax ----------------------------------------------------------------------------------


def _last_dim(m: Meta, dim: Any) -> Rows | None:
    """The space of rows along `dim` where nothing but size-1 dims follows it."""
    if not isinstance(dim, int) or not m.shape or m.tname not in ("f32", "f64", "bf16", "f16"):
        return None
    d = dim % len(m.shape)
    if any(n != 1 for n in m.shape[d + 1 :]):
        return None
    return Rows(m.shape, len(m.shape) - d)


def _elementwise(
    r: Recipe, space: Rows | None, build: Any, sizes: tuple[int, ...] = ()
) -> Body | None:
    """A row op whose operands and single result all have a value at each point."""
    if space is None or r.outs[0].tname is None:
        return None
    ins = [space.elem(m) for m in r.ins]
    out = space.elem(r.outs[0])
    if out is None or any(i is None for i in ins):
        return None
    return Body("row", space.dims, tuple(ins), ((0, out),), build, sizes)


def exps(x: Val) -> tuple[Val, Val, Val]:
    """(x - max, its exp, the row's sum of exps in f64); a row of -inf gives NaN."""
    shifted = x - row_max(x)
    e = fn("exp", shifted)
    return shifted, e, row_sum(e)


@lowers("_softmax.default", "_safe_softmax.default")
def softmax(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Softmax over the last dim; the safe one gives 0 for rows of -inf."""
    space = _last_dim(r.ins[0], argument(r, 1, "dim"))
    cd = value_dtype(r.ins[0].dtype)
    safe = r.name == "_safe_softmax"
    if not safe and argument(r, 2, "half_to_float"):
        return None

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        assert cd is not None
        x = v[0].to(cd)
        _, e, z = exps(x)
        y = e * (1.0 / z).to(cd)  # one division a row: within 1 ULP of the quotient
        if safe:
            y = where(row_max(x).eq(-math.inf), 0, y)
        return [y.to(r.outs[0].tname or "")]

    return _elementwise(r, space, build)


@lowers("_log_softmax.default")
def log_softmax(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Log-softmax over the last dim: (x - max) - log(sum(exp))."""
    space = _last_dim(r.ins[0], argument(r, 1, "dim"))
    cd = value_dtype(r.ins[0].dtype)
    if argument(r, 2, "half_to_float"):
        return None

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        assert cd is not None
        shifted, _, z = exps(v[0].to(cd))
        return [(shifted - fn("log", z.to(cd))).to(r.outs[0].tname or "")]

    return _elementwise(r, space, build)


@lowers("_softmax_backward_data.default")
def softmax_backward(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """y * (g - sum(g * y))."""
    space = _last_dim(r.ins[0], argument(r, 2, "dim"))
    cd = value_dtype(r.ins[0].dtype)

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        assert v[1] is not None
        assert cd is not None
        g, y = v[0].to(cd), v[1].to(cd)
        return [(y * (g - row_sum(g * y).to(cd))).to(r.outs[0].tname or "")]

    return _elementwise(r, space, build)


@lowers("_log_softmax_backward_data.default")
def log_softmax_backward(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """g - exp(y) * sum(g)."""
    space = _last_dim(r.ins[0], argument(r, 2, "dim"))
    cd = value_dtype(r.ins[0].dtype)

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        assert v[1] is not None
        assert cd is not None
        g, y = v[0].to(cd), v[1].to(cd)
        return [(g - fn("exp", y) * row_sum(g).to(cd)).to(r.outs[0].tname or "")]

    return _elementwise(r, space, build)


# -- layer norm -------------------------------------------------------------------------------


def _affine(r: Recipe, space: Rows, k: int, name: str) -> tuple[int, IndexMap] | None:
    """(operand, map) of an optional weight or bias."""
    a = argument(r, k, name)
    if not isinstance(a, T):
        return None
    laid = space.elem(r.ins[a.i])
    return None if laid is None else (a.i, laid)


@lowers("native_layer_norm.default")
def layer_norm(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """(x - mean) * rstd * weight + bias, with mean and rstd as further results."""
    m, shape = r.ins[0], argument(r, 1, "normalized_shape")
    eps = argument(r, 4, "eps")
    if m.tname not in ("f32", "f64", "bf16", "f16") or len({i.dtype for i in r.ins}) > 1:
        return None
    space = Rows(m.shape, len(shape))
    x, y = space.elem(m), space.elem(r.outs[0])
    weight, bias = _affine(r, space, 2, "weight"), _affine(r, space, 3, "bias")
    have = sum(isinstance(argument(r, k, n), T) for k, n in ((2, "weight"), (3, "bias")))
    if x is None or y is None or have != (weight is not None) + (bias is not None):
        return None
    ins: list[IndexMap | None] = [x] + [None] * (len(r.ins) - 1)
    for laid in (weight, bias):
        if laid is not None:
            ins[laid[0]] = laid[1]
    cd = value_dtype(m.dtype)
    stat = r.outs[1].tname
    assert cd is not None
    assert stat is not None

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        e = v[0].to(cd)
        n = s[-1].to("f64")
        mean = (row_sum(e) / n).to(cd)
        d = e - mean
        rstd = (1 / fn("sqrt", row_sum(d * d) / n + s[eps.i])).to(cd)
        out = d * rstd
        if weight is not None:
            w = v[weight[0]]
            assert w is not None
            out = out * w.to(cd)
        if bias is not None:
            c = v[bias[0]]
            assert c is not None
            out = out + c.to(cd)
        return [out.to(m.tname or ""), mean.to(stat), rstd.to(stat)]

    stores = ((0, y), (1, space.row(r.outs[1])), (2, space.row(r.outs[2])))
    return Body("row", space.dims, tuple(ins), stores, build, (space.cols,))


@lowers("native_layer_norm_backward.default")
def layer_norm_backward(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Gradients of x (row sums), weight and bias (column sums), in one pass over rows."""
    g_, x_, shape, mean_, rstd_, weight_, _bias, mask = (argument(r, k, "") for k in range(8))
    m = r.ins[x_.i]
    if m.tname not in ("f32", "f64") or len({i.dtype for i in r.ins}) > 1 or len(shape) != 1:
        return None
    space = Rows(m.shape, len(shape))
    if space.rows < 2 and (mask[1] or mask[2]):
        return None
    ins: list[IndexMap | None] = [None] * len(r.ins)
    for a in (g_, x_):
        ins[a.i] = space.elem(r.ins[a.i])
    for a in (mean_, rstd_):
        ins[a.i] = space.row(r.ins[a.i])
    has_weight = isinstance(weight_, T)
    if has_weight:
        ins[weight_.i] = space.elem(r.ins[weight_.i])
    used = [g_.i, x_.i, *([weight_.i] if has_weight else [])]
    if any(ins[i] is None for i in used):
        return None
    cd = value_dtype(m.dtype)
    assert cd is not None
    stores: list[tuple[int, IndexMap]] = []
    column = (*[0] * (len(space.dims) - 1), 1)
    for k in range(3):
        n = r.returns[k]
        if n is None:
            continue
        laid = space.elem(r.outs[n]) if k == 0 else IndexMap("c", r.outs[n].offset, column)
        if laid is None:
            return None
        stores.append((n, laid))

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        g, x, mean, rstd = (v[a.i] for a in (g_, x_, mean_, rstd_))
        assert g is not None
        assert x is not None
        assert mean is not None
        assert rstd is not None
        n = s[-1].to("f64")
        xhat = (x - mean) * rstd
        out: list[Val] = []
        if r.returns[0] is not None:
            w = v[weight_.i] if has_weight else None
            gw = g if w is None else g * w
            mean_g = (row_sum(gw) / n).to(cd)
            mean_gx = (row_sum(gw * xhat) / n).to(cd)
            out.append((gw - mean_g - xhat * mean_gx) * rstd)
        if r.returns[1] is not None:
            out.append(column_totals(g * xhat).to(cd))
        if r.returns[2] is not None:
            out.append(column_totals(g).to(cd))
        return out

    return Body("row", space.dims, tuple(ins), tuple(stores), build, (space.cols,))


@lowers("_fused_rms_norm.default")
def rms_norm(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """x * rsqrt(mean(x²) + eps) * weight, with rstd as a further result."""
    m, shape, eps = r.ins[0], argument(r, 1, "normalized_shape"), argument(r, 3, "eps")
    if m.tname not in ("f32", "f64") or len({i.dtype for i in r.ins}) > 1:
        return None
    space = Rows(m.shape, len(shape))
    x, y = space.elem(m), space.elem(r.outs[0])
    weight = _affine(r, space, 2, "weight")
    if x is None or y is None or isinstance(argument(r, 2, "weight"), T) != (weight is not None):
        return None
    ins: list[IndexMap | None] = [x] if weight is None else [x, weight[1]]
    cd = value_dtype(m.dtype)
    assert cd is not None
    least = torch.finfo(m.dtype).eps

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        e = v[0]
        assert e is not None
        more = s[eps.i] if isinstance(eps, S) else b.const(least, "f64")
        rstd = (1 / fn("sqrt", row_sum(e * e) / s[-1].to("f64") + more)).to(cd)
        out = e * rstd
        if weight is not None:
            w = v[weight[0]]
            assert w is not None
            out = out * w
        return [out, rstd]

    return Body(
        "row", space.dims, tuple(ins), ((0, y), (1, space.row(r.outs[1]))), build, (space.cols,)
    )


# -- cross entropy ----------------------------------------------------------------------------


def _nll_space(r: Recipe, logp: T, target: T) -> tuple[Rows, IndexMap] | None:
    m, t = r.ins[logp.i], r.ins[target.i]
    if len(m.shape) != 2 or len(t.shape) != 1 or m.tname not in ("f32", "f64") or t.tname != "i64":
        return None
    space = Rows(m.shape, 1)
    return space, IndexMap("r", t.offset, (*[t.stride[0]] * len(space.outer), 0))


@lowers("nll_loss_forward.default")
def nll_loss(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Mean or sum of -logp[row, target[row]]: a row sum that only the target's column enters, then a total over rows.

    The second result is the number of targets that count. Targets outside the classes are counted too, and make the
    launch raise: a row sum would silently leave them out.
    """
    logp, target, weight, how, ignore = (argument(r, k, "") for k in range(5))
    if weight is not None or how == 0 or not isinstance(ignore, int):
        return None
    laid = _nll_space(r, logp, target)
    if laid is None:
        return None
    space, rows = laid
    x = space.elem(r.ins[logp.i])
    if x is None:
        return None
    out = r.outs[0]
    single = (0,) * len(space.dims)

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        p, t = v[logp.i], v[target.i]
        assert p is not None
        assert t is not None
        counts = t.ne(ignore)
        picked = row_sum(where(b.iota("inner").eq(t), p, 0.0))
        loss = total(where(counts, -picked, 0.0))
        count = total(counts).to("f64")
        wrong = total(counts & ((t < 0) | (t >= s[-1])))
        return [
            (loss / count if how == 1 else loss).to(out.tname or ""),
            count.to(out.tname or ""),
            wrong,
        ]

    stores = ((0, IndexMap("f", out.offset, single)), (1, IndexMap("f", r.outs[1].offset, single)))
    classes = space.cols

    def out_of_bounds(targets: torch.Tensor) -> BaseException:
        wrong = targets[((targets < 0) | (targets >= classes)) & (targets != ignore)]
        return IndexError(f"Target {int(wrong.flatten()[0])} is out of bounds.")

    return Body("row", space.dims, (x, rows), stores, build, (classes,), (target.i, out_of_bounds))


@lowers("nll_loss_backward.default")
def nll_loss_backward(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """-g / count in each row's target column, 0 elsewhere: pointwise, by comparing the column's index."""
    g, logp, target, weight, how, ignore, count = (argument(r, k, "") for k in range(7))
    if weight is not None or how == 0 or not isinstance(ignore, int) or r.ins[g.i].numel != 1:
        return None
    laid = _nll_space(r, logp, target)
    if laid is None:
        return None
    space, rows = laid
    out = space.elem(r.outs[0])
    if out is None:
        return None
    single = (0,) * len(space.dims)
    ins: list[IndexMap | None] = [None] * len(r.ins)
    ins[target.i] = rows
    ins[g.i] = IndexMap("e", r.ins[g.i].offset, single)
    ins[count.i] = IndexMap("e", r.ins[count.i].offset, single)

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        t, grad, n = v[target.i], v[g.i], v[count.i]
        assert t is not None
        assert grad is not None
        assert n is not None
        each = -grad / n if how == 1 else -grad
        return [where(b.iota("inner").eq(t) & t.ne(ignore), each, 0.0)]

    return Body("row", space.dims, tuple(ins), ((0, out),), build)
