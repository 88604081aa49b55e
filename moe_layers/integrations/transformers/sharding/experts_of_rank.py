"""Adapts one rank's share of a transformers experts module to the interface that dispatchers use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....experts.grouped import ExpertRows
from ....parallel.collectives import Ranks
from ....parallel.expert_parallel import ExpertParallel
from ....parallel.rank_dispatcher import RankDispatcher, scale_gradient
from ....routing.activation_checkpointing import kept_choice
from ....routing.result import Slots
from ..experts.experts_forward import ATTRIBUTE, ExpertsSpec, LowRank, changes_of, compute_module, stored_pair


@dataclass
class Sharing:
    """The settings with which one experts module is sharded over ranks."""

    name: str  # name of the experts in errors
    num_experts: int  # number of experts on all ranks together
    ranks: Ranks
    style: ExpertParallel
    _dispatchers: dict[str, RankDispatcher] = field(default_factory=dict)

    def forward(
        self,
        experts: nn.Module,
        tokens: Tensor,  # [T, D]
        topk_experts: Tensor,  # [T, K] int32; ids outside [0, E) add nothing
        topk_weights: Tensor,  # [T, K] float32
    ) -> Tensor:  # [T, D]
        chosen = self.style.choose(self.ranks.size, topk_experts.shape[1])
        if chosen not in self._dispatchers:
            made = self.style.make_dispatcher(chosen, self.ranks, any_lengths=True, name=self.name)
            self._dispatchers[chosen] = made
        share = ExpertsOfModule(self, experts, reserved_sms=self.style.sms_of(chosen))
        # A recomputation must reuse the chosen experts. Other experts would change the number of sent and saved rows.
        slots = Slots(kept_choice(topk_experts), topk_weights, logits=topk_weights)  # `logits` is an unread placeholder
        out = self._dispatchers[chosen].run(tokens, slots, share).wait().to(tokens.dtype)
        # Copy an output that is a view, because a view loses FSDP2's hooks if the model changes the view in place.
        return out.clone() if out._is_view() else out

    @property
    def replicated_scale(self) -> float:
        """Return the factor for gradients of parameters that are whole on every rank, such as adapters.

        On each rank, the gradient of a whole parameter covers the rank's own experts and the tokens of all ranks. The
        complete gradient is the sum over ranks. If `average_gradients`, the dispatcher and data parallelism both divide
        by the number of ranks. The factor is then the number of ranks, to undo one division. Else, the factor is 1.
        """
        return self.ranks.size if self.style.average_gradients else 1

    def own(self, change: LowRank) -> LowRank:
        """Return this rank's slices of PEFT's factors. Their gradients are multiplied by `replicated_scale`."""
        num_local = self.num_experts // self.ranks.size
        first = self.ranks.rank * num_local
        return LowRank(*(scale_gradient(part[first : first + num_local], self.replicated_scale) for part in change))


class ExpertsOfModule:
    """A rank's experts during one call of a dispatcher. The class implements the protocol `ExpertsOfRank`."""

    recompute: str | None = None
    batch_invariant = False

    def __init__(self, sharing: Sharing, experts: Any, reserved_sms: int):
        spec: ExpertsSpec = getattr(experts, ATTRIBUTE)
        self.sharing, self.experts, self.spec, self.reserved_sms = sharing, experts, spec, reserved_sms
        self.num_experts = sharing.num_experts
        self.activation, self.implementation, self.precision = spec.activation, spec.implementation, spec.precision
        self.weight_on_input = spec.weight_on_input
        self.changes = {name: sharing.own(change) for name, change in changes_of(experts).items()}

    @property
    def w_up(self) -> Any:
        return stored_pair(self.experts, self.spec)[0]

    def parameters(self) -> Iterator[Tensor]:
        yield from self.spec.tensors(self.experts).values()
        for change in self.changes.values():
            yield from change

    def __call__(self, rows: ExpertRows) -> Tensor:
        # The cache of e4m3 weights identifies a weight by its parameter. Pass the module's own parameters, because the
        # local parts are new objects in each call.
        parameters = stored_pair(self.experts, self.spec) if self.precision is not None else None
        with local_parts(self.experts, self.spec, self.sharing.replicated_scale):
            return compute_module(self.experts, rows.tokens, rows, rows.topk_weights, self.changes, parameters)


@contextmanager
def local_parts(experts: nn.Module, spec: ExpertsSpec, replicated_scale: float) -> Iterator[None]:
    """Replace sharded tensors by this rank's parts inside the context. Backward multiplies the gradients of
    `post_expert_norm`'s parameters by `replicated_scale`."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for path, module in experts.named_modules():
            stores: list[Any] = [module._parameters, module._buffers]
            for held in stores:
                for name, tensor in held.items():
                    if isinstance(tensor, DTensor):
                        replaced.append((held, name, tensor))
                        held[name] = tensor.to_local()
                    elif spec.normed and path.startswith("post_expert_norm") and isinstance(tensor, nn.Parameter):
                        replaced.append((held, name, tensor))
                        held[name] = scale_gradient(tensor, replicated_scale)
        yield
    finally:
        for held, name, tensor in replaced:
            held[name] = tensor
