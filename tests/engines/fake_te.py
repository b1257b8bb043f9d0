"""A thin Transformer Engine (TE) that needs no GPU: what our engine touches of the real one, with the same manners.

What it copies from TE 2.20 (and where `old=True`, from 2.8): names and homes of classes; a module builds its
quantizers at the first quantized forward and keeps them as long as the *class* of the recipe stays the same; rebuilt
delayed-scaling state inherits the old scales; modules register with a global manager; every GEMM goes through
`transformer_engine_torch.generic_gemm` with sixteen positional arguments; fused operators (`te.ops`) never call
their parts as modules. The arithmetic is plain.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lowprec_callback.engines import transformer_engine


class DType(enum.IntEnum):
    """`transformer_engine.pytorch.DType`: to `str` it is a number."""

    kByte = 0
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


OUTPUT = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16, torch.float16: DType.kFloat16}


# -- recipes ---------------------------------------------------------------------------------------------------------


class Format(enum.Enum):
    """`transformer_engine.common.recipe.Format`"""

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    backward_override: str | None = None


@dataclass
class NVFP4BlockScaling:
    fp4_format: Format = Format.E2M1
    disable_rht: bool = False


@dataclass
class CustomRecipe:
    qfactory: Any
    backward_override: str | None = None


# -- quantizers and storages -------------------------------------------------------------------------------------------


class Storage:
    """What the library multiplies: one or two copies in bytes. `values` stands in for them in our arithmetic."""

    def __init__(self, values: Any = None, quantizer: Any = None, **attributes: Any) -> None:
        self.values, self._quantizer = values, quantizer
        for name, value in attributes.items():
            setattr(self, name, value)


class Float8TensorStorage(Storage):
    pass


class Float8BlockwiseQTensorStorage(Storage):
    pass


class MXFP8TensorStorage(Storage):
    pass


class NVFP4TensorStorage(Storage):
    pass


class GroupedTensorStorage:
    """Many matrices in one buffer; `fake_dtype` and `quantizer` as TE names them."""

    def __init__(self, logical_shape: tuple[int, int], num_tensors: int, quantizer: Any = None) -> None:
        self.logical_shape, self.num_tensors, self.quantizer = logical_shape, num_tensors, quantizer
        self.fake_dtype = torch.bfloat16


class Float8Tensor(torch.Tensor):
    """A tensor that shows a wide type and holds bytes."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], *_: Any) -> Float8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)

    def __init__(self, shape: tuple[int, ...], dtype: Any = DType.kFloat8E4M3, quantizer: Any = None) -> None:
        self._data = torch.zeros(shape, dtype=torch.uint8)
        self._transpose = None
        self._fp8_dtype, self._quantizer = dtype, quantizer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} touches the data of an operand")


class Quantizer:
    def __init__(self, dtype: DType = DType.kFloat8E4M3, **flags: Any) -> None:
        self.dtype = dtype
        for name, value in flags.items():
            setattr(self, name, value)

    def __call__(self, x: torch.Tensor) -> Storage:
        raw = x.reshape(-1, x.shape[-1])
        data = torch.zeros(raw.shape, dtype=torch.uint8)
        return Float8TensorStorage(x.detach(), self, _data=data, _transpose=None, _fp8_dtype=self.dtype)


class Float8Quantizer(Quantizer):
    def _get_compatible_recipe(self) -> Any:
        return DelayedScaling


class Float8CurrentScalingQuantizer(Quantizer):
    def _get_compatible_recipe(self) -> Any:
        return Float8CurrentScaling


class Float8BlockQuantizer(Quantizer):
    pass


class MXFP8Quantizer(Quantizer):
    pass


class NVFP4Quantizer(Quantizer):
    pass


class NVFP4TensorRef(Storage):
    """What the reference quantizer makes: it knows the shape that it had, and that TE's library cannot multiply it."""

    custom = True


class NVFP4QuantizerRef(Quantizer):
    def __call__(self, x: torch.Tensor) -> Storage:
        return NVFP4TensorRef(x.detach(), self, original_shape=tuple(x.shape), quant_dtype="E2M1")


def nvfp4_ref_factory(role: Any) -> Quantizer:
    """`nvfp4_ref_rht_2d_factory`"""
    return NVFP4QuantizerRef(DType.kFloat4E2M1)


