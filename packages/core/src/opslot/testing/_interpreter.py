"""Triton's interpreter, repaired and watching memory, so that kernels written in Triton are tested on the CPU."""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def triton_interpreter() -> Iterator[None]:
    """Inside, every Triton kernel of this process runs on the CPU: in numpy, program by program, slowly.

        @pytest.fixture(autouse=True)
        def interpreter():
            pytest.importorskip("triton", reason="there is no triton for this platform")
            pytest.importorskip("numpy", reason="the interpreter computes with numpy")
            with triton_interpreter():
                yield

    It does not matter when a kernel was decorated or imported, and `TRITON_INTERPRET` need not be set: launches are
    redirected, not decorators. What is imported inside is a compiled kernel again outside.

    A launch raises `AssertionError` when a program touches memory outside the tensors that the kernel was given, when
    an integer overflows its type (an index beyond 2**31), or when a `tl.device_assert` fails; `ValueError` for
    bfloat16, which Triton's interpreter gets wrong; `NotImplementedError` for functions of libdevice that have no
    counterpart here. Add `poisoned_memory` to see reads of what nobody wrote. Of an autotuned kernel the first
    configuration that its pruning leaves is run, and no choice is remembered. Programs run one after the other: races
    stay hidden, as do limits of a device (shared memory, TF32, alignment). Not for several threads at once.
    """
    try:
        # Which keeps functions of `tl` from when it is imported: not those of in here.
        import triton.compiler.code_generator  # noqa: F401
        import triton.language as tl
        from triton.runtime import autotuner, interpreter, jit
    except ImportError as error:
        raise ImportError(
            f"opslot.testing.triton_interpreter needs triton and numpy, and {error}. On Linux triton comes with torch; "
            f"where there is none, skip: pytest.importorskip('triton')"
        ) from error

    with ExitStack() as undo:
        memory = _Memory(interpreter.interpreter_builder)
        libdevice = _Libdevice(interpreter)
        libdevice.install(undo)
        _patch_language(undo, interpreter, tl)
        _patch_arguments(undo, interpreter, tl)
        _patch_builder(undo, interpreter, memory)
        _patch_launch(undo, interpreter, memory)
        _patch_rewriting(undo, interpreter, libdevice)
        _patch_functions(undo, interpreter, jit, memory)
        _patch_autotuner(undo, autotuner)
        yield


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and on the way out make the owner's own attributes what they were."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    if before is _ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _set_item(undo: ExitStack, owner: dict[str, Any], name: str, value: Any) -> None:
    before = owner.get(name, _ABSENT)
    owner[name] = value
    if before is _ABSENT:
        undo.callback(owner.pop, name)
    else:
        undo.callback(owner.__setitem__, name, before)


def _patch_language(undo: ExitStack, interpreter: Any, tl: Any) -> None:
    """Make `tl` the interpreter's once and for both of its names.

    The interpreter does it anew at each launch for the names that the kernel's module has, and at each call of a device
    function, where it never undoes it.
    """
    sees_both = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    undo.callback(interpreter._patch_lang(sees_both).restore)
    already = types.SimpleNamespace(restore=lambda: None)
    _set(undo, interpreter, "_patch_lang", lambda function: already)
    # That of triton 3.6 asks numpy to convert an array of one element, which numpy 2.4 no longer does.
    _set(undo, tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))


def _patch_arguments(undo: ExitStack, interpreter: Any, tl: Any) -> None:
    """Floats and bools become scalars of fp32 and i1 as in a compiled kernel: they have dtypes, and `.to`."""
    import numpy as np

    plain = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        for python, numpy, triton in ((bool, np.bool_, tl.int1), (float, np.float32, tl.float32)):
            if isinstance(argument, python):
                return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=numpy), triton), triton)
        return plain(argument)

    _set(undo, interpreter, "_implicit_cvt", convert)


def _patch_builder(undo: ExitStack, interpreter: Any, memory: _Memory) -> None:
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, update = builder.create_atomic_cas, builder.create_atomic_rmw

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        memory.check("reads", pointers, mask)
        return load(self, pointers, mask, *rest, **keywords)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        memory.check("writes", pointers, mask)
        return store(self, pointers, value, mask, *rest, **keywords)

    def create_atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        memory.check("updates", pointers, None)
        return swap(self, pointers, *rest)

    def create_atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check("updates", pointers, mask)
        return update(self, operation, pointers, value, mask, *rest)

    def get_bf16_ty(self: Any) -> Any:
        raise ValueError(_BFLOAT16.format(what="the kernel converts to bfloat16"))

    for function in (create_masked_load, create_masked_store, create_atomic_cas, create_atomic_rmw, get_bf16_ty):
        _set(undo, builder, function.__name__, function)
    # The interpreter computes the checks for overflow anyway, but heeds them and device_assert in debug only.
    debug = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    _set(undo, interpreter.interpreter_builder, "options", debug)


