"""Runs a model over a folder of .npz files of any shapes and writes one .npz of outputs for each.

python examples/batch_inference.py model.onnx inputs/ outputs/ [--cuda-graphs 8]
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
import onnxruntime

import moonpoly_ort


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "inputs", type=Path, help="folder of .npz files, arrays named as the model's inputs"
    )
    parser.add_argument("outputs", type=Path, help="folder for the results, made if missing")
    parser.add_argument(
        "--cuda-graphs", type=int, default=0, metavar="N",
        help="keep N shapes that come again as CUDA graphs (see docs/cuda_graphs.md)",
    )  # fmt: skip
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")

    # One session for all shapes: a shape not seen before costs a plan, microseconds.
    available = onnxruntime.get_available_providers()
    wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = moonpoly_ort.InferenceSession(
        arguments.model,
        providers=[name for name in wanted if name in available],
        cuda_graphs=arguments.cuda_graphs,
    )
    names = [output.name for output in session.get_outputs()]
    arguments.outputs.mkdir(parents=True, exist_ok=True)
    for path in sorted(arguments.inputs.glob("*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            feed = {name: archive[name] for name in archive.files}
        results = session.run(names, feed)
        np.savez(arguments.outputs / path.name, **dict(zip(names, results, strict=True)))
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feed.items())
        print(f"{path.name}: {shapes}")


if __name__ == "__main__":
    main()