@dataclass
class RecipeState:
    """Built by a module at its first quantized forward; delayed scaling's holds `scale` and `amax_history`."""

    recipe: Any
    count: int
    forward: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.recipe, DelayedScaling):
            self.scale = torch.ones(self.count)
            self.amax_history = torch.zeros(self.recipe.amax_history_len, self.count)

    def inherit_state_from(self, other: RecipeState) -> None:
        if hasattr(self, "scale") and hasattr(other, "scale"):
            self.scale.copy_(other.scale)

    def make_quantizers(self) -> list[Quantizer]:
        if isinstance(self.recipe, CustomRecipe):
            return [self.recipe.qfactory(None) for _ in range(self.count)]
        if isinstance(self.recipe, NVFP4BlockScaling):
            return [NVFP4Quantizer(DType.kFloat4E2M1, with_rht=not self.recipe.disable_rht) for _ in range(self.count)]
        wide = not self.forward and self.recipe.fp8_format is Format.HYBRID
        dtype = DType.kFloat8E5M2 if wide else DType.kFloat8E4M3
        if isinstance(self.recipe, DelayedScaling):
            return [Float8Quantizer(dtype, scale=self.scale[i]) for i in range(self.count)]
        return [Float8CurrentScalingQuantizer(dtype) for _ in range(self.count)]


# -- global state --------------------------------------------------------------------------------------------------


@dataclass
class FP8GlobalState:
    fp8_enabled: bool = False
    fp8_recipe: Any = None
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[Any]] = field(default_factory=dict)


class NewManager:
    """`FP8GlobalStateManager` since 2.16 or so: all state in one object."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def state(cls) -> Any:
        return cls.quantization_state

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return True, ""


class OldManager:
    """`FP8GlobalStateManager` of 2.8: state in attributes of the class."""

    fp8_enabled = False
    fp8_recipe: Any = None
    autocast_depth = 0
    global_amax_buffer: dict[str, list[Any]] = {}  # noqa: RUF012  (as TE has it)
    fp8_available: Any = None

    @classmethod
    def reset(cls) -> None:
        cls.fp8_enabled, cls.fp8_recipe, cls.autocast_depth, cls.fp8_available = False, None, 0, None
        cls.global_amax_buffer = {}

    @classmethod
    def state(cls) -> Any:
        return cls

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return True, ""

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return False, "Device compute capability 10.0 or higher required for MXFP8 execution."

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"


class Fake:
    """The installed fake: `te`, `tex`, `recipes`, `manager` as the engine finds them."""

    def __init__(self, old: bool) -> None:
        self.old = old
        body = {
            k: v for k, v in vars(OldManager if old else NewManager).items() if k not in ("__dict__", "__weakref__")
        }
        self.manager: Any = type("FP8GlobalStateManager", (), body)  # a class of its own for each test
        self.manager.reset()
        self.regions: list[tuple[bool, Any]] = []
        """(enabled, recipe) of each region entered."""
        self.gemm: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor] = multiply
        """The arithmetic; tests replace it."""
        self.tex = ModuleType("transformer_engine_torch")
        self.tex.generic_gemm = self._generic_gemm
        self.recipes = ModuleType("transformer_engine.common.recipe")
        for cls in (Format, DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, CustomRecipe):
            setattr(self.recipes, cls.__name__, cls)
        self.extensions = ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
        self.extensions.custom_gemm = self._custom_gemm
        self.te = ModuleType("transformer_engine.pytorch")
        self.te.Linear = lambda k, n, **options: Linear(self, k, n, **options)
        if old:
            self.te.fp8_autocast = self._fp8_autocast
        else:
            self.te.autocast = self._autocast
            self.te.is_mxfp8_available = lambda return_reason=False: (False, "too old") if return_reason else False
            self.te.is_fp8_available = lambda return_reason=False: (True, "") if return_reason else True

    def _generic_gemm(self, *args: Any, **kwargs: Any) -> tuple[Any, None, None, None]:
        assert len(args) == 16
        first, transa, second, transb = args[:4]
        layout = f"{'T' if transa else 'N'}{'T' if transb else 'N'}"
        a, b = (each.values if isinstance(each, Storage) else each for each in (first, second))
        return self.gemm(a, b, layout), None, None, None

    def _custom_gemm(
        self, first: Any, second: Any, workspace: Any, out_dtype: Any, quantizer: Any, gelu: bool, gelu_in: Any,
        accumulate: bool, layout: str, out: Any, bias: Any, split: bool, grad: bool,
    ) -> tuple[Any, None, None, None]:  # fmt: skip
        return multiply(first.values, second.values, layout), None, None, None

    @contextmanager
    def _autocast(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None) -> Iterator[None]:
        state = self.manager.state()
        before = state.fp8_enabled, state.fp8_recipe
        state.fp8_enabled, state.fp8_recipe = enabled, recipe if recipe is not None else DelayedScaling()
        state.autocast_depth += 1
        self.regions.append((enabled, recipe))
        try:
            yield
        finally:
            state.fp8_enabled, state.fp8_recipe = before
            state.autocast_depth -= 1

    def _fp8_autocast(self, enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None) -> Any:
        return self._autocast(enabled, calibrating, fp8_recipe)


def multiply(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    """cuBLAS's column-major names over row-major matrices: TN is B A^T, NN is B A, NT is B^T A."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()


