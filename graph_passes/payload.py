"""Walking and copying ONNX messages with an eye on their tensors, which may be gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

_MAY_HOLD_TENSORS = frozenset(
    [
        "ModelProto",
        "GraphProto",
        "NodeProto",
        "AttributeProto",
        "FunctionProto",
        "SparseTensorProto",
        "TensorProto",
        "TrainingInfoProto",
    ]
)


class UnreadableError(Exception):
    """The payload of a tensor is in another file, which cannot be read; says which and why."""


TensorCopier = Callable[[onnx.TensorProto, onnx.TensorProto], None]


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the payload of a tensor is in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, in subgraphs and functions too."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.name in _MAY_HOLD_TENSORS:
            for item in [value] if isinstance(value, Message) else value:
                yield from tensors(item)


def copy_message(source: Message, target: Message, copy_tensor: TensorCopier) -> None:
    """Copies an ONNX message of any kind into an empty one; tensors are left to `copy_tensor`."""
    if isinstance(source, onnx.NodeProto) and not any(map(_holds_tensors, source.attribute)):
        target.CopyFrom(source)
        return
    for field, value in source.ListFields():
        kind = field.message_type
        if kind is None or kind.name not in _MAY_HOLD_TENSORS:
            _copy_field(target, field.name, value)
            continue
        copied: list[tuple[Any, Any]]
        if isinstance(value, Message):
            copied = [(value, getattr(target, field.name))]
            copied[0][1].SetInParent()
        else:
            copied = [(item, getattr(target, field.name).add()) for item in value]
        for item, copy in copied:
            if isinstance(item, onnx.TensorProto):
                copy_tensor(item, copy)
            else:
                copy_message(item, copy, copy_tensor)


def _copy_field(target: Message, name: str, value: Any) -> None:
    if isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    elif isinstance(value, int | float | str | bytes):
        setattr(target, name, value)
    else:
        getattr(target, name).extend(value)


def _holds_tensors(attribute: onnx.AttributeProto) -> bool:
    return bool(
        attribute.HasField("t") or attribute.HasField("g") or attribute.tensors or attribute.graphs
    )
