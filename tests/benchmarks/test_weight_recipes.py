"""Weights that travel as a recipe: the same in every type and on every machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import weight_recipes


def save_model(path: Path, dtype: type, **weights: np.ndarray) -> None:
    """x W + b, and more initializers that nothing reads."""
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "p", doc_string="at line 3 of a long file"),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", code, ["n", 64])],
        [helper.make_tensor_value_info("y", code, ["n", 32])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


def weights(dtype: type) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(0.25, 0.02, (64, 32)).astype(dtype),
        "b": rng.normal(1, 1, 32).astype(dtype),  # small: it travels in the model
        "indices": np.arange(4096),
    }


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = {}
    recipe: weight_recipes.Recipe = []
    for name, dtype in (("f32", np.float32), ("f16", np.float16)):
        made[name] = tmp_path / name
        made[name].mkdir()
        save_model(tmp_path / "m.onnx", dtype, **weights(dtype))
        recipe = weight_recipes.strip(tmp_path / "m.onnx", made[name], like=recipe)
        weight_recipes.save(recipe, made[name] / "recipe.json")
    return made


def loaded(folder: Path) -> dict[str, np.ndarray]:
    weight_recipes.fill(weight_recipes.load(folder / "recipe.json"), folder)
    model = onnx.load(folder / "m.onnx")
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def test_weights_have_their_mean_and_deviation(folders: dict[str, Path]) -> None:
    found, sent = loaded(folders["f32"]), weights(np.float32)
    assert found["w"].mean() == pytest.approx(0.25, abs=2e-3)
    assert found["w"].std() == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(found["w"], sent["w"])
    for name in ("b", "indices"):
        np.testing.assert_array_equal(found[name], sent[name])
    ort.InferenceSession(folders["f32"] / "m.onnx", providers=["CPUExecutionProvider"])


def test_types_differ_by_rounding_alone(folders: dict[str, Path]) -> None:
    exact, half = loaded(folders["f32"])["w"], loaded(folders["f16"])["w"]
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, exact.astype(np.float16))


def test_what_travels_is_small(folders: dict[str, Path]) -> None:
    text = (folders["f32"] / "m.onnx").read_bytes()
    assert b"long file" not in text
    (line,) = weight_recipes.load(folders["f32"] / "recipe.json")
    assert (line["name"], line["dims"], line["bytes"]) == ("w", [64, 32], 8192)


def test_a_form_shares_the_weights_and_keeps_its_own_small_ones(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["f32"]
    found = loaded(folder)
    recipe = weight_recipes.load(folder / "recipe.json")
    packed = np.concatenate([found["b"]] * 3)
    form = tmp_path / "form.onnx"
    save_model(form, np.float32, **found, packed=packed)
    weight_recipes.adopt(form, folder, recipe)
    adopted = onnx.load(folder / "form.onnx", load_external_data=False).graph.initializer
    places = {tensor.name: tensor.data_location for tensor in adopted}
    assert places.pop("w") == TensorProto.EXTERNAL
    assert set(places.values()) == {TensorProto.DEFAULT}
    x = np.ones((2, 64), np.float32)
    results = [
        ort.InferenceSession(folder / name, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for name in ("m.onnx", "form.onnx")
    ]
    np.testing.assert_array_equal(*results)


def test_a_form_with_large_weights_of_its_own_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    found = loaded(folders["f32"])
    form = tmp_path / "form.onnx"
    save_model(form, np.float32, **found, packed=np.ones((512, 256), np.float32))
    recipe = weight_recipes.load(folders["f32"] / "recipe.json")
    with pytest.raises(ValueError, match="weight of its own, 'packed', 524288 bytes"):
        weight_recipes.adopt(form, folders["f32"], recipe)


def test_another_shape_in_another_type_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "m.onnx", np.float32, **weights(np.float32))
    (tmp_path / "out").mkdir()
    recipe = weight_recipes.strip(tmp_path / "m.onnx", tmp_path / "out")
    recipe[0]["dims"] = [32, 64]
    with pytest.raises(ValueError, match="another shape"):
        weight_recipes.strip(tmp_path / "m.onnx", tmp_path / "out", like=recipe)
