"""Machine code for LLVM modules, by llvmlite: the part of numba that is a JIT, without its front end.

A module is optimised and turned into object code; object code is loaded into one execution engine, whether it
was just made or comes from the disk cache, so that both run the same bytes. Importing numba itself takes 0.3 s of a
program's start, and its code generator only hands on what stands here in a dozen lines.

Of LLVM's passes only those run that help code which comes vectorised, in SSA form and with nothing to
inline. Against numba's pipeline that halves compile time (softmax 23 ms instead of 50) and loses nothing:
unrolling blocks of 32 lanes only adds code, and strength reduction over the unrolled rows cost softmax 10%.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import threading

_LOCK = threading.Lock()
_MACHINE: Machine | None = None
LIBM = (
    "exp exp2 expm1 log log2 log10 log1p tanh erf erfc sin cos tan pow sinh cosh asin acos atan atan2 fmod"
).split()  # fmt: skip
"""Functions that generated code may call; `minimum` and its kin are instructions."""
LIBM_PREFIX = "ae_"
"""Goes before their names in code. LLVM simplifies calls that it knows, such as pow(x, 2), where it can
see the argument; what it sees depends on what was fused."""


class Machine:
    """The target machine of this processor and the engine that holds loaded code."""

    def __init__(self) -> None:
        import llvmlite.binding as ll

        ll.initialize_native_target()
        ll.initialize_native_asmprinter()
        self.cpu = ll.get_host_cpu_name()
        self.features = ll.get_host_cpu_features().flatten()
        self.triple = ll.get_process_triple()
        options = {"cpu": self.cpu, "features": self.features, "opt": 3, "codemodel": "jitdefault"}
        options["reloc"] = (
            "static" if self.triple.startswith(("x86", "i386", "i686")) else "default"
        )
        self.target = ll.Target.from_triple(self.triple).create_target_machine(**options, jit=True)
        empty = ll.parse_assembly("")
        empty.triple = self.triple
        self.engine = ll.create_mcjit_compiler(empty, self.target)
        self.layout = str(self.engine.target_data)
        libm = ctypes.CDLL(ctypes.util.find_library("m") or None)
        for name in LIBM:
            address = ctypes.cast(getattr(libm, name), ctypes.c_void_p).value
            ll.add_symbol(LIBM_PREFIX + name, address)


def machine() -> Machine:
    """The one of this process, made when first asked for."""
    global _MACHINE
    if _MACHINE is None:
        with _LOCK:
            if _MACHINE is None:
                _MACHINE = Machine()
    return _MACHINE


def _in_child() -> None:
    """A thread of the parent may have held the lock when it forked."""
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def features() -> str:
    """What the processor can do, as LLVM writes it: `+avx512f,+avx2,...`."""
    return str(machine().features)


def target() -> str:
    """What object code depends on beside the module: llvmlite, processor, features."""
    import llvmlite

    m = machine()
    return f"{llvmlite.__version__}|{m.triple}|{m.cpu}|{m.features}"


def compile_module(text: str) -> bytes:
    """Object code of a module given as LLVM assembly.

    Raises:
        RuntimeError: when LLVM refuses the module; a bug in code generation.
    """
    import llvmlite.binding as ll

    m = machine()
    with _LOCK:
        module = ll.parse_assembly(text)
        module.data_layout = m.layout
        module.triple = m.triple
        module.verify()
        passes = ll.create_new_module_pass_manager()
        passes.add_instruction_combine_pass()
        passes.add_new_gvn_pass()
        passes.add_loop_rotate_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, ll.create_pass_builder(m.target, ll.PipelineTuningOptions(2)))
        return bytes(m.target.emit_object(module))


def load(code: bytes, name: str) -> tuple[int, int]:
    """Addresses of `body_<name>` and `finish_<name>` in object code of this process's target."""
    import llvmlite.binding as ll

    engine = machine().engine
    with _LOCK:
        engine.add_object_file(ll.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine.get_function_address(f"body_{name}"), engine.get_function_address(
            f"finish_{name}"
        )
