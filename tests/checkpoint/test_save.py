import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import Activation, RouterSpec
from moe_layers import MoEFeedForward
from moe_layers.checkpoint.files.layouts import LAYOUTS
from moe_layers.checkpoint.model.convert import convert

from ..layers import moe_layer
from .golden import CASES, FASTEST, Golden
from .test_convert import read_model
from .test_from_checkpoint import copy_case, same_state

GATED = sorted({layout.name for layout in LAYOUTS if layout.gated and not layout.encoding})


def make_layer(**options):
    torch.manual_seed(0)
    return moe_layer(**{"d_model": 8, "d_ff": 5, "num_experts": 3, "top_k": 2, "implementation": FASTEST, **options})


def refuses_to_save(layer, directory, message, **options):
    with pytest.raises(ValueError, match=message):
        layer.save_checkpoint(directory, **options)
    assert not directory.exists()


@pytest.mark.parametrize("case", CASES)
def test_names_and_layout_of_the_source(case, tmp_path):
    """A loaded layer is written back under the same names, bit by bit."""
    golden = Golden(case)
    layer = MoEFeedForward.from_checkpoint(golden.directory, golden.layer)
    layer.save_checkpoint(tmp_path / "out")
    block = {name: tensor for name, tensor in golden.tensors("model").items() if name.startswith(golden.prefix)}
    written = read_model(tmp_path / "out")
    if case != "gpt_oss_mxfp4":
        torch.testing.assert_close(written, block, rtol=0, atol=0)
    assert same_state(MoEFeedForward.from_checkpoint(tmp_path / "out", golden.layer), layer)


@pytest.mark.parametrize("case", ["qwen2_moe", "mixtral", "llama4", "dbrx", "granitemoe", "ernie4_5_moe"])
def test_every_layout_of_a_loaded_layer(case, tmp_path):
    golden = Golden(case)
    first = layer = MoEFeedForward.from_checkpoint(golden.directory, golden.layer)
    for layout in [*GATED, "per_expert"]:
        target = tmp_path / layout / str(len(list(tmp_path.iterdir())))
        layer.save_checkpoint(target, layout=layout)
        layer, report = MoEFeedForward.from_checkpoint(target, golden.layer, return_report=True)
        assert report.layout == layout
        assert same_state(layer, first)


def test_whatever_the_default_device(tmp_path):
    """Tensors between two files are always in host memory."""
    golden = Golden("deepseek_v3")
    expected = MoEFeedForward.from_checkpoint(golden.directory, golden.layer)
    with torch.device("meta"):
        layer = MoEFeedForward.from_checkpoint(golden.directory, golden.layer, device="cpu")
        layer.save_checkpoint(tmp_path / "saved", layout="fused")
        convert(golden.directory, tmp_path / "converted", "fused")
    for directory in ("saved", "converted"):
        assert same_state(MoEFeedForward.from_checkpoint(tmp_path / directory, golden.layer), expected)


OPTIONS = {
    "plain": {},
    "shared": {"shared_d_ff": 7},
    "gated_shared": {"shared_d_ff": 7, "shared_gate": True},
    "plain_shared": {"shared_d_ff": 7, "shared_activation": "relu"},
    "bias": {"bias": True, "activation": Activation("gpt_oss", limit=2.0), "router": RouterSpec(logit_bias=True)},
    "router": {"router": RouterSpec.deepseek_v3(3, 2, scale=2.5, logit_softcap=3.0)},
    "latent": {"latent_dim": 6, "activation": "relu_squared", "shared_d_ff": 7},
    "zero": {"num_zero_experts": 2, "router": RouterSpec.ernie(normalize=False)},
    "capacity": {"capacity": 3, "top_k": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", [None, "per_expert", "fused", "transposed"])
def test_layer_that_was_not_read_from_a_checkpoint(options, layout, tmp_path):
    layer = make_layer(**options)
    layer.save_checkpoint(tmp_path / "out", layout=layout)
    loaded, report = MoEFeedForward.from_checkpoint(tmp_path / "out", return_report=True, implementation=FASTEST)
    assert report.layout == (layout or "per_expert")
    assert same_state(loaded, layer)
    x = torch.randn(2, 5, 8)
    assert torch.equal(loaded(x), layer(x))


def test_another_layout_is_recorded_in_the_configuration(tmp_path):
    """The rest of the configuration stays that of the source."""
    golden = Golden("deepseek_v3")
    layer = MoEFeedForward.from_checkpoint(golden.directory, 1)
    layer.save_checkpoint(tmp_path / "out", layout="fused")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**golden.config, "moe_layers_layout": "fused"}


def test_a_part_of_the_experts_is_not_saved(tmp_path):
    layer = MoEFeedForward.from_checkpoint(Golden("qwen3_moe").directory, 1, experts=range(2))
    refuses_to_save(layer, tmp_path / "out", "must hold all 8 experts, got 2")


def test_unknown_layout(tmp_path):
    refuses_to_save(make_layer(), tmp_path / "out", "layout must be one of", layout="G")


@pytest.mark.parametrize("layout", ["stacked", "linear"])
def test_a_layer_that_is_the_block_itself(layout, tmp_path):
    """Names that do not begin with "experts." could not be distinguished from the layer's other parts."""

    def move(tensors):
        for name in list(tensors):
            tensors[name.replace(".mlp.", ".")] = tensors.pop(name)

    copy_case("qwen3_moe", tmp_path / "in", move)
    layer = MoEFeedForward.from_checkpoint(tmp_path / "in", 1)
    message = rf"'{layout}' has no names for experts that lie below model\.layers\.1\."
    refuses_to_save(layer, tmp_path / "out", message, layout=layout)
    layer.save_checkpoint(tmp_path / "fused", layout="fused")
    assert same_state(MoEFeedForward.from_checkpoint(tmp_path / "fused", 1), layer)


def test_directory_must_be_empty(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be an empty directory"):
        make_layer().save_checkpoint(tmp_path)


SIZES = st.fixed_dictionaries(
    {name: st.integers(1, 9) for name in ("d_model", "d_ff", "num_experts")}
    | {"bias": st.booleans(), "shared_d_ff": st.none() | st.integers(1, 5), "seed": st.integers(0, 99)}
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, layouts=st.lists(st.sampled_from(["per_expert", "fused", "transposed", "interleaved"]), max_size=4))
def test_any_sizes_through_any_layouts(sizes, layouts, tmp_path_factory):
    """Conversions keep every bit, also if F == D or 2F == D."""
    directory = tmp_path_factory.mktemp("chain")
    torch.manual_seed(sizes.pop("seed"))
    first = layer = MoEFeedForward(**sizes, top_k=1, activation="gpt_oss")
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter)
    for number, layout in enumerate(layouts):
        layer.save_checkpoint(directory / str(number), layout=layout, max_shard_bytes=2_000)
        layer, report = MoEFeedForward.from_checkpoint(directory / str(number), return_report=True)
        assert report.layout == layout
    assert same_state(layer, first)
