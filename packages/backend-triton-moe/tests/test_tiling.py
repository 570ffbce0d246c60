"""Which blocks are taken, and how they are measured."""

import json
import logging
import os

import pytest
import torch
from opslot.testing import poisoned_memory
from opslot_backends.triton_moe import _tiling, tune
from opslot_backends.triton_moe._tiling import Blocks, Problem, Table

HERE = ("NVIDIA Test", "9.9", "0123456789abcdef")
PRODUCT = Problem("product", 2, 128, 512, 2048, 768)
LIMIT = 232448  # of a Hopper GPU


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A GPU with its own name, Triton and kernels, and an empty cache."""
    name, minor, source = HERE
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path))
    monkeypatch.setattr(_tiling, "describe", lambda device: (name, LIMIT))
    monkeypatch.setattr(_tiling, "is_hopper", lambda device: True)
    monkeypatch.setattr(_tiling, "minor_version", lambda: minor)
    monkeypatch.setattr(_tiling, "source", lambda: source)
    for cached in (_tiling._nearest, _tiling.tables, _tiling._say):
        cached.cache_clear()
    yield torch.device("cuda", 0)
    for cached in (_tiling._nearest, _tiling.tables, _tiling._say):
        cached.cache_clear()


def write(table):
    path = _tiling.cache_path(HERE[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else table.dump(), encoding="utf-8")


def test_the_table_that_ships():
    shipped = Table.parse(_tiling._SHIPPED.read_text(encoding="utf-8"))
    assert shipped.source == _tiling.source(), "the kernels have changed: measure them again"
    assert shipped.device == "NVIDIA H200"
    kinds = {problem[:3] for problem, _ in shipped.entries}
    assert kinds == {(kernel, size, tile) for kernel in _tiling.KERNELS for size in (2, 4) for tile in (64, 128)}
    for problem, blocks in shipped.entries:
        assert _tiling.fitted(problem.kernel, blocks, problem.itemsize, LIMIT, hopper=True) == blocks
    assert Table.parse(shipped.dump()) == shipped


@pytest.mark.parametrize("limit", [166912, 101376, 65536])
def test_the_table_that_ships_fits_every_device_that_the_backend_claims(limit):
    """sm_80, sm_89 and sm_120, gfx942."""
    for problem, blocks in Table.parse(_tiling._SHIPPED.read_text(encoding="utf-8")).entries:
        fitting = _tiling.fitted(problem.kernel, blocks, problem.itemsize, limit, hopper=False)
        assert _tiling.shared_memory(problem.kernel, fitting, problem.itemsize, hopper=False) <= limit


def test_the_nearest_is_taken_and_logged(device, caplog):
    small, large = Blocks(128, 128, 64, 4, 3, 2), Blocks(128, 256, 64, 8, 4)
    write(Table(*HERE, ((PRODUCT._replace(rows=64), small), (PRODUCT._replace(rows=2048), large))))
    with caplog.at_level(logging.INFO):
        assert _tiling._nearest(PRODUCT._replace(rows=100), device) == small
        assert _tiling._nearest(PRODUCT._replace(rows=1000), device) == large
    assert "measured for Problem(kernel='product', itemsize=2, tile=128, rows=64" in caplog.text
    assert "opslot_backends.triton_moe.tune" in caplog.text
    caplog.clear()
    assert _tiling._nearest(PRODUCT._replace(rows=64), device) == small
    assert "measured for" not in caplog.text


def test_a_notice_comes_once_for_any_number_of_tokens(device, monkeypatch, caplog):
    write(Table(*HERE, ((PRODUCT, Blocks(128, 256, 64, 8, 4)),)))
    monkeypatch.setattr(_tiling, "describe", lambda device: (HERE[0], 150_000))
    with caplog.at_level(logging.INFO):
        for rows in range(500, 511):
            _tiling._nearest(PRODUCT._replace(rows=rows), device)
    notices = [record.getMessage() for record in caplog.records]
    assert sum("measured for" in notice for notice in notices) == 1
    assert sum("too much shared memory" in notice for notice in notices) == 1


def test_of_equals_the_users_own_goes_first(device):
    shipped = Table.parse(_tiling._SHIPPED.read_text(encoding="utf-8"))
    problem, blocks = next((p, b) for p, b in shipped.entries if p.kernel == "product" and p.itemsize == 2)
    own = blocks._replace(stages=2)
    write(Table(*HERE, ((problem, own),)))
    assert _tiling._nearest(problem, device) == own


def test_another_device_is_said(device, caplog):
    assert len(_tiling.tables(HERE[0])) == 1
    assert (
        "measured on NVIDIA H200 with triton 3.6 for other kernels; here are NVIDIA Test and triton 9.9" in caplog.text
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("[]", "not a table"),
        ('{"device": "NVIDIA Test"}', "not a table"),
        (
            json.dumps({"device": "x", "triton": "y", "source": "z", "entries": [{"problem": {}, "blocks": {}}]}),
            "not a",
        ),
    ],
)
def test_a_broken_cache_is_ignored_with_a_notice(text, message, device, caplog):
    write(text)
    assert len(_tiling.tables(HERE[0])) == 1
    assert f"is ignored: {message}" in caplog.text


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_cache_of_another_device_triton_or_source_is_ignored(number, device, caplog):
    write(Table(*[*HERE[:number], "another", *HERE[number + 1 :]], ()))
    assert len(_tiling.tables(HERE[0])) == 1
    assert "is ignored: it was measured on" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": {"columns": 100}},
        {"blocks": {"rows": 64}},
        {"blocks": {"stages": 0}},
        {"blocks": {"warps": True}},
        {"problem": {"kernel": "other"}},
        {"problem": {"rows": -1}},
    ],
    ids=str,
)
def test_blocks_that_no_kernel_takes_are_no_table(change):
    entry = {"problem": PRODUCT._asdict(), "blocks": Blocks(128, 256, 64, 8, 4)._asdict()}
    text = {"device": "x", "triton": "y", "source": "z", "entries": [entry]}
    Table.parse(json.dumps(text))
    for part, values in change.items():
        entry[part] |= values
    with pytest.raises(ValueError, match=r"."):
        Table.parse(json.dumps(text))


def test_blocks_are_cut_down_to_the_shared_memory_and_said(device, monkeypatch, caplog):
    write(Table(*HERE, ((PRODUCT, Blocks(128, 256, 64, 8, 4)),)))
    monkeypatch.setattr(_tiling, "describe", lambda device: (HERE[0], 100_000))
    found = _tiling._nearest(PRODUCT, device)
    assert _tiling.shared_memory("product", found, 2, hopper=True) <= 100_000
    assert "takes too much shared memory here" in caplog.text
    monkeypatch.setattr(_tiling, "describe", lambda device: (HERE[0], 1000))
    _tiling._nearest.cache_clear()
    with pytest.raises(ValueError, match=r"1000 bytes of shared memory hold no blocks .* choose another kernel"):
        _tiling._nearest(PRODUCT, device)


@pytest.mark.parametrize("kernel", _tiling.KERNELS)
@pytest.mark.parametrize(("itemsize", "tile"), [(2, 128), (2, 64), (4, 128), (4, 64)])
@pytest.mark.parametrize(("limit", "hopper"), [(LIMIT, True), (166912, False), (101376, False), (65536, False)])
def test_candidates_fit(kernel, itemsize, tile, limit, hopper):
    problem = Problem(kernel, itemsize, tile, 512, 2048, 768)
    found = tune.candidates(problem, limit, hopper=hopper)
    assert found
    for blocks in found:
        assert _tiling.shared_memory(kernel, blocks, itemsize, hopper=hopper) * blocks.beside <= limit
    Table.parse(Table("x", "y", "z", tuple((problem, blocks) for blocks in found)).dump())


def test_the_fastest_with_the_same_result_is_kept(capsys):
    times = {4: 3.0, 3: 2.0, 2: 1.0}
    tried = [Blocks(128, 256, 64, 8, stages) for stages in times]
    ran = []

    def launch(blocks):
        ran.append(blocks.stages)
        return torch.full((4,), 1.0 if blocks.stages > 2 else 1.5)

    def timer(run):
        run()
        return times[ran[-1]]

    assert tune.best(launch, slice(None), tried, timer).stages == 3
    assert "stages=2, beside=1) gives other results: left out" in capsys.readouterr().out


def test_what_is_not_a_number_is_another_result():
    tried = [Blocks(128, 256, 64, 8, stages) for stages in (4, 3)]
    nan = float("nan")

    def launch(blocks):
        return torch.tensor([1.0, nan]) if blocks.stages == 4 else torch.tensor([nan, 1.0])

    assert tune.best(launch, slice(None, 1), tried, lambda run: 1.0).stages == 4


def test_measuring_every_product_of_forward_and_backward(device, interpreter, monkeypatch):
    monkeypatch.setattr(tune, "candidates", lambda problem, limit, hopper: [_tiling._INTERPRETED[problem.kernel]])
    shape = {"tokens": 24, "hidden": 32, "inner": 16, "experts": 3, "top_k": 2}
    for paired in (False, True):
        with poisoned_memory():
            table = tune.measured([shape], "float32", "cpu", paired, lambda run: 1.0)
        # active by down, its gradient, and that of the tokens; the gradients of both weights.
        products = {(32, 16), (16, 32), (32, 32)}
        weights = {(32, 16), (32, 32)} if paired else {(16, 32), (32, 32)}
        assert {problem for problem, _ in table.entries} == {
            Problem("up_paired" if paired else "up", 4, 16, 16, 16, 32),
            *(Problem("product", 4, 16, 16, *sizes) for sizes in products),
            *(Problem("weight_gradient", 4, 16, 16, *sizes) for sizes in weights),
        }


def test_what_was_measured_is_kept_beside_what_was_there(device):
    first, second = PRODUCT, PRODUCT._replace(rows=64)
    old, new = Blocks(128, 256, 64, 8, 4), Blocks(128, 256, 64, 8, 3)
    path = _tiling.cache_path(HERE[0])
    tune.save(Table(*HERE, ((first, old), (second, old))), path)
    tune.save(Table(*HERE, ((first, new),)), path)
    assert _tiling.own_table(HERE[0]) == Table(*HERE, ((second, old), (first, new)))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_cache_is_for_its_owner_alone(device, monkeypatch, tmp_path):
    """Else opslot-models, whose cache lies beside it, refuses it where the umask lets a group write."""
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "opslot"))
    path, before = _tiling.cache_path(HERE[0]), os.umask(0o002)
    try:
        tune.save(Table(*HERE, ()), path)
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in path.parents[:2]] == [0o700, 0o700]


@pytest.mark.parametrize("home", ["/home/somebody", None])
def test_the_cache_without_a_variable_of_ours(home, device, monkeypatch):
    monkeypatch.delenv("OPSLOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home) if home else path)
    if home:
        assert _tiling.cache_path(HERE[0]).is_relative_to("/home/somebody/.cache/opslot")
    else:
        assert _tiling.own_table(HERE[0]) is None
        with pytest.raises(ValueError, match=r"no home folder, .* set OPSLOT_CACHE"):
            _tiling.cache_path(HERE[0])


def test_a_cache_that_depends_on_the_working_directory_is_refused(device, monkeypatch):
    monkeypatch.setenv("OPSLOT_CACHE", "somewhere")
    with pytest.raises(ValueError, match="OPSLOT_CACHE='somewhere': write an absolute path"):
        _tiling.cache_path(HERE[0])


def test_two_processes_with_the_same_tables_say_the_same(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: HERE[0])
    shipped = _tiling.implementation()
    assert shipped.startswith("shipped blocks ")
    write(Table(*HERE, ((PRODUCT, Blocks(128, 256, 64, 8, 4)),)))
    _tiling.tables.cache_clear()
    tuned = _tiling.implementation()
    assert tuned.startswith("tuned blocks ")
    assert tuned == _tiling.implementation() != shipped


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--tokens", "8", "--hidden", "8", "--inner", "8", "--experts", "2", "--top-k", "1"]
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert "there is no GPU to measure on" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 1), (8, 3)])
def test_sizes_of_no_problem_are_refused(tokens, top_k, capsys):
    sizes = {"tokens": tokens, "hidden": 8, "inner": 8, "experts": 2, "top-k": top_k}
    with pytest.raises(SystemExit):
        tune.main([text for name, size in sizes.items() for text in (f"--{name}", str(size))])
    assert "no token chooses more experts than there are" in capsys.readouterr().err


def test_products_of_float32_are_as_pytorch_is_told():
    x = torch.ones(1)
    assert _tiling.precision(x.half()) == "tf32"
    try:
        for told, expected in (("highest", "tf32x3"), ("high", "tf32"), ("highest", "tf32x3")):
            torch.set_float32_matmul_precision(told)
            assert _tiling.precision(x) == expected
    finally:
        torch.set_float32_matmul_precision("highest")
