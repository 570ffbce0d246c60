"""Liger's gated activations write gradients over their inputs: only where nobody else can see it."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: it needs triton, which is not everywhere")

from opslot_backends.liger import glu
from opslot_backends.liger._function import writable

# Of gate and up in turn: True where the saved tensor itself was handed out.
given: list[list[bool]] = []


class Probe(torch.autograd.Function):
    """gate * up, noting which of its saved tensors a backward in place would be given."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx, grad):
        saved = list(ctx.saved_tensors)
        addresses = [tensor.data_ptr() for tensor in saved]
        gate, up = writable(saved)
        given.append([tensor.data_ptr() == address for tensor, address in zip((gate, up), addresses, strict=True)])
        return grad * up, grad * gate


class MLP(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)

    def forward(self, x):
        return Probe.apply(self.gate(x), self.up(x))


def alone(mlp, x):
    mlp(x).sum().backward()


def under_checkpoint(mlp, x):
    checkpoint(mlp, x.requires_grad_(), use_reentrant=False).sum().backward()


def under_reentrant_checkpoint(mlp, x):
    checkpoint(mlp, x.requires_grad_(), use_reentrant=True).sum().backward()


@pytest.fixture(params=[(3, 4), (2, 3, 4)], ids=["rows", "batch and sequence"])
def x(request):
    given.clear()
    return torch.randn(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", [alone, under_checkpoint, under_reentrant_checkpoint])
def test_what_two_projections_gave_is_written_over(case, bias, x):
    case(MLP(bias), x)
    assert given == [[True, True]]


def kept_graph(mlp, x):
    mlp(x).sum().backward(retain_graph=True)


def kept_variable(mlp, x):
    gate = mlp.gate(x)
    Probe.apply(gate, mlp.up(x)).sum().backward()


def kept_view(mlp, x):
    gate = mlp.gate(x)
    loss, view = Probe.apply(gate, mlp.up(x)).sum(), gate.view(-1)
    del gate
    loss.backward()
    return view


def kept_part(mlp, x):
    gate = mlp.gate(x)
    loss, part = Probe.apply(gate, mlp.up(x)).sum(), gate[..., :2]
    del gate
    loss.backward()
    return part


def kept_detached(mlp, x):
    gate = mlp.gate(x)
    loss, other = Probe.apply(gate, mlp.up(x)).sum(), gate.detach().numpy()
    del gate
    loss.backward()
    return other


def kept_memory(mlp, x):
    gate = mlp.gate(x)
    loss, memory = Probe.apply(gate, mlp.up(x)).sum(), gate.untyped_storage()
    del gate
    loss.backward()
    return memory


def kept_base(mlp, x):
    base = torch.mm(x.reshape(-1, 4), mlp.gate.weight)
    Probe.apply(base.view(x.shape), mlp.up(x)).sum().backward()


def saved_by_another_function(mlp, x):
    gate = mlp.gate(x)
    sine = gate.sin()
    loss = (Probe.apply(gate, mlp.up(x)) + sine).sum()
    del gate, sine
    loss.backward()


def base_saved_by_another_function(mlp, x):
    base = torch.mm(x.reshape(-1, 4), mlp.gate.weight)
    sine = base.sin()
    loss = (Probe.apply(base.view(x.shape), mlp.up(x)) + sine.view(x.shape)).sum()
    del base, sine
    loss.backward()


def seen_by_a_forward_hook(mlp, x):
    seen = []
    mlp.gate.register_forward_hook(lambda module, arguments, output: seen.append(output))
    mlp(x).sum().backward()


@pytest.mark.parametrize(
    "case",
    [
        kept_variable,
        kept_view,
        kept_part,
        kept_detached,
        kept_memory,
        kept_base,
        saved_by_another_function,
        base_saved_by_another_function,
        seen_by_a_forward_hook,
    ],
)
def test_what_somebody_else_sees_is_copied(case, x):
    case(MLP(), x)
    assert given == [[False, True]]


def one_tensor_twice(mlp, x):
    gate = mlp.gate(x)
    Probe.apply(gate, gate).sum().backward()


def halves_of_one_tensor(mlp, x):
    gate, up = torch.cat((mlp.gate(x), mlp.up(x)), -1).chunk(2, -1)
    Probe.apply(gate, up).sum().backward()


def memory_of_numpy(mlp, x):
    numpy = pytest.importorskip("numpy")
    Probe.apply(
        torch.from_numpy(numpy.ones(4)), torch.from_numpy(numpy.ones(4)).requires_grad_().view(4)
    ).sum().backward()


def memory_through_dlpack(mlp, x):
    seen = [torch.ones(4), torch.ones(4)]
    gate, up = (torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)) for tensor in seen)
    up.requires_grad_()
    loss = Probe.apply(gate, up.view(4)).sum()
    del gate, up
    loss.backward()


def parameters(mlp, x):
    Probe.apply(mlp.gate.weight, mlp.up.weight).sum().backward()


def packed_by_hooks(mlp, x):
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        loss = mlp(x).sum()
    loss.backward()


@pytest.mark.parametrize(
    "case",
    [
        kept_graph,
        one_tensor_twice,
        halves_of_one_tensor,
        memory_of_numpy,
        memory_through_dlpack,
        parameters,
        packed_by_hooks,
    ],
)
def test_both_are_copied(case, x):
    case(MLP(), x)
    assert given == [[False, False]]


@pytest.mark.parametrize(("kernel", "act"), [(glu.swiglu, "silu"), (glu.geglu_tanh, "gelu")])
def test_a_kept_activation_is_what_it_was(kernel, act, interpreter):
    mlp, x = MLP(), torch.randn(3, 4)
    gate, up = mlp.gate(x), mlp.up(x)
    before = gate.detach().clone()
    kernel(gate, up).sum().backward()
    assert torch.equal(gate, before)
    activation = {"silu": nn.functional.silu, "gelu": lambda g: nn.functional.gelu(g, approximate="tanh")}[act]
    expected = torch.autograd.grad((activation(mlp.gate(x)) * mlp.up(x)).sum(), mlp.gate.weight)[0]
    torch.testing.assert_close(mlp.gate.weight.grad, expected)


def test_the_gradients_lie_in_the_memory_of_the_activations(interpreter):
    mlp, x, addresses = MLP(), torch.randn(3, 4), []
    gate = mlp.gate(x)
    gate.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    addresses.append(gate.data_ptr())
    out = glu.swiglu(gate, mlp.up(x))
    del gate
    gc.collect()  # the interpreter leaves cycles that hold the memory
    out.sum().backward()
    assert addresses[0] == addresses[1]
