"""Reading and writing models: bad input, external data, more than 2 GB, nothing half-written."""

from __future__ import annotations

import os
import resource
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx.external_data_helper
import pytest
from equivalence import parse, random, run

from moonpoly_ort import model_files
from moonpoly_ort.errors import ModelError, OutputError
from moonpoly_ort.rewriting import rewrite

LINEAR = "g (float[n, 64] a) => (float[n, 64] y) { t = MatMul (a, w)  y = MatMul (t, v) }"


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model with two weights in one data file, in a folder of its own."""
    path = tmp_path / "source" / "model.onnx"
    path.parent.mkdir()
    onnx.save(linear(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def linear() -> onnx.ModelProto:
    model = parse(LINEAR)
    for seed, name in enumerate("wv"):
        weight = random(64, 64, seed=seed)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def output_of(path: Path) -> np.ndarray:
    return run(onnx.load(path), {"a": random(3, 64)})[0]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_path_to_path(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "model.onnx")
    result = rewrite(str(tmp_path / "model.onnx"), tmp_path / "new.onnx")
    assert result.output == tmp_path / "new.onnx"
    assert len(result.taken) == 2
    assert not result.has_external_data
    assert onnx.load(result.output) == result.model
    np.testing.assert_array_equal(
        output_of(tmp_path / "new.onnx"), output_of(tmp_path / "model.onnx")
    )
    assert files_in(tmp_path) == ["model.onnx", "new.onnx"]


def test_second_rewrite_of_a_file_changes_no_byte(tmp_path: Path) -> None:
    once = rewrite(linear(), tmp_path / "once.onnx").output
    twice = rewrite(once, tmp_path / "twice.onnx").output
    assert once is not None
    assert twice is not None
    assert once.read_bytes() == twice.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no IR version"),
        (b"hello, this is no model at all", "is not an ONNX model"),
        (b"\x08\x08", "has no graph"),
        (b"{}", "is not an ONNX model"),
    ],
)
def test_input_that_is_no_model(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    for model in (path, content):
        with pytest.raises(ModelError, match=message):
            rewrite(model, tmp_path / "out.onnx")
    assert files_in(tmp_path) == ["model.onnx"]


def test_truncated_model(tmp_path: Path) -> None:
    data = linear().SerializeToString()
    with pytest.raises(ModelError, match=f"{len(data) // 2} bytes"):
        rewrite(data[: len(data) // 2], tmp_path / "out.onnx")
    assert files_in(tmp_path) == []


def test_names_that_are_not_utf_8() -> None:
    data = linear().SerializeToString().replace(b"MatMul", b"MatM\xff\xfe")
    with pytest.raises(ModelError, match="utf-8"):
        rewrite(data)


def test_empty_model_proto() -> None:
    with pytest.raises(ModelError, match="has no IR version"):
        rewrite(onnx.ModelProto())


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.onnx.*No such file"):
        rewrite(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match="Is a directory"):
        rewrite(tmp_path)


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="GraphProto"):
        rewrite(linear().graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["same", "relative", "symlink", "hardlink"])
def test_output_that_is_the_input(
    external: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(external.parent)
    output = external.with_name("link.onnx")
    if way == "same":
        output = external
    elif way == "relative":
        output = Path("../source/model.onnx")
    elif way == "symlink":
        output.symlink_to(external)
    else:
        output.hardlink_to(external)
    before = external.read_bytes()
    with pytest.raises(OutputError, match="is the input itself"):
        rewrite(external, output)
    assert external.read_bytes() == before


def test_output_that_is_a_data_file(external: Path) -> None:
    with pytest.raises(OutputError, match="data file of the input"):
        rewrite(external, external.with_name("weights.bin"))


def test_output_with_the_name_of_a_data_file(external: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(OutputError, match="the name of a data file"):
        rewrite(external, tmp_path / "new" / "weights.bin")
    assert files_in(tmp_path / "new") == []


@pytest.mark.parametrize("output", ["absent/out.onnx", "folder", "model.onnx/out.onnx", "x" * 300])
def test_output_that_cannot_be_written(tmp_path: Path, output: str) -> None:
    (tmp_path / "folder").mkdir()
    onnx.save(linear(), tmp_path / "model.onnx")
    with pytest.raises(OutputError, match=output[-8:]):
        rewrite(tmp_path / "model.onnx", tmp_path / output)
    assert files_in(tmp_path) == ["model.onnx"]


def test_full_disk_leaves_nothing_behind(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on file sizes fails a write half way, as a full disk does."""
    target = tmp_path / "new"
    target.mkdir()
    (target / "out.onnx").write_bytes(b"precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            rewrite(external, target / "out.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(target) == ["out.onnx"]
    assert (target / "out.onnx").read_bytes() == b"precious"


def test_external_data_is_copied_alongside(external: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    result = rewrite(external, target / "out.onnx")
    assert result.has_external_data
    assert result.base_dir == external.parent
    assert files_in(target) == ["out.onnx", "weights.bin"]
    expected = output_of(external)
    original = onnx.load(external, load_external_data=False).graph.initializer
    assert onnx.load(target / "out.onnx", load_external_data=False).graph.initializer == original
    shutil.rmtree(external.parent)
    np.testing.assert_array_equal(output_of(target / "out.onnx"), expected)


def test_external_data_in_the_same_folder_is_shared(external: Path) -> None:
    rewrite(external, external.with_name("out.onnx"))
    assert files_in(external.parent) == ["model.onnx", "out.onnx", "weights.bin"]
    np.testing.assert_array_equal(output_of(external.with_name("out.onnx")), output_of(external))


def test_data_file_in_a_subfolder_and_in_a_constant_node(tmp_path: Path) -> None:
    model = parse("g (float[n, 64] a) => (float[n, 64] y) { y = MatMul (a, w) }")
    weight = onnx.numpy_helper.from_array(random(64, 64), "w")
    onnx.external_data_helper.set_external_data(weight, "sub/w.bin", 0, len(weight.raw_data))
    (tmp_path / "old" / "sub").mkdir(parents=True)
    (tmp_path / "old" / "sub" / "w.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weight))
    (tmp_path / "old" / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "new").mkdir()
    rewrite(tmp_path / "old" / "model.onnx", tmp_path / "new" / "model.onnx")
    assert (tmp_path / "new/sub/w.bin").read_bytes() == (tmp_path / "old/sub/w.bin").read_bytes()


def test_data_file_of_another_model_is_not_replaced(external: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    (target / "weights.bin").write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists and differs"):
        rewrite(external, target / "out.onnx")
    assert files_in(target) == ["weights.bin"]
    assert (target / "weights.bin").read_bytes() == b"precious"
    rewrite(external, target / "out.onnx", overwrite=True)
    rewrite(external, target / "out.onnx")  # now the data file has the right content
    np.testing.assert_array_equal(output_of(target / "out.onnx"), output_of(external))


def test_missing_external_data(external: Path, tmp_path: Path) -> None:
    external.with_name("weights.bin").unlink()
    assert len(rewrite(external).taken) == 2  # nothing was needed
    with pytest.raises(ModelError, match=r"weights\.bin.*No such file"):
        rewrite(external, tmp_path / "out.onnx")
    assert files_in(tmp_path) == ["model.onnx"]


def test_truncated_external_data(external: Path, tmp_path: Path) -> None:
    os.truncate(external.with_name("weights.bin"), 20_000)
    with pytest.raises(ModelError, match=r"has 20000 bytes, 32768 are needed"):
        rewrite(external, tmp_path / "out.onnx")


@pytest.mark.parametrize("location", ["/etc/passwd", "../weights.bin", "sub/../../weights.bin", ""])
def test_external_data_outside_of_the_folder(external: Path, tmp_path: Path, location: str) -> None:
    model = onnx.load(external, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    external.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="inside the model's folder"):
        rewrite(external, tmp_path / "out.onnx")


def test_model_in_memory_needs_the_folder_of_its_data(external: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    model = onnx.load(external, load_external_data=False)
    with pytest.raises(ModelError, match="Pass base_dir"):
        rewrite(model, tmp_path / "new" / "out.onnx")
    for number, given in enumerate((model, model.SerializeToString())):
        output = tmp_path / "new" / f"out{number}.onnx"
        rewrite(given, output, base_dir=external.parent)
        np.testing.assert_array_equal(output_of(output), output_of(external))


def test_external_data_of_more_than_2_gb(tmp_path: Path) -> None:
    """A sparse file stands for the weights: neither memory nor disk may fill up with them."""
    rows, columns = 600_000, 1024  # 2.46 GB
    model = parse("g (float[n, k] a) => (float[n, 1024] y) { y = MatMul (a, w) }")
    weight = model.graph.initializer.add(name="w", data_type=1, dims=[rows, columns])
    weight.data_location = onnx.TensorProto.EXTERNAL
    size = rows * columns * 4
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
        weight.external_data.add(key=key, value=value)
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    (tmp_path / "old" / "model.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "old" / "w.bin", "wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"in the middle")
    if (tmp_path / "old" / "w.bin").stat().st_blocks * 512 > 2**20:
        pytest.skip("the file system of the temporary folder has no sparse files")
    tracemalloc.start()
    result = rewrite(tmp_path / "old" / "model.onnx", tmp_path / "new" / "model.onnx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(result.taken) == 1
    assert peak < 64 << 20
    copy = tmp_path / "new" / "w.bin"
    assert copy.stat().st_size == size
    assert copy.stat().st_blocks * 512 <= 2**20
    with open(copy, "rb") as file:
        file.seek(size // 2)
        assert file.read(13) == b"in the middle"


def test_weights_in_memory_above_the_protobuf_limit_become_external(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered: the path is that of a model of more than 2 GB."""
    monkeypatch.setattr(model_files, "PROTOBUF_LIMIT", 20_000)
    model = linear()
    model.graph.initializer[0].metadata_props.add(key="origin", value="layer")
    result = rewrite(model, tmp_path / "out.onnx")
    assert files_in(tmp_path) == ["out.onnx", "out.onnx.data"]
    assert result.model.graph.initializer == model.graph.initializer
    written = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert [len(tensor.raw_data) for tensor in written.graph.initializer] == [0, 0]
    loaded = onnx.load(tmp_path / "out.onnx")
    for tensor, original in zip(loaded.graph.initializer, model.graph.initializer, strict=True):
        assert tensor.raw_data == original.raw_data
        assert tensor.metadata_props == original.metadata_props
    loaded_output = run(loaded, {"a": random(3, 64)})[0]
    np.testing.assert_array_equal(loaded_output, run(model, {"a": random(3, 64)})[0])
