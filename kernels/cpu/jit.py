"""How functions are compiled: kernels, which Python calls; what only other compiled functions call; work on all threads.

Each body is compiled once: a `prange` around it would have it compiled three times over, as its own function, with the
wrapper around that and with what calls the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from ..disk_cache import locked

_I64 = ir.IntType(64)


class _PartLibrary(JITCodeLibrary):
    """The code of an inner function, which is optimized and becomes machine code in the kernels it is part of, and only there.

    numba does both to every function, together with all that it calls, which took a third of the time of compiling. What else
    it asks of a library is answered with nothing to do. Overridden are two methods that numba has for itself, in 0.61 as
    in 0.68: without them this would only be slower.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return that of no function."""
        return 0

    @property
    def codegen(self) -> _PartLibrary:
        """Whoever keeps the functions' environments: they have none."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: environments hold what functions need of Python."""


class _PartCompiler(Compiler):
    """numba's, into such a library."""

    def __init__(self, typingctx, targetctx, library, *more):
        super().__init__(typingctx, targetctx, _PartLibrary(targetctx.codegen(), "part"), *more)


# Without the wrappers through which Python or C would call it.
inner: Callable[[Callable[..., Any]], Any] = njit(
    boundscheck=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_PartCompiler
)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function whose machine code is kept on disk.

    Those that `layers.py` calls by their addresses return True: an exception on that way becomes False.
    """
    return locked(njit(cache=True, boundscheck=False, error_model="numpy", nogil=True)(function))


@inner
def part_of(count, thread, num_threads):
    """The first and the end of a thread's even part of `count` things."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


@intrinsic
def keep_alive(typingctx, array):
    """Use an array. Numba gives its memory back after the last use, and having its address is none."""

    def codegen(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def _call(typingctx, address, thread, record):
    """Call a function of (thread, record) by its address."""

    def codegen(context, builder, signature, args):
        function_t = ir.FunctionType(ir.VoidType(), [_I64, _I64])
        builder.call(builder.inttoptr(args[0], function_t.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(parallel=True, boundscheck=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _call_on_threads(address, record, num_threads):
    for thread in prange(num_threads):
        _call(address, thread, record)


@intrinsic
def on_threads(typingctx, work, num_threads, args):
    """Call work(thread, *args), an inner function without a result, for `num_threads` threads at once.

    Raises:
        MemoryError: a thread's work failed; there is nothing else that fails in there.
    """
    inner_signature = work.get_call_type(typingctx, (types.int64, *args.types), {})
    compiled = work.dispatcher.overloads[inner_signature.args]
    launch = typingctx.resolve_value_type(_call_on_threads)
    launch_signature = launch.get_call_type(typingctx, (types.int64, types.int64, types.int64), {})

    def codegen(context, builder, signature, values):
        _, threads, packed = values
        record = cgutils.alloca_once(builder, ir.LiteralStructType([_I64, packed.type]))
        failed = cgutils.gep_inbounds(builder, record, 0, 0)
        builder.store(_I64(0), failed)
        builder.store(packed, cgutils.gep_inbounds(builder, record, 0, 1))

        # The function whose address is called: it finds its arguments in the record.
        function_t = ir.FunctionType(ir.VoidType(), [_I64, _I64])
        name = builder.module.get_unique_name(f"on_thread.{compiled.fndesc.mangled_name}")
        function = ir.Function(builder.module, function_t, name)
        function.linkage = "internal"
        body = ir.IRBuilder(function.append_basic_block())
        own = body.inttoptr(function.args[1], record.type)
        unpacked = cgutils.unpack_tuple(body, body.load(cgutils.gep_inbounds(body, own, 0, 1)))
        callee = context.declare_function(builder.module, compiled.fndesc)
        status, _ = context.call_conv.call_function(
            body, callee, types.none, inner_signature.args, [function.args[0], *unpacked]
        )
        with cgutils.if_unlikely(body, status.is_error):
            body.store(_I64(1), cgutils.gep_inbounds(body, own, 0, 0))
        body.ret_void()
        context.active_code_library.add_linking_library(compiled.library)

        call = context.get_function(launch, launch_signature)
        context.add_linking_libs(getattr(call, "libs", ()))
        addresses = [builder.ptrtoint(pointer, _I64) for pointer in (function, record)]
        call(builder, [*addresses, threads])
        with cgutils.if_unlikely(builder, cgutils.is_true(builder, builder.load(failed))):
            context.call_conv.return_user_exc(builder, MemoryError, ("no memory for a thread's work",))
        return context.get_dummy_value()

    return types.void(work, types.int64, args), codegen
