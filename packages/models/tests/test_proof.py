"""The proof that kernels ran, on a generated model: what is missed, and why."""

import pytest
import torch
from opslot import BindError
from opslot_models import adopt, build_foundation_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    return build_foundation_model(config(), {"glu": "torch"}, device="cpu")


def missed(proof):
    return {miss.row.op: miss.reason for miss in proof.misses()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_runs_every_kernel(model, batch, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable()
    with model.opslot_binding.proof() as proof:
        model(**batch).loss.backward()
    proof.check()
    assert len(proof.counts()) == len(model.opslot_binding.rows)
    assert model.opslot_binding.verify() == ()


def test_losses_that_nobody_asks_for_are_named_with_their_condition(model, batch):
    with model.opslot_binding.proof() as proof:
        model(**batch, output_router_logits=False).loss.backward()
    assert list(missed(proof)) == ["load_balancing_loss"]
    assert "It runs when the model returns router logits" in missed(proof)["load_balancing_loss"]
    with model.opslot_binding.proof() as proof, torch.no_grad():
        model(**batch)
    assert "called only without gradients (no_grad)" in missed(proof)["cross_entropy_loss"]
    assert set(missed(proof)) == {row.op for row in model.opslot_binding.rows}


def test_modules_that_peft_trains_whole(model, config, batch):
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config())
    tuned = get_peft_model(stock, lora)
    binding = adopt(tuned, {"glu": "torch"}, device="cpu").binding
    assert {"model.norm.original_module", "model.norm.modules_to_save.default"} <= {row.module for row in binding.rows}
    with binding.proof() as proof:
        tuned(**batch).loss.backward()
    proof.check()
    with tuned.disable_adapter(), binding.proof() as proof, torch.no_grad():
        tuned(**batch)
    never = [miss for miss in proof.misses(backward=False) if miss.reason == "its module was never called"]
    assert never == []
    first = model.opslot_binding
    get_peft_model(model, lora)
    assert [problem for problem in first.verify() if "another module was put beside it" in problem]


def test_a_trainer_that_takes_the_labels_is_found_out(model, config, batch, tmp_path):
    rows = [{name: tensor[0] for name, tensor in batch.items()}]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", label_smoothing_factor=0.1
    )
    with model.opslot_binding.proof() as proof:
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    with pytest.raises(
        BindError, match=r"chunk_loss: its module was called, but not the kernel.*takes the labels away"
    ):
        proof.check()
