"""Recognises the transformers routers that the experts' op can compute: see `experts/deferred_routing.py`.

A router is recognised by its results on test tokens. A block is recognised by its source code: the block must pass the
router's choice and weights to the experts, and do nothing else with them. Other routers and blocks run unchanged.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from moe_kernels import RouterSpec, topk_routing
from moe_kernels.routing.linear_op import LinearRouter
from moe_kernels.routing.routers import linear_router

from ....experts.whole_op import has_hooks, runs_unseen
from ..experts.deferred_routing import DeferredRouting
from ..experts.discovery import Found, has_interface
from ..experts.experts_forward import ENABLED, NAME, SHARING
from ..experts.replaced_forwards import has_only_own_forward, is_replaced
from .attached import router_in_block

FORM = "_moe_layers_router_form"  # router's attribute that holds its RouterForm, set by `enable`
_MODELS = "transformers.models."  # package whose classes may be recognised
_NUM_TOKENS = 16  # number of test tokens


@dataclass
class RouterForm:
    """A router that the experts' op can compute."""

    operands: LinearRouter  # without the router's parameters
    attributes: dict[str, Any]  # the router's numbers and strings, which other code may change later
    implementation: str | None  # the experts' implementation: "triton", or None to choose by device
    child: str  # name of the router in its block
    block: nn.Module | None  # None if only the router was copied, as PEFT does for `modules_to_save`
    forwards: tuple[Any, Any, Any]  # forwards of the classes of block, router and experts, which other code may replace

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterForm:
        return replace(self, block=memo.get(id(self.block)))


def router_forward(self: nn.Module, hidden_states: Tensor) -> tuple[Any, Any, Any]:
    """Return (None, routing, routing), where routing is a `DeferredRouting`. If kernels do not run, or if anything but
    the experts may read the routing, return the results of the router's class."""
    form: RouterForm = getattr(self, FORM)
    if not _defers(self, form, hidden_states):
        return type(self).forward(self, hidden_states)
    routing = DeferredRouting(self, hidden_states, form.operands)
    return None, routing, routing


def _defers(router: nn.Module, form: RouterForm, tokens: Tensor) -> bool:
    modes = [] if torch.compiler.is_dynamo_compiling() else _get_current_function_mode_stack()
    block, (of_block, of_router, of_experts) = form.block, form.forwards
    return (
        block is not None
        and block._modules.get(form.child) is router
        and (type(block).forward is of_block and "forward" not in vars(block))
        and (type(router).forward is of_router and has_only_own_forward(router))
        and type(router._parameters.get("weight")) in (nn.Parameter, Tensor)  # neither a DTensor nor adapted by PEFT
        and all([getattr(router, name) == value for name, value in form.attributes.items()])
        and not has_hooks(router)
        and _takes_routing(block._modules.get("experts"), of_experts)
        # torch.set_default_device sets a DeviceContext, which only adds a device. Other modes may see each op.
        and all([type(mode) is DeviceContext for mode in modes])
        and runs_unseen(form.implementation, tokens)
    )


def _takes_routing(experts: Any, forward: Any) -> bool:
    """Return whether `experts_forward` computes the experts, and no other code would get the DeferredRouting: neither
    hooks nor wrapped forwards of the experts or of PEFT's wrappers around the experts."""
    while experts is not None and not has_hooks(experts):
        if "forward" in vars(experts) and not has_only_own_forward(experts):
            return False
        if "base_layer" not in experts._modules:
            if ENABLED not in vars(experts) or SHARING in vars(experts) or type(experts).forward is not forward:
                return False
            return is_replaced(experts) or vars(experts.config).get("_experts_implementation_internal") == NAME
        experts = experts._modules["base_layer"]
    return False


