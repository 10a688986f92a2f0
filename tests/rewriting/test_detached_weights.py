"""Weights that bypass protobuf: every result must be that of the way through protobuf."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence import parse, random
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import detached_weights, skeleton
from moonpoly_ort.graph_passes.detached_weights import attach, detach

from moonpoly_ort import InferenceSession, model_files
from moonpoly_ort.errors import ModelError
from moonpoly_ort.rewriting import rewrite

Tensor = onnx.TensorProto
SMALL = 64
UNKNOWN = [
    b"\xe0\x3e\x05",  # field 1004, varint
    b"\xe2\x3e\x03abc",
    b"\xe5\x3e\x00\x01\x02\x03",
    b"\xe3\x3e\xe0\x3e\x05\xe4\x3e",  # a group
]
GRAPH = "g (float[n, 4] a) => (float[n, 4] y) { y = MatMul (a, w) }"


@pytest.fixture(autouse=True, scope="module")
def small_weights_are_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detached_weights, "LARGE", SMALL)
        patch.setattr(skeleton, "KEPT_ELEMENTS", SMALL // 16)
        yield


@st.composite
def tensors(draw: st.DrawFn, name: str) -> onnx.TensorProto:
    count = draw(st.sampled_from([0, 3, 4, 5, 16, 40]))
    kind = draw(st.sampled_from(["raw", "float", "double", "int32", "string", "external", "both"]))
    tensor = onnx.TensorProto(name=name, dims=[count], data_type=Tensor.FLOAT)
    if kind in ("raw", "both"):
        tensor.raw_data = draw(st.binary(min_size=4 * count, max_size=4 * count))
    if kind in ("float", "both"):
        tensor.float_data.extend(range(count))
    if kind == "double":
        tensor.data_type = Tensor.DOUBLE
        tensor.double_data.extend(range(count))
    if kind == "int32":
        tensor.data_type = Tensor.INT32
        tensor.int32_data.extend(range(count))
    if kind == "string":
        tensor.data_type = Tensor.STRING
        tensor.string_data.extend([b"\xff text"] * count)
    if kind == "external":
        tensor.data_location = Tensor.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    if draw(st.booleans()):
        tensor.doc_string = "of" * draw(st.integers(0, 80))
        tensor.metadata_props.add(key="k", value="v")
    return tensor


def with_unknown(draw: st.DrawFn, message: Any) -> None:
    """Adds a field that this version of ONNX does not know."""
    for field in draw(st.lists(st.sampled_from(UNKNOWN[:3]), max_size=1)):
        message.MergeFromString(field)


@st.composite
def models(draw: st.DrawFn) -> bytes:
    """Serialized models with weights in all places, in one or several pieces."""
    model = parse(GRAPH.replace("y = ", "u = Relu (a)  y = "))
    weight = onnx.numpy_helper.from_array(random(4, 4), "w")
    initializers = [weight, *[draw(tensors(f"t{i}")) for i in range(draw(st.integers(0, 5)))]]
    for tensor in initializers:
        with_unknown(draw, tensor)
    model.graph.initializer.extend(draw(st.permutations(initializers)))
    if draw(st.booleans()):
        model.graph.node.append(
            onnx.helper.make_node("Constant", [], ["c"], value=draw(tensors("c")))
        )
    if draw(st.booleans()):
        branch = onnx.GraphProto(name="b", initializer=[draw(tensors("in_branch"))])
        branch.output.add(name="in_branch")
        branches = {"then_branch": branch, "else_branch": branch}
        model.graph.node.append(onnx.helper.make_node("If", ["condition"], ["i"], **branches))
        model.graph.input.append(onnx.helper.make_tensor_value_info("condition", Tensor.BOOL, []))
    if draw(st.booleans()):
        model.graph.sparse_initializer.append(
            onnx.helper.make_sparse_tensor(
                onnx.numpy_helper.from_array(random(30), "s"),
                onnx.numpy_helper.from_array(np.arange(30)),
                [64],
            )
        )
    if draw(st.booleans()):
        constant = onnx.helper.make_node("Constant", [], ["Y"], value=draw(tensors("f")))
        imports = [onnx.helper.make_opsetid("", 17)]
        model.functions.append(onnx.helper.make_function("my", "F", [], ["Y"], [constant], imports))
    with_unknown(draw, model.graph)
    with_unknown(draw, model)
    data = model.SerializeToString()
    if draw(st.booleans()):  # protobuf merges the pieces of a graph
        more = onnx.ModelProto()
        more.graph.initializer.extend([draw(tensors("p")), draw(tensors("q"))])
        data += more.SerializeToString()
    if draw(st.booleans()):
        data += draw(st.sampled_from(UNKNOWN))
    return data


def large_weights(data: bytes) -> int:
    """How many initializers hold one long payload of fixed-size elements."""
    count = 0
    for tensor in onnx.ModelProto.FromString(data).graph.initializer:
        sizes = (len(tensor.raw_data), 4 * len(tensor.float_data), 8 * len(tensor.double_data))
        count += sum(map(bool, sizes)) == 1 and max(sizes) >= SMALL
    return count


@given(models())
@settings(max_examples=300, deadline=None)
def test_a_detached_and_attached_model_is_what_protobuf_makes_of_it(data: bytes) -> None:
    found = detach(memoryview(data))
    if found is None:
        assert not large_weights(data) or UNKNOWN[3] in data
        return
    light, weights = found
    assert len(weights) == large_weights(data)
    assert len(light) < len(data) - SMALL * len(weights)
    serialized = onnx.ModelProto.FromString(light).SerializeToString()
    whole = b"".join(attach(memoryview(serialized), weights))
    assert whole == onnx.ModelProto.FromString(data).SerializeToString()


def plainly(data: bytes) -> bytes | str:
    """The outcome if nothing gets detached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "detach", lambda _: None)
        return outcome(data)


