"""Fine-tune a Hugging Face Qwen3-MoE by LoRA: PEFT adapts attention and experts, and transformers' Trainer trains.

    pip install 'transformers>=5.7' 'peft>=0.19' accelerate
    python examples/fine_tune_lora.py                          # under a minute on one CPU core; larger with a GPU
    python examples/fine_tune_lora.py --rank 32 --output lora

Nothing is downloaded, so the base is trained here first, on the source of the Python standard library; a published
model comes from `from_pretrained`. LoRA then adapts it to another text, Python's documentation as `pydoc` holds it. The
adapters are saved, loaded into a fresh copy of the base, merged, and exported: the result is a model of transformers.
Losses are in nats per byte of documentation that no training saw.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from _language_model import Settings, Text, load_text, use_one_cpu_thread
from fine_tune_hugging_face import PRESETS, make_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moe_layers.integrations.transformers import enable

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Windows(Dataset):
    """Neighbouring windows of a text, as a causal language model of transformers reads them."""

    def __init__(self, text: Tensor, context: int):  # [num_bytes] uint8
        self.windows = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def load_documentation() -> Text:
    """Return the pages of `pydoc`. A hash of the name holds out one page in ten."""
    training, held_out = [], []
    for name, page in sorted(topics.items()):
        (held_out if zlib.crc32(name.encode()) % 10 == 0 else training).append(page.encode())
    return Text(*(torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in (training, held_out)))


def make_trainer(
    model: nn.Module, text: Text, settings: Settings, folder: Path, *, learning_rate: float | None = None
) -> Trainer:
    """Make a Trainer, which shows a progress bar. On a GPU matrix products are bfloat16."""
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=settings.steps,
        learning_rate=learning_rate or settings.peak_learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        logging_steps=settings.log_every,
        save_strategy="no",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        label_names=["labels"],
        report_to="none",
        seed=settings.seed,
    )
    held_out = Windows(text.held_out[: settings.held_out_windows * settings.context], settings.context)
    training = Windows(text.training, settings.context)
    return Trainer(model=model, args=arguments, train_dataset=training, eval_dataset=held_out)


def train_base(settings: Settings, folder: Path) -> None:
    """Train the base with its load-balancing loss, and write it to `folder / "base"`."""
    model = make_model("qwen3_moe", settings)
    print(enable(model))
    make_trainer(model, load_text(Path(sysconfig.get_paths()["stdlib"])), settings, folder).train()
    model.save_pretrained(folder / "base")


def load_base(folder: Path) -> nn.Module:
    """Load the base for LoRA. Its router is frozen and needs no load-balancing loss."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", output_router_logits=False)
    enable(model)
    return model


def evaluate(model: nn.Module, text: Text, settings: Settings, folder: Path, name: str) -> None:
    loss = make_trainer(model, text, settings, folder).evaluate()["eval_loss"]
    print(f"{name}: {loss:.4f} nats per byte")


def fine_tune(text: Text, settings: Settings, folder: Path, rank: int) -> None:
    """Train adapters of attention and experts, and write them to `folder / "adapter"`."""
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, target_parameters=EXPERTS)
    model = get_peft_model(load_base(folder), lora)
    model.print_trainable_parameters()
    evaluate(model, text, settings, folder, "before")
    make_trainer(model, text, settings, folder, learning_rate=2 * settings.peak_learning_rate).train()
    evaluate(model, text, settings, folder, "after")
    model.save_pretrained(folder / "adapter")


def export(text: Text, settings: Settings, folder: Path) -> None:
    """Merge the saved adapters into a fresh base, and write the model to `folder / "merged"`."""
    model = PeftModel.from_pretrained(load_base(folder), folder / "adapter")
    evaluate(model, text, settings, folder, "loaded")
    model.merge_and_unload().save_pretrained(folder / "merged")
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    evaluate(model, text, settings, folder, "merged, with transformers alone")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--rank", type=int, default=8, help="of all adapters; default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder of base, adapter and merged; default: a temporary one")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    settings = PRESETS[options.preset]
    transformers.set_seed(settings.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        text = load_documentation()
        train_base(settings, folder)
        fine_tune(text, settings, folder, options.rank)
        export(text, settings, folder)


if __name__ == "__main__":
    main()