def deferrable_router(modules: dict[str, nn.Module], part: Found) -> tuple[nn.Module, RouterForm] | None:
    """Return the router of these experts and its `RouterForm`, or None if the experts' op cannot compute the router.
    `modules` are the modules of the whole model by name."""
    found = router_in_block(modules, part.name)
    if found is None or not has_interface(part.experts) or part.spec.normed or part.spec.implementation == "reference":
        return None
    block, router = (modules[name] for name in found)
    child = found[1].rpartition(".")[2]  # if PEFT wraps the router, "base_layer", which no block calls
    forwards = type(block).forward, type(router).forward, type(part.experts).forward
    is_known = all(str(forward.__module__).startswith(_MODELS) for forward in forwards[:2])
    if not is_known or not _passes_on(forwards[0], child) or (operands := _recognised(router)) is None:
        return None
    with torch.no_grad():  # otherwise quantised weights that are not frozen are refused
        if part.spec.w_down(part.experts).shape[0] != router.get_parameter("weight").shape[0]:
            return None
    attributes = {name: value for name, value in vars(router).items() if isinstance(value, (bool, int, float, str))}
    del attributes["training"]
    return router, RouterForm(operands, attributes, part.spec.implementation, child, block, forwards)


@torch.no_grad()
def _recognised(router: Any) -> LinearRouter | None:
    """Return a router's operands, without parameters, if it is linear and its routing weights are a softmax. Return
    None for any other router."""
    parameters, top_k = router._parameters, getattr(router, "top_k", None)
    is_linear = set(parameters) - {"bias"} == {"weight"} and not (router._modules or router._buffers)
    takes_tokens = len(inspect.signature(type(router).forward).parameters) == 2
    if not (is_linear and takes_tokens and isinstance(top_k, int)) or parameters["weight"].dim() != 2:
        return None
    num_experts, d_model = parameters["weight"].shape
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    values = {"weight": draw(num_experts, d_model) / d_model**0.5}
    if parameters.get("bias") is not None:
        values["bias"] = draw(num_experts)
    tested, tokens = copy.copy(router), draw(_NUM_TOKENS, d_model)
    out = logits = None
    for dtype in (torch.bfloat16, torch.float32):
        held = {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}
        # Test in training mode, so that routers with noise fail: noise changes the results.
        vars(tested).update(_parameters={**dict.fromkeys(parameters), **held}, training=True)
        with torch.random.fork_rng(devices=[]):
            out = type(router).forward(tested, tokens.to(dtype))
        logits = functional.linear(tokens.to(dtype), *held.values())
        if not isinstance(out, tuple) or len(out) != 3 or not torch.equal(out[0].float(), logits.float()):
            return None
    for spec in (RouterSpec.softmax(normalize=True), RouterSpec.softmax(normalize=False)):
        wanted = topk_routing(logits, top_k, spec, implementation="reference")  # in float32
        same_choice = out[1].shape == out[2].shape and torch.equal(out[2].int(), wanted.topk_experts)
        if same_choice and torch.allclose(out[1].float(), wanted.topk_weights, rtol=1e-5, atol=1e-7):
            operands = linear_router(spec, top_k, values["weight"], logit_bias=values.get("bias"))
            return operands._replace(w_router=None, logit_bias=None, rounds_logits=True)
    return None


def _passes_on(forward: Any, router: str) -> bool:
    """Return whether a block's forward has the form

        _, weights, experts = self.<router>(x)  ...  self.experts(x, experts, weights)

    without another use of the three results, and without an assignment to x between the two calls."""
    try:
        lines = inspect.getsource(forward)
    except OSError:  # there is no source, as in a frozen program
        return False
    source = ast.unparse(ast.parse(textwrap.dedent(lines)))  # one statement per line
    form = rf"(\w+), (\w+), (\w+)\)? = self\.{router}\((\w+)\)\n(.*)self\.experts\(\4, \3, \2\)"
    found = re.search(form, source, re.DOTALL)
    if found is None:
        return False
    logits, weights, experts, tokens, between = found.groups()
    uses = {f"self.{router}": 1, "self.experts": 1, logits: 1, weights: 2, experts: 2}
    uses.pop("_", None)  # other statements may also assign to _
    is_only_use = all(len(re.findall(rf"\b{name}\b", source)) == count for name, count in uses.items())
    return is_only_use and not re.search(rf"\b{tokens}\b.* \S*= .*\n", between)
