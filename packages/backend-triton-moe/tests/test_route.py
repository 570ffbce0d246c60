"""The counting sort, beside a loop over the choices."""

import pytest
import torch
from opslot.testing import poisoned_memory
from opslot_backends.triton_moe._route import check, is_checking, route

# T, K, E, tile: chunks of choices that end in the middle, experts around powers of two, more experts than choices, and
# more chunks than `layout` looks at in one step.
SIZES = [
    (33, 2, 8, 16),
    (300, 3, 5, 16),
    (1, 1, 1, 16),
    (40, 9, 129, 16),
    (1000, 8, 3, 128),
    (171, 3, 7, 64),
    (1400, 3, 600, 16),
]


def by_hand(index, experts, tile):
    """choice, place, expert, tiles, first, size, as lists."""
    flat = index.flatten().tolist()
    choice, place, expert, first, size = [], [-1] * len(flat), [], [], []
    for e in range(experts):
        mine = [i for i, chosen in enumerate(flat) if chosen == e]
        first.append(len(choice))
        size.append(len(mine))
        for i in mine:
            place[i] = len(choice)
            choice.append(i)
        padding = -len(mine) % tile
        choice += [len(flat)] * padding
        expert += [e] * ((len(mine) + padding) // tile)
    return choice, place, expert, [len(expert)], first, size


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts", "tile"), SIZES)
def test_any_routing(tokens, top_k, experts, tile, dtype, interpreter):
    index = torch.randint(-2, experts + 3, (tokens, top_k), dtype=dtype)
    with poisoned_memory():
        found = route(index, experts, tile)
    choice, place, expert, tiles, first, size = by_hand(index, experts, tile)
    assert found.choice[: len(choice)].tolist() == choice
    assert set(found.choice[len(choice) :].tolist()) <= {index.numel()}, "what is behind the last tile is padding"
    assert found.place.tolist() == place
    assert found.expert[: len(expert)].tolist() == expert
    assert 0 <= int(found.expert.min()) <= int(found.expert.max()) < experts
    assert (found.tiles.tolist(), found.first.tolist(), found.size.tolist()) == (tiles, first, size)


@pytest.mark.parametrize("chosen", [0, 2, 4])
def test_one_expert_gets_everything_or_nobody_does(chosen, interpreter):
    index = torch.full((600, 2), chosen)
    found = route(index, 4, 16)
    assert found.size.tolist() == [1200 * (e == chosen) for e in range(4)]
    assert found.place.tolist() == (list(range(1200)) if chosen < 4 else [-1] * 1200)


def test_a_strided_index(interpreter):
    index = torch.randint(4, (3, 50)).t()
    assert all(torch.equal(a, b) for a, b in zip(route(index, 4, 16), route(index.contiguous(), 4, 16), strict=True))


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_the_check_names_the_row_and_the_value(wrong):
    index = torch.tensor([[0, 4], [3, 1], [2, wrong], [wrong, 0]])
    with pytest.raises(ValueError, match=rf"top_k_index\[2, 1\] is {wrong}, .*0 to 3, nor 4 .*\(2 of 8 are not\)"):
        check(index, 4)
    check(index[:2], 4)


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("True", True), ("0", False), ("false", False), (None, False)]
)
def test_the_check_is_asked_for(value, expected, monkeypatch):
    monkeypatch.delenv("OPSLOT_CHECK_ROUTING", raising=False)
    if value is not None:
        monkeypatch.setenv("OPSLOT_CHECK_ROUTING", value)
    assert is_checking() is expected


def test_a_value_of_no_meaning_is_refused(monkeypatch):
    monkeypatch.setenv("OPSLOT_CHECK_ROUTING", "banana")
    with pytest.raises(ValueError, match="OPSLOT_CHECK_ROUTING='banana': write 1 or true to check"):
        is_checking()
