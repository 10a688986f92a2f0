"""Constants in files beside the model: read where a rule needs them, as if they were inside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, random

from moonpoly_ort.rewriting import RewriteResult, rewrite

GRAPH = """g (float[n, 4, h, w] x, float[p, s, 6] a) => (y, z) {
    t = Conv (x, k)  u = Add (t, c)  v = BatchNormalization (u, g0, g1, g2, g3)  y = Relu (v)
    rows = Reshape (a, flat)  m = Gemm (rows, f, d)  o = MatMul (a, f)  q = Add (o, e)
    l = Mul (q, alpha)  i = Sigmoid (l)  z = Mul (q, i) }"""


def model() -> onnx.ModelProto:
    result = parse(GRAPH)
    result.graph.node.append(onnx.helper.make_node("Reshape", ["m", "unflat"], ["w"]))
    result.graph.output.append(onnx.helper.make_tensor_value_info("w", 1, None))
    values = {name: random(5, seed=i) ** 2 for i, name in enumerate(("g0", "g1", "g2", "g3"))}
    values |= {
        "k": random(5, 4, 1, 1), "c": random(5, 1, 1), "f": random(6, 40), "d": random(40),
        "e": random(1, 40), "alpha": np.array(1.7, np.float32),
        "flat": np.array([-1, 6]), "unflat": np.array([0, 40]),
    }  # fmt: skip
    for name, value in values.items():
        result.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return result


def saved(folder: Path, **options: object) -> Path:
    path = folder / "model.onnx"
    onnx.save(
        model(), path, save_as_external_data=True, location="w.bin", size_threshold=0, **options
    )
    return path


def left(result: RewriteResult) -> set[str]:
    return {str(entry.reason) for entry in result.report if not entry.taken}


@pytest.mark.parametrize("in_nodes", [False, True])
def test_a_model_fuses_the_same_wherever_its_weights_are(tmp_path: Path, in_nodes: bool) -> None:
    inside = model()
    if in_nodes:
        for tensor in reversed(inside.graph.initializer):
            constant = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
            inside.graph.node.insert(0, constant)
        del inside.graph.initializer[:]
    wanted = rewrite(inside)
    path = tmp_path / "model.onnx"
    onnx.save(  # which takes the payloads out of the model
        inside, path, save_as_external_data=True, location="w.bin", size_threshold=0,
        convert_attribute=True,
    )  # fmt: skip
    got = rewrite(path)
    assert "ai.moonpoly.ConvRelu" in op_types(wanted.model)
    assert "ai.moonpoly.MatMulBiasQuickGelu" in op_types(wanted.model)
    assert op_types(got.model) == op_types(wanted.model)
    assert got.report == wanted.report
    merged = got.model
    onnx.external_data_helper.load_external_data_for_model(merged, str(tmp_path))
    values = [
        {t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer}
        for m in (wanted.model, merged)
    ]
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        np.testing.assert_array_equal(values[1][name], value, strict=True)


def test_bytes_and_models_say_where_their_data_is(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    result = rewrite(data)
    assert left(result) >= {"data-unreadable"}
    assert any("pass base_dir" in entry.detail for entry in result.report)
    assert op_types(rewrite(data, base_dir=tmp_path).model) == op_types(rewrite(model()).model)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "cannot be read: No such file"),
        (lambda file: file.write_bytes(b"short"), "truncated"),
    ],
)
def test_missing_data_is_a_near_miss(tmp_path: Path, damage: object, said: str) -> None:
    path = saved(tmp_path)
    damage(tmp_path / "w.bin")  # type: ignore[operator]
    result = rewrite(path)
    missed = [entry for entry in result.report if str(entry.reason) == "data-unreadable"]
    assert {entry.op_type for entry in missed} >= {"Add"}
    assert all("'w.bin'" in entry.detail and said in entry.detail for entry in missed)
    assert "BatchNormalization" in op_types(result.model)
    assert {"conv", "matmul"} <= {entry.rule for entry in result.taken}


def test_no_file_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    path = saved(inside)
    (inside / "w.bin").rename(tmp_path / "w.bin")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../w.bin"
    result = rewrite(proto, base_dir=inside)
    assert "data-unreadable" in left(result)
    assert "BatchNormalization" in op_types(result.model)