_BFLOAT16 = (
    "{what}, and Triton's interpreter does arithmetic on its bits as if they were whole numbers. Test in float32 or "
    "float16 here, and bfloat16 on a GPU"
)


def _patch_launch(undo: ExitStack, interpreter: Any, memory: _Memory) -> None:
    executor = interpreter.GridExecutor
    launch, to_host = executor.__call__, executor._init_args_hst

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        import numpy as np

        memory.kernel = self.fn.__name__
        try:
            # A GPU does not warn of what becomes infinite or NaN.
            with np.errstate(all="ignore"):
                launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            # It holds no more than the text of its cause.
            raise (error.__cause__ or error) from None
        finally:
            memory.kernel = None

    def init_args_hst(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = to_host(self, args, kwargs)
        memory.allow(dict(zip(self.arg_names, host_args, strict=False)) | host_kwargs)
        return host_args, host_kwargs

    _set(undo, executor, "__call__", call)
    _set(undo, executor, "_init_args_hst", init_args_hst)


def _patch_rewriting(undo: ExitStack, interpreter: Any, libdevice: _Libdevice) -> None:
    """Kernels are rewritten inside only, and the modules that they stand in get back the globals that they had."""
    rewriter = interpreter.FunctionRewriter

    class Transformer(interpreter.ASTTransformer):  # type: ignore[misc]
        def visit_For(self, node: ast.For) -> ast.For:
            """The counter of a `range` is a tensor in a compiled kernel; that of `tl.static_range` is a number."""
            self.generic_visit(node)
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "range" and isinstance(node.target, ast.Name):
                counter = ast.Name(node.target.id, ast.Load())
                node.body.insert(0, self.visit(ast.Assign([ast.Name(node.target.id, ast.Store())], counter)))
            return node

    def compile_and_exec(self: Any, tree: ast.AST) -> Any:
        known = self.fn.__globals__
        names = {"interpreter_semantic": interpreter.interpreter_semantic}
        for name, value in [*names.items(), *libdevice.substitutes(known).items()]:
            _set_item(undo, known, name, value)
        made: dict[str, Any] = {}
        exec(compile(tree, self.filename, "exec"), known, made)  # type: ignore[call-overload]
        return made[self.fn.__name__]

    _set(undo, rewriter, "ast_transformer", Transformer())
    _set(undo, rewriter, "_compile_and_exec", compile_and_exec)
    _set(undo, interpreter.InterpretedFunction, "rewritten_fn", {})


def _patch_functions(undo: ExitStack, interpreter: Any, jit: Any, memory: _Memory) -> None:
    """What was decorated to be compiled is interpreted, the functions of `tl` that are themselves Triton included."""
    compiled = jit.JITFunction
    outside = compiled.__call__
    functions: dict[Any, Any] = {}

    def interpreted(function: Any) -> Any:
        if function.fn not in functions:
            functions[function.fn] = interpreter.InterpretedFunction(function.fn)
        return functions[function.fn]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        function = interpreted(self)
        function.pre_run_hooks = self.pre_run_hooks
        function.run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if memory.kernel is None:
            return outside(self, *args, **kwargs)
        return interpreted(self).rewrite()(*args, **kwargs)

    _set(undo, compiled, "run", run)
    _set(undo, compiled, "__call__", call)


def _patch_autotuner(undo: ExitStack, autotuner: Any) -> None:
    """Nothing is timed, so the first configuration wins, and what was measured on a device is neither used nor lost."""
    tuner = autotuner.Autotuner
    tuned = tuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache, cache_results = self.cache, self.cache_results
        self.cache, self.cache_results = {}, False
        try:
            return tuned(self, *args, **kwargs)
        finally:
            self.cache, self.cache_results = cache, cache_results

    _set(undo, tuner, "run", run)
    _set(undo, tuner, "_bench", lambda self, *args, config, **meta: [0.0, 0.0, 0.0])


class _Memory:
    """The memory that the running kernel was given, storage by storage."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.kernel: str | None = None
        self.given: list[tuple[int, int, str]] = []  # first address, the one behind the last, and whose it is

    def allow(self, arguments: Mapping[str, Any]) -> None:
        import torch

        given: dict[int, tuple[int, int, str]] = {}
        for name, tensor in _tensors(arguments.items()):
            if tensor.dtype == torch.bfloat16:
                raise ValueError(_BFLOAT16.format(what=f"{self.kernel}: {name} is of bfloat16"))
            storage = tensor.untyped_storage()
            first = storage.data_ptr()
            given.setdefault(first, (first, first + storage.nbytes(), name))
        self.given = sorted(given.values())

    def check(self, verb: str, pointers: Any, mask: Any) -> None:
        import numpy as np

        addresses = pointers.data
        if mask is not None:  # whose data is of integers where it was computed from a scalar
            addresses = addresses[np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)]
        addresses = addresses.ravel().astype(np.uint64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, dtype=bool)
        for first, behind, _ in self.given:
            inside |= (addresses >= np.uint64(first)) & (addresses + np.uint64(size) <= np.uint64(behind))
        if inside.all():
            return
        address = int(addresses[~inside][0])
        where = "and it was given none"
        if self.given:
            first, behind, name = min(self.given, key=lambda given: max(given[0] - address, address - given[1]))
            distance = f"{address - behind} bytes behind" if address >= behind else f"{first - address} bytes before"
            where = f"the first {distance} that of {name}"
        raise AssertionError(
            f"{self.kernel} {verb} {int((~inside).sum())} of {addresses.size} elements outside the memory of its "
            f"tensors, {where} (program {self.builder.grid_idx})"
        )


def _tensors(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Tensors among the arguments of a launch, also those in tuples, in descriptors and under another dtype."""
    for name, value in named:
        if isinstance(value, tuple):
            yield from _tensors((name, item) for item in value)
        elif hasattr(value, "untyped_storage"):
            yield name, value
        elif hasattr(value, "base"):
            yield from _tensors([(name, value.base)])


class _Libdevice:
    """numpy in place of libdevice, whose functions the interpreter answers with None."""

    def __init__(self, interpreter: Any) -> None:
        import triton.language.extra.libdevice  # noqa: F401

        self.interpreter = interpreter
        self.table = _numpy_functions()
        self.modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("triton.language.extra.") and name.endswith(".libdevice")
        ]

    def install(self, undo: ExitStack) -> None:
        for module in self.modules:
            for name, value in self.substitutes(vars(module)).items():
                _set(undo, module, name, value)

    def substitutes(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """What to put for each name that stands for a function of libdevice."""
        names = {module.__name__ for module in self.modules}
        return {
            name: self._substitute(value.__name__)
            for name, value in list(known.items())
            if isinstance(value, types.FunctionType) and value.__module__ in names
        }

    def _substitute(self, name: str) -> Callable[..., Any]:
        import numpy as np
        import triton.language as tl

        interpreter, function = self.interpreter, self.table.get(name)

        def call(*arguments: Any, **_: Any) -> Any:
            if function is None:
                raise NotImplementedError(
                    f"libdevice.{name} has no counterpart in opslot.testing.triton_interpreter, which has "
                    f"{', '.join(sorted(self.table))}"
                )
            tensors = [interpreter.interpreter_semantic.to_tensor(argument) for argument in arguments]
            dtypes = [tensor.dtype for tensor in tensors]
            if any(dtype.is_floating() and dtype not in (tl.float32, tl.float64) for dtype in dtypes):
                raise TypeError(f"libdevice.{name} is for fp32 and fp64, got {', '.join(map(str, dtypes))}")
            data = function(*(tensor.handle.data for tensor in tensors))
            dtype = max(dtypes, key=lambda dtype: (dtype.is_floating(), dtype.primitive_bitwidth))
            if data.dtype == np.bool_:
                dtype = tl.int32  # as libdevice's predicates give
            data = data.astype(interpreter._get_np_dtype(dtype))
            block = any(tensor.type.is_block() for tensor in tensors)
            kind = tl.block_type(dtype, list(data.shape)) if block else dtype
            return tl.tensor(interpreter.TensorHandle(data, dtype), kind)

        return call


def _numpy_functions() -> dict[str, Callable[..., Any]]:
    """By their names in libdevice. Those that round otherwise than to nearest are left out."""
    import numpy as np

    def each(function: Callable[[float], float]) -> Callable[..., Any]:
        return np.vectorize(function, otypes=[np.float64])

    same = (
        "floor ceil trunc rint exp exp2 expm1 log log2 log10 log1p sqrt cbrt sin cos tan sinh cosh tanh hypot fmod "
        "copysign nextafter isnan isinf signbit abs"
    )
    return {
        **{name: getattr(np, name) for name in same.split()},
        **{f"fast_{name}f": getattr(np, name) for name in ("sin", "cos", "tan", "tanh", "exp", "log", "log2", "log10")},
        "asin": np.arcsin,
        "acos": np.arccos,
        "atan": np.arctan,
        "atan2": np.arctan2,
        "asinh": np.arcsinh,
        "acosh": np.arccosh,
        "atanh": np.arctanh,
        "nearbyint": np.rint,
        # Halves go away from zero, where numpy's round takes the even neighbour.
        "round": lambda x: np.trunc(x) + np.copysign(np.abs(x - np.trunc(x)) >= 0.5, x),
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "rsqrt_rn": lambda x: 1 / np.sqrt(x),
        "sqrt_rn": np.sqrt,
        "rcp_rn": lambda x: 1 / x,
        "exp10": lambda x: np.power(10.0, x),
        "pow": np.power,
        "fast_powf": np.power,
        "div_rn": np.divide,
        "fast_dividef": np.divide,
        "fma": lambda x, y, z: x * y + z,
        "finitef": np.isfinite,
        "isfinited": np.isfinite,
        "erf": each(math.erf),
        "erfc": each(math.erfc),
        "lgamma": each(math.lgamma),
        "tgamma": each(math.gamma),
    }
