"""Expert weights that stay in their stored form: FP8, MXFP4, NF4 or int8.

A `QuantizedExperts` module replaces the parameter of a quantised weight, such as `experts.w_up`. The module holds
tensors such as `experts.w_up.values` and `experts.w_up.scales`. State dicts, safetensors files, FSDP2 and DCP hold the
stored bytes. The experts' op dequantises a weight before the GEMM, or the GEMM itself decodes the weight while loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.quantization.ops import dequantize
from moe_kernels.types import QuantizedWeight, WeightFormat

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes per element -> integer dtype
LocalShare = Callable[[str, Tensor], Tensor]  # (name, parameter distributed over ranks) -> this rank's part


class QuantizedExperts(nn.Module):
    """A frozen quantised weight [E, out, in] of E experts, held in the tensors of its format.

    `values` and `scales` are parameters with the experts as first axis, so that ranks can shard the parameters.
    `nested_scales` holds one scale per nested block, a block of quantised scales. If no nested block spans two experts,
    `nested_scales` is a parameter with this axis, too. Other tensors, such as code tables, are buffers. All tensors
    hold their bits as integers, so that `layer.bfloat16()`, mixed precision and collectives do not change the stored
    bits. `dtype` is the dtype that the layer computes in. `layer.bfloat16()` changes only `dtype`.

    Raises:
        ValueError: the format is nf4, and an expert's matrix does not consist of whole blocks.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype):
        super().__init__()
        num_experts, *matrix = weight.shape
        self.format: WeightFormat = weight.format
        self.matrix_shape, self.dtype = tuple(matrix), dtype
        # True if every block and every nested block lies within one expert.
        self.is_divisible = True
        if weight.format.name == "nf4":
            block = weight.format.block[1]
            num_blocks, rest = divmod(matrix[0] * matrix[1], block)
            if rest:
                raise ValueError(f"GroupedExperts: matrices of nf4 must be whole blocks of {block}, got {matrix}")
            self.is_divisible = num_blocks % (weight.format.nested_block or 1) == 0
        by_expert = ("values", "scales", "nested_scales") if self.is_divisible else ("values", "scales")
        self._stored_dtypes = {name: tensor.dtype for name, tensor in weight.tensors.items()}
        for name, tensor in weight.tensors.items():
            bits = as_bits(tensor)
            if bits.dim() == 4:  # the published form of MXFP4: [E, out, in / 32, 16]
                bits = bits.flatten(2)
            if name in by_expert:
                has_axis = bits.dim() > 1 and len(bits) == num_experts
                held = bits if has_axis else bits.reshape(num_experts, -1)
                held = held.view(torch.uint8) if held.dtype == torch.int16 else held  # collectives refuse int16
                self.register_parameter(name, nn.Parameter(held, requires_grad=False))
            else:
                # Tables are copied, because safetensors refuses tensors that share memory.
                self.register_buffer(name, bits.clone())

    @property
    def shape(self) -> torch.Size:  # [E, out, in]
        return torch.Size((len(self), *self.matrix_shape))

    @property
    def device(self) -> torch.device:
        return self.get_parameter("values").device

    def __len__(self) -> int:
        return len(self.get_parameter("values"))

    def weight(self, local_share: LocalShare | None = None, name: str = "w") -> QuantizedWeight:
        """Return the stored weight of this rank's experts.

        Args:
            local_share: a function that returns this rank's part of each parameter. Default None: use whole parameters.
            name: prefix of the names that `local_share` gets, such as "w" in "w.values". Default: "w".
        """
        tensors: dict[str, Any] = {n: getattr(self, n) for n in self._stored_dtypes}
        if local_share is not None:
            shared = [n for n, _ in self.named_parameters()]
            tensors |= {n: local_share(f"{name}.{n}", tensors[n]) for n in shared}
        shape = torch.Size((len(tensors["values"]), *self.matrix_shape))
        stored_tensors = {n: t.view(self._stored_dtypes[n]) for n, t in tensors.items()}
        return QuantizedWeight(format=self.format, shape=shape, **stored_tensors)

    def dequantize(self) -> Tensor:  # [E, out, in]
        """Return the dequantised weight in `dtype`. The experts' op computes with exactly these values."""
        if self.device.type != "cpu" or not self.is_divisible:
            return dequantize(self.weight(), self.dtype)
        # Decode one expert at a time to save memory: the reference code holds several tensors of the decoded size.
        out = torch.empty(self.shape, dtype=self.dtype)
        for expert, matrix in enumerate(out.split(1)):
            of_expert = self.weight(lambda _, tensor, e=expert: tensor[e : e + 1])
            matrix.copy_(dequantize(of_expert, self.dtype))
        return out

    def check_divisible(self, op: str) -> None:
        """Raise ValueError unless each expert's stored bytes can be separated from those of the other experts."""
        if not self.is_divisible:
            raise ValueError(
                f"{op}: each expert must hold whole blocks of {self.format}, got matrices of "
                f"{list(self.matrix_shape)}; quantise them as 'nf4', without nested scales"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # Refuse a dtype other than that of the held tensor, because copying would convert the integers.
        wrong = []
        for name, dtype in self._stored_dtypes.items():
            held = getattr(self, name).dtype
            given = state_dict[prefix + name].dtype if prefix + name in state_dict else held
            if given != held:
                wrong.append(f"{prefix}{name} must be {held} with the bits of {dtype}, got {given}")
        args[-1].extend(wrong)  # load_state_dict raises these errors
        if not wrong:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.format}, shape={list(self.shape)}, dtype={self.dtype}"


def as_bits(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers with the element size of the tensor."""
    return tensor.view(_BITS[tensor.element_size()])


def stored(weight: Any) -> Any:
    """Return the parameter with the experts as first axis: a plain weight, or the values of a quantised weight."""
    return weight.get_parameter("values") if isinstance(weight, QuantizedExperts) else weight


def replace_weight(experts: nn.Module, name: str, weight: nn.Parameter | QuantizedExperts) -> None:
    """Replace a weight of the experts by a weight of another kind: plain or quantised."""
    delattr(experts, name)  # deleted first, because nn.Module refuses to assign a module to a parameter's name
    setattr(experts, name, weight)
