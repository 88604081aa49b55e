"""Adapter files (LoRA) of expert weights: PEFT's, and those of inference engines."""

from .adapter_files import AdapterReport, PeftAdapter, read_peft_adapter, write_adapter

__all__ = ["AdapterReport", "PeftAdapter", "read_peft_adapter", "write_adapter"]
