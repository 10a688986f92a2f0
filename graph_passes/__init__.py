"""Rewrites of ONNX graphs: which nodes become `ai.moonpoly` nodes, and why the others do not.

`pipeline.py` holds the ordered list of rules and runs them; each rule is a file of its own. Nothing
here knows of GPUs, sessions or the file system.
"""
