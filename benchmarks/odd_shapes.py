"""Every kernel once on odd shapes, in allocations of exactly the bytes it may touch; no torch.

    compute-sanitizer --tool memcheck --padding 256 python -m benchmarks.odd_shapes --pack sm_90.mpk

Made for a memory checker: an allocator that pools memory, as torch's does, would hide accesses
out of bounds. The check is the gate of `moonpoly tune`. Kernels come in a shuffled order, so that
a run cut short has seen all sorts. Exit codes: 0 all right, 1 a wrong result.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from moonpoly_ort import native
from moonpoly_ort.tuning.cuda import Gpu
from moonpoly_ort.tuning.product_gate import check


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    stop = time.monotonic() + arguments.seconds
    pack = native.Pack(arguments.pack)
    device = native.device_query(arguments.device)
    launcher = native.Launcher(pack, arguments.device)
    order = [i for i, k in enumerate(pack.kernels) if not native.Family(k.family).convolves]
    random.Random(0).shuffle(order)
    done, wrong = 0, []
    with Gpu(arguments.device) as gpu:
        for index in order:
            if time.monotonic() > stop:
                break
            fault = check(gpu, launcher, pack, device, index)
            done += 1
            if fault:
                wrong.append(f"{pack.kernels[index].name} ({fault})")
    print(
        f"odd shapes: {done} of {len(order)} kernels, {len(wrong)} wrong {' '.join(wrong[:20])}",
        flush=True,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
