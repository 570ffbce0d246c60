"""What each guard becomes, and every place where one is refused."""

import re
from dataclasses import replace

import pytest
from opslot_patchgen import (
    AmbiguousTarget,
    CallGuard,
    EntryGuard,
    ForwardGuard,
    InverseError,
    ModelSpec,
    NameCollision,
    RegionGuard,
    Slot,
    SourceError,
    SpecError,
    TargetGone,
    UnreachableGuard,
    build,
    lock_family,
    read_source,
)

MODULE = "transformers.models.tiny.modeling_tiny"
FRAME = """\
import torch
from torch import nn


class TinyPreTrainedModel(PreTrainedModel):
    pass


"""
NORM = """\
class TinyNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        # upcast
        x = x.float()
        return self.weight * x
"""
NORM_GUARD = EntryGuard(
    target="TinyNorm.forward", slot=Slot("rms_norm", "standard"), result="kernel(x, self.weight, self.eps)"
)

ATTENTION = '''\
class TinyAttention(nn.Module):
    """Attention."""

    def forward(self, q, k, position):
        """Rotates."""

        # both at once
        q, k = rotate(q, k, *position)  # in place

        return q @ k
'''
ATTENTION_GUARD = CallGuard(target="TinyAttention.forward", slot=Slot("rotary_pos_emb", "full"), call="rotate")

HEAD = """\
class TinyForCausalLM(TinyPreTrainedModel):
    def forward(self, x, labels=None, **kwargs):
        x = self.model(x)
        logits = self.lm_head(x)

        # no labels, no loss
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, **kwargs)
        return loss, logits
"""
HEAD_GUARD = RegionGuard(
    target="TinyForCausalLM.forward",
    slot=Slot("cross_entropy_loss", "causal", check="acme.adoption:own_loss"),
    first="self.lm_head",
    last="self.loss_function",
    when="labels is not None",
    cleared=("logits",),
    result="loss",
    arguments=("self.cross_entropy_loss_op.weight(self.lm_head)",),
    forwarded=(("num_items_in_batch", None), ("ignore_index", -100)),
)

EXPERTS = """\
# Many of them.
@use_experts_implementation(is_concatenated=False)
class TinyExperts(nn.Module):
    def __init__(self):
        self.gate_up_proj = self.down_proj = self.act_fn = None

    def forward(self, x):
        return x
"""
EXPERTS_GUARD = ForwardGuard(
    target="TinyExperts",
    slot=Slot("moe_experts", "standard", activation="act_fn"),
    attributes=("gate_up_proj", "down_proj"),
)


def test_entry_guard_stands_above_the_comment_of_the_first_statement(generate):
    assert """\
class TinyNorm(nn.Module):
    rms_norm_op = OpSlot("rms_norm", "standard")  # opslot
    def __init__(self, size, eps=1e-6):
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        kernel = self.rms_norm_op.kernel  # opslot: rms_norm/standard
        if kernel is not None:  # opslot
            return kernel(x, self.weight, self.eps)  # opslot
        # upcast
        x = x.float()
        return self.weight * x
""" in generate(NORM, NORM_GUARD)


def test_entry_guard_stands_below_the_docstring(generate):
    text = NORM.replace("        # upcast\n", '        """Normalise."""\n\n        # upcast\n')
    assert (
        '        """Normalise."""\n        kernel = self.rms_norm_op.kernel  # opslot: rms_norm/standard\n'
    ) in generate(text, NORM_GUARD)


def test_call_guard_takes_targets_and_arguments_from_the_source(generate):
    assert '''\
class TinyAttention(nn.Module):
    """Attention."""
    rotary_pos_emb_op = OpSlot("rotary_pos_emb", "full")  # opslot

    def forward(self, q, k, position):
        """Rotates."""

        # both at once
        kernel = self.rotary_pos_emb_op.kernel  # opslot: rotary_pos_emb/full
        if kernel is not None:  # opslot
            q, k = kernel(q, k, *position)  # in place  # opslot
        else:  # opslot
            q, k = rotate(q, k, *position)  # in place

        return q @ k
''' in generate(ATTENTION, ATTENTION_GUARD)


