"""Models whose experts the ranks share: what each rank reads, what the first rank writes, and resumed training."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe_layers.integrations.transformers import reading_shares, save_sharded

from ..processes import make_test, on_cpu, shared_folder
from ..tiers import slow
from .sharded_models import batches, build, here, logits_of, loss_of, saved, sharded, whole

sharding_utils = pytest.importorskip("transformers.distributed.sharding_utils")
pytestmark = [
    slow,  # each process imports transformers
    pytest.mark.skipif(
        not hasattr(sharding_utils, "DtensorShardOperation"), reason="this version of transformers reads no parts"
    ),
]
MIB = 2**20
KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3", "llama4_text")


def load(folder, **options):
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    place = {"device_map": {"": here()}} if here().type == "cuda" else {}
    with reading_shares(init_device_mesh(here().type, (2,)), **{"implementation": "reference", **options}):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", **place
        )


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Counted:
    """A slice of a safetensors file that counts the bytes that are read."""

    total = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, index):
        tensor = self.inner[index]
        Counted.total += tensor.nbytes
        return tensor


class CountedFile:
    def __init__(self, *args, **kwargs):
        self.inner = safe_open(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_slice(self, name):
        return Counted(self.inner.get_slice(name))

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.inner.__exit__(*args)


def memory():
    """Return the process's own memory, without pages of mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


@contextmanager
def measured():
    """Count the bytes read, and sample the memory above the start."""

    def sample():
        while not done.is_set():
            result["peak"] = max(result["peak"], memory() - start)
            time.sleep(0.002)

    Counted.total, result, done, start = 0, {"peak": 0}, threading.Event(), memory()
    thread = threading.Thread(target=sample)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_open", CountedFile)
        try:
            yield result
        finally:
            done.set()
            thread.join()
    result["read"] = Counted.total


