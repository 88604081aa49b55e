"""`RoutingCallback`: what the Trainer logs of the routing, and balancing once per optimizer step."""

import pytest
import torch
import transformers

from moe_layers import BalanceLosses
from moe_layers.integrations.transformers import RoutingCallback, balance_routing
from moe_layers.integrations.transformers.routers.attached import hooked_routers

from .models import make_trainer
from .test_statistics import enabled

pytest.importorskip("accelerate", reason="accelerate is not installed")

STEPS, BATCH, LENGTH = 4, 2, 6


def trainer_of(model_type, directory, **settings):
    model = enabled(model_type, "cpu").train()
    rows = torch.randint(1, model.config.vocab_size, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    usual = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "seed": 3}
    usual |= {"logging_steps": 2, "save_strategy": "no", "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0}
    return make_trainer(model, directory, rows, **{**usual, **settings})


def train(trainer, *callbacks):
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()


def test_logs_statistics_of_the_steps_since_the_last_log(tmp_path):
    """Only training forwards count, with gradient accumulation and with evaluations in between."""
    trainer = trainer_of("qwen3_moe", tmp_path, gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=1)
    callback = RoutingCallback(trainer, plot=tmp_path / "plots" / "load.png")
    train(trainer, callback)
    logged = [entry for entry in trainer.state.log_history if "routing/entropy" in entry]
    assert [entry["step"] for entry in logged if {"loss", "learning_rate"} <= entry.keys()] == [2, 4]
    assert len(logged) == 2
    layers = [f"model.layers.{i}.mlp" for i in range(2)]
    for entry, loads in zip(logged, callback.loads, strict=True):
        slots = 2 * 3 * BATCH * LENGTH * trainer.model.config.num_experts_per_tok
        assert [loads[layer].sum().item() for layer in layers] == [slots] * 2
        for name, reduce in (("max_violation", max), ("dead_experts", sum), ("entropy", lambda two: sum(two) / 2)):
            assert entry[f"routing/{name}"] == pytest.approx(
                reduce([entry[f"routing/{layer}/{name}"] for layer in layers])
            )
        for layer in layers:
            violation = loads[layer].max().item() / loads[layer].double().mean().item() - 1
            assert entry[f"routing/{layer}/max_violation"] == pytest.approx(violation)
    assert (tmp_path / "plots" / "load.png").stat().st_size > 1000
    assert all(router.observer is None for router in hooked_routers(trainer.model).values())


class Reporter(transformers.TrainerCallback):
    """Keeps all logs, and asks for one after the first step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step == 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, logs))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, [1, 2, 4]), ({"logging_strategy": "epoch"}, [1, 4]), ({"logging_strategy": "no"}, [1])],
    ids=["steps", "epoch", "no"],
)
def test_each_log_of_the_loss_holds_the_statistics(settings, steps, tmp_path):
    """Logs that the callback cannot foresee hold the statistics, too, and so do the logs seen by other callbacks."""
    trainer = trainer_of("qwen3_moe", tmp_path, **settings)
    trainer.train_dataset = trainer.train_dataset[: STEPS * BATCH]  # one epoch
    before, after = Reporter(), Reporter()
    callback = RoutingCallback(trainer, per_layer=False)
    train(trainer, before, callback, after)
    slots = BATCH * LENGTH * trainer.model.config.num_experts_per_tok
    assert [load["model.layers.0.mlp"].sum().item() for load in callback.loads] == [
        slots * (step - last) for last, step in zip([0, *steps], steps, strict=False)
    ]
    for reporter in (before, after):
        losses = [(step, logs) for step, logs in reporter.seen if "loss" in logs]
        assert [step for step, logs in losses if "routing/max_violation" in logs] == steps == callback.steps
        assert len(losses) == len(steps) and not [name for name in losses[0][1] if "layers" in name]
        assert not [logs for _, logs in reporter.seen if "loss" not in logs and "routing/entropy" in logs]


def test_logs_of_others_stay_as_they_are(tmp_path):
    """`log` of a Trainer's class, as those of trl have, runs once per log. Only the Trainer's loss gets statistics."""
    trainer, own = trainer_of("qwen3_moe", tmp_path), []

    class Own(type(trainer)):
        def log(self, logs, start_time=None):
            own.append(min(logs))
            super().log(logs, start_time)

    class Other(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.log({"other": 1.0})

    trainer.__class__ = Own
    train(trainer, Other(), RoutingCallback(trainer))
    assert own == ["other", "other", "grad_norm"] * 2 + ["total_flos"]
    trainer.log({"loss": 1.0})
    assert not [name for name in trainer.state.log_history[-1] if name.startswith("routing/")]


def test_statistics_of_every_second_step(tmp_path):
    trainer = trainer_of("qwen3_moe", tmp_path)
    trainer.args.logging_steps = trainer.state.logging_steps = 1
    callback = RoutingCallback(trainer, every=2)
    train(trainer, callback)
    slots = BATCH * LENGTH * trainer.model.config.num_experts_per_tok
    assert [load["model.layers.0.mlp"].sum().item() for load in callback.loads] == [slots] * 2
    assert callback.steps == [1, 3]
    with pytest.raises(ValueError, match="RoutingCallback: every must be a positive integer, got 0"):
        RoutingCallback(trainer, every=0)


def test_updates_the_selection_bias_after_each_optimizer_step(tmp_path):
    trainer = trainer_of("deepseek_v3", tmp_path, gradient_accumulation_steps=2)
    (router,) = hooked_routers(trainer.model).values()
    before, rate = router.selection_bias.clone(), 0.5
    train(trainer, RoutingCallback(trainer, bias_rate=rate))
    moved = (router.selection_bias - before) / rate
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-5)
    assert moved.abs().max() <= STEPS + 1e-5 and moved.any()
    assert not router.expert_counts.any() and router.accumulated_counts is None


def router_after_one_step(tmp_path, batch, accumulated, callback):
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
    trainer = trainer_of("qwen3_moe", tmp_path, **settings, max_steps=1, learning_rate=1.0)
    balance_routing(trainer.model, BalanceLosses(z=0.3))
    train(trainer, *([RoutingCallback(trainer)] if callback else []))
    return trainer.model.model.layers[1].mlp.gate.weight.detach().clone()


def test_accumulated_steps_average_the_losses(tmp_path):
    """One batch in two calls changes the router as one call does. Without the callback, the losses would add up."""
    whole = router_after_one_step(tmp_path, 4, 1, callback=True)
    split = router_after_one_step(tmp_path, 2, 2, callback=True)
    added = router_after_one_step(tmp_path, 2, 2, callback=False)
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-6)
    assert (added - whole).abs().max() > 1e-3


def test_a_model_without_experts_is_refused(tmp_path):
    trainer = trainer_of("qwen3_moe", tmp_path)
    trainer.model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="RoutingCallback: the model must have MoE blocks, got Linear"):
        RoutingCallback(trainer)


@pytest.mark.parametrize("num_tokens", [None, BATCH * LENGTH])
def test_losses_are_scaled_as_the_main_loss(num_tokens, tmp_path):
    """A GradScaler multiplies the main loss, and the optimizer divides all gradients."""
    states = []
    for scale in (None, 1024.0):
        trainer = trainer_of("qwen3_moe", tmp_path, gradient_accumulation_steps=2, learning_rate=0.1)
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler(trainer.args.device.type, init_scale=scale)
        balance_routing(trainer.model, BalanceLosses(switch=10.0), num_tokens=num_tokens)
        train(trainer, RoutingCallback(trainer))
        states.append(trainer.model.state_dict())
    torch.testing.assert_close(states[1], states[0])
