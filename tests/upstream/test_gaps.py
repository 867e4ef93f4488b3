"""Gaps of torch itself that we work around. A test fails when its gap closes: then the work-around can go."""

import subprocess
import sys
import textwrap

import torch


def exit_code(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=120, check=False
    ).returncode


def test_a_guard_written_in_c_aborts_on_a_hooks_exception():
    """Without our guard's try, an exception in a backward hook ends the process (Note in device.NeuronGuard)."""
    code = """
        import itertools, torch, adaptive_eager.device as d
        d.NeuronGuard.type_ = itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__
        x = torch.ones(3, device="neuron", requires_grad=True)
        y = x * 2
        def boom(g): raise ValueError
        y.register_hook(boom)
        try: y.sum().backward()
        except ValueError: pass
    """
    assert exit_code(code) != 0


def test_set_data_leaves_the_payload_behind():
    """torch's own `.data =` swaps a wrapper's metadata but not what it wraps, so NeuronTensor defines the property."""
    import torch

    x, y = torch.zeros(2, device="neuron"), torch.ones(3, device="neuron")
    payload = x._buf
    torch.Tensor.data.__set__(x, y)
    assert x.shape == (3,) and x._buf is payload


def test_batch_norms_meta_kernel_promises_statistics_it_does_not_save():
    """In evaluation the CPU's native_batch_norm returns empty statistics, its meta kernel full ones (lower.META_FIXES)."""
    import torch

    def shapes(device):
        a = torch.ones(2, 3, device=device)
        s = torch.ones(3, device=device)
        return [
            tuple(t.shape)
            for t in torch.ops.aten.native_batch_norm(a, s, s, s, s, False, 0.1, 1e-5)
        ]

    assert shapes("cpu") != shapes("meta")


def test_list_forms_need_exact_types():
    """Optimizers still ask for exactly torch's own tensor types; once they do not, `patches._foreach` can go."""
    from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types

    from adaptive_eager.tensor import NeuronTensor

    p = torch.nn.Parameter(torch.ones(2).to("neuron"))
    where = _foreach_supported_types.index(NeuronTensor)
    _foreach_supported_types.remove(NeuronTensor)
    try:
        assert not _default_to_fused_or_foreach([p], differentiable=False)[1]
    finally:
        _foreach_supported_types.insert(where, NeuronTensor)


def test_matrix_rank_does_not_fill_out_for_subclasses():
    """Its C++ takes a branch for tensor subclasses that rebinds its own reference; once not, `patches.rank_out` can go."""
    x, tolerance = torch.ones(3, 3, device="neuron"), torch.tensor(0.1, device="neuron")
    out = torch.full((), 7, dtype=torch.int64, device="neuron")
    torch.ops.aten.linalg_matrix_rank.atol_rtol_tensor_out._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, x, atol=tolerance, rtol=tolerance, out=out
    )
    assert out.item() == 7
    torch.linalg.matrix_rank(x, out=out)
    assert out.item() == 1


def test_autocasts_cache_can_only_be_cleared_by_the_module_function():
    """`patches._autocast_cache` wraps a function of the module torch, which autocast looks up there on leaving."""
    import inspect

    from torch.amp.autocast_mode import autocast

    assert "torch.clear_autocast_cache()" in inspect.getsource(autocast.__exit__)
