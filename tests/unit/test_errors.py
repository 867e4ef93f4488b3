"""Bad input: PyTorch's error, at the user's line, and nothing lost."""

import pytest
import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager


@pytest.fixture
def x():
    return torch.arange(12.0).reshape(3, 4).to("neuron")


CALLS = {
    "broadcast": lambda d: torch.ones(3, 4, device=d) + torch.ones(5, device=d),
    "matmul": lambda d: torch.ones(3, 4, device=d) @ torch.ones(3, 4, device=d),
    "view": lambda d: torch.ones(3, 4, device=d).view(5),
    "dim": lambda d: torch.ones(3, 4, device=d).sum(5),
    "index": lambda d: torch.ones(3, 4, device=d)[7],
    "cat": lambda d: torch.cat([torch.ones(3, 4, device=d), torch.ones(2, 2, device=d)]),
    "dtype refused": lambda d: torch.ones(3, device=d).bitwise_and(torch.ones(3, device=d)),
    "in-place promotion": lambda d: torch.ones(3, dtype=torch.int64, device=d).add_(
        torch.ones(3, device=d)
    ),
    "in-place shape": lambda d: torch.ones(3, device=d).add_(torch.ones(2, 3, device=d)),
    "expanded write": lambda d: torch.ones(1, device=d).expand(3).add_(1),
    "leaf": lambda d: torch.ones(3, device=d, requires_grad=True).add_(1),
    "twice backward": lambda d: [
        f.backward() for f in [(torch.ones(3, device=d, requires_grad=True) ** 2).sum()] * 2
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_same_error_as_the_cpu(name):
    """The type and first line of the error are the CPU's, raised by the call itself."""
    with pytest.raises(Exception) as cpu:
        CALLS[name]("cpu")
    with pytest.raises(type(cpu.value)) as neuron:
        CALLS[name]("neuron")
    assert str(neuron.value).splitlines()[0] == str(cpu.value).splitlines()[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: x + c,
        lambda x, c: c + x,
        lambda x, c: x @ c.t(),
        lambda x, c: torch.cat([x, c]),
    ],
)
def test_mixed_devices(x, f):
    """A CPU tensor among neuron tensors is refused in PyTorch's words."""
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device.*neuron:0 and cpu"
    ):
        f(x, torch.ones(3, 4))


def test_cpu_scalars_mix(x):
    """0-dim CPU tensors count as numbers."""
    assert (x + torch.tensor(2.0)).device.type == "neuron"


VALUE_FAULTS = {
    "embedding": (lambda x: F.embedding(torch.tensor([0, 9], device="neuron"), x), IndexError),
    "gather": (lambda x: x.gather(1, torch.full((3, 4), 9, device="neuron")), RuntimeError),
    "target": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 17], device="neuron")), IndexError),
}


@pytest.mark.parametrize("name", VALUE_FAULTS)
def test_value_errors_come_at_the_next_sync(x, name):
    """An index out of range is found when the op runs, and names the op's line; other results are not lost."""
    f, kind = VALUE_FAULTS[name]
    before = x * 2
    bad = f(x)  # the fault is here
    after = x * 3
    with pytest.raises(kind) as e:
        torch.neuron.synchronize()
    assert any("test_errors.py" in n for n in e.value.__notes__)
    torch.testing.assert_close(before.cpu() + x.cpu(), after.cpu())
    with pytest.raises(kind):
        (bad + 1).cpu()


def test_out_of_memory_and_on():
    """Too large a tensor raises OutOfMemoryError with the numbers; after freeing, work goes on."""
    kept = torch.ones(1000, device="neuron")
    giant = torch.empty(20 << 30, dtype=torch.uint8, device="neuron")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 20480.00 MiB.*held by tensors.*free"
    ):
        more = torch.empty(20 << 30, dtype=torch.uint8, device="neuron")
        giant[0] = 1
        more[0] = 1
        torch.neuron.synchronize()
    del giant, more
    assert (kept + 1).sum().item() == 2000


def test_user_errors_in_backward_arrive_as_themselves():
    """An exception in a custom backward, in a hook, or in an op of the backward reaches the caller of backward."""

    class Boom(Exception):
        pass

    def boom(_):
        raise Boom("from a hook")

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1

        @staticmethod
        def backward(ctx, g):
            raise Boom("from backward")

    x = torch.ones(3, device="neuron", requires_grad=True)
    with pytest.raises(Boom, match="from backward"):
        Bad.apply(x).sum().backward()
    y = x * 2
    y.register_hook(boom)
    with pytest.raises(Boom, match="from a hook"):
        y.sum().backward()
    z = x * 2
    z.register_hook(lambda g: g.view(7))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        z.sum().backward()
    w = x * 2
    w.grad_fn.register_hook(lambda *_: boom(0))
    with pytest.raises(Boom):
        w.sum().backward()
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_an_exception_inside_the_scope_leaves_nothing_behind():
    """Settings, default device and pending work are as before; what was computed is there."""
    from adaptive_eager.record import TAPE

    before = TAPE.limits
    with pytest.raises(KeyError), neuron_eager("eager"):
        x = torch.ones(3) * 2
        raise KeyError
    assert TAPE.limits == before and not TAPE.listeners and not TAPE.runtime.queue
    assert torch.ones(1).device.type == "cpu"
    assert x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("bad", [{"mode": "fast"}, {"byte_budget": 0}, {"max_ops": -1}])
def test_bad_options(bad):
    """Unknown modes and limits below 1 are refused by name."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        neuron_eager(**bad)


def test_no_numpy_without_asking(x):
    """numpy() refuses as for any accelerator; DLPack never hands out garbage."""
    with pytest.raises(TypeError, match="can't convert neuron:0"):
        x.numpy()
    with pytest.raises(BufferError):
        x.__dlpack__()


@pytest.mark.parametrize("read", [True, False])
def test_an_error_keeps_no_memory(read):
    """A model that ran out of memory, with a graph over it, is gone when its names are: no leak through the kept error."""
    import gc

    from adaptive_eager.device_sim.spec import TRN2

    def fails():
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to("neuron")
        y = model(torch.ones(4, 512, device="neuron")).sum()
        y.item() if read else torch.neuron.synchronize()

    with neuron_eager(default_device=False, spec=TRN2.replace(hbm_bytes=4 << 20)):
        before = torch.neuron.memory_allocated()
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                fails()
            gc.collect()
            assert torch.neuron.memory_allocated() <= before
