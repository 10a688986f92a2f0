"""BERT-base with random weights, exported on the spot with batch and length dynamic.

python -m benchmarks.bert FOLDER        # writes f32.onnx and f16.onnx, then the file `done`
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

MATMULS, GEMMS = 96, 1  # what the export of BERT-base holds


def export(folder: Path, layers: int = 12) -> None:
    """Writes the fp32 model and the one with the same weights rounded to fp16, opset 18."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers)).train(False)
    example = (torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shape = {0: batch, 1: length}
    folder.mkdir(parents=True, exist_ok=True)
    for name, dtype in (("f32", torch.float32), ("f16", torch.float16)):
        program = torch.onnx.export(
            model.to(dtype), example, dynamo=True, opset_version=18, verbose=False,
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state", "pooler_output"],
            dynamic_shapes={"input_ids": shape, "attention_mask": shape},
        )  # fmt: skip
        if program is None:
            raise RuntimeError("torch.onnx.export returned no program")
        program.save(str(folder / f"{name}.onnx"), external_data=False)


def wait(folder: Path, deadline: float) -> int:
    """Waits for an export that another process makes; returns how many layers it has.

    Raises RuntimeError if the export failed, TimeoutError at `deadline` (of `time.monotonic`).
    """
    while not (folder / "done").exists():
        if (folder / "failed").exists():
            raise RuntimeError(f"the export failed: {(folder / 'failed').read_text()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no finished export in {folder}")
        time.sleep(0.2)
    return int((folder / "done").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick rehearsal")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the export is CPU work; leave the GPU to the checks
    try:
        export(folder, arguments.layers)
    except Exception as error:
        traceback.print_exc()
        (folder / "failed").write_text(f"{type(error).__name__}: {error}")
        return 1
    (folder / "done").write_text(str(arguments.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
