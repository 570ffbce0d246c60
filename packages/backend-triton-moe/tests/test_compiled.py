"""Every kernel compiles for every target that the backend claims, which needs no device."""

import pytest
import torch
from opslot_backends.triton_moe import _tiling
from opslot_backends.triton_moe.moe_experts import moe_experts, moe_experts_gpt_oss

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory that a program may have: CUDA's programming guide, "technical specifications"; CDNA3's ISA.
LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def run(function, arguments):
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    function(*arguments).sum().backward()


def standard(dtype, tokens=2048, hidden=256, inner=128, experts=4):
    index = torch.randint(experts, (tokens, 2))
    x, weights = torch.ones(tokens, hidden, dtype=dtype), torch.ones(tokens, 2, dtype=dtype)
    return (
        x,
        index,
        weights,
        torch.ones(experts, 2 * inner, hidden, dtype=dtype),
        torch.ones(experts, hidden, inner, dtype=dtype),
    )


def gpt_oss(dtype):
    x, index, weights, gate_up, down = standard(dtype)
    biases = torch.ones(gate_up.shape[:2], dtype=dtype), torch.ones(down.shape[:2], dtype=dtype)
    return x, index, weights, gate_up.mT.contiguous(), biases[0], down.mT.contiguous(), biases[1], 1.702, 7.0


@pytest.mark.slow
@pytest.mark.parametrize(("target", "tile"), [*((target, 128) for target in TARGETS), ("sm_90", 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["standard", "gpt_oss"])
def test_the_experts(variant, dtype, target, tile, offline, monkeypatch):
    """With the blocks of a GPU, cut down to the shared memory of the target, which what is compiled keeps to."""
    table = _tiling.Table.parse(_tiling._SHIPPED.read_text(encoding="utf-8"))

    def blocks(kernel, x, tile, rows, columns, depth):
        found = next(b for p, b in table.entries if (p.kernel, p.itemsize, p.tile) == (kernel, x.element_size(), tile))
        return _tiling.fitted(kernel, found, x.element_size(), LIMITS[target], hopper=target == "sm_90")

    monkeypatch.setattr(_tiling, "tile", lambda x, choices, experts: tile)
    monkeypatch.setattr(_tiling, "blocks", blocks)
    if target == "gfx942":
        monkeypatch.setattr(_tiling, "precision", lambda x: "ieee")
    function, arguments = (moe_experts, standard) if variant == "standard" else (moe_experts_gpt_oss, gpt_oss)
    compiled = offline(*TARGETS[target])
    run(function, arguments(dtype))
    expected = {
        "count",
        "layout",
        "place",
        "up",
        "product",
        "combine",
        "dispatch",
        "activation_gradient",
        "weight_gradient",
    }
    assert {name for name, _ in compiled} == expected | ({"bias_gradient"} if variant == "gpt_oss" else set())
    assert max(kernel.metadata.shared for _, kernel in compiled) <= LIMITS[target]
