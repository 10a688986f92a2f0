"""A pack of some kernels alone, for trials: it takes seconds where all of them take minutes.

    python -m benchmarks.build_part gemm_shallow gemv --output part.mpk [--arch 90]

Kernels whose names begin with one of the words are compiled. The pack is used where it is named
(`--pack`), and never taken for the current one: its key is not that of the sources.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moonpoly_ort.custom_ops.kernels.compiling import compile_specs, triton_version
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.pack_format import write_pack
from moonpoly_ort.custom_ops.kernels.spec import SHARED_LIMIT, name

PART_KEY = "0" * 64


def build(beginnings: list[str], output: Path, sm: int = 90) -> int:
    """Writes the pack; the number of kernels. Raises SystemExit where no kernel is meant."""
    wanted = [spec for spec in specs(sm) if name(spec).startswith(tuple(beginnings))]
    if not wanted:
        raise SystemExit(f"no kernel of sm_{sm} begins with {' or '.join(beginnings)}")
    write_pack(output, sm, compile_specs(wanted, sm), [], key=PART_KEY, triton=triton_version())
    return len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("beginnings", nargs="+", help="how the names of the kernels begin")
    parser.add_argument("--output", type=Path, required=True, help="the pack to write")
    parser.add_argument("--arch", type=int, default=90, choices=SHARED_LIMIT, help="90 for sm_90")
    arguments = parser.parse_args()
    count = build(arguments.beginnings, arguments.output, arguments.arch)
    print(f"{arguments.output}: {count} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