def test_call_guard_over_several_lines(generate):
    text = ATTENTION.replace("rotate(q, k, *position)", "rotate(\n            q,\n\n            k,\n        )")
    assert """\
            q, k = kernel(  # opslot
                q,  # opslot
                k,  # opslot
            )  # in place  # opslot
        else:  # opslot
            q, k = rotate(
                q,

                k,
            )  # in place
""" in generate(text, ATTENTION_GUARD)


def test_a_call_may_have_a_condition(generate):
    guard = replace(ATTENTION_GUARD, when="torch.is_grad_enabled()")
    line = (
        "kernel = self.rotary_pos_emb_op.kernel if torch.is_grad_enabled() else None  # opslot: rotary_pos_emb/full\n"
    )
    assert line in generate(ATTENTION, guard)
    with pytest.raises(TargetGone, match="no `later` where the guard reads it"):
        generate(ATTENTION, replace(guard, when="later"))


def test_region_guard(generate):
    generated = generate(HEAD, HEAD_GUARD)
    assert (
        """\
        x = self.model(x)
        kernel = self.cross_entropy_loss_op.kernel if labels is not None else None  # opslot: cross_entropy_loss/causal
        if kernel is not None:  # opslot
            logits = None  # opslot
            loss = kernel(  # opslot
                x,  # opslot
                self.cross_entropy_loss_op.weight(self.lm_head),  # opslot
                num_items_in_batch=kwargs.get("num_items_in_batch"),  # opslot
                ignore_index=kwargs.get("ignore_index", -100),  # opslot
            )  # opslot
        else:  # opslot
            logits = self.lm_head(x)

            # no labels, no loss
            loss = None
            if labels is not None:
                loss = self.loss_function(logits, labels, **kwargs)
        return loss, logits
"""
        in generated
    )
    assert 'cross_entropy_loss_op = OpSlot("cross_entropy_loss", "causal", check=own_loss)  # opslot\n' in generated
    assert "from acme.adoption import own_loss  # opslot\n" in generated


def test_an_entry_guard_in_front_of_a_call(generate):
    assert """\
        # upcast
        x = x.float()
        kernel = self.rms_norm_op.kernel  # opslot: rms_norm/standard
        if kernel is not None:  # opslot
            return kernel(x, self.weight)  # opslot
        return x.rsqrt() * x
""" in generate(NORM.replace("self.weight * x", "x.rsqrt() * x"), before("x.rsqrt"))


def test_a_kernel_gets_of_a_mapping_what_is_forwarded(generate):
    text = mapped("rotate(\n            q,\n            k,\n            **kwargs,\n        )")
    guard = replace(ATTENTION_GUARD, forwarded=(("cu_seqlens", "cu_seq_lens_q"), ("most", "most")))
    assert """\
            q, k = kernel(  # opslot
                q,  # opslot
                k,  # opslot
                cu_seqlens=kwargs.get("cu_seq_lens_q"), most=kwargs.get("most"),  # opslot
            )  # in place  # opslot
        else:  # opslot
            q, k = rotate(
                q,
                k,
                **kwargs,
            )  # in place
""" in generate(text, guard)
    assert """\
                k,  # opslot
            )  # in place  # opslot
""" in generate(text, replace(guard, forwarded=()))


def test_a_call_guard_may_give_the_value_itself(generate):
    text = ATTENTION.replace("rotate(q, k, *position)", "tuple(rotate(q, k, *position))")
    assert """\
        if kernel is not None:  # opslot
            q, k = kernel(q, k), None  # opslot
        else:  # opslot
            q, k = tuple(rotate(q, k, *position))  # in place
""" in generate(text, replace(ATTENTION_GUARD, result="kernel(q, k), None"))


def test_a_region_may_assign_what_nobody_reads_later(generate):
    text = HEAD.replace("loss = None\n", "loss = None\n        scale = 2\n        labels = labels\n")
    assert "loss = kernel(" in generate(text, HEAD_GUARD)
    with pytest.raises(SourceError, match="assigns labels, logits, loss, scale; the guard sets logits, loss"):
        generate(text.replace("return loss, logits", "return loss, logits * scale"), HEAD_GUARD)


