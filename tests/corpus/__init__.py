"""Models to test against: hand-written cases, ONNX's node tests, published models, fresh exports.

Nothing here imports pytest or this project's packages, so that tests, benchmarks and the checks on
a GPU machine share one corpus and one set of comparison rules.
"""
