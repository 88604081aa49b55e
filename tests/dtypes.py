"""Dtypes that the kernels compute in on this machine: the interpreter has no bfloat16."""

import torch

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