def test_a_region_without_the_operand_of_its_first_call(generate):
    generated = generate(HEAD, region(operand=False, arguments=("x", "labels"), forwarded=()))
    assert "loss = kernel(  # opslot\n                x,  # opslot\n                labels,  # opslot\n" in generated


def test_a_guard_of_a_later_release_is_in_no_earlier_module(upstream):
    guard = replace(NORM_GUARD, since=("5.24", "no weight"))
    spec = ModelSpec(family="tiny", source=MODULE, guards=(guard, ATTENTION_GUARD))
    for version, found in (("5.9.0", 0), ("5.23.4", 0), ("5.24.0.dev0", 1), ("5.100.0", 1), ("6.0.0", 1)):
        source = read_source(MODULE, upstream(FRAME + NORM + "\n\n" + ATTENTION, version=version))
        assert build(spec, source, "acme.patches").text.count("# opslot: rms_norm/standard") == found
        assert ("TinyNorm.forward" in lock_family(spec, source).targets) == bool(found)


def test_a_class_that_only_chooses_says_so(upstream):
    spec = ModelSpec(
        family="tiny", source=MODULE, guards=(NORM_GUARD,), untrained=("TinyAttention",), whole=("TinyNorm",)
    )
    text = build(spec, read_source(MODULE, upstream(FRAME + NORM + "\n\n" + ATTENTION)), "acme.patches").text
    assert '    """Attention."""\n    opslot_untrained = True  # opslot\n' in text
    assert "class TinyNorm(nn.Module):\n" in text
    assert "    opslot_whole = True  # opslot\n" in text
    with pytest.raises(TargetGone, match="TinyIndexer is gone"):
        build(replace(spec, untrained=("TinyIndexer",)), read_source(MODULE, upstream(FRAME + NORM)), "acme.patches")


def test_forward_guard_is_the_outermost_decorator(generate):
    generated = generate(EXPERTS, EXPERTS_GUARD)
    assert (
        """\
# Many of them.
@guard_forward("moe_experts_op", "gate_up_proj", "down_proj")  # opslot: moe_experts/standard
@use_experts_implementation(is_concatenated=False)
class TinyExperts(nn.Module):
    moe_experts_op = OpSlot("moe_experts", "standard", activation="act_fn")  # opslot
"""
        in generated
    )
    assert "from opslot import OpSlot, guard_forward  # opslot\n" in generated


def test_two_guards_of_one_op_in_a_class_declare_its_slot_once(generate):
    text = f"{NORM}\n    def extra(self, y):\n        return y\n"
    second = EntryGuard(target="TinyNorm.extra", slot=NORM_GUARD.slot, result="kernel(y, self.weight, self.eps)")
    generated = generate(text, NORM_GUARD, second)
    assert generated.count("rms_norm_op = OpSlot") == 1
    assert generated.count("# opslot: rms_norm/standard") == 2


def test_attributes_of_a_base_in_the_module_are_known(generate):
    text = f"{NORM}\n\nclass Other(TinyNorm):\n    def forward(self, x):\n        return x\n"
    assert "class Other" in generate(text, EntryGuard(**{**vars(NORM_GUARD), "target": "Other.forward"}))


def test_decorators_that_only_kernelize_uses_are_allowed(generate):
    assert "rms_norm_op" in generate(f'@use_kernel_forward_from_hub("RMSNorm")\n{NORM}', NORM_GUARD)


def entry(target, result="kernel(x)"):
    return EntryGuard(target=target, slot=Slot("rms_norm", "standard"), result=result)


def call(name):
    return CallGuard(target="TinyAttention.forward", slot=Slot("rotary_pos_emb", "full"), call=name)


def region(**changes):
    return RegionGuard(**{**vars(HEAD_GUARD), **changes})


def before(name):
    return replace(NORM_GUARD, result="kernel(x, self.weight)", before=name)


def mapped(text):
    return ATTENTION.replace("position):", "position, **kwargs):").replace("rotate(q, k, *position)", text)


