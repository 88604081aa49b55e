"""Logs statistics of a model's routing in the Trainer of transformers, and balances the routing."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from transformers import TrainerCallback

from ....balance.balancing import carry_expert_counts, reset_expert_counts, update_selection_bias
from ....balance.routing_statistics import RoutingObserver, RoutingStatistics
from ....checks import check_positive
from .attached import hooked_routers

if TYPE_CHECKING:
    from transformers import Trainer

_METRICS = ("entropy", "margin", "max_violation", "max_call_violation", "num_dropped", "aux_loss")


class _TrainingObserver(RoutingObserver):
    """Collects statistics only in training mode, which excludes the Trainer's evaluations."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        if self.router.training:
            super().add(*args, **kwargs)


class RoutingCallback(TrainerCallback):
    """Logs the routing of a model's MoE layers, and balances it once per optimizer step.

        trainer = Trainer(model, ...)
        trainer.add_callback(RoutingCallback(trainer))

    Whenever the Trainer logs its loss, the callback adds the statistics of the calls in training mode since the last
    log. The statistics are written to the log history and to every destination in `report_to`. `routing/<metric>` is a
    mean, sum or maximum over the layers, and `routing/<layer>/<metric>` is the value of one layer. With several ranks,
    statistics cover all ranks of `group`.

    If `balance_routing` got no `num_tokens`, the callback divides the gradients of the auxiliary losses by the number
    of accumulation steps. With `fp16=True`, the callback multiplies these gradients by the GradScaler's scale. The loss
    `global_batch` also counts the experts chosen in earlier accumulated calls of the same step.

    Args:
        trainer: a Trainer whose model has MoE blocks of transformers.
        per_layer: also log the metrics of each layer. Default True.
        every: collect statistics only in every `every`-th step, to save time. Default 1.
        bias_rate: call `update_selection_bias` with this rate after every optimizer step. Default None: never.
        group: the ranks over which statistics and expert counts are summed. Default None: all ranks.
        plot: file of a plot that is written at the end of training, see `plot`. Default None: no file.

    Raises:
        ValueError: the model has no MoE block of transformers, or an unsupported router, or `every` is not positive.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        per_layer: bool = True,
        every: int = 1,
        bias_rate: float | None = None,
        group: ProcessGroup | None = None,
        plot: str | os.PathLike[str] | None = None,
    ):
        check_positive("RoutingCallback", every=every)
        model = trainer.model
        if not isinstance(model, nn.Module) or not hooked_routers(model):
            raise ValueError(f"RoutingCallback: the model must have MoE blocks, got {type(model).__name__}")
        self.trainer, self.model, self.per_layer, self.bias_rate = trainer, model, per_layer, bias_rate
        self._every, self._group, self._plot = every, group, plot
        self._observers: dict[str, RoutingObserver] = {}
        self._shares: dict[str, Tensor] = {}  # layer name -> scale of the layer's losses in each accumulated call
        self.steps: list[int] = []
        self.loads: list[dict[str, Tensor]] = []  # for each log, a dict: layer name -> tokens per expert [E]
        # Wrap `log`, because the Trainer has no event before it writes a log. If this callback called `log` separately,
        # the Trainer would skip its own log.
        trainer.log = partial(self._log, trainer.log)

    @property
    def group(self) -> ProcessGroup | None:
        has_group = distributed.is_available() and distributed.is_initialized()
        return distributed.group.WORLD if self._group is None and has_group else self._group

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the statistics. The model is on its final device at this event."""
        routers = hooked_routers(self.model)
        for name, router in routers.items():
            self._observers[name] = _TrainingObserver(router, router.num_experts - router.num_zero_experts)
            if self.bias_rate is not None and router.selection_bias is not None:
                router.counts = True
            if router.balance_losses.any:
                share = 1 / args.gradient_accumulation_steps
                if router.num_tokens is not None:  # `num_tokens` already counts all accumulated calls
                    share = 1.0 if router.aux_loss_scale is None else router.aux_loss_scale
                self._shares[name] = torch.as_tensor(share, device=router.weight.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        observed = state.global_step % self._every == 0
        scaler = self.trainer.accelerator.scaler  # None without fp16
        for name, router in hooked_routers(self.model).items():
            router.observer = self._observers[name] if observed else None
            if (share := self._shares.get(name)) is not None:
                router.aux_loss_scale = share if scaler is None else scaler.scale(share)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        carry_expert_counts(self.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bias_rate is not None:
            update_selection_bias(self.model, rate=self.bias_rate, group=self.group)
        reset_expert_counts(self.model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the statistics, reset the scale of losses, and write the plot."""
        for router in hooked_routers(self.model).values():
            router.observer = router.aux_loss_scale = None
        if self._plot is not None and state.is_world_process_zero and self.steps:
            self.plot(self._plot)

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the statistics to a training log, then call `Trainer.log`. All ranks of `group` must call this method."""
        if "loss" in logs and self.trainer.control.should_log:
            logs.update(self._metrics(self.trainer.state.global_step))
        log(logs, *args, **kwargs)

    def _metrics(self, step: int) -> dict[str, float]:
        """Return the metrics to log, or an empty dict if no step was observed since the last log."""
        read = {name: observer.read(group=self.group) for name, observer in self._observers.items()}
        if not any(layer.num_calls for layer in read.values()):
            return {}
        for observer in self._observers.values():
            observer.reset()
        self.steps.append(step)
        self.loads.append({name: layer.tokens_per_expert for name, layer in read.items()})
        layers = {name: _numbers(layer) for name, layer in read.items()}
        metrics = _of_all_layers(list(layers.values()))
        if self.per_layer:
            metrics |= {f"routing/{layer}/{k}": v for layer, numbers in layers.items() for k, v in numbers.items()}
        return metrics

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write an image that shows each expert's percentage of the layer's slots at each log. Needs matplotlib."""
        from matplotlib.figure import Figure

        layers = list(self.loads[0])
        figure = Figure(figsize=(9, 1 + 1.2 * len(layers)), layout="constrained")
        axes = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
        for axis, layer in zip(axes, layers, strict=True):
            counts = torch.stack([load[layer] for load in self.loads]).double()  # [N, E]
            shares = 100 * counts / counts.sum(1, keepdim=True).clamp(min=1)
            even = 100 / counts.shape[1]
            extent = (0, self.steps[-1], counts.shape[1], 0)
            settings = {"aspect": "auto", "interpolation": "nearest", "cmap": "coolwarm", "vmin": 0, "vmax": 2 * even}
            image = axis.imshow(shares.T.numpy(), extent=extent, **settings)
            axis.set_ylabel(layer, rotation=0, ha="right", fontsize="small")
            figure.colorbar(image, ax=axis, extend="max", label="%")
        axes[-1].set_xlabel("step")
        figure.suptitle("share of each expert in its layer's slots")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _numbers(statistics: RoutingStatistics) -> dict[str, float]:
    return {
        **{name: float(getattr(statistics, name)) for name in _METRICS},
        "dead_experts": float(len(statistics.dead_experts)),
    }


def _of_all_layers(layers: list[dict[str, float]]) -> dict[str, float]:
    """Return metrics over all layers: sums of counts, maxima of violations, and means of the other metrics."""
    worst = {"dead_experts": sum, "num_dropped": sum, "max_violation": max, "max_call_violation": max}
    return {
        f"routing/{name}": worst.get(name, fmean)([numbers[name] for numbers in layers])
        for name in (*_METRICS, "dead_experts")
    }
