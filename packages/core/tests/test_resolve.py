"""What a configuration means before there is a model, and VeOmni's configurations among them."""

import json
import os

import opslot
import pytest
import yaml
from opslot import Backend, BackendRecord, KernelSpec, OpsConfig, Priority, Registry, Requires
from opslot._device import CORE_KINDS
from opslot._modules import glob_pattern, matches
from opslot.ops import BACKEND
from opslot.tools.cli import main

# The fields and GPU defaults of VeOmni's OpsImplementationConfig, in a file that holds what its trainers read besides.
VEOMNI = """
model:
  model_path: Qwen/Qwen3-30B-A3B
  ops_implementation:
    attn_implementation: flash_attention_2
    moe_implementation: fused_triton
    cross_entropy_loss_implementation: liger_kernel
    rms_norm_implementation: liger_kernel
    swiglu_mlp_implementation: liger_kernel
    rotary_pos_emb_implementation: liger_kernel
    rotary_pos_emb_vision_implementation: eager
    load_balancing_loss_implementation: triton
    rms_norm_gated_implementation: fla
    causal_conv1d_implementation: fla
    chunk_gated_delta_rule_implementation: flash_qla
    dsa_indexer_implementation: eager
    dsa_attention_implementation: tilelang
    mhc_implementation: eager
data:
  train_path: corpus
train:
  accelerator: {ep_size: 8}
"""


def _same_as_its_reference(name):
    return {
        (c.op, c.variant): KernelSpec(
            op=c.op, variant=c.variant, name=name, target=c.reference, priority=Priority.TUNED,
            aliases=("liger_kernel",) if name == "liger" else (), requires=Requires(devices=("cuda", "cpu")),
        )
        for c in BACKEND.contracts
    }  # fmt: skip


@pytest.fixture
def bare(monkeypatch) -> Registry:
    """The core alone: its contracts and no kernel."""
    registry = Registry()
    registry.add(BACKEND, "opslot", "1.0")
    monkeypatch.setattr("opslot._discovery._registry", registry)
    return registry


@pytest.fixture
def full(bare) -> Registry:
    """Beside it the backends that offer what this VeOmni file names for the ops that have a contract."""
    liger, triton = _same_as_its_reference("liger"), _same_as_its_reference("triton")
    moe = [triton[key] for key in triton if key[0] in ("moe_experts", "load_balancing_loss")]
    bare.add(Backend(api=1, kernels=tuple(liger.values())), "opslot-backend-liger", "0.1")
    fla = [spec for (op, _), spec in _same_as_its_reference("fla").items() if op in ("rms_norm_gated", "causal_conv1d")]
    fla += [spec for (op, _), spec in _same_as_its_reference("flash_qla").items() if op == "chunk_gated_delta_rule"]
    bare.add(Backend(api=1, kernels=tuple(moe)), "opslot-backend-triton-moe", "0.1")
    bare.add(Backend(api=1, kernels=tuple(fla)), "opslot-backend-fla", "0.1")
    tilelang = [spec for (op, _), spec in _same_as_its_reference("tilelang").items() if op == "dsa_attention"]
    bare.add(Backend(api=1, kernels=tuple(tilelang)), "opslot-backend-tilelang", "0.1")
    return bare


@pytest.fixture
def veomni(tmp_path):
    path = tmp_path / "qwen3_moe.yaml"
    path.write_text(VEOMNI, encoding="utf-8")
    return str(path)


def resolve(capsys, *arguments):
    code = main(["resolve", *arguments])
    return code, capsys.readouterr()


def test_a_veomni_yaml_chooses_what_it_says_where_the_backends_are_there(full, veomni, capsys):
    code, captured = resolve(capsys, veomni, "--json")
    rows = {row["op"]: row for row in json.loads(captured.out)["ops"]}
    assert code == 0
    assert rows["moe_experts/standard"]["selector"] == "opslot-backend-triton-moe:triton"
    assert rows["glu/swiglu"]["selector"] == "opslot-backend-liger:liger"
    assert rows["glu/swiglu"]["field"] == "swiglu_mlp_implementation"
    assert rows["load_balancing_loss/standard"]["kernel"] == "triton"
    assert rows["chunk_gated_delta_rule/standard"]["selector"] == "opslot-backend-fla:flash_qla"
    assert rows["dsa_attention/glm"]["selector"] == "opslot-backend-tilelang:tilelang"
    assert json.loads(captured.out)["attn_implementation"] == "flash_attention_2"


