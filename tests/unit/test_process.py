"""Processes: autoload, fork, exit with work pending, Ctrl-C. Each in a process of its own."""

import subprocess
import sys
import textwrap

import pytest


def run(code, timeout=120, ok=True):
    p = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert not ok or p.returncode == 0, f"exit {p.returncode}\n{p.stdout}\n{p.stderr[-2000:]}"
    return p.stdout


def test_autoload_is_light():
    """`import torch` registers the device without numba, the recorder or anything else of ours."""
    out = run("""
        import sys, torch
        print(sorted(m for m in sys.modules if m.startswith(("adaptive_eager", "numba", "llvmlite"))))
        print(torch.ones(3, device="neuron").sum().item())
    """)
    assert (
        out.splitlines()[0]
        == "['adaptive_eager', 'adaptive_eager.autoload', 'adaptive_eager.device']"
    )
    assert out.splitlines()[1] == "3.0"


@pytest.mark.parametrize(
    "tail",
    [
        "",
        "y.sum().backward()",
        "y.sum().backward(); torch.neuron.synchronize()",
        "import os; os._exit(0)",
    ],
)
def test_exit_with_work_pending(tail):
    """A script may end at any point: no hang, no crash."""
    for _ in range(3):
        run(f"""
            import torch
            from adaptive_eager import neuron_eager
            x = torch.ones(300, 300, device="neuron", requires_grad=True)
            with neuron_eager("eager"):
                y = (x @ x).tanh()
            y = y * 2
            for _ in range(50): y = y + 1
            {tail}
        """)


def test_fork_after_use():
    """A forked child goes on computing, library ops included; the parent is undisturbed."""
    out = run("""
        import os, torch
        from adaptive_eager import neuron_eager
        x = torch.ones(400, 400, device="neuron")
        with neuron_eager("eager"): y = (x @ x).exp_().clamp(max=2)
        z = y + 1
        pid = os.fork()
        if pid == 0:
            print("child", (z @ x).sum().item(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent", (z @ x).sum().item())
    """)
    assert out.split() == ["child", "192000000.0", "parent", "192000000.0"]


def test_ctrl_c_loses_nothing():
    """Ctrl-C at any moment of a long run raises KeyboardInterrupt; in-place sums afterwards are exact, so no step was lost or
    done twice."""
    out = run("""
        import os, signal, threading, time, torch
        x = torch.ones(300_000, device="neuron")
        total = torch.zeros(300_000, device="neuron")
        done = hits = 0
        def kick(seconds):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)
        for seconds in (0.02, 0.05, 0.09, 0.14, 0.2, 0.27):
            threading.Thread(target=kick, args=(seconds,)).start()
            try:
                while True:
                    total.add_(x); done += 1
                    if done % 7 == 0: total[0].item()
            except KeyboardInterrupt:
                hits += 1
            seen = total.min().item()
            assert total.max().item() == seen, "a write was lost or done twice in part of the tensor"
            assert abs(seen - done) <= 1, (seen, done)
            done = round(seen)
        print(hits)
    """)
    assert out.split() == ["6"]


def test_error_in_backward_does_not_abort():
    """Ten failing backwards and a good one in a fresh process end normally."""
    out = run("""
        import torch
        x = torch.ones(3, device="neuron", requires_grad=True)
        def boom(g): raise ValueError("boom")
        n = 0
        for _ in range(10):
            y = x * 2
            y.register_hook(boom)
            try: y.sum().backward()
            except ValueError: n += 1
        x.grad = None
        (x * 2).sum().backward()
        print(n, x.grad.tolist())
    """)
    assert out.strip() == "10 [2.0, 2.0, 2.0]"


def test_huggingface_kernels_is_not_overwritten():
    """The folder `kernels` is imported as part of our package only."""
    run("""
        import importlib.util, adaptive_eager.kernels.ir
        spec = importlib.util.find_spec("kernels")
        assert spec is None or "adaptive" not in (spec.origin or ""), spec
    """)


def test_ctrl_c_inside_an_op_of_backward():
    """A KeyboardInterrupt raised while an op of the backward is recorded reaches backward's caller as itself."""
    out = run("""
        import torch, adaptive_eager.dispatch as dispatch
        x = torch.ones(3, device="neuron", requires_grad=True)
        cos = id(torch.ops.aten.cos.default)
        def interrupt(*_): raise KeyboardInterrupt
        from adaptive_eager.tensor import FAST
        FAST.discard(cos)
        n = 0
        for _ in range(5):
            dispatch._KINDS[cos] = interrupt
            try: torch.sin(x).sum().backward()
            except KeyboardInterrupt: n += 1
            del dispatch._KINDS[cos]
        x.grad = None
        torch.sin(x).sum().backward()
        print(n, x.grad.shape[0])
    """)
    assert out.split() == ["5", "3"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_an_idle_worker_ends_with_its_threads():
    """After a run in eager mode the process has the threads it had before: more of them than cores slow all OpenMP code down."""
    out = run("""
        import os, time, torch
        from adaptive_eager import neuron_eager

        def count():
            return len(os.listdir("/proc/self/task"))

        x = (torch.randn(1000, 1000) / 40).to("neuron")
        torch.mm(torch.ones(500, 500), torch.ones(500, 500))
        (x * 2 + 1).sum().item()
        before = count()
        for _ in range(3):  # it starts again when there is work
            with neuron_eager("eager"):
                y = x
                for _ in range(50):
                    y = torch.relu(y * 1.01) @ x
            until = time.monotonic() + 60
            while count() > before and time.monotonic() < until:
                time.sleep(0.01)
            print(before - count(), y.sum().isfinite().item())
    """)
    assert out.split() == ["0", "True"] * 3
