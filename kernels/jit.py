"""Machine code for LLVM modules: numba's target machine and execution engine, without its front end.

A module is optimised and turned into object code; object code is loaded into numba's engine, whether it
was just made or comes from the disk cache, so that both run the same bytes.

Of LLVM's passes only those run that help code which comes vectorised, in SSA form and with nothing to
inline. Against numba's pipeline that halves compile time (softmax 23 ms instead of 50) and loses nothing:
unrolling blocks of 32 lanes only adds code, and strength reduction over the unrolled rows cost softmax 10%.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from typing import Any

_LOCK = threading.Lock()
_READY = False
LIBM = (
    "exp exp2 expm1 log log2 log10 log1p tanh erf erfc sin cos tan pow sinh cosh asin acos atan atan2 fmod"
).split()  # fmt: skip
"""Functions that generated code may call; `minimum` and its kin are instructions."""
LIBM_PREFIX = "ae_"
"""Goes before their names in code. LLVM simplifies calls that it knows, such as pow(x, 2), where it can
see the argument; what it sees depends on what was fused."""


def _codegen() -> Any:
    """numba's code generator for this processor, libm's functions made known to it."""
    global _READY
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    if not _READY:
        import llvmlite.binding as ll

        libm = ctypes.CDLL(ctypes.util.find_library("m") or None)
        for name in LIBM:
            ll.add_symbol(
                LIBM_PREFIX + name, ctypes.cast(getattr(libm, name), ctypes.c_void_p).value
            )
        _READY = True
    return codegen


def features() -> str:
    """What the processor can do, as LLVM writes it: `+avx512f,+avx2,...`."""
    return str(_codegen().magic_tuple()[2])


def target() -> str:
    """What object code depends on beside the module: numba, llvmlite, processor, features."""
    import llvmlite
    import numba

    return "|".join(map(str, (numba.__version__, llvmlite.__version__, *_codegen().magic_tuple())))


def compile_module(text: str) -> bytes:
    """Object code of a module given as LLVM assembly.

    Raises:
        RuntimeError: when LLVM refuses the module; a bug in code generation.
    """
    import llvmlite.binding as ll

    with _LOCK:
        codegen = _codegen()
        module = ll.parse_assembly(text)
        module.data_layout = codegen._data_layout
        module.triple = codegen._tm.triple
        module.verify()
        passes = ll.create_new_module_pass_manager()
        passes.add_instruction_combine_pass()
        passes.add_new_gvn_pass()
        passes.add_loop_rotate_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, ll.create_pass_builder(codegen._tm, ll.PipelineTuningOptions(2)))
        return bytes(codegen._tm.emit_object(module))


def load(code: bytes, name: str) -> tuple[int, int]:
    """Addresses of `body_<name>` and `finish_<name>` in object code of this process's target."""
    import llvmlite.binding as ll

    with _LOCK:
        engine = _codegen()._engine._ee
        engine.add_object_file(ll.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine.get_function_address(f"body_{name}"), engine.get_function_address(
            f"finish_{name}"
        )