def test_without_the_backends_it_parses_and_names_what_would_bring_each(bare, veomni, capsys):
    assert OpsConfig.parse(veomni).rules(bare)
    code, captured = resolve(capsys, veomni)
    assert code == 1
    for distribution in ("liger", "triton-moe", "fla", "tilelang"):
        assert f"opslot-backend-{distribution}" in captured.out
    assert "attention: flash_attention_2, passed on to transformers" in captured.out


def test_auto_names_what_is_not_installed(bare, capsys):
    code, captured = resolve(capsys, "--json")
    rows = {row["op"]: row for row in json.loads(captured.out)["ops"]}
    assert code == 0
    assert "not installed: liger of opslot-backend-liger" in rows["rms_norm/standard"]["reason"]


def test_auto_does_not_call_a_backend_absent_that_lacks_the_variant(bare, capsys):
    standard = next(spec for key, spec in _same_as_its_reference("liger").items() if key == ("glu", "swiglu"))
    bare.add(Backend(api=1, kernels=(standard,)), "opslot-backend-liger", "0.1")
    _, captured = resolve(capsys, "--json")
    rows = {row["op"]: row for row in json.loads(captured.out)["ops"]}
    reason = rows["glu/swiglu_clamped"]["reason"]
    assert "liger of" not in reason
    assert "torch of opslot-backend-torch" in reason


def test_the_frozen_configuration_chooses_the_same_explicitly(full, veomni, tmp_path, capsys):
    (tmp_path / "ops.yaml").write_text("modules: {'a.*': {rms_norm: eager}}\nmoe_experts: eager\n", encoding="utf-8")
    for source in (veomni, str(tmp_path / "ops.yaml"), "auto"):
        code, captured = resolve(capsys, source, "--freeze")
        assert code == 0, captured.err
        frozen = yaml.safe_load(captured.out)
        assert "auto" not in json.dumps(frozen)
        (tmp_path / "frozen.yaml").write_text(captured.out, encoding="utf-8")
        rows = {}
        for config in (source, str(tmp_path / "frozen.yaml")):
            _, captured = resolve(capsys, config, "--json")
            ops = json.loads(captured.out)["ops"]
            rows[config] = {(row["op"], row["modules"]): row["selector"] for row in ops if "/" in row["op"]}
        assert len({json.dumps(sorted(map(str, each.items()))) for each in rows.values()}) == 1


@pytest.mark.parametrize("variable", [None, "rms_norm=eager", "glu=liger"])
def test_a_frozen_file_binds_the_same(full, tmp_path, capsys, monkeypatch, variable):
    """Globs keep their order, and what the variable overrides is gone."""
    given, frozen = tmp_path / "ops.yaml", tmp_path / "frozen.yaml"
    given.write_text(
        "default: eager\nstrict: true\nmodules:\n"
        "  layers.**: {rms_norm: liger}\n  layers.0.**: {glu: eager, rms_norm: eager}\n  '**.norm': {glu: liger}\n"
    )
    if variable:
        monkeypatch.setenv("OPSLOT_OPS", variable)
    code, captured = resolve(capsys, str(given), "--freeze")
    assert code == 0
    assert "strict is left out" in captured.err
    frozen.write_text(captured.out)

    def in_force(config):
        found = {}
        for rule in OpsConfig.effective(str(config)).rules(full):
            for name in ("layers.0.norm", "layers.1.norm", "head"):
                if rule.glob is None or matches(glob_pattern(rule.glob), name):
                    found[rule.key, name] = rule.kernel.rpartition(":")[2]
        return {key: kernel for key, kernel in found.items() if kernel != "eager"}

    expected = in_force(given)
    monkeypatch.delenv("OPSLOT_OPS", raising=False)
    assert in_force(frozen) == expected