# -- modules ---------------------------------------------------------------------------------------------------------


class BaseModule(nn.Module):
    """`TransformerEngineBaseModule`: what our engine reads and clears of it."""

    __module__ = "transformer_engine.pytorch.module.base"

    def __init__(self, fake: Fake, gemms: int = 1) -> None:
        super().__init__()
        self.fake = [fake]  # in a list: no submodule, and no copy
        self.gemms = gemms
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._fp8_workspaces: dict[str, Any] = {}

    def prepare_forward(self) -> None:
        """`init_fp8_metadata`, `set_meta_tensor` and `add_fp8_tensors_to_global_buffer` in one."""
        state, meta = self.fake[0].manager.state(), self.fp8_meta
        self.fp8 = meta["fp8_checkpoint"] = state.fp8_enabled
        if not self.fp8:
            self.fp8_initialized = False
            return
        if not (self.fp8_initialized and meta.get("recipe") == state.fp8_recipe):
            meta["recipe"], meta["num_gemms"] = state.fp8_recipe, self.gemms
            for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                old = meta.get(key)
                if self.fp8_meta_tensors_initialized and type(old.recipe) is type(state.fp8_recipe):
                    continue  # TE issue #3157: the class alone decides
                new = RecipeState(state.fp8_recipe, count * self.gemms, key == "scaling_fwd")
                if old is not None:
                    new.inherit_state_from(old)
                meta[key], self.quantizers[key] = new, new.make_quantizers()
            self.fp8_meta_tensors_initialized = self.fp8_initialized = True
        if hasattr(meta["scaling_fwd"], "amax_history") and "buffer_index_and_autocast_key" not in meta:
            buffer = state.global_amax_buffer.setdefault("forward", [])
            meta["buffer_index_and_autocast_key"] = len(buffer)
            buffer.append(meta["scaling_fwd"].amax_history)


class _Product(torch.autograd.Function):
    """The three GEMMs of one linear layer, with their operands quantized if the module says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: BaseModule, index: int) -> torch.Tensor:
        x2, w2 = x.detach(), weight.detach()
        if module.fp8:
            quantizers = module.quantizers["scaling_fwd"][3 * index :]
            x2, w2 = quantizers[0](x2), quantizers[1](w2)
        ctx.module, ctx.index, ctx.x, ctx.w, ctx.shape = module, index, x2, w2, x.shape
        ctx.quantized = module.fp8
        if module.fp8 and getattr(module.fp8_meta["recipe"], "backward_override", None):
            ctx.quantized, ctx.x, ctx.w = False, x.detach(), weight.detach()
        y = gemm(module, w2, True, x2, False, x.dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        grad: Any = dy.contiguous()
        if ctx.quantized:
            grad = ctx.module.quantizers["scaling_bwd"][2 * ctx.index](grad)
        dx = gemm(ctx.module, ctx.w, False, grad, False, dy.dtype) if ctx.needs_input_grad[0] else None
        dw = gemm(ctx.module, ctx.x, False, grad, True, dy.dtype)
        return None if dx is None else dx.reshape(ctx.shape), dw, None, None


def gemm(module: BaseModule, a: Any, transa: bool, b: Any, transb: bool, dtype: torch.dtype) -> torch.Tensor:
    """`general_gemm`'s call, by attribute of the compiled module; custom operands go another way."""
    workspace = torch.empty(1)
    if getattr(a, "custom", False):
        layout = f"{'T' if transa else 'N'}{'T' if transb else 'N'}"
        custom = module.fake[0].extensions.custom_gemm
        return custom(a, b, workspace, dtype, None, False, None, False, layout, None, None, False, layout != "TN")[0]
    result = module.fake[0].tex.generic_gemm(
        a, transa, b, transb, None, None, OUTPUT[dtype], None, DType.kBFloat16, False, None, False, workspace, 1,
        False, False, alpha=1.0, beta=0.0,
    )  # fmt: skip
    return result[0]


class Linear(BaseModule):
    """`te.Linear`"""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(
        self,
        fake: Fake,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ) -> None:
        super().__init__(fake)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features, dtype=params_dtype, device=device))
        self.microbatches: list[bool | None] = []
        # Without bias TE holds an empty tensor, which is no parameter.
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.empty(0)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.microbatches.append(is_first_microbatch)
        self.prepare_forward()
        y = _Product.apply(x, self.weight, self, 0)
        return y + self.bias if self.bias.numel() else y


