"""Random chains of nodes behind a product: one rewrite finds all that there is to find."""

from __future__ import annotations

import numpy as np
import onnx
from equivalence import op_types, parse, random, run
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import rewrite

CONSTANTS = {
    "k": random(4, 4, 1, 1), "w": random(4, 4), "channel": random(4, 1, 1), "vector": random(4),
    "number": np.array(0.5, np.float32), "b": random(4), "s": random(4) ** 2 + 0.1, "o": random(4),
    "m": random(4), "v": random(4) ** 2 + 0.5, "g": random(4, 4),
    "hw": random(4, 4, dtype=np.float16),
}  # fmt: skip
STEPS = {
    "bias": "{1} = Add ({0}, {vector})", "number": "{1} = Add ({0}, number)",
    "scale": "{1} = Mul (number, {0})", "divide": "{1} = Div ({0}, number)",
    "normalize": "{1} = BatchNormalization ({0}, s, o, m, v)", "relu": "{1} = Relu ({0})",
    "silu": "{1}s = Sigmoid ({0})  {1} = Mul ({0}, {1}s)", "residual": "{1} = Add ({0}, x)",
    "gate": "{1} = Mul (x, {0})", "again": "{1} = {product}",
    "branch": "{1}n = Neg ({0})  {1} = Add ({0}, {1}n)",
    "gated": "{1}g = MatMul ({0}, g)  {1}u = MatMul ({0}, w)  {1} = Mul ({1}g, {1}u)",
    "half": "{1}a = Cast <to = 10> ({0})  {1}p = MatMul ({1}a, hw)  {1} = Cast <to = 1> ({1}p)",
}  # fmt: skip


@given(st.booleans(), st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7))
@settings(max_examples=120, deadline=None)
def test_random_chains(image: bool, chain: list[str]) -> None:
    inputs = "float[n, 4, h, w] x" if image else "float[n, h, 4] x"
    product = "Conv ({0}, k)" if image else "MatMul ({0}, w)"
    vector = "channel" if image else "vector"
    nodes = [f"v0 = {product.format('x')}"]
    for index, step in enumerate(chain):
        if step in ("gated", "half") if image else step == "normalize":
            step = "bias"
        text = STEPS[step].replace("{product}", product)
        nodes.append(text.format(f"v{index}", f"v{index + 1}", vector=vector))
    model = parse(f"g ({inputs}) => (y) {{ {'  '.join(nodes)}  y = Identity (v{len(chain)}) }}")
    read = {name for node in model.graph.node for name in node.input}
    for name, value in CONSTANTS.items():
        if name in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    first = rewrite(model)
    again = rewrite(first.model)
    assert not again.taken, op_types(first.model)
    assert again.model == first.model
    outputs = {output for node in first.model.graph.node for output in node.output}
    absorbed = [entry for entry in first.taken if entry.into]
    assert outputs >= {entry.into for entry in absorbed}
    assert outputs.isdisjoint(entry.output for entry in absorbed if entry.output != entry.into)
    feeds = {"x": random(2, 4, 3, 5) if image else random(2, 3, 4)}
    (wanted,), (got,) = run(model, feeds), run(first.model, feeds)
    tolerance = 1e-2 if "half" in chain else 2e-4
    np.testing.assert_allclose(got, wanted, atol=tolerance * max(1, np.abs(wanted).max()))
