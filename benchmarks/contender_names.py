"""How the contenders of `bench_models` are called: SIDE, SIDE+FORM, and a setting behind a space.

SIDE is `ort`, `ours`, `torch` or `torch.compile`; FORM is a value of `optimize=`.
"""

from __future__ import annotations

OUR_PASSES = ("-lean", "-mha", "-packed")
"""What the name of a form ends with where passes of ours ran behind another optimizer."""


def side(name: str) -> str:
    """`ort`, `ours`, `torch` or `torch.compile`."""
    return name.split(" ")[0].split("+")[0]


def form(name: str) -> str:
    """The value of `optimize=`; empty: as exported."""
    return name.split(" ")[0].partition("+")[2]


def has_our_passes(of_form: str) -> bool:
    """Whether a form is partly our work: `onnxscript-packed`, `ort-lean:bert`."""
    return of_form.split(":")[0].endswith(OUR_PASSES)


def is_for_information(name: str) -> bool:
    """ONNX Runtime on a form with our passes: no optimization that it has without us."""
    return side(name) == "ort" and has_our_passes(form(name))


def with_graphs(name: str) -> bool:
    """Whether CUDA graphs of repeating sizes are captured."""
    return name.endswith("graphs")