def test_what_a_backend_prints_does_not_stand_among_what_was_asked(bare, monkeypatch, capfd):
    def noisy():
        print("noise")
        os.write(1, b"more noise")
        return bare

    monkeypatch.setattr("opslot.tools.output.registry", noisy)
    assert main(["list", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["ops"]
    assert "noise" in captured.err
    assert "more noise" in captured.err


def test_what_is_denied_is_not_called_not_installed(bare, tmp_path, capsys):
    denied = "denied by OPSLOT_BACKENDS='-liger'"
    bare.records.append(BackendRecord("liger", "opslot-backend-liger", "0.1", denied=denied))
    code, captured = resolve(capsys, "--json")
    rows = {row["op"]: row for row in json.loads(captured.out)["ops"]}
    assert code == 0
    reason = rows["rms_norm/standard"]["reason"]
    assert f"; {denied}: liger of opslot-backend-liger" in reason
    assert "; not installed: quack of opslot-backend-quack" in reason
    lock = tmp_path / "uv.lock"
    lock.write_text('[[package]]\nname = "torch"\nversion = "2.13.0"\n', encoding="utf-8")
    _, captured = resolve(capsys, "--json", "--target", "cuda:sm_90", "--packages", str(lock))
    rows = {row["op"]: row for row in json.loads(captured.out)["ops"]}
    assert "; not installed: liger of opslot-backend-liger" in rows["rms_norm/standard"]["reason"]


def test_what_cannot_be_chosen_is_not_frozen(bare, veomni, capsys):
    code, captured = resolve(capsys, veomni, "--freeze")
    assert (code, captured.out) == (1, "")
    assert "opslot: moe_implementation: no kernel 'fused_triton'" in captured.err


def test_the_prefix_alone_means_a_kernel_and_never_eager(full):
    cpu = opslot.Device("cpu")
    choice = full.choose("moe_experts", "standard", "fused", cpu)
    assert choice.offer.spec.name == "liger"
    assert "'fused' is deprecated" in choice.reason
    alone = Registry()
    alone.add(BACKEND, "opslot", "1.0")
    with pytest.raises(opslot.KernelUnavailable, match="'fused' for moe_experts/standard needs a kernel, and there is"):
        alone.choose("moe_experts", "standard", "fused", cpu)
    with pytest.raises(opslot.UnknownKernel):
        full.choose("rms_norm", "standard", "fused", cpu)


def test_a_third_partys_kernel_takes_the_prefix_too(full):
    acme = KernelSpec(op="moe_experts", name="acme", target="acme.kernels:experts")
    full.add(Backend(api=1, kernels=(acme,), device_kinds=()), "acme")
    assert full.offer("moe_experts", "standard", "fused_acme").spec is acme
    assert {kind.name for kind in CORE_KINDS} >= {"cuda", "rocm"}


def test_another_machine_is_judged_by_its_device_and_its_packages(full, tmp_path, capsys):
    """The specs are those of the backends here; whether these, and what they need, are there says the lock file."""
    gated = KernelSpec(
        op="rms_norm",
        name="gated",
        target="acme.kernels:norm",
        requires=Requires(devices=("cuda",), archs=("sm_90..",), packages=("quack-kernels>=0.6",)),
        priority=Priority.NATIVE,
    )
    full.add(Backend(api=1, kernels=(gated,)), "acme", "1.0")
    config, lock = tmp_path / "ops.yaml", tmp_path / "uv.lock"
    config.write_text("rms_norm: {standard: gated}\n", encoding="utf-8")
    packages = {
        "quack_kernels": "0.6.5",
        "acme": "1.0",
        "opslot-backend-liger": "0.1",
        "opslot-backend-triton-moe": "0.1",
        "opslot-backend-fla": "0.1",
    }
    text = "".join(f'[[package]]\nname = "{name}"\nversion = "{version}"\n' for name, version in packages.items())
    lock.write_text(text, encoding="utf-8")
    code, captured = resolve(capsys, str(config), "--target", "cuda:sm_90", "--packages", str(lock))
    assert code == 0, captured
    for target, packages in (("rocm:gfx942", lock), ("cuda:sm_80", lock), ("cuda:sm_90", None)):
        more = ("--packages", str(packages)) if packages else ()
        code, captured = resolve(capsys, str(config), "--target", target, *more)
        assert code == 1
        assert "error: kernel 'gated' for rms_norm/standard cannot run" in captured.out
    code, captured = resolve(capsys, "--target", "cuda:0")
    assert (code, captured.out) == (1, "")
    assert "cuda:sm_90" in captured.err