REFUSALS = {
    "nothing to stand before": (NORM, before("x.half"), TargetGone, ":19: TinyNorm.forward does not call x.half"),
    "before a header": (
        NORM.replace("        x = x.float()\n", "        if x.float() is None:\n            pass\n"),
        before("x.float"),
        SourceError,
        ":21: x.float is not called in a line of TinyNorm.forward itself",
    ),
    "before a call in a function inside": (
        NORM.replace("        x = x.float()\n", "        def wide(x):\n            return x.float()\n"),
        before("x.float"),
        SourceError,
        ":22: x.float is not called in a line of TinyNorm.forward itself",
    ),
    "nothing to forward from": (
        ATTENTION,
        replace(ATTENTION_GUARD, forwarded=(("cu_seqlens", "cu_seq_lens_q"),)),
        TargetGone,
        ":21: rotate gets no `**mapping`",
    ),
    "a mapping beside another argument": (
        mapped("rotate(q, k, **kwargs)"),
        replace(ATTENTION_GUARD, forwarded=()),
        SourceError,
        ":21: a mapping that no kernel gets does not stand on a line of its own",
    ),
    "a value in a return": (
        ATTENTION,
        replace(ATTENTION_GUARD, call="q.view", result="kernel(q, k)"),
        TargetGone,
        "does not call q.view",
    ),
    "read in the next round of a loop": (
        """\
class TinyForCausalLM(TinyPreTrainedModel):
    def forward(self, x, labels=None, **kwargs):
        for n in x:
            self.note(n, scale)
            logits = self.lm_head(x)
            scale = 2
            loss = self.loss_function(logits, labels, **kwargs)
        return loss
""",
        HEAD_GUARD,
        SourceError,
        ":18: the region from self.lm_head to self.loss_function assigns logits, loss, scale; the guard sets",
    ),
    "target gone": (
        NORM,
        entry("TinyNorms.forward"),
        TargetGone,
        "TinyNorms.forward is gone; near it: TinyNorm.forward",
    ),
    "two definitions": (NORM + "\n\n" + NORM, NORM_GUARD, AmbiguousTarget, ":30: TinyNorm.forward is defined 2 times"),
    "not a method": (
        "def f():\n    def g(self):\n        pass\n",
        entry("f.g", "kernel()"),
        SourceError,
        ":15: f.g is not a method",
    ),
    "no self": (NORM.replace("self, x", "cls, x"), NORM_GUARD, SourceError, ":19: TinyNorm.forward has no self"),
    "one-line body": (
        "class A:\n    def forward(self, x): return x\n",
        entry("A.forward"),
        SourceError,
        ":15: the body",
    ),
    "parameter renamed": (NORM.replace("x", "y"), NORM_GUARD, TargetGone, "no `x` where the guard reads it"),
    "bound only later": (
        NORM.replace("x = x.float()", "y = x.float()"),
        entry("TinyNorm.forward", "kernel(y)"),
        TargetGone,
        ":19: TinyNorm.forward has no `y` where the guard reads it",
    ),
    "attribute renamed": (
        NORM.replace("eps", "epsilon"),
        NORM_GUARD,
        TargetGone,
        ":14: TinyNorm has no attribute `eps`",
    ),
    "activation renamed": (EXPERTS.replace("act_fn", "act"), EXPERTS_GUARD, TargetGone, "no attribute `act_fn`"),
    "parameter gone": (EXPERTS.replace("down", "dn"), EXPERTS_GUARD, TargetGone, "no attribute `down_proj`"),
    "no forward": (EXPERTS.replace("def forward", "def run"), EXPERTS_GUARD, TargetGone, "TinyExperts.forward is gone"),
    "experts swap it": (
        f"@use_experts_implementation\n{NORM}",
        NORM_GUARD,
        UnreachableGuard,
        ":14: @use_experts_implementation swaps TinyNorm.forward",
    ),
    "fallback swaps it": (
        NORM.replace(
            "    def forward", '    @integrations.use_kernel_func_from_hub_with_fallback("f", "g")\n    def forward'
        ),
        NORM_GUARD,
        UnreachableGuard,
        ":19: @use_kernel_func_from_hub_with_fallback swaps TinyNorm.forward",
    ),
    "kernel is taken": (
        NORM.replace("x.float()", "kernel(x)"),
        NORM_GUARD,
        NameCollision,
        ":21: TinyNorm.forward already",
    ),
    "slot is taken": (
        NORM.replace("self.eps = eps", "self.eps = self.rms_norm_op = eps"),
        NORM_GUARD,
        NameCollision,
        ":17:",
    ),
    "call gone": (ATTENTION, call("turn"), TargetGone, ":17: TinyAttention.forward does not call turn"),
    "call twice": (
        ATTENTION.replace("return q @ k", "q, k = rotate(q, k)\n        return q @ k"),
        ATTENTION_GUARD,
        AmbiguousTarget,
        ":23: TinyAttention.forward calls rotate 2 times",
    ),
    "call inside an expression": (
        ATTENTION.replace("rotate(q, k, *position)", "list(rotate(q, k, *position))"),
        ATTENTION_GUARD,
        SourceError,
        ":21: the call of rotate is not the value of an assignment",
    ),
    "two statements on the line": (
        ATTENTION.replace("*position)", "*position); q = q + 1"),
        ATTENTION_GUARD,
        SourceError,
        ":21: the call of rotate is not the value of an assignment",
    ),
    "backslash": (
        ATTENTION.replace("q, k = rotate", "q, k = \\\n            rotate"),
        ATTENTION_GUARD,
        SourceError,
        ":22: a line continued with a backslash",
    ),
    "string over lines": (
        HEAD.replace("logits, labels,", 'logits, f"""a\n                {x}""",'),
        HEAD_GUARD,
        SourceError,
        ":22: a string over several lines",
    ),
    "left of the block": (
        HEAD.replace("        # no labels", "    # no labels"),
        HEAD_GUARD,
        SourceError,
        ":19: stands left",
    ),
    "first call gone": (HEAD.replace("lm_head", "head"), HEAD_GUARD, TargetGone, "does not call self.lm_head"),
    "order turned": (
        HEAD,
        region(first="self.loss_function", last="self.lm_head", arguments=("x",)),
        SourceError,
        ":22: self.loss_function is called after self.lm_head",
    ),
    "region assigns more": (
        HEAD.replace("loss = None\n", "loss = None\n        scale, self.n = 1, 2\n"),
        HEAD_GUARD,
        SourceError,
        ":17: the region from self.lm_head to self.loss_function assigns logits, loss, scale, self.n; the guard sets",
    ),
    "guard sets more": (HEAD, region(cleared=("logits", "hidden")), SourceError, "the guard sets hidden, logits, loss"),
    "region returns inside": (
        HEAD.replace("loss = None\n", "loss = None\n        if x is None:\n            return None\n"),
        HEAD_GUARD,
        SourceError,
        ":22: a return inside the region",
    ),
    "the call takes more": (
        HEAD.replace("self.lm_head(x)", "self.lm_head(x, bias=None)"),
        HEAD_GUARD,
        SourceError,
        ":17: self.lm_head is not called with one positional argument",
    ),
    "the call is spread": (
        HEAD.replace("self.lm_head(x)", "self.lm_head(\n            x[\n                0])"),
        HEAD_GUARD,
        SourceError,
        ":17: the argument of self.lm_head is not written on one line",
    ),
    "nothing is forwarded any more": (
        HEAD.replace("labels, **kwargs)", "labels)"),
        HEAD_GUARD,
        TargetGone,
        ":22: self.loss_function gets no `**mapping`",
    ),
    "argument not bound yet": (HEAD, region(arguments=("y",)), TargetGone, "TinyForCausalLM.forward has no `y`"),
    "condition not bound yet": (HEAD, region(when="later is None"), TargetGone, "no `later` where the guard reads it"),
    "comment would move": (
        HEAD.replace("**kwargs)\n        return", "**kwargs)\n            # deeper than the block\n        return"),
        HEAD_GUARD,
        InverseError,
        "undoing the edits does not give the source back",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case, generate):
    text, guard, error, message = REFUSALS[case]
    with pytest.raises(error, match=re.escape(message)) as raised:
        generate(text, guard)
    assert raised.type is error
    assert "modeling_tiny.py" in str(raised.value)


def test_a_region_reads_what_upstream_gives_its_calls(generate):
    """Whatever they are called there: releases slice the tokens in the call, and name the keywords otherwise."""
    text = HEAD.replace("self.lm_head(x)", "self.lm_head(x[:, keep, :])").replace("x = self", "keep = x = self")
    text = text.replace("**kwargs", "**lm_kwargs")
    generated = generate(text, HEAD_GUARD)
    assert "loss = kernel(  # opslot\n                x[:, keep, :],  # opslot\n" in generated
    assert 'ignore_index=lm_kwargs.get("ignore_index", -100),  # opslot\n' in generated


def test_overlapping_guards_are_refused(generate):
    inner = CallGuard(target="TinyForCausalLM.forward", slot=Slot("loss", "standard"), call="self.loss_function")
    with pytest.raises(SpecError, match=r"modeling_tiny\.py:\d+: two edits of tiny meet here"):
        generate(HEAD, HEAD_GUARD, inner)


def test_one_attribute_for_two_variants_is_refused(generate):
    text = f"{NORM}\n    def extra(self, x):\n        return x\n"
    other = EntryGuard(target="TinyNorm.extra", slot=Slot("rms_norm", "unweighted"), result="kernel(x)")
    with pytest.raises(SpecError, match="rms_norm_op is declared in two ways"):
        generate(text, NORM_GUARD, other)


# Below or inside NORM: what runs in place of the guarded method.
REPLACED = {
    "the method": ("", "\nTinyNorm.forward = other\n", "replaces TinyNorm.forward"),
    "the method by setattr": ("", "\nsetattr(TinyNorm, 'forward', other)\n", "replaces TinyNorm.forward"),
    "the class": ("", "\nif other:\n    TinyNorm = other\n", "replaces TinyNorm"),
    "the class among others": ("", "\nTinyNorm, more = other\n", "replaces TinyNorm"),
    "the class by an import": ("", "\nfrom ...more import TinyNorm\n", "replaces TinyNorm"),
    "the class by a name": ("", "\nfrom ...more import B as TinyNorm\n", "replaces TinyNorm"),
    "wrapped in the class": ("", "    forward = other(forward)\n", "replaces forward"),
    "of an instance": (
        "        self.eps = eps",
        "        self.eps = self.forward = eps",
        "replaces self.forward",
    ),
    "in a subclass": (
        "",
        "\nclass A(TinyNorm):\n    pass\n\n\nclass B(A):\n    def forward(self, x):\n        return x\n",
        "B.forward overrides TinyNorm.forward",
    ),
    "of a subclass": ("", "\nclass A(TinyNorm):\n    pass\n\n\nA.forward = other\n", "replaces A.forward"),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize(
    "guard", [NORM_GUARD, ForwardGuard(target="TinyNorm", slot=NORM_GUARD.slot, attributes=())], ids=["in", "over"]
)
def test_a_method_that_something_replaces_is_refused(generate, case, guard):
    line, code, message = REPLACED[case]
    text = NORM.replace(line, code) if line else NORM + code
    with pytest.raises(UnreachableGuard, match=rf"modeling_tiny\.py:\d+: .*{re.escape(message)}"):
        generate(text, guard)


def test_an_override_with_a_guard_of_its_own_is_no_obstacle(generate):
    other = EntryGuard(target="A.forward", slot=NORM_GUARD.slot, result="kernel(x, self.weight, self.eps)")
    heir = "\n\nclass A(TinyNorm):\n    def forward(self, x):\n        return x\n"
    assert generate(NORM + heir, NORM_GUARD, other).count("# opslot: rms_norm/standard") == 2


@pytest.mark.parametrize(
    "code",
    [
        "class A(TinyNorm):\n    def forward(self, x):\n        return super().forward(x) + 1\n",
        "other.TinyNorm = TinyNorm\n",
        "class A:\n    forward = None\n\n    def __init__(self):\n        self.forward = 1\n",
    ],
)
def test_what_replaces_nothing_is_no_obstacle(generate, code):
    assert "# opslot: rms_norm/standard" in generate(f"{NORM}\n\n{code}", NORM_GUARD)