class LayerNormMLP(BaseModule):
    """`te.LayerNormMLP`: two linears and a norm in one module."""

    __module__ = "transformer_engine.pytorch.module.layernorm_mlp"

    def __init__(self, fake: Fake, hidden: int, ffn: int, bias: bool = True) -> None:
        super().__init__(fake, gemms=2)
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden))
        self.fc1_weight = nn.Parameter(torch.randn(ffn, hidden))
        self.fc2_weight = nn.Parameter(torch.randn(hidden, ffn))
        if bias:
            self.fc1_bias = nn.Parameter(torch.zeros(ffn))
            self.fc2_bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.prepare_forward()
        x = nn.functional.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)
        return _Product.apply(_Product.apply(x, self.fc1_weight, self, 0).tanh(), self.fc2_weight, self, 1)


class BasicLinear(nn.Module):
    """`te.ops.BasicLinear`: its `forward` is never called, a fuser runs it."""

    __module__ = "transformer_engine.pytorch.ops.basic.basic_linear"

    def __init__(self, fake: Fake, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fake = [fake]
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self._fp8_metas: Any = None
        self._quantizers: Any = None

    def reset_recipe_state(self, recipe: Any) -> None:
        if recipe is None:
            self._fp8_metas = self._quantizers = None
        elif self._quantizers is None or type(self._fp8_metas["recipe"]) is not type(recipe):
            self._fp8_metas = {"recipe": recipe}
            self._quantizers = {"forward": RecipeState(recipe, 2).make_quantizers()}


class OpsLinear(nn.Module):
    """`te.ops.Linear`: a container of operators, which shows the weight of the one inside as its own."""

    __module__ = "transformer_engine.pytorch.ops.linear"

    def __init__(self, fake: Fake, in_features: int, out_features: int) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList([BasicLinear(fake, in_features, out_features)])
        self.register_parameter("weight", self.basic_ops[0].weight)


OpsLinear.__name__ = "Linear"


class Fuser:
    """`OperationFuser`: remembers the class of the recipe that its operators were built for."""

    def __init__(self, ops: list[BasicLinear]) -> None:
        self.ops, self.recipe_type = ops, type(None)

    def __call__(self, x: torch.Tensor, sequential: OpsSequential) -> torch.Tensor:
        state = sequential.fake[0].manager.state()
        recipe = state.fp8_recipe if state.fp8_enabled else None
        if type(recipe) is not self.recipe_type:
            for op in self.ops:
                op.reset_recipe_state(recipe)
            self.recipe_type = type(recipe)
        for op in self.ops:
            assert (op._quantizers is None) == (recipe is None), "quantized compute without a quantizer"
            x = _Fused.apply(x, op.weight, op)
        return x


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, op: BasicLinear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.op = op
        return gemm(op, weight.detach(), True, x.detach(), False, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = gemm(ctx.op, weight, False, dy.contiguous(), False, dy.dtype)
        return dx, gemm(ctx.op, x, False, dy.contiguous(), True, dy.dtype), None


class OpsSequential(nn.Module):
    """`te.ops.Sequential`"""

    __module__ = "transformer_engine.pytorch.ops.sequential"

    def __init__(self, fake: Fake, *ops: OpsLinear) -> None:
        super().__init__()
        self.fake = [fake]
        for index, op in enumerate(ops):
            self.add_module(str(index), op)
        self._module_groups: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._module_groups is None:
            self._module_groups = [Fuser([op for module in self._modules.values() for op in module.basic_ops])]
        return self._module_groups[0](x, self)


class GroupedLinear(BaseModule):
    """`te.GroupedLinear`: weights `weight0`, `weight1`, ..."""

    __module__ = "transformer_engine.pytorch.module.grouped_linear"

    def __init__(self, fake: Fake, groups: int, in_features: int, out_features: int) -> None:
        super().__init__(fake, gemms=groups)
        self.in_features, self.out_features = in_features, out_features
        for index in range(groups):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.randn(out_features, in_features)))


class DotProductAttention(BaseModule):
    """`te.DotProductAttention`: quantization state, and no weight."""

    __module__ = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.prepare_forward()
        return x * 2


def install(monkeypatch: pytest.MonkeyPatch, *, old: bool = False, version: str | None = None) -> Fake:
    """Make `import transformer_engine...` find the fake, for the test's duration."""
    fake = Fake(old)
    top = ModuleType("transformer_engine")
    top.__version__ = version or ("2.8.0" if old else "2.20.2")
    common = ModuleType("transformer_engine.common")
    home = ModuleType(f"transformer_engine.pytorch.{'fp8' if old else 'quantization'}")
    home.FP8GlobalStateManager = fake.manager
    top.pytorch, top.common, common.recipe = fake.te, common, fake.recipes
    for module in (top, fake.te, common, fake.recipes, home, fake.tex, fake.extensions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    transformer_engine.load.cache_clear()
    return fake
