"""The checks of a conformance run: what each op of PyTorch's database has to do on a device, as it does on the CPU.

A check takes an op and a sample on the CPU, runs both devices, and raises AssertionError with what differs, or `Left` with the reason
why the sample says nothing. They are slim equivalents of PyTorch's test/test_ops.py.
"""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from adaptive_eager.testing.exceptions import without_values

TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.complex64: 1e-4,
}
"""Relative and absolute; 1e-6 for the others."""


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
FACTORIES = ("arange", "linspace", "logspace", "empty_permuted")
"""Ops whose bad calls in the database name no device, though they take one."""


class Left(Exception):  # noqa: N818 - no error
    """A sample that says nothing. code: a status or a reason code."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class Trial:
    """An op with a sample on the CPU, for a device. grad: whether its inputs ask for gradients."""

    op: Any
    sample: Any
    device: torch.device
    grad: bool = False

    @property
    def _all(self) -> Any:
        return (self.sample.input, self.sample.args, self.sample.kwargs)

    def host(self) -> tuple[Any, ...]:
        """Fresh copies of the inputs on the CPU."""
        x, args, kwargs = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().clone().requires_grad_(self.grad and t.requires_grad),
            self._all,
        )
        if self.op.name in FACTORIES:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return x, args, kwargs

    def moved(self) -> tuple[Any, ...]:
        """The inputs on the device. Where they name a device, they name this one.

        Raises:
            Left: where nothing among them lies on a device.
        """
        leaves = tree_flatten(self._all)[0]
        named = "device" in self.sample.kwargs or self.op.name in FACTORIES
        if not named and not any(isinstance(t, torch.Tensor) for t in leaves):
            raise Left("upstream", "no tensor among the arguments")

        def move(t: torch.Tensor) -> torch.Tensor:
            y = t.detach()
            if t.layout in COMPRESSED:
                y = y.to_dense().to(self.device).to_sparse(layout=t.layout)
            else:
                y = y.to(self.device)
            return y.requires_grad_() if self.grad and t.requires_grad else y

        def named_device(v: Any) -> Any:
            return self.device if isinstance(v, (str, torch.device)) and self.op.name == "to" else v

        x, args, kwargs = tree_map(named_device, tree_map_only(torch.Tensor, move, self._all))
        if self.op.name == "tensor_split":  # PyTorch wants indices on the CPU
            args = self.sample.args
        if named:
            kwargs = {**kwargs, "device": self.device}
        return x, args, kwargs

    def call(self, f: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """f on inputs."""
        x, args, kwargs = given
        return f(x, *args, **kwargs)

    def expected(self, f: Callable[..., Any]) -> tuple[Any, tuple[Any, ...]]:
        """The CPU's result and its inputs.

        Raises:
            Left: where the CPU raises.
        """
        given = self.host()
        try:
            return self.call(f, given), given
        except Exception as e:
            raise Left("upstream", f"{type(e).__name__} on the CPU") from e

    @property
    def draws(self) -> str:
        """Why values are not compared with the CPU's, or nothing."""
        return without_values(self.op.name) or (
            "random"
            if self.sample.kwargs.get("dropout_p", 0) or self.sample.kwargs.get("p_dropout", 0)
            else ""
        )


def compare(trial: Trial, got: Any, want: Any, *, values: bool = True) -> None:
    """Structure, device, dtype, shape and values of results."""
    gs, ws = tree_flatten(got)[0], tree_flatten(want)[0]
    assert len(gs) == len(ws), f"{len(gs)} results, not {len(ws)}"
    for g, w in zip(gs, ws, strict=True):
        if isinstance(w, torch.Tensor):
            assert isinstance(g, torch.Tensor), f"{type(g).__name__}, not a tensor"
            assert g.device.type == trial.device.type, f"a result on {g.device}"
            assert g.dtype == w.dtype, f"{g.dtype}, not {w.dtype}"
            assert g.shape == w.shape, f"shape {tuple(g.shape)}, not {tuple(w.shape)}"
            if values:
                close(g.cpu(), w)
        elif isinstance(w, (int, float, complex)) and values:
            assert type(g) is type(w), f"{type(g).__name__}, not {type(w).__name__}"
            assert g == w or (g != g and w != w) or abs(g - w) < 1e-4, f"{g}, not {w}"  # noqa: PLR0124


