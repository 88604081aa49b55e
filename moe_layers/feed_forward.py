"""The Mixture-of-Experts feed-forward layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import Activation, RouterSpec, Routing
from moe_kernels.gemm.batch_invariance import invariant_linear
from moe_kernels.runtime.dispatch import IMPLEMENTATIONS

from .autocast import call_with_autocast_rules
from .balance.balancing import BalanceLosses
from .balance.losses import attach_aux_loss
from .balance.routing_statistics import RoutingObserver
from .checkpoint import CheckpointSource, LoadReport, load_layer, load_safetensors, save_layer, save_safetensors
from .checks import check_choice, check_kind
from .config import MoEConfig
from .experts.dispatcher import LocalDispatcher
from .experts.grouped import GroupedExperts
from .experts.lora.adapters import add_lora, remove_lora, set_lora
from .experts.lora.merging import merge_lora, unmerge_lora
from .experts.shared import SharedExpert
from .experts.whole_op import check_tokens, compute_whole, runs_as_one_op
from .input import TokenInfo, flatten_router_input, flatten_tokens, restore_shape
from .memory import saved_bytes
from .routing.assignment import Assignment, as_assignment
from .routing.capacity import CapacityFactor, drop_beyond_capacity
from .routing.noise import RouterNoise
from .routing.result import LayerRouting, Slots, identity_output, layer_routing
from .routing.router import TopKRouter


class MoEFeedForward(nn.Module):
    """A feed-forward layer that sends each token through `top_k` of `num_experts` experts.

        y = sum over the chosen experts of weight * w_down @ activation(w_up @ x)   [+ shared expert]

    Input and output are [..., d_model] in the dtype of the parameters. Under autocast, the layer computes and returns
    its output in autocast's dtype, as matrix products do. Router logits, routing weights and all sums are float32. The
    forward and backward are deterministic and never wait for the GPU.

    All weights start from a normal distribution of mean 0 and standard deviation `MoEConfig.init_std` (default 0.02).
    Biases start from zero and learned scales from one. `reset_parameters` initialises all parameters again.

    The constructor takes the common settings. `MoEConfig` holds all settings: `from_config` builds the layer that a
    configuration describes, and `config` is the configuration of a layer.

    Args:
        d_ff: hidden size of one expert.
        activation: the experts' activation: "swiglu" (default), another name, or an `Activation`. A gated activation
            makes the experts gated.
        router: the router's settings; None for `RouterSpec()`, the router of Mixtral and Qwen3.
        bias: whether the experts' projections have biases. Default False.
        shared_d_ff: hidden size of a shared expert that processes every token; None (default) for no shared expert.
        capacity: maximum number of slots that each expert takes from one sequence, or a `CapacityFactor`. See
            `MoEConfig`. None (default) for no limit.
        assignment: an `Assignment` that replaces each token's top-k choice, or a function for `CustomAssignment`.
            None (default) for the top-k choice.
        noise: noise that the router adds in training mode. None (default) for no noise.
        balance_losses: coefficients of the auxiliary losses. Backward adds the gradients of the losses, multiplied by
            the scale of `set_aux_loss_scale`. None (default) for no losses.
        recompute: "up" recomputes the experts' pre-activations in backward, with one more GEMM. None (default) saves
            the pre-activations.
        precision: "fp8" multiplies e4m3 operands in the routed experts, see `MoEConfig`. None (default) multiplies
            operands in the dtype of the parameters.
        implementation: "triton", "reference", or None (default) to choose by device.

    Raises:
        ValueError: a size is not positive, a name is unknown, the router cannot choose `top_k` experts, or two
            arguments exclude each other.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str | Activation = "swiglu",
        router: RouterSpec | None = None,
        bias: bool = False,
        shared_d_ff: int | None = None,
        capacity: int | CapacityFactor | None = None,
        assignment: Assignment | Callable | None = None,
        noise: RouterNoise | None = None,
        balance_losses: BalanceLosses | None = None,
        recompute: str | None = None,
        precision: str | None = None,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        try:
            config = MoEConfig(
                d_model,
                d_ff,
                num_experts,
                top_k,
                activation=activation,
                router=RouterSpec() if router is None else router,
                bias=bias,
                shared_d_ff=shared_d_ff,
                capacity=capacity,
                balance_losses=BalanceLosses() if balance_losses is None else balance_losses,
                recompute=recompute,
                precision=precision,
            )
        except ValueError as error:  # the message must name this class, not MoEConfig
            raise ValueError(str(error).replace("MoEConfig", "MoEFeedForward", 1)) from error
        self._build(config, assignment, noise, implementation=implementation, device=device, dtype=dtype)

    @classmethod
    def from_config(
        cls,
        config: MoEConfig,
        *,
        assignment: Assignment | Callable | None = None,
        noise: RouterNoise | None = None,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MoEFeedForward:
        """Build the layer that a configuration describes. The class docstring describes the other arguments.

        This method does not call the constructor. A subclass with its own constructor must also override `from_config`.
        """
        check_kind("MoEFeedForward", "config", config, MoEConfig)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._build(config, assignment, noise, implementation=implementation, device=device, dtype=dtype)
        return layer

    def _build(
        self, config: MoEConfig, assignment: Assignment | Callable | None, noise: RouterNoise | None, **factory: Any
    ) -> None:
        check_choice("MoEFeedForward", "implementation", factory["implementation"], (*IMPLEMENTATIONS, None))
        assignment = as_assignment("MoEFeedForward", assignment)
        if assignment is not None:
            assignment.check("MoEFeedForward", config.router)
            if config.capacity is not None and assignment.decides_counts:
                raise ValueError(f"MoEFeedForward: there is no capacity with {assignment}, got {config.capacity}")
        if noise is not None:
            check_kind("MoEFeedForward", "noise", noise, RouterNoise)
            noise.check("MoEFeedForward", config.router, assignment is not None)
        self._config = config
        self.d_model = config.d_model
        self.num_zero_experts = config.num_zero_experts
        self.separate_router_input = config.separate_router_input
        self.capacity = config.capacity
        self.balance_losses = config.balance_losses
        self.aux_loss_scale: Tensor | None = None
        self.aux_loss: Tensor | None = None  # loss of the last forward, see `aux_losses`
        self.observer: RoutingObserver | None = None
        self.checkpoint_source: CheckpointSource | None = None
        empty = partial(torch.empty, device=factory["device"], dtype=factory["dtype"])
        factory["init_std"] = config.init_std
        self.router = TopKRouter(
            config.d_model,
            config.num_experts + config.num_zero_experts,
            config.top_k,
            router=config.router,
            assignment=assignment,
            noise=noise,
            **factory,
        )
        self.dispatcher = LocalDispatcher()
        self.experts = GroupedExperts(
            config.latent_dim or config.d_model,
            config.d_ff,
            config.num_experts,
            activation=config.activation,
            bias=config.bias,
            weight_on_input=config.router.weight_on_input,
            recompute=config.recompute,
            precision=config.precision,
            **factory,
        )
        self.w_latent_in, self.w_latent_out = None, None
        if config.latent_dim is not None:
            self.w_latent_in = nn.Parameter(empty(config.latent_dim, config.d_model))
            self.w_latent_out = nn.Parameter(empty(config.d_model, config.latent_dim))
        self.shared_expert = None
        if config.shared_d_ff is not None:
            self.shared_expert = SharedExpert(
                config.d_model,
                config.shared_d_ff,
                activation=config.shared_activation or config.activation,
                gate=config.shared_gate,
                **factory,
            )
        self.batch_invariant = config.batch_invariant
        self._reset_latent(config.init_std)

    @property
    def config(self) -> MoEConfig:
        """Return the layer's configuration, including changes of settings after the layer was built."""
        return replace(
            self._config,
            capacity=self.capacity,
            recompute=self.experts.recompute,
            precision=self.experts.precision,
            balance_losses=self.balance_losses,
            batch_invariant=self.batch_invariant,
        )

    @classmethod
    def from_checkpoint(
        cls, directory: str | os.PathLike[str], layer: int | str = 0, **options: Any
    ) -> MoEFeedForward | tuple[MoEFeedForward, LoadReport]:
        """Return a layer of a published model. `moe_layers.checkpoint.load_layer` describes `layer` and the options."""
        return load_layer(cls, directory, layer, **options)

    @property
    def num_experts(self) -> int:
        """Return the number of experts with parameters on all ranks together. Zero experts do not count."""
        return self.router.num_experts - self.num_zero_experts

    @property
    def batch_invariant(self) -> bool:
        """Return whether a token's output is independent, bit for bit, of the other tokens of a call. Default False.

        Without auxiliary losses, a token's gradient is independent of other tokens, too. Gradients of parameters are
        sums over all tokens. The same kernels compute outputs and tokens' gradients for any number of tokens, without
        cuBLAS. The shared expert runs as a routed expert. The cost is highest with few tokens. The reference
        implementation computes each token alone. Expert parallelism breaks the guarantee, because collectives sum in
        their own order. Setting True raises ValueError if the layer has a capacity, assignment or noise, because the
        effects of these settings depend on the whole call.
        """
        return self.experts.batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, wanted: bool) -> None:
        if wanted:
            self._check_invariance()
        for part in (self.router, self.experts, self.shared_expert):
            if part is not None:
                part.batch_invariant = wanted

    def _check_invariance(self) -> None:
        if (self.capacity, self.router.assignment, self.router.noise) != (None, None, None):
            raise ValueError(
                "MoEFeedForward: batch_invariant must have no capacity, assignment or noise, "
                f"got {self.capacity}, {self.router.assignment} and {self.router.noise}"
            )

    # Methods for low-rank adapters of the experts. Each is a function whose first argument is the layer.
    add_lora, set_lora, remove_lora = add_lora, set_lora, remove_lora
    merge_lora, unmerge_lora = merge_lora, unmerge_lora

    def saved_bytes(self, num_tokens: int, dtype: torch.dtype | None = None) -> int:
        """Return how many bytes a forward of `num_tokens` tokens saves for backward, without parameters and input."""
        return saved_bytes(self, num_tokens, dtype)

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of parameters of the whole layer, without adapters. See `MoEConfig.num_parameters`."""
        return self.config.num_parameters(active=active)

    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward of one token. See `MoEConfig.flops_per_token`."""
        return self.config.flops_per_token()

    def keep_local_experts(self, experts: range) -> None:
        """Keep only the parameters of `experts`, and compute only these experts' part of the sum over experts.

        Shared and zero experts always remain. If you sum the outputs of layers that keep different experts, count the
        outputs of the shared and zero experts only once.

        Raises:
            ValueError: `experts` is not a range within this layer's experts, or some experts were dropped before.
        """
        self.experts.keep(experts, self.num_experts)
        self.dispatcher = LocalDispatcher(experts.start)

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw every weight from a normal distribution with standard deviation `std`, by default `config.init_std`."""
        for part in (self.router, self.experts, self.shared_expert):
            if part is not None:
                part.reset_parameters(std)
        self._reset_latent(self._config.init_std if std is None else std)

    def _reset_latent(self, std: float) -> None:
        for weight in (self.w_latent_in, self.w_latent_out):
            if weight is not None:
                nn.init.normal_(weight, std=std)

    def forward(
        self,
        x: Tensor,  # [..., D]
        *,
        return_routing: bool = False,
        token_mask: Tensor | None = None,  # [...] bool
        sequence_lengths: Tensor | None = None,  # [N] int32 or int64
        num_tokens: int | Tensor | None = None,
        topk_experts: Tensor | None = None,  # [T, K] int32
        router_input: Tensor | None = None,  # [..., D]
    ) -> Tensor | tuple[Tensor, LayerRouting]:  # [..., D]
        """Send each token through its experts.

        Shapes: x [..., D], token_mask [...] bool, sequence_lengths [N] int32 or int64, topk_experts [T, K] int32,
        router_input [..., D]; result [..., D].

        Args:
            return_routing: return (y, LayerRouting). Gradients flow through the routing's weights and logits.
            token_mask: False for padding. Routed experts, counts and losses skip padding. The router computes the
                logits of padding from zeros. Shared experts compute padding, too. A masked copy of x is saved for
                backward.
            sequence_lengths: lengths of sequences that are packed into the leading axes, for `BalanceLosses.sequence`.
                Default: x [..., S, D] with three or more axes holds sequences of length S.
            num_tokens: divisor of the auxiliary losses, see `losses.py`. Default: the number of tokens in this call.
            topk_experts: experts that replace the router's choice, see `RoutingReplay`. The router computes the weights
                of these experts. K is the router's number of slots per token: top_k, unless an assignment sets another
                number. The id -1 means no expert. On a GPU, ids beyond the experts are not reported and mean no expert.
            router_input: the tensor that the router reads. Required with `MoEConfig.separate_router_input`, else None.

        Raises:
            ValueError: x is a DTensor, does not end in d_model, or has another dtype or device than the parameters.
                `token_mask`, `topk_experts` or `router_input` has a wrong shape or dtype. On a CPU, `topk_experts` has
                an id beyond the experts. `BalanceLosses.sequence` is set, but the sequence lengths are unknown.
        """
        tokens, info = flatten_tokens(x, self.d_model, token_mask, sequence_lengths, num_tokens)
        check_tokens(self, x)
        given = token_mask is not None or topk_experts is not None or router_input is not None
        if not (given or return_routing) and runs_as_one_op(self, tokens):
            out, shared = compute_whole(self, tokens), self._modules.get("shared_expert")
            out = out if shared is None else out + shared(info.all_tokens)
            return out if out.shape == x.shape else restore_shape(out, info)
        if self.batch_invariant:
            self._check_invariance()  # check in each call, because router or assignment may have been replaced
        router_tokens = flatten_router_input(tokens, info, router_input, separate=self.separate_router_input)
        slots = self._route(router_tokens, info, topk_experts)
        pending = self.dispatcher.run(self._to_latent(tokens), slots, self.experts)  # dispatch, compute, combine
        shared = self.shared_expert
        shared_out = None if shared is None else shared(info.all_tokens)  # runs while the dispatcher communicates
        out = self._from_latent(pending.wait(), tokens, slots)
        out = out if shared_out is None else out + shared_out
        return self._finish(out, slots, pending.offsets, info, return_routing)

    def _route(self, tokens: Tensor, info: TokenInfo, topk_experts: Tensor | None) -> Slots:
        """Return the router's choices as `Slots`. Slots of padding or beyond the capacity have expert id -1."""
        given = {} if topk_experts is None else {"topk_experts": topk_experts}
        if info.token_mask is not None and self.router.assignment is not None:
            given["token_mask"] = info.token_mask
        routed = self.router(tokens, **given)
        if not isinstance(routed, Routing | Slots):
            raise ValueError(
                f"MoEFeedForward: router must return a Routing, as TopKRouter does, got {type(routed).__name__}; for "
                "another choice pass assignment=, for another router call moe_kernels.fused_experts"
            )
        chosen = routed.topk_experts
        if info.token_mask is not None:
            chosen = torch.where(info.token_mask[:, None], chosen, -1)
        max_rows = routed.max_rows if isinstance(routed, Slots) else None
        slots = Slots(chosen, routed.topk_weights, routed.logits, max_rows)
        return drop_beyond_capacity(slots, info.sequence_length, self.router.top_k, self.capacity)

    def _to_latent(self, tokens: Tensor) -> Tensor:  # [T, D] -> [T, D or latent_dim]
        return tokens if self.w_latent_in is None else self._linear(tokens, self.w_latent_in)

    def _from_latent(self, out: Tensor, tokens: Tensor, slots: Slots) -> Tensor:  # out [T, D or latent_dim] -> [T, D]
        if self.w_latent_out is not None:
            return self._linear(out, self.w_latent_out)
        if self.num_zero_experts:
            out = out + identity_output(tokens, slots, self.num_experts, self.experts.implementation).to(out.dtype)
        return out

    def _linear(self, tokens: Tensor, weight: Tensor) -> Tensor:
        if not self.batch_invariant:
            return functional.linear(tokens, weight)
        linear = partial(invariant_linear, implementation=self.experts.implementation)
        return call_with_autocast_rules(linear, tokens, weight)

    def _finish(
        self, out: Tensor, slots: Slots, offsets: Tensor, info: TokenInfo, return_routing: bool
    ) -> Tensor | tuple[Tensor, LayerRouting]:
        """Attach losses, and update counts and statistics. Return the output in the shape of the input."""
        routing, loss = None, None
        has_aux_loss = self.balance_losses.any and torch.is_grad_enabled()
        counts = self.training and (self.balance_losses.global_batch > 0 or self.router.selection_bias is not None)
        if return_routing or has_aux_loss or counts:
            # Offsets lack zero experts and experts dropped by `keep_local_experts`. With such experts, pass no offsets.
            counted = offsets if self.experts.num_experts == self.router.num_experts else None
            routing = layer_routing(slots, info, counted, self.router.num_experts, self.experts.implementation)
            if has_aux_loss:
                out, loss = attach_aux_loss(self, out, routing, info.num_tokens)
            if counts:
                self.router.count(routing.choices_per_expert)
        if self.observer is not None:
            self.observer.add(slots.logits, slots.choices, kept=slots.kept, token_mask=info.token_mask, aux_loss=loss)
        out = restore_shape(out, info)
        return (out, routing) if return_routing and routing is not None else out

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *, layout: str | None = None, max_shard_bytes: int = 5_000_000_000
    ) -> None:
        """Write a directory from which `from_checkpoint` reads the same bits. See `checkpoint.save_layer`."""
        save_layer(self, directory, layout, max_shard_bytes)

    def save_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters to one safetensors file, with the names of the state dict."""
        save_safetensors(self, path)

    def load_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Load a file written by `save_safetensors`. Convert tensors to the parameters' dtype and device. If tensors
        are missing, unexpected or of a wrong shape, raise ValueError and leave the layer unchanged."""
        load_safetensors(self, path)