@on_cpu("the peak is that of the host's memory")
def bytes_and_peak(device):
    """A rank reads its experts and all other tensors. It holds at most 1.1 times these bytes and the largest file."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 3}
    model = build("qwen3_moe", torch.float32, **sizes)
    # A file is larger than the copies with which transformers stacks a layer's experts.
    folder = saved(model, max_shard_size="70MB")
    expected = model.state_dict()
    experts = sum(tensor.nbytes for name, tensor in expected.items() if ".experts." in name)
    share = sum(tensor.nbytes for tensor in expected.values()) - experts // 2
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert share > 100 * MIB and len(list(folder.glob("*.safetensors"))) > 2
    with measured() as result:
        loaded = load(folder)
    assert result["read"] <= share
    assert result["peak"] <= 1.1 * (share + largest), (result["peak"] / MIB, share / MIB, largest / MIB)
    for name, tensor in loaded.state_dict().items():
        assert isinstance(tensor, DTensor) == (".experts." in name), name
        assert torch.equal(whole(tensor), expected[name]), name


def files_are_those_of_one_process(device):
    """Files are equal bit by bit: one or several, with tied embeddings, and over the files of an earlier model."""
    for kind in KINDS:
        for size in ("50GB", "20KB"):
            model = build(kind, torch.float32, tie_word_embeddings=kind == "mixtral")  # mixtral then saves no head
            # transformers sorts the tensors of a model that it loaded.
            model = transformers.AutoModelForCausalLM.from_pretrained(
                saved(model), dtype="auto", attn_implementation="eager"
            ).to(here())
            expected, again = saved(model, max_shard_size=size), shared_folder()
            loaded = load(expected)
            assert torch.equal(logits_of(loaded, *batches((1,))[0]), logits_of(sharded(model), *batches((1,))[0]))
            if distributed.get_rank() == 0:
                (again / "model-00001-of-00099.safetensors").touch()
            save_sharded(loaded, again, max_shard_size=size)
            distributed.barrier()
            wanted, got = files_of(expected), files_of(again)
            assert wanted.keys() == got.keys() and (len(wanted) > 4) == (size == "20KB")
            for name, content in wanted.items():
                assert got[name] == content, (kind, name)


@on_cpu("the ranks meet without collectives")
def one_rank_alone(device):
    """A single caller gets an error soon, and a later call of all ranks works."""
    model, folder = sharded(build("qwen3_moe", torch.float32)), shared_folder()
    if distributed.get_rank() == 0:
        start = time.monotonic()
        alone = "save_sharded: all ranks of the group must call it, got no call .* rank 1"
        with pytest.raises(ValueError, match=alone):
            save_sharded(model, folder, seconds=1.0)
        assert time.monotonic() - start < 10 and not list(folder.iterdir())
    else:
        with pytest.raises(ValueError, match=r"reading_shares: all ranks of the group must call it, .* from rank 0"):
            load(folder, seconds=1.0)
    distributed.barrier()
    save_sharded(model, folder)
    assert (folder / "model.safetensors").exists() or distributed.get_rank()
    distributed.barrier()
    load(folder)


class Interrupting:
    def __fspath__(self):
        raise KeyboardInterrupt


@on_cpu("the ranks tell errors without collectives")
def errors_of_one_rank(device):
    """All ranks learn of an error at once, and later calls of all ranks work."""
    rank, start = distributed.get_rank(), time.monotonic()
    folder, model = saved(build("qwen3_moe", torch.float32)), sharded(build("qwen3_moe", torch.float32))
    with pytest.raises(OSError if rank else ValueError, match=r"Repo id" if rank else r"rank 1: OSError: Repo"):
        load(folder / "other" if rank else folder)
    with pytest.raises(ValueError, match=r"reading_shares: rank 1: .*implementation must be one of"):
        load(folder, implementation="other" if rank else "reference")
    with pytest.raises(ValueError, match="save_sharded: rank 1: the model must be sharded"):
        save_sharded(build("qwen3_moe") if rank else model, folder)
    with pytest.raises(ValueError, match=r"save_sharded: rank 0: Unit .* not supported"):
        save_sharded(model, folder, max_shard_size="some")
    with pytest.raises(ValueError, match="save_sharded: all ranks must agree about names, shapes and dtypes"):
        save_sharded(model.double() if rank else model, folder)
    with pytest.raises(KeyboardInterrupt if rank else ValueError, match="" if rank else r"rank 1: KeyboardInterrupt"):
        load(Interrupting() if rank else folder)
    assert time.monotonic() - start < 20
    load(folder)


@on_cpu("folders are those of the host")
def folders_that_cannot_be_written(device):
    folder = shared_folder()
    if distributed.get_rank() == 0:
        (folder / "file").touch()
    with pytest.raises(ValueError if distributed.get_rank() else OSError, match=r"Not a directory|File exists"):
        save_sharded(sharded(build("qwen3_moe", torch.float32)), folder / "file" / "model")


def checkpoints_without_experts(device):
    """Every rank gets an error that names a rank and the experts."""
    model = build("gpt_oss", torch.float32)
    del model.model.layers[1].mlp.experts.down_proj_bias
    missing = r"rank \d: the checkpoint must hold .* model.layers.1.mlp.experts.down_proj_bias"
    with pytest.raises(ValueError, match=missing):
        load(saved(model))
    model = build("qwen3_moe", torch.float32)
    state = model.state_dict()
    state["model.layers.0.mlp.experts.gate_up_proj"] = state["model.layers.0.mlp.experts.gate_up_proj"][:-1]
    with pytest.raises(ValueError, match=r"rank 1: the checkpoint must hold .*model.layers.0.mlp.experts.gate_up_proj"):
        load(saved(model, state_dict=state))


def prepared(ranks):
    """Return (model, optimizer) over a mesh of these ranks [efsdp, ep], or None outside. None makes a whole model."""
    model = build("gpt_oss", torch.float32)
    if ranks is not None:
        kind = here().type
        mesh, everyone = DeviceMesh(kind, ranks, mesh_dim_names=("efsdp", "ep")), DeviceMesh(kind, ranks.flatten())
        if distributed.get_rank() not in ranks:
            return None
        sharded(model, mesh["ep"])
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh["efsdp"])
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step(model, optimizer, data):
    """Take a step with the mean over all ranks."""
    loss_of(model, *data).backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def resume(saving, loading):
    """Save a model and its momentum after a step, load them over other ranks, and compare them after another step."""
    data, folder = batches((2,))[0], shared_folder()  # equal on all ranks, so that any number of them has one mean
    first, second = prepared(saving), prepared(loading)
    groups = [None if ranks is None else distributed.new_group(ranks.flatten().tolist()) for ranks in (saving, loading)]
    if first is not None:
        step(*first, data)
        checkpoint.save(states_of(*first), checkpoint_id=folder, process_group=groups[0])
        step(*first, data)
    distributed.barrier()
    if second is not None:
        held = states_of(*second)
        checkpoint.load(held, checkpoint_id=folder, process_group=groups[1], no_dist=loading is None)
        set_state_dict(*second, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        step(*second, data)
    parameters = [
        {} if pair is None else {n: whole(p.detach()) for n, p in pair[0].named_parameters()}
        for pair in (first, second)
    ]
    assert all(parameters) or distributed.get_rank() > 0
    for name in parameters[0].keys() & parameters[1].keys():
        torch.testing.assert_close(parameters[0][name], parameters[1][name], msg=name)


def resumed_on_the_same_ranks(device):
    """Experts over two ranks are resumed with each expert on both."""
    resume(torch.tensor([[0, 1]]), torch.tensor([[0], [1]]))


def resumed_on_one_rank(device):
    """Experts over two ranks are resumed in a model that holds all."""
    resume(torch.tensor([[0, 1]]), None)


def resumed_on_other_numbers_of_ranks(device):
    two, four = torch.tensor([[0, 1]]), torch.tensor([[0, 1], [2, 3]])
    resume(two, four)
    resume(four.view(1, 4), two)


test_two_processes = make_test(
    [
        bytes_and_peak,
        files_are_those_of_one_process,
        one_rank_alone,
        errors_of_one_rank,
        folders_that_cannot_be_written,
        checkpoints_without_experts,
        resumed_on_the_same_ranks,
        resumed_on_one_rank,
    ],
    2,
)
test_four_processes = make_test([resumed_on_other_numbers_of_ranks], 4)