def close(g: torch.Tensor, w: torch.Tensor) -> None:
    """Equal within the dtype's tolerance."""
    tolerance = TOLERANCES.get(w.dtype, 1e-6)
    torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)


def repeatable(t: Trial, f: Callable[..., Any], g: Callable[..., Any] | None = None) -> None:
    """After the same seed an op draws the same, whether it is called as f or as g."""
    if t.draws != "random":
        return
    results = []
    for h in (f, g or f):
        torch.manual_seed(7)
        results.append(tree_flatten(t.call(h, t.moved()))[0])
    for a, b in zip(*results, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def values(t: Trial) -> None:
    """The op's result is the CPU's; a random op's has the CPU's shape and dtype, and is the same after the same seed."""
    given = t.moved()
    want, _ = t.expected(t.op)
    compare(t, t.call(t.op, given), want, values=not t.draws)
    repeatable(t, t.op)


def gradients(t: Trial) -> None:
    """The gradients of all inputs are the CPU's."""
    t = Trial(t.op, t.sample, t.device, grad=True)
    given = t.moved()
    want, host = t.expected(t.op)
    got = t.call(t.op, given)
    results = [[x for x in tree_flatten(r)[0] if _differentiable(x)] for r in (want, got)]
    assert len(results[0]) == len(results[1]), "other results require gradients"
    if not results[0]:
        raise Left("upstream", "no result requires a gradient")
    out = []
    for r, inputs in zip(results, (host, given), strict=True):
        leaves = [x for x in tree_flatten(inputs)[0] if _differentiable(x)]
        total = [x.abs().sum() if x.is_complex() else x.float().sum() for x in r]
        try:
            out.append(torch.autograd.grad(total, leaves, allow_unused=True))
        except Exception as e:
            if inputs is given:
                raise
            raise Left("upstream", f"{type(e).__name__} in the CPU's backward") from e
    assert [g is None for g in out[0]] == [g is None for g in out[1]], "other gradients are None"
    got, want = ([g for g in side if g is not None] for side in (out[1], out[0]))
    compare(t, got, want, values=not t.draws)


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def inplace(t: Trial) -> None:
    """The in-place form writes what the CPU's does, returns its argument and counts a version."""
    f = t.op.inplace_variant
    given = t.moved()
    want, host = t.expected(f)  # fresh copies: their versions begin at 0
    x, y = (v[0][0] if isinstance(v[0], (list, tuple)) else v[0] for v in (given, host))
    before = x._version
    got = t.call(f, given)
    compare(t, got, want, values=not t.draws)
    if isinstance(want, torch.Tensor) and want is y:
        assert got is x, "the result is not the argument"
    counts = x._version > before
    assert counts == (y._version > 0), (
        "a version was counted" if counts else "no version was counted"
    )
    repeatable(t, f)


def variants(t: Trial) -> None:
    """The method gives what the function gives."""
    f = t.op.method_variant
    given = t.moved()
    want, _ = t.expected(f)
    compare(t, t.call(f, given), want, values=not t.draws)
    repeatable(t, f, t.op)


def noncontiguous(t: Trial) -> None:
    """Inputs with gaps between their elements give what they give on the CPU."""
    given = t.moved()

    def spread(x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided or x.numel() < 2 or x.dim() == 0:
            return x
        y = torch.zeros((*x.shape, 2), dtype=x.dtype, device=x.device)[..., 0]
        return y.copy_(x)

    host, mine = (tuple(tree_map_only(torch.Tensor, spread, v)) for v in (t.host(), given))
    try:
        want = t.call(t.op, host)
    except Exception as e:
        raise Left("upstream", f"{type(e).__name__} on the CPU") from e
    compare(t, t.call(t.op, mine), want, values=not t.draws)


def out(t: Trial) -> None:
    """out= is filled and returned, where it has the shape and where it has to be resized; a wrong dtype is refused as on the CPU."""
    given = t.moved()
    want, host = t.expected(t.op)
    many = isinstance(want, (tuple, list))
    wants = list(want) if many else [want]
    if not all(isinstance(w, torch.Tensor) for w in wants):
        raise Left("upstream", "a result is no tensor")

    def fresh(device: torch.device, kind: str) -> list[torch.Tensor]:
        made = []
        for w in wants:
            if kind == "right":
                y = torch.zeros(w.shape, dtype=w.dtype, device=device)
            elif kind == "strided":
                y = torch.zeros((*w.shape, 2), dtype=w.dtype, device=device)[..., 0]
            elif kind == "empty":
                y = torch.empty(0, dtype=w.dtype, device=device)
            else:
                y = torch.zeros(w.shape, dtype=torch.int64, device=device)
            made.append(y)
        return made

    def call(inputs: tuple[Any, ...], outs: list[torch.Tensor]) -> Any:
        x, args, kwargs = inputs
        return t.op(x, *args, **kwargs, out=tuple(outs) if many else outs[0])

    for kind in ("right", "strided", "empty", "dtype"):
        on_host, on_device = fresh(torch.device("cpu"), kind), fresh(t.device, kind)
        error = returned = None
        try:
            returned = call(host, on_host)
        except Exception as e:  # noqa: BLE001 - the device has to raise the same
            error = e
        if error is not None:
            if kind == "dtype":
                try:
                    call(given, on_device)
                except type(error):
                    continue
                raise AssertionError(f"no {type(error).__name__} for out= of a wrong dtype")
            raise Left("upstream", f"{type(error).__name__} on the CPU with out=")
        if (
            kind == "strided"
            and not t.draws
            and not all(
                torch.equal(y.nan_to_num(), w.nan_to_num())
                for y, w in zip(on_host, wants, strict=True)
            )
        ):
            continue  # a bug of the CPU's: its gelu writes nothing there
        result = call(given, on_device)
        if returned is None:
            assert result is None, f"{kind}: a result, where the CPU has none"
        else:
            results = list(result) if many else [result]
            same = all(r is y for r, y in zip(results, on_device, strict=True))
            assert same, f"{kind}: result is not out"
        for y, w in zip(on_device, on_host, strict=True):
            assert y.shape == w.shape, f"{kind}: shape {tuple(y.shape)}, not {tuple(w.shape)}"
            assert y.dtype == w.dtype, f"{kind}: {y.dtype}, not {w.dtype}"
            if not t.draws:
                close(y.cpu(), w)


def views(t: Trial) -> None:
    """Results are views of the input, or the input itself, where the CPU's are; writing to such a view writes to the input."""
    given = t.moved()
    want, host = t.expected(t.op)
    got = t.call(t.op, given)
    x, y = given[0], host[0]
    if not isinstance(x, torch.Tensor):
        raise Left("upstream", "no single input")
    for g, w in zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True):
        if isinstance(w, torch.Tensor):
            assert (g is x) == (w is y), "is the input" if g is x else "is not the input"
            assert g._is_view() == w._is_view(), "a view" if g._is_view() else "no view"
            base = w._base is y
            assert (g._base is x) == base, (
                "a view of the input" if not base else "no view of the input"
            )
            if base and w.numel() and not any(s == 0 for s in w.stride()):
                with torch.no_grad():
                    w.zero_()
                    g.zero_()
                close(x.cpu(), y)
                break


def strides(t: Trial) -> None:
    """Results have the CPU's strides, of contiguous inputs and of channels-last ones."""
    given = t.moved()
    want, host = t.expected(t.op)
    _same_strides(t.call(t.op, given), want)
    if isinstance(host[0], torch.Tensor) and host[0].dim() == 4:
        x, y = (v.to(memory_format=torch.channels_last) for v in (given[0], host[0]))
        try:
            want = t.call(t.op, (y, *host[1:]))
        except Exception as e:
            raise Left("upstream", f"{type(e).__name__} on the CPU") from e
        _same_strides(t.call(t.op, (x, *given[1:])), want)


def _same_strides(got: Any, want: Any) -> None:
    for g, w in zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True):
        if isinstance(w, torch.Tensor) and w.layout is torch.strided and w.numel():
            kept = [k for k, n in enumerate(w.shape) if n > 1]
            a, b = ([v.stride(k) for k in kept] for v in (g, w))
            assert a == b, f"strides {tuple(g.stride())}, not {tuple(w.stride())}"


