"""transformers' own expert parallelism with `ep_implementation="moe_layers"`, against one process, in float64."""

import tempfile
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import distributed

from moe_layers.integrations.transformers import enable

from ..processes import make_test, shared_folder
from ..tiers import slow
from .models import config_of, initialise, make_trainer, model_class_of
from .sharded_models import (
    Case,
    adapted,
    assert_close,
    batches,
    build,
    gradients_of,
    here,
    own,
    saved,
    shard,
    whole,
)

distributed_transformers = pytest.importorskip("transformers.distributed.expert_parallel")
pytestmark = [
    slow,  # each process imports transformers
    pytest.mark.skipif(
        not hasattr(distributed_transformers, "EPImplementationInterface"),
        reason="this version of transformers takes no other implementation of its expert parallelism",
    ),
]
KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3")  # for which transformers has a plan


def load(folder, model_class=transformers.AutoModelForCausalLM, **sizes):
    size = distributed.get_world_size()
    sizes = {"fsdp_size": size, "ep_size": size, "ep_implementation": "moe_layers", **sizes}
    config = transformers.distributed.DistributedConfig(**sizes)
    return model_class.from_pretrained(
        folder, dtype="auto", distributed_config=config, experts_implementation="eager", attn_implementation="eager"
    ).train()


def assert_same_gradients(model, kind, data):
    _, expected = gradients_of(build(kind), data, scale=1 / len(data))
    _, gradients = gradients_of(model, [own(data)])
    assert any("_moe_layers_experts" in vars(module) for module in model.modules())  # this package computes the experts
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(whole(gradient), expected[name], name)


def assert_same_parameters(model, expected):
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter.detach()), expected.get_parameter(name).detach(), name)


def lora():
    """Add adapters of experts and attention, with and without `enable`. As in the Trainer, average their gradients."""
    data, folder = batches((3, 1)), saved(build("qwen3_moe"))
    _, expected = gradients_of(adapted(build("qwen3_moe")), data, scale=1 / 2)
    for is_enabled in (False, True):
        model = load(folder)
        if is_enabled:
            enable(model, implementation="reference")
            reason = r"got model.layers.0.mlp.experts, which transformers' expert parallelism sharded"
            with pytest.raises(ValueError, match=reason):
                shard(model)
        model = adapted(model)
        with pytest.raises(ValueError, match="Qwen3MoeExperts: adapters must be merged into whole experts, got"):
            model.base_model.model.model.layers[0].mlp.experts.merge()
        _, gradients = gradients_of(model, [own(data)])
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            distributed.all_reduce(gradient)
            assert_close(gradient / 2, expected[name], name)


def gradients():
    for kind in KINDS:
        for data in (batches((3, 1), pad=4), batches((2, 2))):
            assert_same_gradients(load(saved(build(kind))), kind, data)


def saved_again():
    """transformers gathers and writes what the model held."""
    folder, again = saved(build("qwen3_moe")), shared_folder()
    load(folder).save_pretrained(again)
    distributed.barrier()
    expected, actual = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (folder, again)
    )
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], tensor), name


def train(model):
    """Return the Trainer's losses and norms of three steps, with accumulation and clipping."""
    rows = torch.randint(0, 64, (12, 12), generator=torch.Generator().manual_seed(3))
    settings = {"max_steps": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "seed": 7}
    settings |= {"logging_steps": 1, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1.0}
    trainer = make_trainer(model, tempfile.mkdtemp(), rows, **settings)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return torch.tensor([[log["loss"], log["grad_norm"]] for log in logs])


def trainer():
    """Compare the Trainer on sharded experts with the Trainer on whole experts, which uses DDP."""
    expected, model = build("qwen3_moe"), load(saved(build("qwen3_moe")))
    logs = train(expected)
    assert len(logs) == 3
    assert_close(train(model), logs, "loss and norm")
    assert_same_parameters(model, expected)


@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL")
def trl():
    """Compare TRL's SFTTrainer, with padding, on sharded experts and on whole experts, for which it uses DDP."""
    from .test_trl import train as train_by_trl

    expected, model = build("qwen3_moe"), load(saved(build("qwen3_moe")))
    options = {"optim": "sgd", "max_grad_norm": 0.0, "seed": 7}
    for part in (expected, model):
        train_by_trl(part, tempfile.mkdtemp(), **options)
    assert_same_parameters(model, expected)


def tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"each rank must have its own tokens, got tp_size=2"):
        load(saved(build("qwen3_moe")), tp_size=2, fsdp_size=1)


def llama4_is_refused():
    """transformers has no plan for Llama 4. With a user's plan, its blocks would pass the experts no choice."""
    folder, experts = saved(build("llama4_text")), "model.layers.*.feed_forward.experts"
    with pytest.raises(ValueError, match="`Llama4ForCausalLM` has no `ep_plan`"):
        load(folder)
    plan = dict.fromkeys((f"{experts}.gate_up_proj", f"{experts}.down_proj"), "grouped_gemm")
    with pytest.raises(ValueError, match=r"got Llama4TextExperts; .* call enable and shard_experts"):
        load(folder, ep_plan=plan | {experts: "ep_dispatch_experts"})


def experts_without_the_interface():
    """transformers has a plan for the experts of Step 3.7, whose class has no experts interface."""
    folder, config = shared_folder(), config_of("step3p7_text")
    config.n_routed_experts = 16
    torch.manual_seed(0)
    model, drawn = (model_class_of("step3p7_text")._from_config(config).to(here()).double().eval() for _ in range(2))
    model.load_state_dict(initialise(drawn).state_dict())  # but not the limits that `initialise` sets
    if distributed.get_rank() == 0:
        model.save_pretrained(folder)
    distributed.barrier()
    ids = own(batches((3, 1)))[0] % model.config.vocab_size
    with torch.no_grad():
        actual, expected = (part(input_ids=ids).last_hidden_state for part in (load(folder, type(model)), model))
    assert_close(actual, expected)


def two_copies_of_each_expert():
    assert_same_gradients(load(saved(build("qwen3_moe")), ep_size=2), "qwen3_moe", batches((3, 1, 2, 2)))


TRAINING = (gradients, lora, saved_again, trainer, trl)
OTHERS = (tensor_parallelism_is_refused, llama4_is_refused, experts_without_the_interface)
test_two_processes = make_test([Case(run) for run in (*TRAINING, *OTHERS)], 2)
test_four_processes = make_test([Case(two_copies_of_each_expert)], 4)