def outcome(data: bytes) -> bytes | str:
    """The model that is read, or the error."""
    try:
        return model_files.read(data).model.SerializeToString()
    except ModelError as error:
        return str(error)


@given(models(), st.data())
@settings(max_examples=500, deadline=None)
def test_malformed_models(data: bytes, choices: st.DataObject) -> None:
    """Bytes changed, cut out or inserted anywhere: the same model, or the same error."""
    position = choices.draw(st.integers(0, len(data) - 1))
    end = choices.draw(st.integers(position, min(position + 3, len(data))))
    broken = data[:position] + choices.draw(st.binary(max_size=3)) + data[end:]
    assert outcome(broken) == plainly(broken)
    assert outcome(data[:position]) == plainly(data[:position])


@given(data=models())
@settings(max_examples=60, deadline=None)
def test_rewrite_equals_that_of_a_model_proto(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rewrite")
    (folder / "w.bin").touch()
    (folder / "model.onnx").write_bytes(data)
    plain = rewrite(onnx.ModelProto.FromString(data), folder / "plain.onnx", base_dir=folder)
    for number, given_ in enumerate((data, folder / "model.onnx")):
        result = rewrite(given_, folder / f"{number}.onnx", base_dir=folder)
        assert result.report == plain.report
        written = (folder / f"{number}.onnx").read_bytes()
        assert written == (folder / "plain.onnx").read_bytes()
        assert result.model == plain.model
        assert result.save(folder / "again.onnx").read_bytes() == written


@pytest.mark.parametrize(
    "tensor",
    [
        b"\x4a\xc8\x01" + bytes(200) + b"\x4a\xc8\x01" + b"\1" * 200,  # twice: the last counts
        b"\x4a\xc8\x81\x00" + bytes(200),  # a length in one byte too many
        b"\xca\x00\xc8\x01" + bytes(200),  # a tag in one byte too many
        b"\x22\x64" + bytes(100) + b"\x22\x64" + b"\1" * 100,  # two packed parts
        b"\x22\x65" + bytes(101),  # no whole number of floats: malformed
        b"\x4a\xc8\x01" + bytes(199),  # too short: malformed
        b"\x08\x32" * 300 + b"\x4a\xc8\x01" + bytes(200),  # more fields than are looked at
        b"\x4a\xc8\x01" + bytes(200) + b"\x4d\x00\x00\x00\x00",  # of another wire type, too
        b"\x4a\xc8\x01" + bytes(200) + b"\x02\x00",  # field number 0: malformed
        b"\x4a\xc8\x01" + bytes(200) + b"\x08" + b"\xff" * 10 + b"\x01",  # malformed number
        b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x4a\xc8\x01" + bytes(200),  # dims -1
    ],
)
def test_unusual_tensors(tensor: bytes) -> None:
    graph = onnx.GraphProto(name="g").SerializeToString() + field(5, tensor)
    data = b"\x08\x08" + field(7, graph)
    assert outcome(data) == plainly(data)


def field(number: int, value: bytes) -> bytes:
    return bytes(detached_weights._header(number, len(value))) + value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model of 4 MB, nearly all of it weights, of which one is an input with a default."""
    model = parse(
        """g (float[n, 1024] a, float[1024, 8] v) => (float[n, 8] y)
            { t = MatMul (a, w)  y = MatMul (t, v) }"""
    )
    for name, *shape in (("w", 1024, 1024), ("v", 1024, 8)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(random(*shape), name))
    return Path(onnx.save(model, tmp_path / "model.onnx") or tmp_path / "model.onnx")


def test_a_session_copies_the_weights_once(path: Path) -> None:
    from moonpoly_ort.session import _rewritten

    _rewritten(path, None)  # imports
    tracemalloc.start()
    data, _, report, _ = _rewritten(path, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(entry.taken for entry in report) == 2
    assert isinstance(data, bytes)
    assert len(data) < peak < 1.1 * len(data)
    assert data == rewrite(onnx.load(path)).model.SerializeToString()


def test_a_session_computes_with_them(path: Path) -> None:
    feeds = {"a": random(3, 1024)}
    plain = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for given_ in (path, path.read_bytes()):
        session = InferenceSession(given_, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, feeds)[0], plain.run(None, feeds)[0])
        assert [v.name for v in session.get_overridable_initializers()] == ["v"]
        feeds["v"] = random(1024, 8, seed=9)


def test_a_session_of_a_model_without_candidates_gets_it_as_it_is(path: Path) -> None:
    from moonpoly_ort.session import _rewritten

    rewritten = rewrite(path, path.with_name("rewritten.onnx")).output
    assert rewritten is not None
    assert _rewritten(rewritten, None)[:2] == (rewritten, None)


def test_a_file_above_the_protobuf_limit_is_written_with_external_data(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered: the path is that of a model of nearly 2 GB."""
    monkeypatch.setattr(model_files, "PROTOBUF_LIMIT", 1 << 20)
    result = rewrite(path, path.with_name("out.onnx"))
    assert path.with_name("out.onnx.data").stat().st_size >= 4 << 20
    assert onnx.load(path).graph.initializer == result.model.graph.initializer


def test_a_result_outlives_its_file(path: Path) -> None:
    original = path.read_bytes()
    results = [rewrite(path) for _ in range(2)]
    path.write_bytes(b"truncated")
    expected = rewrite(original)
    assert results[0].save(path.with_name("saved.onnx")).read_bytes() == (
        expected.model.SerializeToString()
    )
    assert results[1].model == expected.model
    assert results[1].model is results[1].model


def test_the_model_of_a_result_can_be_changed_and_saved(path: Path) -> None:
    result = rewrite(path)
    result.model.graph.initializer[0].raw_data = bytes(4 * 1024 * 1024)
    saved = onnx.load(result.save(path.with_name("saved.onnx")))
    assert saved == result.model
    assert saved.graph.initializer[0].raw_data.count(0) == 4 * 1024 * 1024


def test_a_result_can_be_copied_and_compared(path: Path) -> None:
    result = rewrite(path)
    assert pickle.loads(pickle.dumps(rewrite(path))).model == result.model
    assert copy.deepcopy(rewrite(path)).model == result.model
    source = result._source
    assert source == model_files.Source(source.model, path, path.parent)
    assert source != model_files.Source(source.model, None, None)


def test_a_file_that_cannot_be_mapped_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    expected = model_files.read(path, mapped=True).model
    monkeypatch.setattr(model_files.mmap, "mmap", refuse)
    assert model_files.read(path, mapped=True).model == expected
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="has no IR version"):
        model_files.read(path, mapped=True)
    with pytest.raises(ModelError, match="Is a directory"):
        model_files.read(path.parent, mapped=True)