def gradcheck(t: Trial) -> None:
    """Numerical and analytical gradients agree in float64, in a random direction."""
    t = Trial(t.op, t.sample, t.device, grad=True)
    given = t.moved()
    leaves, spec = tree_flatten(given)
    index = [k for k, x in enumerate(leaves) if _differentiable(x)]
    if not index:
        raise Left("upstream", "no differentiable inputs")
    t.expected(t.op)

    def f(*xs: torch.Tensor) -> Any:
        mine = list(leaves)
        for k, x in zip(index, xs, strict=True):
            mine[k] = x
        x, args, kwargs = tree_unflatten(mine, spec)
        torch.manual_seed(7)
        r = t.op.gradcheck_wrapper(t.op.get_op(), x, *args, **kwargs)
        r = t.sample.output_process_fn_grad(r)
        return tuple(x for x in tree_flatten(r)[0] if _differentiable(x))

    results = f(*[leaves[k] for k in index])
    if not results or any(x.dtype is not torch.float64 for x in results):
        raise Left("upstream", "no float64 result requires a gradient")
    torch.autograd.gradcheck(
        f, [leaves[k] for k in index], fast_mode=True, nondet_tol=t.op.gradcheck_nondet_tol
    )


def error_of(f: Callable[[], Any]) -> BaseException | None:
    """What a call raises."""
    try:
        f()
    except Exception as e:  # noqa: BLE001 - any error is the answer
        return e
    return None


