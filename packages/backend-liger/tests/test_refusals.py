"""What Liger's kernels cannot do is refused before they run, and says what would work."""

import subprocess
import sys
from types import SimpleNamespace

import opslot
import pytest
import torch
from opslot import KernelUnavailable

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: it needs triton, which is not everywhere")

from opslot_backends.liger import cross_entropy_loss, glu, moe_experts, rms_norm, rotary_pos_emb
from opslot_backends.liger._implementation import chosen, implementation


def tables(*shape):
    angle = torch.randn(*shape[:-1], shape[-1] // 2).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def heads():
    return torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)


def test_rows_longer_than_a_block():
    x = torch.randn(1, 65537)
    with pytest.raises(KernelUnavailable, match=r"up to 65536 elements, got 65537: choose eager"):
        rms_norm.rms_norm(x, torch.ones(65537), 1e-6)
    with pytest.raises(KernelUnavailable, match=r"glu/swiglu: liger takes rows of up to 65536"):
        glu.swiglu(x, x)


def test_shapes_that_liger_would_read_past():
    with pytest.raises(ValueError, match=r"weight of shape \(4,\) for rows of 8"):
        rms_norm.rms_norm(torch.randn(3, 8), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match=r"one shape, got \(3, 8\) and \(1, 8\)"):
        glu.swiglu(torch.randn(3, 8), torch.randn(1, 8))
    q, k = heads()
    with pytest.raises(ValueError, match="cos and sin"):
        rotary_pos_emb.rotary_pos_emb(q, k, *tables(1, 4, 8))
    with pytest.raises(ValueError, match="cos and sin"):
        rotary_pos_emb.rotary_pos_emb(q, k, *tables(1, 5, 16))
    with pytest.raises(ValueError, match=r"cos and sin must both be \[B or 1, S, 8\]"):
        rotary_pos_emb.rotary_pos_emb(q, k, tables(1, 5, 8)[0], tables(1, 5, 6)[1])
    with pytest.raises(ValueError, match=r"got \(1, 5, 4\) and \(1, 5, 4\) for 5 tokens"):
        rotary_pos_emb.rotary_pos_emb(q, k, *tables(1, 5, 4))
    with pytest.raises(ValueError, match="cos and sin"):
        rotary_pos_emb.rotary_pos_emb_partial(q, k, *tables(2, 5, 4))
    with pytest.raises(ValueError, match="cos and sin"):
        rotary_pos_emb.rotary_pos_emb_half_table(q, k, *tables(1, 5, 8))


@pytest.mark.parametrize("shape", [(1, 1, 7, 8), (2, 1, 5, 8), (1, 1, 5, 4), (1, 5, 8)])
def test_keys_of_other_sizes_than_the_queries(shape):
    """Liger goes over k by the sizes of q."""
    for function, width in ((rotary_pos_emb.rotary_pos_emb, 8), (rotary_pos_emb.rotary_pos_emb_partial, 4)):
        with pytest.raises(ValueError, match="differ in their number of heads alone"):
            function(heads()[0], torch.randn(shape), *tables(1, 5, width))


@pytest.mark.parametrize("unsqueeze_dim", [-3, -2, 0, 3])
def test_heads_that_are_in_no_known_place(unsqueeze_dim):
    x = torch.randn(1, 5, 5, 8)
    with pytest.raises(ValueError, match=f"unsqueeze_dim is 1 for .* or 2 for .*, got {unsqueeze_dim}"):
        rotary_pos_emb.rotary_pos_emb(x, x, *tables(1, 5, 8), unsqueeze_dim)


def test_tables_whose_halves_differ(interpreter):
    q, k = heads()
    cos, sin = tables(1, 5, 8)
    rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)
    with pytest.raises(KernelUnavailable, match=r"reads the first half of cos and sin.*rotary_pos_emb: eager"):
        rotary_pos_emb.rotary_pos_emb(q, k, cos, torch.randn(1, 5, 8))
    # What was found to agree is looked at again once it has been written to.
    cos[0, 3, 5] += 1
    with pytest.raises(KernelUnavailable, match="reads the first half"):
        rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)
    with torch.inference_mode():
        cos, sin = tables(1, 5, 8)
        rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)
        sin[0, 0, 0] += 1
        with pytest.raises(KernelUnavailable, match="reads the first half"):
            rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)


def test_a_table_that_got_other_memory(interpreter):
    (q, k), (cos, sin) = heads(), tables(1, 5, 8)
    rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)
    cos.data = torch.randn(1, 5, 8)
    with pytest.raises(KernelUnavailable, match="reads the first half"):
        rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)


def test_tables_are_looked_at_once(interpreter, monkeypatch):
    looked = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: looked.append(1) or equal(a, b))
    (q, k), (cos, sin) = heads(), tables(1, 5, 8)
    for _ in range(3):
        rotary_pos_emb.rotary_pos_emb(q, k, cos, sin)
    assert len(looked) == 2


def test_compiled_the_device_stops_at_tables_whose_halves_differ(interpreter):
    (q, k), (cos, sin) = heads(), tables(1, 5, 8)
    compiled = torch.compile(rotary_pos_emb.rotary_pos_emb, fullgraph=True, backend="aot_eager")
    compiled(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="reads the first half"):
        compiled(q, k, cos, torch.randn(1, 5, 8))


