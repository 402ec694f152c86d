"""Convert a program of torch.export to an ONNX graph, for the operations that networks and heads use.

Values that depend only on weights are computed here and become constants. N, the number of images, is dynamic.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx

from engram.core.errors import EngramError

OPSET, IR_VERSION = 17, 8
_ELEMENT = {torch.float32: 1, torch.uint8: 2, torch.int64: 7, torch.bool: 9}
_WHOLE = 2**63 - 1


class Graph:
    """Nodes and constants of an ONNX graph; values are referred to by name. source: the images, whose number is N."""

    source: str

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._make: Any = helper
        self._pack: Any = numpy_helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._tensors: dict[int, tuple[Tensor, str]] = {}  # by id; weights are used once for each view

    def constant(self, value: Any) -> str:
        """Add a constant (a tensor, a number or a list of integers), a tensor only once; return its name."""
        if id(value) in self._tensors:
            return self._tensors[id(value)][1]
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous().numpy()
        else:
            kind = np.int64 if isinstance(value, (list, tuple)) else np.float32
            array = np.array(value, dtype=kind)
        name = f"c{len(self.constants)}"
        if isinstance(value, Tensor):
            self._tensors[id(value)] = value, name
        self.constants.append(self._pack.from_array(array, name))
        return name

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add an operation; return the name of its result."""
        name = f"v{len(self.nodes)}"
        made = [name, f"{name}_places"] if kind == "TopK" else [name]
        self.nodes.append(self._make.make_node(kind, list(inputs), made, **attributes))
        return name


def convert(program: torch.export.ExportedProgram, graph: Graph, source: str) -> list[str]:
    """Add the program to the graph, applied to the value `source`; return the names of its outputs."""
    graph.source = source
    constants = _constants(program)
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = constants.get(node.name, source)
        elif node.op == "call_function":
            values[node] = _call(graph, node, values)
        elif node.op == "output":
            return [_name(graph, values[item]) for item in node.args[0]]
    raise AssertionError("a program has an output")


