"""What the kernels compute in here: the interpreter has no bfloat16."""

import torch

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