def test_gradients_of_tables():
    (q, k), (cos, sin) = heads(), tables(1, 5, 8)
    with pytest.raises(KernelUnavailable, match="no gradient of cos and sin; to learn them choose eager"):
        rotary_pos_emb.rotary_pos_emb(q, k, cos.requires_grad_(), sin)


def loss_of(labels, **keywords):
    return cross_entropy_loss.token_cls(torch.randn(3, 8), torch.randn(5, 8), torch.tensor(labels), **keywords)


def test_labels_that_are_no_class(interpreter):
    loss_of([0, 4, -100])
    loss_of([0, 4, -1], ignore_index=-1)
    for labels in ([0, 4, 5], [0, 4, -1]):
        with pytest.raises(RuntimeError, match="a label is neither a class nor ignore_index"):
            loss_of(labels)


def test_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="one label a row of hidden_states, got 2 labels for 3 rows"):
        loss_of([0, 1])


def test_dtypes_that_differ():
    rows, labels = torch.randn(3, 8), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"got hidden_states torch.float32 and lm_head_weight torch.bfloat16"):
        cross_entropy_loss.token_cls(rows, torch.randn(5, 8).bfloat16(), labels)
    with pytest.raises(ValueError, match=r"got hidden_states torch.bfloat16 and down torch.float16"):
        moe_experts.moe_experts(
            rows.bfloat16(), labels[:, None], rows[:, :1], torch.randn(2, 6, 8).bfloat16(), torch.randn(2, 8, 3).half()
        )


def test_a_choice_of_experts_that_is_none():
    with pytest.raises(ValueError, match=r"must both be \[T, K\], got \(3,\) and \(3, 1\)"):
        moe_experts.moe_experts(
            torch.randn(3, 8), torch.zeros(3), torch.randn(3, 1), torch.randn(2, 6, 8), torch.randn(2, 8, 3)
        )


@pytest.mark.parametrize(
    ("hidden", "gate_up", "down"),
    [
        ((2, 8), (2, 6, 8), (2, 8, 3)),
        ((3, 4), (2, 6, 8), (2, 8, 3)),
        ((3, 8), (2, 5, 8), (2, 8, 3)),
        ((3, 8), (2, 6, 8), (1, 8, 3)),
        ((3, 8), (2, 6, 8), (2, 4, 3)),
        ((1, 3, 8), (2, 6, 8), (2, 8, 3)),
    ],
)
def test_experts_that_liger_would_read_past(hidden, gate_up, down):
    choices = torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"gate_up \[E, 2I, H\] and down \[E, H, I\], got .* of 3 tokens"):
        moe_experts.moe_experts(torch.randn(hidden), choices, torch.ones(3, 1), torch.randn(gate_up), torch.randn(down))


def in_module(name):
    return SimpleNamespace(__module__=name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("liger_kernel.ops.rms_norm", "triton"),
        ("liger_kernel.ops.cutedsl.ops.rms_norm", "cutedsl"),
        ("liger_kernel.ops.cutile.ops.swiglu", "cutile"),
        ("liger_kernel.ops.backends._ascend.ops.rope", "ascend"),
    ],
)
def test_the_implementation_is_read_off_the_function(module, name):
    assert implementation(in_module(module)) == name


def test_an_implementation_that_was_not_verified_gives_way_to_triton_and_says_so(monkeypatch):
    from liger_kernel import ops
    from liger_kernel.ops import rms_norm as triton

    def replacement():
        raise AssertionError

    replacement.__module__ = "liger_kernel.ops.cutedsl.ops.rms_norm"
    monkeypatch.setattr(ops, "rms_norm_forward", replacement)
    arguments = "rms_norm", "liger_kernel.ops.rms_norm", ("rms_norm_forward", "rms_norm_backward")
    with pytest.warns(UserWarning, match=r"rms_norm: LIGER_KERNEL_IMPL chose liger's 'cutedsl'.*runs liger's Triton"):
        name, (forward, backward) = chosen(*arguments)
    assert (name, forward, backward) == ("triton", triton.rms_norm_forward, triton.rms_norm_backward)
    assert chosen(*arguments, also=("cutedsl",)) == ("cutedsl", (replacement, triton.rms_norm_backward))


def test_an_implementation_that_liger_does_not_know_is_an_error_at_bind():
    code = (
        "import opslot\n"
        "known = opslot.registry()\n"
        "try: known.load(known.offer('rms_norm', 'standard', 'liger'))\n"
        "except RuntimeError as error: print(error, *error.__notes__)\n"
    )
    environment = {"LIGER_KERNEL_IMPL": "nonsense", "PATH": ""}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "Unknown LIGER_KERNEL_IMPL='nonsense'" in said.stdout
    assert "while loading kernel rms_norm/standard:liger of opslot-backend-liger" in said.stdout


def test_reports_name_the_implementation():
    known = opslot.registry()
    for op, variant in (("rms_norm", "standard"), ("glu", "geglu_tanh"), ("cross_entropy_loss", "causal")):
        kernel = known.offer(op, variant, "liger")
        known.load(kernel)
        module, _, name = kernel.spec.nested.partition(":")
        assert getattr(sys.modules[module], name)() == "triton"