def _constants(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    signature = program.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    found = {place: held[name] for place, name in named.items()}
    return found | {place: held[name] for place, name in signature.inputs_to_lifted_tensor_constants.items()}


def _call(graph: Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the result of a node: a name, or a constant if all its inputs are constants."""
    arguments = fx.map_arg(node.args, lambda inner: values[inner])
    named = fx.map_arg(node.kwargs, lambda inner: values[inner])
    if not any(isinstance(values[inner], (str, _Open)) for inner in node.all_input_nodes):
        assert callable(node.target)
        with torch.no_grad():
            return node.target(*arguments, **named)
    if node.target is operator.getitem:
        return arguments[0]  # of a norm; only its first result is used
    if node.target in (operator.mul, operator.add, operator.floordiv):
        return OPEN  # computed from N: a size in a reshape, which infers it
    kind = str(node.target).removeprefix("aten.").removesuffix(".default")
    if kind.startswith("sym_size"):
        return OPEN
    if kind.startswith("_assert"):
        return None
    if kind == "as_strided" and _is_same(node):
        return arguments[0]
    if kind in ("view", "expand"):
        arguments = (arguments[0], _sizes(node))
    if kind not in _OPERATIONS:
        _refuse(node)
    return _OPERATIONS[kind](graph, *arguments, **named)


def _refuse(node: fx.Node) -> NoReturn:
    raise EngramError(f"this model's network uses the operation {node.target}, which cannot be exported yet")


def _sizes(node: fx.Node) -> list[Any]:
    """The shape of a result: OPEN where it depends on N, -1 where an expansion leaves such a size as it is."""
    given = node.args[0].meta["val"].shape if isinstance(node.args[0], fx.Node) else ()
    sizes = [size if isinstance(size, int) else OPEN for size in node.meta["val"].shape]
    if str(node.target) == "aten.expand.default":
        for place, size in enumerate(given, start=len(sizes) - len(given)):
            sizes[place] = sizes[place] if isinstance(size, int) else -1
    return sizes


def _is_same(node: fx.Node) -> bool:
    """Whether a new view of memory has the elements of its input where they were: a mean's, in another layout."""
    places: list[tuple[Any, ...]] = []
    for each in (node.args[0], node):
        assert isinstance(each, fx.Node)
        value: Tensor = each.meta["val"]
        sizes = zip(map(str, value.shape), map(str, value.stride()), strict=True)
        places.append((value.storage_offset(), *((size, step) for size, step in sizes if size != "1")))
        places[-1] += (value.dim(),)
    return places[0] == places[1]


class _Open:
    """The number of images, which is dynamic."""


OPEN = _Open()


def _name(graph: Graph, value: Any) -> str:
    return value if isinstance(value, str) else graph.constant(value)


def _plain(kind: str, **attributes: Any) -> Callable[..., str]:
    """Return a converter for an operation that has the same inputs in ONNX under another name."""

    def add(graph: Graph, *inputs: Any) -> str:
        return graph.add(kind, [_name(graph, value) for value in inputs], **attributes)

    return add


def _scaled(kind: str) -> Callable[..., str]:
    """Return a converter for a sum or difference, in which torch multiplies the second operand by alpha."""

    def add(graph: Graph, first: Any, second: Any, alpha: float = 1) -> str:
        if alpha != 1:
            second = graph.add("Mul", [_name(graph, second), graph.constant(alpha)])
        return graph.add(kind, [_name(graph, first), _name(graph, second)])

    return add


def _cast(graph: Graph, value: str, dtype: torch.dtype | None = None, **_: Any) -> str:
    return value if dtype is None else graph.add("Cast", [value], to=_ELEMENT[dtype])


def _convolution(
    graph: Graph,
    images: str,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Any,
    groups: int,
) -> str:
    if transposed:
        raise EngramError("this model's network uses a transposed convolution, which cannot be exported yet")
    inputs = [images, _name(graph, weight), *([] if bias is None else [_name(graph, bias)])]
    shape = {"strides": list(stride), "pads": [*padding, *padding], "dilations": list(dilation)}
    return graph.add("Conv", inputs, group=groups, **shape)


def _batch_norm(
    graph: Graph, x: str, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, epsilon: float
) -> str:
    weight, bias = torch.ones_like(mean) if weight is None else weight, torch.zeros_like(mean) if bias is None else bias
    inputs = [x, *(_name(graph, value) for value in (weight, bias, mean, variance))]
    return graph.add("BatchNormalization", inputs, epsilon=epsilon)


def _slice(graph: Graph, x: str, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> str:
    first, last = start or 0, _WHOLE if end is None or isinstance(end, _Open) else end
    if first == 0 and last == _WHOLE and step == 1:
        return x
    return graph.add("Slice", [x, *(graph.constant([value]) for value in (first, last, dim, step))])


def _pad(graph: Graph, x: str, pad: Sequence[int], value: float = 0.0) -> str:
    sides = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]  # torch starts with the last dimension
    sides = [(0, 0)] * (4 - len(sides)) + sides
    return graph.add(
        "Pad",
        [x, graph.constant([before for before, _ in sides] + [after for _, after in sides]), graph.constant(value)],
    )


def _mean(graph: Graph, x: str, dim: Sequence[int], keepdim: bool = False, **_: Any) -> str:
    return graph.add("ReduceMean", [x], axes=list(dim), keepdims=int(keepdim))


def _sum(graph: Graph, x: str, dim: Sequence[int], keepdim: bool = False, **_: Any) -> str:
    return graph.add("ReduceSum", [x, graph.constant(list(dim))], keepdims=int(keepdim))


def _norm(graph: Graph, x: str, order: float, dim: Sequence[int], keepdim: bool = False, **_: Any) -> str:
    if order != 2:
        raise EngramError(f"this model's network uses a norm of order {order:g}, which cannot be exported yet")
    return graph.add("ReduceL2", [x], axes=list(dim), keepdims=int(keepdim))


def _clamp(graph: Graph, x: str, least: Any = None, most: Any = None) -> str:
    bounds = ["" if bound is None else _name(graph, bound) for bound in (least, most)]
    return graph.add("Clip", [x, *bounds])


def _view(graph: Graph, x: str, shape: Sequence[Any]) -> str:
    return graph.add("Reshape", [x, graph.constant([-1 if isinstance(size, _Open) else size for size in shape])])


def _expand(graph: Graph, x: Any, shape: Sequence[Any], **_: Any) -> Any:
    if not any(isinstance(size, _Open) for size in shape):
        return x  # the next operation broadcasts it
    images = graph.add("Gather", [graph.add("Shape", [graph.source]), graph.constant([0])])
    parts = [images if isinstance(size, _Open) else graph.constant([max(size, 1)]) for size in shape]  # -1: unchanged
    return graph.add("Expand", [_name(graph, x), graph.add("Concat", parts, axis=0)])


def _any(graph: Graph, x: str, dim: int, keepdim: bool = False) -> str:
    found = graph.add("ReduceMax", [_cast(graph, x, torch.int64)], axes=[dim], keepdims=int(keepdim))
    return _cast(graph, found, torch.bool)


def _full_like(graph: Graph, x: str, value: float, **_: Any) -> str:
    return graph.add("Expand", [graph.constant(float(value)), graph.add("Shape", [x])])


def _addmm(graph: Graph, bias: Any, first: Any, second: Any) -> str:
    product = graph.add("MatMul", [_name(graph, first), _name(graph, second)])
    return graph.add("Add", [product, _name(graph, bias)])


def _layer_norm(graph: Graph, x: str, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> str:
    weight = torch.ones(list(shape)) if weight is None else weight
    inputs = [x, _name(graph, weight), *([] if bias is None else [_name(graph, bias)])]
    return graph.add("LayerNormalization", inputs, axis=-len(shape), epsilon=epsilon)


def _gelu(graph: Graph, x: str, approximate: str = "none") -> str:
    if approximate != "none":
        raise EngramError("this model's network uses an approximate GELU, which cannot be exported yet")
    half = graph.add("Erf", [graph.add("Div", [x, graph.constant(math.sqrt(2))])])
    return graph.add("Mul", [graph.add("Mul", [x, graph.constant(0.5)]), graph.add("Add", [half, graph.constant(1.0)])])


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_softmax": lambda graph, x, dim, _half: graph.add("Softmax", [x], axis=dim),
    "_to_copy": _cast,
    "abs": _plain("Abs"),
    "add.Tensor": _scaled("Add"),
    "addmm": _addmm,
    "any.dim": _any,
    "bmm": _plain("MatMul"),
    "cat": lambda graph, parts, dim=0: graph.add("Concat", [_name(graph, part) for part in parts], axis=dim),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clone": lambda graph, x, **_: x,
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "div.Tensor": _plain("Div"),
    "eq.Scalar": _plain("Equal"),
    "exp": _plain("Exp"),
    "expand": _expand,
    "full_like": _full_like,
    "gelu": _gelu,
    "hardtanh": _clamp,
    "index_select": lambda graph, x, dim, places: graph.add("Gather", [x, _name(graph, places)], axis=dim),
    "linalg_vector_norm": _norm,
    "logical_not": _plain("Not"),
    "max_pool2d": lambda graph, x, size, stride, padding=(0, 0): graph.add(
        "MaxPool", [x], kernel_shape=list(size), strides=list(stride), pads=[*padding, *padding]
    ),
    "mean.dim": _mean,
    "mm": _plain("MatMul"),
    "mul.Scalar": _plain("Mul"),
    "mul.Tensor": _plain("Mul"),
    "native_layer_norm": _layer_norm,
    "neg": _plain("Neg"),
    "permute": lambda graph, x, order: graph.add("Transpose", [x], perm=list(order)),
    "pow.Tensor_Scalar": _plain("Pow"),
    "relu": _plain("Relu"),
    "select.int": lambda graph, x, dim, index: graph.add("Gather", [x, graph.constant(torch.tensor(index))], axis=dim),
    "sigmoid": _plain("Sigmoid"),
    "sign": _plain("Sign"),
    "slice.Tensor": _slice,
    "sqrt": _plain("Sqrt"),
    "squeeze.dims": lambda graph, x, dims: graph.add("Squeeze", [x, graph.constant(list(dims))]),
    "sub.Tensor": _scaled("Sub"),
    "sum.dim_IntList": _sum,
    "tanh": _plain("Tanh"),
    "unsqueeze": lambda graph, x, dim: graph.add("Unsqueeze", [x, graph.constant([dim])]),
    "view": _view,
    "where.self": _plain("Where"),
}
_OPERATIONS["max_pool2d_with_indices"] = _OPERATIONS["max_pool2d"]
