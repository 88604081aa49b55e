"""Enabled models in the Trainer of transformers: the same training, and what resuming keeps and loses."""

import shutil
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version

from moe_layers.checkpoint.model.repair import repair
from moe_layers.integrations.transformers import enable as enable_with

from ..checkpoint.golden import FASTEST
from .models import assert_same_bits, build, make_trainer

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and accelerate warn about their own deprecations
enable = partial(enable_with, implementation=FASTEST)
loses_experts = pytest.mark.skipif(
    Version(transformers.__version__) != Version("5.23"), reason="the fault was seen in transformers 5.23"
)


def trainer_of(model, directory, **options):
    options = {"logging_strategy": "no", "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, **options}
    return make_trainer(model, directory, torch.arange(256).view(32, 8) % 31, **options)


def other(device):
    """Return a model of the same sizes with other weights."""
    model = build("qwen3_moe", device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def experts_of(state):
    return {name: tensor for name, tensor in state.items() if ".experts." in name}


def test_training_is_that_of_the_models_own_experts(tmp_path, device):
    """Each step has two micro-batches, and the loss contains the router's auxiliary loss."""
    states = []
    for own in (True, False):
        model = build("qwen3_moe", device, output_router_logits=True)
        if not own:
            assert enable(model).blocks
        trainer_of(model, tmp_path, gradient_accumulation_steps=2, save_strategy="no").train()
        states.append(model.state_dict())
    start = build("qwen3_moe", device).state_dict()
    for name, tensor in states[1].items():
        torch.testing.assert_close(tensor, states[0][name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(tensor, start[name])


def test_a_repaired_checkpoint_resumes_as_if_never_stopped(tmp_path, device):
    whole = build("qwen3_moe", device)
    enable(whole)
    trainer_of(whole, tmp_path).train()
    report = repair(tmp_path / "checkpoint-2")
    again = other(device)
    enable(again)
    trainer_of(again, tmp_path / "again").train(resume_from_checkpoint=str(report.directory))
    assert_same_bits(again.state_dict(), whole.state_dict())


class Captured(transformers.TrainerCallback):
    """Keeps the model's state at the start of training."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@loses_experts
@pytest.mark.parametrize("enabled", [False, True], ids=["own", "enabled"])
def test_resuming_without_repair_starts_from_other_experts(enabled, tmp_path):
    """The model keeps the experts that it had before the Trainer resumed. All else is loaded."""
    trainer_of(build("qwen3_moe", "cpu"), tmp_path).train()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    model, captured = other("cpu"), Captured()
    if enabled:
        enable(model)
    before = {name: tensor.clone() for name, tensor in experts_of(model.state_dict()).items()}
    trainer = trainer_of(model, tmp_path / "again")
    trainer.add_callback(captured)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(captured.state, {**saved, **before})
    assert not any(torch.equal(tensor, saved[name]) for name, tensor in before.items())


@loses_experts
def test_the_best_model_at_the_end_has_the_last_experts(tmp_path):
    """The worst loss counts as the best, so that the first checkpoint is loaded. The checkpoint is complete on disk."""
    model = build("qwen3_moe", "cpu")
    enable(model)
    best = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    trainer = trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=2, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    loaded = model.state_dict()
    saved, last = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        for step in (2, 4)
    )
    assert_same_bits(experts_of(loaded), experts_of(last))
    assert torch.equal(loaded["lm_head.weight"], saved["lm_head.weight"])
    assert not torch.equal(loaded["lm_head.weight"], last["lm_head.weight"])


def test_adapters_resume_as_if_never_stopped(tmp_path):
    """The Trainer saves adapters in PEFT's files, which hold the experts' adapters, too."""
    peft = pytest.importorskip("peft", minversion="0.19", reason="peft 0.19 or later is not installed")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def adapted():
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)
        model = peft.get_peft_model(build("qwen3_moe", "cpu"), lora)
        assert enable(model).adapted
        return model

    whole = adapted()
    trainer_of(whole, tmp_path).train()
    again = adapted()
    trainer_of(again, tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(again.state_dict(), whole.state_dict())
    shutil.rmtree(tmp_path / "again")
