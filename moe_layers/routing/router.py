"""The router: a linear map to one logit per expert, and the choice of the top-k."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import RouterSpec, Routing, linear_routing, routing_weights
from moe_kernels.routing.linear_op import LinearRouter
from moe_kernels.routing.routers import check_experts, is_one_op
from moe_kernels.routing.scored import score_settings
from moe_kernels.runtime.dispatch import IMPLEMENTATIONS

from ..autocast import call_with_autocast_rules
from ..checks import check_choice, check_kind, check_positive
from .activation_checkpointing import add_once
from .assignment import Assignment, as_assignment
from .noise import RouterNoise
from .result import Slots


class TopKRouter(nn.Module):
    """Chooses `top_k` experts per token and weighs them. Logits and weights are float32.

    Parameters are `weight` [E, D] and, depending on the settings, `bias` [E], `input_scale` [D] and `per_expert_scale`
    [E]. The weight may be float32 with 16-bit tokens, as in some models. All products are then float32.

    The selection bias is the buffer `selection_bias` [E]. This bias stays float32 when the module is converted to a
    shorter dtype, because updates of the bias are small.

    `expert_counts` [E] int64 holds the counts for balancing. State dicts do not contain the counts. The counts are no
    buffer, because each rank has its own counts, which DistributedDataParallel would overwrite with the first rank's.

    Args:
        router: the settings. Default: `RouterSpec()`, a softmax whose weights sum to one over the chosen experts, as in
            Mixtral and Qwen3. `weight_on_input` concerns the experts, not the router.
        assignment: an `Assignment` that replaces the top-k choice, or a function for `CustomAssignment`. Default: None.
        noise: noise in training mode. Default: None.
        batch_invariant: whether a token's result and gradient are bitwise independent of other tokens. Default: False.
        init_std: standard deviation of the weight at initialisation. Default: 0.02.
        implementation: "triton", "reference", or None (default) to choose by device.

    Warns:
        RuntimeWarning: `top_k` is 1 and `router` normalises the weights: each weight is 1 and has no gradient.

    Raises:
        ValueError: a size is not positive, `router` cannot choose `top_k` of `num_experts`, or `router` does not
            support the assignment or the noise.
    """

    selection_bias: Tensor | None
    expert_counts: Tensor
    accumulated_counts: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        router: RouterSpec | None = None,
        assignment: Assignment | Callable | None = None,
        noise: RouterNoise | None = None,
        batch_invariant: bool = False,
        init_std: float = 0.02,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive("TopKRouter", d_model=d_model, num_experts=num_experts, top_k=top_k)
        check_choice("TopKRouter", "implementation", implementation, (*IMPLEMENTATIONS, None))
        spec = RouterSpec() if router is None else router
        check_kind("TopKRouter", "router", spec, RouterSpec)
        spec.check_sizes("TopKRouter", num_experts, top_k)
        self.num_experts = num_experts
        self.top_k = top_k
        self._spec = spec
        # True if one op computes the routing: nothing precedes the linear map, and nothing changes the weights later.
        self.is_linear_op = is_one_op(spec) and spec.input_norm_epsilon is None and not spec.per_expert_scale
        self._is_softmax = spec.is_softmax_of_logits and not spec.logit_bias
        self._score_settings = score_settings(spec)
        self.assignment = as_assignment("TopKRouter", assignment)
        self.noise = noise
        if self.assignment is not None:
            self.assignment.check("TopKRouter", spec)
        if noise is not None:
            check_kind("TopKRouter", "noise", noise, RouterNoise)
            noise.check("TopKRouter", spec, self.assignment is not None)
        if num_experts > 1 and self.num_slots == 1 and spec.single_weight_is_one:
            warnings.warn(
                "TopKRouter: with top_k=1 a normalised weight is 1 for any logits, so that only auxiliary losses train "
                "the router. To train it, pass router=RouterSpec.softmax(normalize=False), as in Switch",
                RuntimeWarning,
                stacklevel=2,
            )
        self.batch_invariant = batch_invariant
        self.init_std = init_std
        self.implementation = implementation

        def parameter(*shape: int, wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)) if wanted else None

        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.bias = parameter(num_experts, wanted=spec.logit_bias)
        self.input_scale = parameter(d_model, wanted=spec.input_norm_epsilon is not None)
        self.per_expert_scale = parameter(num_experts, wanted=spec.per_expert_scale)
        has_bias = spec.selection_bias is not None
        selection_bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if has_bias else None
        self.register_buffer("selection_bias", selection_bias)
        self.expert_counts = torch.zeros(num_experts, device=device, dtype=torch.int64)
        self.reset_parameters()

    @property
    def spec(self) -> RouterSpec:
        """Return the settings. The settings cannot be changed, because they determine the parameters."""
        return self._spec

    def operands(
        self,
        weight: Tensor,  # [E, D]
    ) -> LinearRouter:
        """Return the operands of the op that routes with this weight. `is_linear_op` must be True.

        Shapes: weight [E, D].
        """
        logit_bias = self.bias if self._spec.logit_bias else None
        selection_bias = None if self._spec.selection_bias is None else self.selection_bias
        settings = self.top_k, self._is_softmax, self.batch_invariant, self._score_settings
        return LinearRouter(weight, logit_bias, selection_bias, *settings)

    @property
    def num_slots(self) -> int | None:
        """Return the number of slots per token, or None if it depends on the logits, as with `CustomAssignment`."""
        if self.assignment is None:
            return self.top_k
        return self.assignment.num_slots(self.num_experts, self.top_k)

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the weight from a normal distribution with standard deviation `std`, by default `init_std`. Set biases
        and counts to zero, and scales to one."""
        nn.init.normal_(self.weight, std=self.init_std if std is None else std)
        for tensor, value in (
            (self.bias, 0.0),
            (self.selection_bias, 0.0),
            (self.input_scale, 1.0),
            (self.per_expert_scale, 1.0),
        ):
            if tensor is not None:
                nn.init.constant_(tensor, value)
        self.expert_counts.zero_()
        self.accumulated_counts = None

    def forward(
        self,
        tokens: Tensor,  # [T, D]
        topk_experts: Tensor | None = None,  # [T, K] int32
        token_mask: Tensor | None = None,  # [T] bool
    ) -> Routing | Slots:
        """Choose and weigh experts.

        Shapes: tokens [T, D], topk_experts [T, K] int32, token_mask [T] bool.

        Args:
            topk_experts: experts to weigh, with -1 for no expert. Default: None, which lets the router choose. On a GPU
                and in compiled code, ids cannot be checked, and ids of E or more become -1.
            token_mask: False for padding, which an assignment leaves out. A router without assignment ignores the mask.

        Raises:
            ValueError: a shape, dtype or device disagrees with the signature or the parameters, or an id on the CPU is
                too large.
        """
        if topk_experts is not None:
            self._check_replayed(topk_experts, len(tokens))
            topk_experts = torch.where(topk_experts < self.num_experts, topk_experts, -1)
        routed = call_with_autocast_rules(self._route, self._prepared(tokens), self.weight)
        if topk_experts is None and self.assignment is not None:
            routed = self.assignment(routed, self.spec, token_mask)
            check_experts(type(self.assignment).__name__, routed.topk_experts, self.num_experts)
        elif topk_experts is None and self.training and self.noise is not None and self.noise.gumbel:
            choose = self.noise.choose
            topk_experts = choose(routed.logits, self.top_k, self.spec, self.selection_bias, self.implementation)
        if topk_experts is not None:
            routed = Routing(topk_experts, routing_weights(routed.logits, topk_experts, self.spec), routed.logits)
        if self.per_expert_scale is not None:
            scale = self.per_expert_scale[routed.topk_experts.clamp(min=0).long()]
            kind = Routing if self.assignment is None else Slots
            # Call the class, because PyTorch 2.11 cannot compile `_replace` of a NamedTuple.
            routed = kind(routed.topk_experts, routed.topk_weights * scale, *routed[2:])  # pyright: ignore[reportArgumentType]  # these are the fields of `kind`
        return routed

    def _check_replayed(self, topk_experts: Tensor, num_tokens: int) -> None:
        if self.num_slots is None:
            raise ValueError("TopKRouter: a CustomAssignment's choice must not be replayed, got topk_experts")
        check_kind("TopKRouter", "topk_experts", topk_experts, Tensor)
        if topk_experts.shape != (num_tokens, self.num_slots):
            raise ValueError(
                f"TopKRouter: topk_experts must be {[num_tokens, self.num_slots]}, got {list(topk_experts.shape)}"
            )
        check_experts("TopKRouter", topk_experts, self.num_experts)

    def _prepared(self, tokens: Tensor) -> Tensor:  # [T, D]
        """Return the input of the linear map. Add jitter in training mode, and normalise if the settings say so."""
        if self.training and self.noise is not None:
            tokens = self.noise.jitter(tokens)
        if self.input_scale is not None:
            d_model = tokens.shape[-1]
            normed = functional.rms_norm(tokens, (d_model,), eps=self.spec.input_norm_epsilon)
            tokens = normed * (self.input_scale * d_model**-0.5)
        return tokens

    def _route(self, tokens: Tensor, weight: Tensor) -> Routing:
        return linear_routing(
            tokens,
            weight,
            self.top_k,
            self.spec,
            logit_bias=self.bias,
            selection_bias=self.selection_bias,
            batch_invariant=self.batch_invariant,
            implementation=self.implementation,
        )

    def count(
        self,
        choices_per_expert: Tensor,  # [E]
    ) -> None:
        """Add the counts of a forward to `expert_counts`, except in a recomputation.

        Shapes: choices_per_expert [E].
        """
        if self.expert_counts.is_meta and not choices_per_expert.is_meta:
            self.expert_counts = torch.zeros_like(self.expert_counts, device=choices_per_expert.device)
        self.take_counts_to(choices_per_expert.device)
        add_once(self.expert_counts, choices_per_expert)

    def take_counts_to(self, device: torch.device) -> None:
        """Move the counts to `device`, because `fully_shard` moves only parameters. Counts on meta are not moved."""
        if self.expert_counts.device != device and not self.expert_counts.is_meta:
            self.expert_counts = self.expert_counts.to(device)

    def _apply(self, fn, recurse: bool = True):
        bias, counts = self.selection_bias, self.expert_counts
        super()._apply(fn, recurse)
        self.expert_counts = fn(counts)
        if self.accumulated_counts is not None:
            self.accumulated_counts = fn(self.accumulated_counts)
        if counts.is_meta and not self.expert_counts.is_meta:
            self.expert_counts.zero_()  # `to_empty` left the counts uninitialised, and no state dict has counts
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype.itemsize < 4:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        # Undo two effects of `assign=True`: the counts stay on meta, and the bias gets the state dict's dtype.
        if self.expert_counts.is_meta:
            self.expert_counts = torch.zeros_like(self.expert_counts, device=self.weight.device)
        if self.selection_bias is not None and self.selection_bias.dtype.itemsize < 4:
            self.selection_bias = self.selection_bias.float()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, {self.spec}"


def watches_choice(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a router's forward hook as one that only reads the chosen experts, and return the hook. Other hooks prevent
    the layer from running as one op."""
    hook.watches_choice = True
    return hook
