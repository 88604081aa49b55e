"""Plans a load: matches every tensor of a block with a parameter before any tensor is read.

The layer keeps the names of its tensors on disk in a `CheckpointSource`, because `save_checkpoint` writes these names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...checks import first_three
from ...config import MoEConfig
from ..files.blocks import OTHER_NAMES, Block, shared_keys
from ..files.directory import CheckpointFiles
from ..files.layouts import LAYOUTS, Key, Layout, Sizes
from ..files.recognition import choose_layout
from ..files.stored_weights import Stored, describe

_STACKED = {key.name for layout in LAYOUTS for key in layout.keys if not key.per_expert}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fill:
    """A weight of the checkpoint, and the parameter that the weight fills.

    Attributes:
        key: maps the weight's matrices on disk to rows of the parameter. None copies the weight without reordering.
        experts: the experts to read from the weight; None for a weight that belongs to no routed expert.
    """

    stored: Stored
    parameter: str
    key: Key | None = None
    experts: range | None = None


@dataclass
class Plan:
    """The weights to read for a layer.

    Attributes:
        others: names of tensors on disk to skip, because their experts were not requested or are zero experts.
    """

    layout: Layout
    sizes: Sizes
    fills: list[Fill] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckpointSource:
    """Describes the checkpoint that a layer was read from. By default, `save_checkpoint` keeps layout and names.

    Attributes:
        config: the complete `config.json`.
        layout: name of the experts' layout.
        prefix: prefix of the block's tensor names.
        names: parameter -> full name on disk, for all parameters except projections of experts and shared expert.
        shapes: parameter -> shape on disk, for the parameters in `names`; some biases are [1, E] on disk.
        shared: one `Key` for each tensor of the shared expert, with the tensor's full name as its `name`.
        dotted_scales: whether the scales of experts are called "w1.scale" instead of "w1.weight_scale_inv".
    """

    config: dict
    prefix: str
    layer: int
    layout: str
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    shared: tuple[Key, ...]
    dotted_scales: bool = False

    @classmethod
    def of(cls, config: dict, block: Block, plan: Plan) -> CheckpointSource:
        others = [fill for fill in plan.fills if fill.experts is None]
        single = [fill for fill in others if fill.key is None]
        return cls(
            config=config,
            prefix=block.prefix,
            layer=block.layer,
            layout=plan.layout.name,
            names={fill.parameter: fill.stored.name for fill in single},
            shapes={fill.parameter: fill.stored.shape for fill in single},
            shared=tuple(Key(fill.stored.name, fill.key.parts) for fill in others if fill.key is not None),
            dotted_scales=any(f.stored.names[-1].endswith(".scale") for f in plan.fills if f.experts is not None),
        )


class Planner:
    """Matches weights with the parameters of a layer, and reports all problems in one error."""

    def __init__(self, files: CheckpointFiles, block: Block, float8_block: tuple[int, int]):
        self.files = files
        self.block = block
        self.float8_block = float8_block
        self.problems: list[str] = []
        self.unused = dict.fromkeys(block.weights)

    def plan(
        self, config: MoEConfig, shapes: Shapes, experts: range, *, published: tuple[str, ...], recorded: str | None
    ) -> Plan:
        """Return a plan that fills all of the layer's parameters with the weights of the block.

        Args:
            shapes: shape of each parameter and persistent buffer of the layer, by name.
            experts: the experts to read.
            published: the layouts of this architecture, from `published_layouts`.
            recorded: the layout that `config.json` records, or None.

        Raises:
            ValueError: tensors are missing, left over, ambiguous or of a wrong shape or dtype, or the configuration
                gives another number of experts than the tensors. The message names the tensors.
        """
        sizes = Sizes.of(config)
        # Find the shapes of weights that hold all experts. `[]` drops the problems, because `_fill` reports them later.
        described = {name: self._describe(name, []) for name in self.block.weights if name in _STACKED}
        stacked = {name: held.shape for name, held in described.items() if held is not None}
        layout = choose_layout(
            self.block, stacked, sizes, gated=config.is_gated, published=published, recorded=recorded
        )
        self._check_num_experts(config, stacked)
        plan = Plan(layout, sizes)
        self._plan_experts(plan, config, experts, stacked)
        self._plan_shared_expert(plan, config)
        for parameter, shape in shapes.items():
            if parameter in OTHER_NAMES:
                self._plan_other(plan, parameter, shape)
        self.problems += [f"left over: {self._full(name)}{self._shape_of(name)}" for name in self.unused]
        if self.problems:
            raise ValueError(
                f"checkpoint: {self.files.directory}, block {self.block.prefix} ({layout.name} layout), "
                "does not fit the layer:\n  " + first_three(self.problems, "\n  ")
            )
        filled = {fill.parameter for fill in plan.fills}
        assert filled == set(shapes), sorted(filled ^ set(shapes))
        return plan

    def _check_num_experts(self, config: MoEConfig, stacked: Shapes) -> None:
        """Raise ValueError if the router and the experts agree on a number of experts that differs from `config`'s."""
        name = next((name for name in OTHER_NAMES["router.weight"] if name in self.block.weights), None)
        router = None if name is None else self._describe(name, self.problems)
        if router is None or len(router.shape) != 2:
            return
        numbers, rows = self.block.expert_numbers(), router.shape[0]
        expected = config.num_experts + config.num_zero_experts
        held = {max(numbers) + 1} if numbers else {shape[0] for shape in stacked.values() if shape}
        if rows != expected and rows in held:
            raise ValueError(
                f"checkpoint: config.json gives block {self.block.prefix} {expected} experts, but its tensors are of "
                f"{rows}: {router.name} is {router.shape}"
            )

    def _plan_experts(self, plan: Plan, config: MoEConfig, experts: range, stacked: Shapes) -> None:
        """Plan the experts' weights. Skip rows and tensors that transformers may write for zero experts, because zero
        experts use no weights."""
        with_zero_experts = replace(plan.sizes, num_experts=config.num_experts + config.num_zero_experts)
        for key in plan.layout.select(bias=config.bias):
            for number, name in key.names(with_zero_experts.num_experts):
                if number is None or number in experts:
                    held = experts if number is None else range(number, number + 1)
                    longer = stacked.get(name) == key.shape(with_zero_experts)
                    shape = key.shape(with_zero_experts if longer else plan.sizes)
                    self._fill(plan, name, f"experts.{key.parameter}", shape, key, held)
                elif name in self.unused:
                    del self.unused[name]
                    plan.others.extend(self.block.weights[name][1][1])
                elif number < config.num_experts:
                    self.problems.append(f"missing: {self._full(name)}")

    def _plan_shared_expert(self, plan: Plan, config: MoEConfig) -> None:
        if config.shared_d_ff is None:
            return
        sizes = Sizes(1, config.shared_d_ff, config.d_model)
        tables = shared_keys(gated=config.shared_is_gated)
        found = max(tables, key=lambda keys: sum(key.name in self.unused for key in keys))
        for key in found:
            self._fill(plan, key.name, f"shared_expert.{key.parameter}", key.matrix_shape(sizes), key, None)

    def _plan_other(self, plan: Plan, parameter: str, shape: tuple[int, ...]) -> None:
        names = [name for name in OTHER_NAMES[parameter] if name in self.unused]
        if len(names) > 1:
            self.problems.append(f"ambiguous: {first_three(map(self._full, names))} may each be {parameter}")
        elif names:
            self._fill(plan, names[0], parameter, shape, None, None)
        else:
            places = " or ".join(self._full(name) for name in OTHER_NAMES[parameter])
            self.problems.append(f"missing: {parameter} {shape}, at {places}")

    def _fill(
        self, plan: Plan, name: str, parameter: str, shape: tuple[int, ...], key: Key | None, experts: range | None
    ) -> None:
        if name not in self.block.weights:
            self.problems.append(f"missing: {self._full(name)} {shape}")
            return
        self.unused.pop(name, None)
        stored = self._describe(name, self.problems)
        if stored is None:
            return
        actual = stored.shape if key is not None else _without_leading_one(stored.shape)
        if actual != (shape if key is not None else _without_leading_one(shape)):
            self.problems.append(f"wrong shape: {self._full(name)} is {stored.shape}, must be {shape}")
        elif stored.encoding == "plain" and not stored.dtype.is_floating_point:
            self.problems.append(f"wrong dtype: {self._full(name)} is {stored.dtype}, must be floating point")
        elif key is not None and key.flat and stored.encoding != "plain":
            self.problems.append(f"not supported: {self._full(name)} is {stored.encoding} in layout {plan.layout.name}")
        elif key is not None and experts is not None and (problem := ambiguous_scales(stored, key)):
            self.problems.append(problem)
        else:
            plan.fills.append(Fill(stored, parameter, key, experts))

    def _describe(self, name: str, problems: list[str]) -> Stored | None:
        return describe(self.files, *self.block.weights[name], self.float8_block, problems)

    def _full(self, name: str) -> str:
        if name in self.block.weights:
            return self.block.weights[name][0]
        if name.startswith("../"):
            return ".".join(self.block.prefix.split(".")[:-2]) + "." + name.removeprefix("../")
        return self.block.prefix + name

    def _shape_of(self, name: str) -> str:
        present = [part for part in self.block.weights[name][1][1] if part in self.files.file_of]
        return "".join(f" {self.files.info(part).shape}" for part in present[:1])


def ambiguous_scales(stored: Stored, key: Key) -> str | None:
    """Return an error text if a float8 tensor of gate and up has ambiguous scales, else None.

    Blocks may divide the rows of gate and up together or separately. Let n be the number of gate rows, and b the number
    of rows of a block. The two divisions differ if n % b > 0. Shapes do not show which division was used if both have
    equally many scales: ceil(2n / b) == 2 ceil(n / b).
    """
    if stored.encoding != "float8" or len(key.parts) == 1 or key.interleaved:
        return None
    axis = -1 if key.transposed else -2
    size, step = stored.shape[axis] // len(key.parts), stored.block[axis]
    if size % step == 0 or -(-2 * size // step) != 2 * -(-size // step):
        return None
    return (
        f"ambiguous: the scales of {stored.name} {stored.shape} may be of gate and up together or of each, "
        f"because gate is not whole blocks of {stored.block[0]}x{stored.block[1]}"
    )


def _without_leading_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop a leading axis of size 1, because some biases are stored as [1, E]."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
