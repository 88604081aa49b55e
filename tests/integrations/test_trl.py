"""TRL's SFTTrainer: experts enabled beforehand, or chosen by name, and adapters of experts."""

import pytest
import torch
import transformers

import moe_layers.integrations.transformers as integration

from ..tiers import slow
from .models import QUIET, build

pytest.importorskip("trl", reason="needs TRL")
peft = pytest.importorskip("peft", reason="needs PEFT")
pytestmark = [slow, pytest.mark.filterwarnings("ignore")]  # TRL and datasets import for seconds, and warn


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({**{str(i): i for i in range(30)}, "<eos>": 30}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def train(model, directory, *, peft_config=None, **options):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [" ".join(str((7 * i + j) % 30) for j in range(8 + i % 5)) for i in range(8)]
    arguments = SFTConfig(
        str(directory),
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        bf16=False,
        **QUIET,
        **options,
    )
    data = Dataset.from_dict({"text": rows})
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=peft_config)
    trainer.train()
    return trainer.model


def test_sft_is_that_of_the_models_own_experts(tmp_path, device):
    """Training has padding, the router's auxiliary loss and gradient checkpointing, which are TRL's defaults."""
    start, states = build("qwen3_moe", device).state_dict(), []
    for own in (True, False):
        model = build("qwen3_moe", device)
        if not own:
            assert integration.enable(model).blocks
        # Adam would divide a rounding error of a small gradient by its size.
        states.append(train(model, tmp_path, optim="sgd", max_grad_norm=0.0).state_dict())
    for name, tensor in states[1].items():
        torch.testing.assert_close(tensor, states[0][name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(tensor, start[name])


def test_sft_of_adapters_with_experts_chosen_by_name(tmp_path, device, monkeypatch):
    build("qwen3_moe", device).save_pretrained(tmp_path / "model")
    start = build("qwen3_moe", device).state_dict()
    calls, registered = [], transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    forward = registered["moe_layers"]
    monkeypatch.setitem(registered, "moe_layers", lambda *args, **kw: calls.append(1) or forward(*args, **kw))
    factors = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    kwargs = {"experts_implementation": "moe_layers"}
    model = train(str(tmp_path / "model"), tmp_path / "out", peft_config=factors, model_init_kwargs=kwargs)
    assert calls
    trained = {name: tensor for name, tensor in model.named_parameters() if "lora_B" in name}
    assert trained and all(tensor.any() for tensor in trained.values())
    base = {name: tensor for name, tensor in model.named_parameters() if "lora_" not in name}
    assert len(base) == len(start)
    for name, tensor in base.items():
        own = name.removeprefix("base_model.model.").replace("base_layer.", "")
        assert torch.equal(tensor, start[own]), name
