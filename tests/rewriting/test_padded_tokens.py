"""Tokens of encoders up to a multiple of 8 or 16: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equivalence import node_of, op_types, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import aligned_keys, padded_tokens
from onnx import TensorProto, helper, numpy_helper

HEADS, COLUMNS, INNER, WORDS = 2, 8, 12, 20
MULTIPLE = 16  # of fp32
MASK = ("batch", 1, "length", "length")
CONTRIB = {"domain": "com.microsoft"}

Shape = tuple[int | str, ...]


class Encoder:
    """A post-norm encoder as optimizers leave it, written down node by node."""

    def __init__(self, form: str, *, seed: int = 0) -> None:
        self.form = form
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.rng = np.random.default_rng(seed)

    def constant(self, name: str, values: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def normal(self, name: str, *shape: int) -> str:
        return self.constant(name, self.rng.standard_normal(shape).astype(np.float32) * 0.5)

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def known(self, name: str, *shape: int | str) -> str:
        self.infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def dense(self, x: str, rows: int, columns: int, name: str) -> str:
        product = self.node("MatMul", [x, self.normal(f"{name}_w", rows, columns)], f"{name}_xw")
        return self.node("Add", [product, self.normal(f"{name}_b", columns)], name)

    def layer(self, x: str, index: int) -> str:
        of = f"l{index}_"
        parts = [f"{of}{part}" for part in "qkv"]
        sizes = np.array([COLUMNS] * 3, np.int64)
        if self.form == "packed":
            qkv = self.dense(x, COLUMNS, 3 * COLUMNS, f"{of}qkv")
            apart = np.array([0, 0, HEADS, 3, COLUMNS // HEADS], np.int64)
            shape = self.constant(f"{of}apart", apart)
            parts = [self.node("Reshape", [qkv, shape], f"{of}packed"), "", ""]
        elif self.form == "merged":
            qkv = self.dense(x, COLUMNS, 3 * COLUMNS, f"{of}qkv")
            operands = [qkv, self.constant(f"{of}sizes", sizes)]
            self.nodes.append(helper.make_node("Split", operands, parts, axis=-1))
        else:  # products of their own, to which slices of one bias are added
            biases = [f"{part}_b" for part in parts]
            bias = [self.normal(f"{of}b", 3 * COLUMNS), self.constant(f"{of}sizes", sizes)]
            self.nodes.append(helper.make_node("Split", bias, biases, axis=0))
            for part, name in zip(parts, biases, strict=True):
                weight = self.normal(f"{part}_w", COLUMNS, COLUMNS)
                product = self.node("MatMul", [x, weight], f"{part}_xw")
                self.node("Add", [product, name], part)
        operands = [*parts, "", "", "mask"]
        attention = self.node("MultiHeadAttention", operands, f"{of}a", num_heads=HEADS, **CONTRIB)
        self.known(attention, "batch", "length", COLUMNS)
        out = self.dense(attention, COLUMNS, COLUMNS, f"{of}out")
        x = self.normalized(out, x, f"{of}middle")
        wide = self.dense(x, COLUMNS, INNER, f"{of}wide")
        back = self.dense(
            self.node("Gelu", [wide], f"{of}gelu", **CONTRIB), INNER, COLUMNS, f"{of}d"
        )
        return self.normalized(back, x, f"{of}end")

    def normalized(self, x: str, skip: str, name: str) -> str:
        scale = self.normal(f"{name}_scale", COLUMNS)
        self.node("SkipLayerNormalization", [x, skip, scale], name, epsilon=1e-5, **CONTRIB)
        return self.known(name, "batch", "length", COLUMNS)


def model(
    layers: int = 2, *, form: str = "merged", mask: Shape | None = MASK, hidden: bool = False,
    opset: int = 18, **attributes: object,
) -> onnx.ModelProto:  # fmt: skip
    """Embeddings, layers, and the first token's columns; `hidden`: every layer's are outputs, too.

    The attributes go to every attention node.
    """
    encoder = Encoder(form)
    words = encoder.node("Gather", [encoder.normal("words", WORDS, COLUMNS), "ids"], "embedding")
    encoder.known(words, "batch", "length", COLUMNS)
    scale = encoder.normal("scale", COLUMNS)
    x = encoder.node("LayerNormalization", [words, scale], "embedded", axis=-1)
    states = [encoder.known(x, "batch", "length", COLUMNS)]
    for index in range(layers):
        states.append(encoder.layer(states[-1], index))
    zero = encoder.constant("zero", np.array(0, np.int64))
    encoder.node("Gather", [states[-1], zero], "first", axis=1)
    info = helper.make_tensor_value_info
    inputs = [info("ids", TensorProto.INT64, ["batch", "length"])]
    if mask is not None:
        inputs.append(info("mask", TensorProto.FLOAT, mask))
    outputs = [info("first", TensorProto.FLOAT, ["batch", COLUMNS])]
    if hidden:
        outputs += [info(s, TensorProto.FLOAT, ["batch", "length", COLUMNS]) for s in states]
    for node in encoder.nodes:
        if node.op_type == "MultiHeadAttention":
            node.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
            if mask is None:
                del node.input[3:]
    kept = {output.name for output in outputs}
    infos = [value for value in encoder.infos if value.name not in kept]
    graph = helper.make_graph(
        encoder.nodes, "g", inputs, outputs, encoder.constants, value_info=infos
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(batch: int, length: int, *, hidden_rows: bool = False) -> dict[str, np.ndarray]:
    """Random words and masks; `hidden_rows`: some tokens see none."""
    rng = np.random.default_rng([batch, length])
    seen = rng.random((batch, 1, length, length)) < 0.6
    seen[..., 0] = True
    if hidden_rows:
        seen[:, :, rng.integers(length)] = False
    return {
        "ids": rng.integers(0, WORDS, (batch, length)),
        "mask": np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32),
    }


def value(proto: onnx.ModelProto, name: str, feed: dict[str, np.ndarray]) -> np.ndarray:
    """What a value is in a run of what comes in front of it."""
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    places = [index for index, node in enumerate(proto.graph.node) if name in node.output]
    del watched.graph.node[places[0] + 1 :]
    del watched.graph.output[:]
    watched.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return run(watched, feed)[0]


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 40), layers=st.integers(1, 3),
    form=st.sampled_from(["merged", "three"]), hidden=st.booleans(), hidden_rows=st.booleans(),
)  # fmt: skip
def test_results_are_equal(
    batch: int, length: int, layers: int, form: str, hidden: bool, hidden_rows: bool
) -> None:
    feed = feeds(batch, length, hidden_rows=hidden_rows)
    proto = model(layers, form=form, hidden=hidden)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == layers
    onnx.checker.check_model(proto)
    for one, other in zip(run(proto, feed), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    attention = node_of(proto, "l0_a")
    rows = -(-length // MULTIPLE) * MULTIPLE
    keys = value(proto, attention.input[1], feed)
    assert keys.shape == (batch, rows, COLUMNS)
    np.testing.assert_array_equal(
        keys[:, length:], np.repeat(keys[:, length - 1 : length], rows - length, 1)
    )
    mask = value(proto, attention.input[5], feed)
    assert mask.shape == (batch, 1, rows, rows)
    assert np.isneginf(mask[..., length:]).all()
    np.testing.assert_array_equal(mask[..., :length, :length], feed["mask"])


@pytest.mark.parametrize("length", [1, 16, 23])
def test_one_token_that_is_not_finite_spoils_what_it_spoilt_before(length: int) -> None:
    """An added token is a copy of the last one: with it come no more numbers that are none."""
    proto = model(hidden=True)
    words = next(t for t in proto.graph.initializer if t.name == "words")
    table = numpy_helper.to_array(words).copy()
    table[3] = np.inf
    words.CopyFrom(numpy_helper.from_array(table, "words"))
    feed = feeds(2, length)
    feed["ids"][:] = np.where(feed["ids"] == 3, 4, feed["ids"])
    feed["ids"][0, -1] = 3  # of the first of two texts
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    got = run(proto, feed)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
    assert not np.isfinite(got[-1][0]).all()
    assert np.isfinite(got[-1][1]).all()


def test_the_operators_that_are_left() -> None:
    proto = model(layers=3)
    before = Counter(op_types(proto))
    assert padded_tokens.pad(proto) == 3
    added = Counter(op_types(proto))
    added.subtract(before)
    assert +added == {"Pad": 3, "Slice": 1, "Shape": 1, "Neg": 1, "Mod": 1, "Concat": 3}
    order = [node.output[0] for node in proto.graph.node]
    # The last layer's wide product is behind the cut, all in front of it sees padded tokens.
    assert order.index("l2_middle") < order.index("l2_wide_xw")
    assert node_of(proto, "l2_middle").op_type == "Slice"
    assert node_of(proto, "l1_wide_xw").input[0] == "l1_middle"


def test_recorded_shapes_say_that_tokens_are_padded() -> None:
    """ONNX Runtime reuses memory of values whose recorded shapes are equal."""
    proto = model()
    padded_tokens.pad(proto)
    shapes = {
        info.name: [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in proto.graph.value_info
    }
    assert shapes["l0_end"] == ["batch", "length_padded", COLUMNS]
    assert shapes["l1_middle"] == ["batch", "length", COLUMNS]
    assert shapes["embedding_padded"] == ["batch", "length_padded", COLUMNS]
    assert shapes["l1_middle_padded"] == ["batch", "length_padded", COLUMNS]
    assert shapes["mask_padded"] == ["batch", 1, "length_padded", "length_padded"]


def test_a_dimension_that_has_the_name_already() -> None:
    proto = model(mask=("length_padded", 1, "length", "length"))
    feed = feeds(2, 5)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    dims = {
        dim.dim_param
        for info in proto.graph.value_info
        if info.name == "mask_padded"
        for dim in info.type.tensor_type.shape.dim[2:]
    }
    assert dims == {"length_1_padded"}
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


def test_twice_is_once() -> None:
    proto = model()
    assert padded_tokens.pad(proto) == 2
    once = proto.SerializeToString(deterministic=True)
    assert padded_tokens.pad(proto) == 0
    assert proto.SerializeToString(deterministic=True) == once
    assert aligned_keys.pad(proto) == 0


def test_the_packed_form() -> None:
    """For which the CPU has no kernel: the operands' shape, and what was padded."""
    proto = model(form="packed")
    assert padded_tokens.pad(proto) == 2
    onnx.checker.check_model(proto)
    operand = node_of(proto, "l0_a").input[0]
    shape = value(
        proto, operand, {"ids": feeds(2, 21)["ids"]} | {"mask": feeds(2, 21)["mask"]}
    ).shape
    assert shape == (2, 32, HEADS, 3, COLUMNS // HEADS)


def _tell_the_length(proto: onnx.ModelProto) -> None:
    sizes = next(t for t in proto.graph.initializer if t.name == "l1_apart")
    shape = np.array([0, 7, HEADS, 3, COLUMNS // HEADS], np.int64)
    sizes.CopyFrom(numpy_helper.from_array(shape, "l1_apart"))


def _take_zeros_for_sizes(proto: onnx.ModelProto) -> None:
    node_of(proto, "l1_packed").attribute.append(helper.make_attribute("allowzero", 1))


def _read_packed_operands(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(helper.make_node("Relu", ["l1_packed"], ["positive"]))


@pytest.mark.parametrize("change", [_tell_the_length, _take_zeros_for_sizes, _read_packed_operands])
def test_other_packed_operands_end_the_encoder(
    change: Callable[[onnx.ModelProto], None],
) -> None:
    proto = model(form="packed")
    change(proto)
    assert padded_tokens.pad(proto) == 1
    assert node_of(proto, "l1_a").input[5] == "mask"


def test_keys_of_rank_4_stay() -> None:
    """Attention takes them for [batch, heads, tokens, columns], which fits as many tokens."""
    proto = model(layers=2, form="three")
    split = np.array([0, 0, HEADS, COLUMNS // HEADS], np.int64)
    proto.graph.initializer.append(numpy_helper.from_array(split, "split"))
    place = list(proto.graph.node).index(node_of(proto, "l1_a"))
    for index, name in {1: "l1_k", 2: "l1_v"}.items():
        node_of(proto, "l1_a").input[index] = f"{name}_apart"
        apart = helper.make_node("Reshape", [name, "split"], [f"{name}_apart"])
        proto.graph.node.insert(place, apart)
    feed = feeds(2, HEADS)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 1
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


def test_one_mask_for_the_whole_batch() -> None:
    proto = model(mask=(1, 1, "length", "length"))
    feed = feeds(3, 19)
    feed["mask"] = feed["mask"][:1]
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": None},
        {"mask": ("batch", 1, "length", "total")},
        {"mask": ("batch", 1, 1, "length")},
        {"mask": ("batch", 1, "other", "other")},
        {"mask": ("batch", 1, 16, 16)},
        {"mask": ("batch", 1, "?", "?")},
        {"unidirectional": 1},
        {"opset": 14},
    ],
    ids=str,
)
def test_what_stays(options: dict[str, object]) -> None:
    proto = model(**options)
    before = proto.SerializeToString(deterministic=True)
    assert padded_tokens.pad(proto) == 0
    assert proto.SerializeToString(deterministic=True) == before


def test_attention_without_the_mask_ends_the_encoder() -> None:
    """It would see the tokens that were added."""
    proto = model(layers=3)
    second = node_of(proto, "l1_a")
    del second.input[3:]
    feed = feeds(2, 13)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    assert value(proto, node_of(proto, "l1_a").input[1], feed).shape[1] == 13
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


def test_a_mean_over_tokens_sees_those_that_were_there() -> None:
    proto = model(hidden=True)
    mean = helper.make_node("ReduceMean", ["l0_end"], ["mean"], axes=[1])
    proto.opset_import[0].version = 17  # the last one whose axes are an attribute
    proto.graph.node.append(mean)
    proto.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, None))
    feed = feeds(2, 7)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    np.testing.assert_allclose(run(proto, feed)[-1], want[-1], rtol=1e-4, atol=1e-5)


def test_a_sum_along_tokens_is_not_of_each_alone() -> None:
    """Constants with more than one row are not the same for all tokens."""
    proto = model(layers=2)
    proto.graph.initializer.append(
        numpy_helper.from_array(np.ones((11, COLUMNS), np.float32), "positions")
    )
    product = node_of(proto, "l1_qkv_xw")
    product.input[0] = "placed"
    place = list(proto.graph.node).index(product)
    proto.graph.node.insert(place, helper.make_node("Add", ["l0_end", "positions"], ["placed"]))
    proto.graph.value_info.append(
        helper.make_tensor_value_info("placed", TensorProto.FLOAT, ["batch", "length", COLUMNS])
    )
    feed = feeds(2, 11)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    assert node_of(proto, "placed").input[0] == "l0_end"
    assert value(proto, "placed", feed).shape[1] == 11
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


def _read_padding(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input[4] = "words_of_each"


def _read_cache(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input.extend(["past_key", "past_value"])


def _give_cache(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.output.extend([f"{node.name}_key", f"{node.name}_value"])


def _read_bias(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    node.input[3] = "bias"  # which could have a row for each token for all that the model says


def _take_other_types(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BFLOAT16


def _embed_other_types(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    for info in proto.graph.value_info:
        if info.name.startswith("embed"):
            info.type.tensor_type.elem_type = TensorProto.BFLOAT16


@pytest.mark.parametrize(
    "change",
    [_read_padding, _read_cache, _give_cache, _read_bias, _take_other_types, _embed_other_types],
)
def test_attention_that_stays(
    change: Callable[[onnx.ModelProto, onnx.NodeProto], None],
) -> None:
    proto = model(layers=1)
    change(proto, node_of(proto, "l0_a"))
    before = proto.SerializeToString(deterministic=True)
    assert padded_tokens.pad(proto) == 0
    assert proto.SerializeToString(deterministic=True) == before


def test_the_new_dimension_has_an_identifier_for_its_name() -> None:
    proto = model(layers=1, mask=("batch", 1, "to be seen", "to be seen"))
    for info in proto.graph.value_info:
        for dim in info.type.tensor_type.shape.dim:
            dim.dim_param = dim.dim_param.replace("length", "to be seen")
    assert padded_tokens.pad(proto) == 1
    info = next(info for info in proto.graph.value_info if info.name == "mask_padded")
    assert info.type.tensor_type.shape.dim[3].dim_param == "to_be_seen_padded"


def test_the_recorded_shape_of_packed_operands() -> None:
    proto = model(form="packed")
    shape = ["batch", "length", HEADS, 3, COLUMNS // HEADS]
    info = helper.make_tensor_value_info("l0_packed", TensorProto.FLOAT, shape)
    proto.graph.value_info.append(info)
    assert padded_tokens.pad(proto) == 2
    recorded = next(info for info in proto.graph.value_info if info.name == "l0_packed")
    dims = recorded.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == [
        "batch", "length_padded", HEADS, 3, COLUMNS // HEADS
    ]  # fmt: skip


def test_a_size_of_which_no_name_is_recorded() -> None:
    proto = model(mask=(None, 1, "length", "length"))
    assert padded_tokens.pad(proto) == 2
    info = next(info for info in proto.graph.value_info if info.name == "mask_padded")
    assert info.type.tensor_type.shape.dim[0].WhichOneof("value") is None


@pytest.mark.parametrize("shape", [(), ("batch",), ("batch", COLUMNS), ("batch", "length", 1, 8)])
@pytest.mark.parametrize("name", ["l0_out", "l0_middle", "l1_middle"])
def test_a_recorded_shape_of_another_rank(name: str, shape: Shape) -> None:
    """ONNX Runtime takes such a model, as it goes by what it finds itself."""
    proto = model()
    for info in [info for info in proto.graph.value_info if info.name == name]:
        proto.graph.value_info.remove(info)
    wrong = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    proto.graph.value_info.append(wrong)
    feed = feeds(2, 5)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    assert wrong in proto.graph.value_info
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)


def test_a_weight_that_the_caller_may_give() -> None:
    """An initializer that is an input, too."""
    proto = model(layers=2)
    tensor = next(t for t in proto.graph.initializer if t.name == "l1_qkv_w")
    info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    proto.graph.input.append(info)
    feed = feeds(2, 5) | {tensor.name: np.ones(tensor.dims, np.float32)}
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 1
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)
