"""On a GPU, in bfloat16: all-eager is upstream there too, and the kernels that `auto` chooses train as it does."""

import opslot
import pytest
import torch
from opslot_models import families

from packages.models.tests.parity import assert_equal, both, perturb

every_family = pytest.mark.parametrize("family", families())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def on_gpu(batch):
    return {name: value.cuda() for name, value in batch.items()}


@every_family
def test_all_eager_is_upstream(config, on_gpu, deterministic):
    models = [*both(config(dtype=torch.bfloat16)), both(config(dtype=torch.bfloat16))[0]]
    perturb(*models)
    upstream, ours, again = (model.cuda() for model in models)
    assert_equal(upstream, again, on_gpu)  # else there is nothing to be equal to
    upstream.zero_grad()
    assert_equal(upstream, ours, on_gpu)


def gradients(model, batch):
    model.train()
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().float(), torch.cat(found)


@every_family
def test_the_kernels_of_auto_are_as_near_to_float32_as_upstream(config, on_gpu):
    """In bfloat16, by the loss and by all gradients as one vector.

    A router or an indexer may choose otherwise by a rounding, in upstream's code too: hence twice upstream's distance.
    """
    wide, ours = both(config(attention_dropout=0.0))
    perturb(wide, ours)
    narrow, _ = both(config(attention_dropout=0.0))
    perturb(narrow)
    wide.cuda()
    ours.to("cuda", torch.bfloat16)
    narrow.to("cuda", torch.bfloat16)
    binding = opslot.bind(ours, "auto")
    chosen = {row.op for row in binding.rows if row.kernel != "eager"}
    assert {"rms_norm", "cross_entropy_loss"} <= chosen
    loss, exact = gradients(wide, on_gpu)
    upstream_loss, upstream = gradients(narrow, on_gpu)
    with binding.proof() as proof:
        our_loss, actual = gradients(ours, on_gpu)
    without_images = [
        miss for miss in proof.misses() if miss.row.op not in ("rotary_pos_emb_vision", "load_balancing_loss")
    ]
    assert without_images == []
    distance, allowed = (actual - exact).norm(), 2 * (upstream - exact).norm()
    print(f"{distance / exact.norm():.2e} of the norm, upstream {allowed / 2 / exact.norm():.2e}; {sorted(chosen)}")
    assert distance <= allowed
    assert (our_loss - loss).abs() <= 2 * (upstream_loss - loss).abs() + 2**-8 * loss.abs()