def errors(t: Trial) -> None:
    """A bad call raises the CPU's error, type and first line, at the call. The sample is one of the op's `error_inputs`."""
    try:
        given = t.moved()
    except Left:
        raise
    except Exception as e:
        raise Left("device", f"{type(e).__name__} on the way to the device") from e
    host = t.host()
    want = error_of(lambda: t.call(t.op, host))
    if want is None:
        raise Left("upstream", "the CPU does not raise")
    got = error_of(lambda: t.call(t.op, given))
    assert got is not None, f"no {type(want).__name__}: {_first_line(want)}"
    assert type(got) is type(want), (
        f"{type(got).__name__}: {_first_line(got)}, not {type(want).__name__}: {_first_line(want)}"
    )
    name = f"{t.device.type}:{t.device.index or 0}"
    mine = _first_line(got).replace(name, "cpu").replace(t.device.type, "cpu")
    kinds = {type(x).__name__ for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)}
    for kind in kinds:  # a device may have a class of its own, which messages about types name
        mine = mine.replace(kind, "Tensor")
    assert mine == _first_line(want), f"{_first_line(got)!r}, not {_first_line(want)!r}"


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0]


@dataclass(frozen=True, slots=True)
class Check:
    """run: the check of a sample. applies: whether an op has what it checks. dtypes: of which it is run, None for all.
    upstream: PyTorch's own test (class, name) that says so: what it skips or expects to fail is left out."""

    run: Callable[[Trial], None]
    applies: Callable[[Any], bool]
    dtypes: tuple[torch.dtype, ...] | None = None
    upstream: tuple[str, str] = ("", "")

    def left_upstream(self, op: Any, dtype: torch.dtype) -> bool:
        """Whether PyTorch does not run its own test of this on the CPU."""
        if not self.upstream[0]:
            return False
        found = op.get_decorators(*self.upstream, "cpu", dtype, {})
        return any(
            d is unittest.expectedFailure or getattr(d, "__qualname__", "").startswith("skip.")
            for d in found
        )


ONE = (torch.float32,)
CHECKS: dict[str, Check] = {
    "values": Check(values, lambda op: True),
    "inplace": Check(
        inplace,
        lambda op: op.inplace_variant is not None,
        upstream=("TestCommon", "test_variant_consistency_eager"),
    ),
    "gradients": Check(
        gradients, lambda op: op.supports_autograd, (torch.float32, torch.complex64)
    ),
    "variants": Check(
        variants,
        lambda op: op.method_variant is not None,
        (torch.float32, torch.int64),
        ("TestCommon", "test_variant_consistency_eager"),
    ),
    "out": Check(
        out, lambda op: op.supports_out, (torch.float32, torch.int64), ("TestCommon", "test_out")
    ),
    "noncontiguous": Check(
        noncontiguous,
        lambda op: True,
        (torch.float32, torch.int64),
        ("TestCommon", "test_noncontiguous_samples"),
    ),
    "views": Check(views, lambda op: True, ONE),
    "strides": Check(strides, lambda op: True, ONE),
    "gradcheck": Check(
        gradcheck,
        lambda op: op.supports_autograd,
        (torch.float64,),
        ("TestBwdGradients", "test_fn_grad"),
    ),
    "errors": Check(errors, lambda op: op.error_inputs_func is not None, ONE),
}
"""By name. Where an op has no float32, its first dtype stands for it."""


def quiet() -> None:
    """PyTorch's database warns a lot about itself."""
    warnings.simplefilter("ignore")
