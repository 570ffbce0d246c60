import pytest


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def interpreter():
    pytest.importorskip("triton", reason="there is no triton for this platform")
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    from opslot.testing import triton_interpreter

    with triton_interpreter():
        yield


class Launches(list):
    """What would have been launched: (kernel, arguments, options). Nothing runs: results are what memory held."""

    def compiled(self, backend, arch, warp):
        """Each compiled for a target, which needs no device: (name, bytes of shared memory), without repeats."""
        import triton
        from triton.backends.compiler import GPUTarget

        target, found = GPUTarget(backend, arch, warp), {}
        for kernel, arguments, options in self:
            source, key = self._source(kernel, arguments)
            if key not in found:
                compiled = triton.compile(source, target=target, options=options)
                found[key] = (kernel.__name__, compiled.metadata.shared)
        return list(found.values())

    def _source(self, kernel, arguments):
        from triton.compiler import ASTSource

        names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "torch.float64": "fp64"}
        names |= {"torch.int32": "i32", "torch.int64": "i64", "torch.int16": "i16", "torch.bool": "i1"}

        def kind(value):
            if isinstance(value, tuple):
                return tuple(kind(item) for item in value)
            if hasattr(value, "block_shape"):
                block = ",".join(map(str, value.block_shape))
                return f"tensordesc<{names[str(value.base.dtype)]}[{block}]>"
            if hasattr(value, "data_ptr"):
                return f"*{names[str(value.dtype)]}"
            if isinstance(value, bool):
                return "i1"
            return {int: "i32", float: "fp32"}[type(value)]

        signature, constants, attributes = {}, {}, {}
        for number, param in enumerate(kernel.params):
            value = arguments[param.name]
            if param.is_constexpr or value is None:
                signature[param.name], constants[(number,)] = "constexpr", value
                continue
            signature[param.name] = kind(value)
            values = value if isinstance(value, tuple) else (value,)
            for place, item in enumerate(values):
                where = (number, place) if isinstance(value, tuple) else (number,)
                aligned = item.data_ptr() if hasattr(item, "data_ptr") else item
                if isinstance(aligned, int) and not isinstance(aligned, bool) and aligned % 16 == 0:
                    attributes[where] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
        return source, (kernel.__name__, str(signature), str(constants), str(attributes))


@pytest.fixture
def launches(monkeypatch):
    """Record launches instead of running them."""
    pytest.importorskip("triton", reason="there is no triton for this platform")
    from triton.runtime.jit import JITFunction

    recorded = Launches()
    options = {"num_warps", "num_stages"}

    def run(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        recorded.append((self, given, {name: given[name] for name in options & set(given)}))

    monkeypatch.setattr(JITFunction, "run", run)
    return recorded
