"""Performance tables: written, read back, found, refused when malformed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import name

from moonpoly_ort import OutputError, TableError, tables

KERNELS = [name(spec) for spec in specs(90)[:2]]


def table(**changes: Any) -> tables.Table:
    base = tables.Table(
        gpu="NVIDIA H200",
        sm=90,
        sm_count=132,
        shared_per_block=232448,
        bandwidth_gbps=4300.0,
        launch_us=2.5,
        triton="3.9.0",
        cuda="13.0",
        driver="580.1",
        key="ab" * 32,
        date="2026-11-30",
        clocks="free",
        costs=tuple(tables.Cost(kernel, 3.0, 0.25, 0.2, 2.0) for kernel in sorted(KERNELS)),
    )
    return dataclasses.replace(base, **changes)


def test_round_trip_and_one_line_per_kernel(tmp_path: Path) -> None:
    path = tmp_path / table().name
    tables.dump(table(), path)
    assert path.name == "gemm__nvidia-h200.json"
    assert tables.load(path) == table()
    rows = [line for line in path.read_text().splitlines() if '"kernel"' in line]
    assert len(rows) == 2
    assert rows == sorted(rows)
    assert list(tmp_path.iterdir()) == [path]


def test_the_users_folder_comes_first_and_only_the_exact_gpu_is_found() -> None:
    shipped = tables.find("NVIDIA H200")
    assert shipped is not None
    assert shipped != table()
    tables.dump(table(), tables.user_folder() / table().name)
    assert tables.find("NVIDIA H200") == table()
    assert tables.find("NVIDIA H100 80GB HBM3") is None
    assert tables.for_architecture(90) == [table()]
    assert tables.for_architecture(89) == []


def test_a_table_of_another_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tables.dump(table(), path)
    with pytest.raises(TableError, match="measured on 'NVIDIA H200', not on 'NVIDIA L4'"):
        tables.load(path, gpu="NVIDIA L4")


def without(field: str) -> dict[str, Any]:
    data = good()
    del data[field]
    return data


def good() -> dict[str, Any]:
    data = dataclasses.asdict(table())
    return {"schema": tables.SCHEMA, **data, "costs": list(data["costs"])}


ROW = dataclasses.asdict(tables.Cost("k", 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object is expected"),
        ({**good(), "schema": 99}, "schema 99"),
        (without("gpu"), "'gpu' is missing"),
        ({**good(), "sm": "90"}, "sm = '90' is not of the right type"),
        ({**good(), "sm_count": True}, "not of the right type"),
        ({**good(), "color": "green"}, "unknown field 'color'"),
        ({**good(), "costs": []}, "one entry per kernel"),
        ({**good(), "costs": [ROW, ROW]}, "'k' is listed more than once"),
        (
            {**good(), "costs": [{**ROW, "step_us": -1.0}]},
            r"costs\[0\]: step_us = -1.0 must be finite",
        ),
        ({**good(), "costs": [{**ROW, "step_us": float("nan")}]}, "must be finite"),
        ({**good(), "costs": [3]}, "an object is expected"),
    ],
)
def test_a_malformed_table_names_the_fault(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TableError, match=message):
        tables.load(path)


def test_a_missing_table_and_an_unwritable_one(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        tables.load(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot make the folder"):
        tables.dump(table(), tmp_path / "file" / "t.json")


def test_costs_reach_the_pack_builder_in_the_order_of_the_kernels() -> None:
    tables.dump(table(), tables.user_folder() / table().name)
    (packed,) = tables.cost_tables(90)
    assert packed.gpu == "NVIDIA H200"
    assert len(packed.costs) == len(specs(90))
    assert packed.costs["fixed_us"][:2].tolist() == [3.0, 3.0]
    # The table of convolutions is the shipped one.
    products = [not spec.family.name.startswith("CONV") for spec in specs(90)][2:]
    assert not packed.costs["fixed_us"][2:][products].any()


def test_a_table_of_other_kernels_is_refused() -> None:
    other = table(costs=(tables.Cost("gemm_of_old", 1.0, 1.0, 1.0, 1.0),))
    tables.dump(other, tables.user_folder() / other.name)
    with pytest.raises(TableError, match="gemm_of_old"):
        tables.cost_tables(90)
