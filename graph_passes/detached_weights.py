"""Large weights taken past protobuf: out of a serialized model, and into what it became.

Protobuf copies the weights several times to parse and to serialize a model, and no rule looks at
them. So `detach` walks the wire format (protobuf.dev/programming-guides/encoding) as far down as
the initializers of the main graph and cuts out the fields that hold large payloads; `attach` puts
them back where protobuf would have written them. The bytes are those of the long way.

A model that is unusual (groups, lengths in more bytes than they need, malformed in any way) is left
alone: protobuf then parses it whole, or says what is wrong with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import onnx

LARGE = 1 << 14
"""Bytes from which on a payload is detached; what shape inference reads is smaller."""

MAX_FIELDS = 256
"""Tensors of more fields (unpacked numbers, one field each) stay as they are."""

_ELEMENT_BYTES = {
    onnx.TensorProto.RAW_DATA_FIELD_NUMBER: 1,
    onnx.TensorProto.FLOAT_DATA_FIELD_NUMBER: 4,
    onnx.TensorProto.DOUBLE_DATA_FIELD_NUMBER: 8,
}
"""Fields that are detached. Any bytes are valid in them, if they make whole elements."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


class Weight(NamedTuple):
    """The payload of an initializer: its field in TensorProto, and that field's bytes."""

    number: int
    payload: memoryview

    def pieces(self) -> list[memoryview]:
        """The field as it is serialized, in pieces."""
        return [_header(self.number, len(self.payload)), self.payload]


class _Field(NamedTuple):
    """A field in a serialized message: where its tag, its value and the next field start."""

    number: int
    delimited: bool
    start: int
    body: int
    end: int


class _UnusualError(Exception):
    """The bytes are malformed, or not as protobuf writes them."""


def detach(data: memoryview) -> tuple[bytes, dict[int, Weight]] | None:
    """Cuts the large weights out of a serialized model.

    Args:
        data: A serialized ModelProto, valid or not. The weights returned are views of it.

    Returns:
        The model without these weights, valid if and only if `data` is, and the weights by their
        index among the initializers of the main graph. None if there is nothing to cut out.
    """
    weights = {}
    indices = itertools.count()

    def cut(tensor: _Field) -> list[memoryview] | None:
        index = next(indices)
        field = _payload(data, tensor)
        if field is None:
            return None
        weights[index] = Weight(field.number, data[field.body : field.end])
        return [data[tensor.body : field.start], data[field.end : tensor.end]]

    try:
        light = _edit_initializers(data, cut)
    except _UnusualError:
        return None
    return (b"".join(light), weights) if weights else None


def attach(data: memoryview, weights: Mapping[int, Weight]) -> list[memoryview]:
    """Undoes `detach`, after any change but to the initializers.

    Args:
        data: The model without its weights, serialized by protobuf.
        weights: What `detach` returned, or a part of it.

    Returns:
        The serialized model, in pieces; those of the weights are not copies.
    """
    indices = itertools.count()

    def insert(tensor: _Field) -> list[memoryview] | None:
        weight = weights.get(next(indices))
        if weight is None:
            return None
        fields = _fields(data, tensor.body, tensor.end)
        place = next((f.start for f in fields if f.number > weight.number), tensor.end)
        return [data[tensor.body : place], *weight.pieces(), data[place : tensor.end]]

    return _edit_initializers(data, insert)


_Change = Callable[[_Field], list[memoryview] | None]


def _edit_initializers(data: memoryview, change: _Change) -> list[memoryview]:
    def edit_graph(graph: _Field) -> list[memoryview]:
        return _edit(data, graph.body, graph.end, onnx.GraphProto.INITIALIZER_FIELD_NUMBER, change)

    return _edit(data, 0, len(data), onnx.ModelProto.GRAPH_FIELD_NUMBER, edit_graph)


def _edit(data: memoryview, start: int, end: int, number: int, change: _Change) -> list[memoryview]:
    """A message, in pieces, with new values for its fields `number`; for None the old one stays."""
    pieces = []
    kept = start
    for field in _fields(data, start, end):
        if field.number == number and field.delimited:
            value = change(field)
            if value is not None:
                pieces += [data[kept : field.start], _header(number, sum(map(len, value))), *value]
                kept = field.end
    return [*pieces, data[kept:end]]


def _payload(data: memoryview, tensor: _Field) -> _Field | None:
    """The one field of a tensor that is to be cut out."""
    if tensor.end - tensor.body < LARGE:
        return None
    fields = list(itertools.islice(_fields(data, tensor.body, tensor.end), MAX_FIELDS + 1))
    if len(fields) > MAX_FIELDS:
        return None
    found = [field for field in fields if field.number in _ELEMENT_BYTES]
    if len(found) != 1:  # of several, protobuf takes the last or joins them
        return None
    size = found[0].end - found[0].body
    whole = size % _ELEMENT_BYTES[found[0].number] == 0
    return found[0] if found[0].delimited and size >= LARGE and whole else None


def _fields(data: memoryview, position: int, end: int) -> Iterator[_Field]:
    while position < end:
        start = position
        tag, position = _varint(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        body = position
        if wire_type == _DELIMITED:
            size, body = _varint(data, position, end)
            position = body + size
        elif wire_type == _VARINT:
            position = _skip_varint(data, position, end)
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:
            raise _UnusualError
        if position > end:
            raise _UnusualError
        yield _Field(number, wire_type == _DELIMITED, start, body, position)


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """A tag or a length, 32 bits in the fewest bytes, and the position behind it."""
    value = 0
    for index, byte in enumerate(data[position : min(position + 5, end)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value >> 32 or (index and not byte):
                break
            return value, position + index + 1
    raise _UnusualError


def _skip_varint(data: memoryview, position: int, end: int) -> int:
    for index, byte in enumerate(data[position : min(position + 10, end)]):
        if byte < 0x80:
            return position + index + 1
    raise _UnusualError


def _header(number: int, size: int) -> memoryview:
    """Tag and length of a delimited field."""
    header = bytearray()
    for value in (number << 3 | _DELIMITED, size):
        while value > 0x7F:
            header.append(value & 0x7F | 0x80)
            value >>= 7
        header.append(value)
    return memoryview(header)
