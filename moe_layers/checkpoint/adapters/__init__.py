"""Reads LoRA adapters of experts from PEFT's files, and writes files for PEFT or for inference engines."""

from .adapter_files import AdapterReport, PeftAdapter, read_peft_adapter, write_adapter

__all__ = ["AdapterReport", "PeftAdapter", "read_peft_adapter", "write_adapter"]
