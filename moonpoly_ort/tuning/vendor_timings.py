"""From timings of cuBLASLt in a journal to its models in a table."""

from __future__ import annotations

from .. import native, tables
from . import vendor_model
from .candidates import VENDOR_NAME
from .fitting import Planner
from .journal import Record
from .shapes import NUMBERS, Shape


def vendor_costs(
    planner: Planner, table: tables.Table, record: Record
) -> tuple[tables.VendorCost, ...]:
    """The models for `Table.vendor`; empty where cuBLASLt was not timed. `table` plans without it:
    what its plans promise and take is a part of the comparison.
    """
    timings = []
    one = native.PlanFlag.NO_REGIONS | native.PlanFlag.NO_VENDOR  # as all that was timed
    with planner.with_table(table) as pack:
        for shape, times in record.timings.items():
            us = {(timed.name, timed.split): timed.us for timed in times}
            own = us.get((VENDOR_NAME, 1))
            if own is None or not isinstance(shape, Shape):
                continue
            plan = pack.plan(planner.device, shape.problem(), flags=one)
            region = plan.regions[0]
            taken = us.get((planner.names[region.kernel], region.split))
            known = taken is not None
            dtype, precision = NUMBERS[shape.number]
            timings.append(
                vendor_model.Timing(
                    dtype.name.lower(), precision.name.lower(), shape.layout,
                    shape.m, shape.n, shape.k, own, shape.batch,
                    promised_us=plan.predicted_us if known else None,
                    taken_us=taken if known else None,
                )
            )  # fmt: skip
    return vendor_model.fit(timings, planner.device.sm_count)
