"""A stand-in for ONNX Runtime with a CUDA provider: the slots of OrtApi that the library uses, by
number, over numpy arrays as device memory. Drives the CUDA ops without either.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from fake_gpu import Aligned

from moonpoly_ort import native

ONNX_TYPES = {native.Dtype.F32: 1, native.Dtype.F16: 10, native.Dtype.BF16: 16}


def _bytes(pointer: int, values: bytes) -> None:
    ctypes.memmove(pointer, values, len(values))


def _pointer(out: int, value: int) -> None:
    c_void_p.from_address(out).value = value


@dataclass
class Context:
    """One call of Compute."""

    inputs: Sequence[Aligned | None]
    dtype: np.dtype[Any]
    stream: int = 0x5EED
    output: Aligned | None = None
    scratch: list[int] = field(default_factory=list)


class FakeOrt:
    everyone: ClassVar[list[FakeOrt]] = []  # like the real one, never unloaded

    def __init__(
        self, config: Mapping[str, str], *, device: int = 0, version: bytes = b"1.23.2",
        attributes: Mapping[str, Any] | None = None,
        constants: Mapping[int, Aligned] | None = None,
    ) -> None:  # fmt: skip
        FakeOrt.everyone.append(self)
        self.config, self.device, self.attributes = dict(config), device, dict(attributes or {})
        self.constants = dict(constants or {})  # inputs by index
        self.newest_api = int(version.split(b".")[1])
        self.handles: dict[int, Any] = {}
        self.next_handle = itertools.count(0x1000, 16)
        self.ops: list[int] = []
        self.live = {"info": 0, "allocator": 0, "status": 0}
        self.freed: list[int] = []
        self.shapes_lent = self.shapes_copied = 0
        self.warnings: list[str] = []
        self.scratch_memory: dict[int, Aligned] = {}
        self._keep: list[Any] = []
        self.table = (c_void_p * 424)()
        self._fill()
        api = ctypes.addressof(self.table)
        self.base = (c_void_p * 2)(
            self._callback(
                c_void_p, [ctypes.c_uint32], lambda v: api if v <= self.newest_api else None
            ),
            self._callback(c_void_p, [], lambda: self._text(version)),
        )

    def _text(self, text: bytes) -> int:
        buffer = ctypes.create_string_buffer(text)
        self._keep.append(buffer)
        return ctypes.addressof(buffer)

    def _callback(self, result: Any, arguments: list[Any], function: Callable[..., Any]) -> int:
        made = ctypes.CFUNCTYPE(result, *arguments)(function)
        self._keep.append(made)
        return ctypes.cast(made, c_void_p).value or 0

    def handle(self, thing: Any) -> int:
        number = next(self.next_handle)
        self.handles[number] = thing
        return number

    def _fill(self) -> None:
        def slot(number: int, *arguments: Any, result: Any = c_void_p) -> Callable[..., None]:
            def put(function: Callable[..., Any]) -> None:
                self.table[number] = self._callback(result, list(arguments), function)

            return put

        @slot(0, c_int, c_char_p)
        def _(code: int, text: bytes) -> int:
            self.live["status"] += 1
            return self.handle((code, text.decode()))

        @slot(93, c_void_p, result=None)
        def _(status: int) -> None:
            self.live["status"] -= 1

        @slot(26, c_char_p, c_void_p)
        def _(name: bytes, out: int) -> None:
            assert name == b"ai.moonpoly"
            _pointer(out, self.handle("domain"))

        @slot(27, c_void_p, c_void_p)
        def _(domain: int, op: int) -> None:
            self.ops.append(op)

        @slot(28, c_void_p, c_void_p)
        def _(options: int, domain: int) -> None:
            assert self.handles[domain] == "domain"

        @slot(51, c_void_p, c_void_p)
        def _(value: int, out: int) -> None:
            _pointer(out, self.handles[value].address)

        @slot(65, c_void_p, c_void_p)
        def _(value: int, out: int) -> None:
            self.live["info"] += 1
            self.shapes_copied += 1
            _pointer(out, self.handle(self.handles[value].array.shape))

        def lend_shape(value: int, kind: int, dims: int, rank: int) -> None:
            shape = np.asarray(self.handles[value].array.shape, np.int64)
            self._keep.append(shape)
            c_int.from_address(kind).value = 0
            _pointer(dims, shape.ctypes.data)
            c_size_t.from_address(rank).value = len(shape)
            self.shapes_lent += 1

        if self.newest_api >= 24:  # else the table ends before it
            slot(414, c_void_p, c_void_p, c_void_p, c_void_p)(lend_shape)

        @slot(61, c_void_p, c_void_p)
        def _(info: int, out: int) -> None:
            c_size_t.from_address(out).value = len(self.handles[info])

        @slot(62, c_void_p, c_void_p, c_size_t)
        def _(info: int, out: int, count: int) -> None:
            shape = self.handles[info]
            assert count == len(shape)
            if count:
                _bytes(out, np.asarray(shape, np.int64).tobytes())

        @slot(99, c_void_p, result=None)
        def _(info: int) -> None:
            self.live["info"] -= 1

        @slot(278, c_void_p, c_int, c_void_p)
        def _(info: int, kind: int, out: int) -> None:
            assert kind == 0
            self.live["allocator"] += 1
            _pointer(out, self.handle("allocator"))

        @slot(77, c_void_p, c_void_p)
        def _(allocator: int, out: int) -> None:
            assert self.handles[allocator] == "allocator"
            _pointer(out, self.handle("memory"))

        @slot(72, c_void_p, c_void_p)
        def _(memory: int, out: int) -> None:
            assert self.handles[memory] == "memory"
            c_int.from_address(out).value = self.device

        @slot(132, c_void_p, result=None)
        def _(allocator: int) -> None:
            self.live["allocator"] -= 1

        @slot(277, c_void_p, c_void_p, c_size_t, c_void_p)
        def _(context: int, memory: int, size: int, out: int) -> None:
            assert self.handles[memory] == "memory"
            block = Aligned(np.full(size, 0xCD, np.uint8))
            self.scratch_memory[block.address] = block
            self.handles[context].scratch.append(size)
            _pointer(out, block.address)

        @slot(76, c_void_p, c_void_p)
        def _(allocator: int, pointer: int) -> None:
            assert pointer in self.scratch_memory
            self.freed.append(pointer)

        def attribute(number: int, kind: Any) -> None:
            @slot(number, c_void_p, c_char_p, c_void_p)
            def _(info: int, name: bytes, out: int) -> int | None:
                if name.decode() not in self.attributes:
                    self.live["status"] += 1
                    return self.handle((1, "no such attribute"))
                kind.from_address(out).value = self.attributes[name.decode()]
                return None

        attribute(85, c_float)
        attribute(86, c_int64)

        @slot(87, c_void_p, c_char_p, c_void_p, c_void_p)
        def _(info: int, name: bytes, out: int | None, size: int) -> int | None:
            if name.decode() not in self.attributes:
                self.live["status"] += 1
                return self.handle((1, "no such attribute"))
            text = str(self.attributes[name.decode()]).encode() + b"\0"
            if out:
                _bytes(out, text)
            c_size_t.from_address(size).value = len(text)
            return None

        @slot(163, c_void_p, c_char_p, c_void_p, c_void_p)
        def _(info: int, name: bytes, out: int | None, count: int) -> int | None:
            if name.decode() not in self.attributes:
                self.live["status"] += 1
                return self.handle((1, "no such attribute"))
            values = np.asarray(self.attributes[name.decode()], np.int64)
            if out:
                assert c_size_t.from_address(count).value >= len(values)
                _bytes(out, values.tobytes())
            c_size_t.from_address(count).value = len(values)
            return None

        @slot(249, c_void_p, c_size_t, c_void_p, c_void_p)
        def _(info: int, index: int, constant: int, out: int) -> None:
            value = self.constants.get(index)
            c_int.from_address(constant).value = value is not None
            _pointer(out, 0 if value is None else self.handle(value))

        @slot(88, c_void_p, c_void_p)
        def _(context: int, out: int) -> None:
            c_size_t.from_address(out).value = len(self.handles[context].inputs)

        @slot(90, c_void_p, c_size_t, c_void_p)
        def _(context: int, index: int, out: int) -> None:
            value = self.handles[context].inputs[index]
            _pointer(out, 0 if value is None else self.handle(value))

        @slot(91, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
        def _(context: int, index: int, dims: int, count: int, out: int) -> None:
            shape = [c_int64.from_address(dims + 8 * i).value for i in range(count)]
            made = Aligned(np.full(shape, 77, self.handles[context].dtype))
            self.handles[context].output = made
            _pointer(out, self.handle(made))

        @slot(125, c_void_p, c_void_p)
        def _(out: int, count: int) -> None:
            names = (c_void_p * 1)(self._text(b"CUDAExecutionProvider"))
            self._keep.append(names)
            _pointer(out, ctypes.addressof(names))
            c_int.from_address(count).value = 1

        slot(126, c_void_p, c_int)(lambda names, count: None)

        @slot(193, c_void_p, c_void_p)
        def _(context: int, out: int) -> None:
            _pointer(out, self.handles[context].stream)

        @slot(237, c_void_p, c_char_p, c_void_p)
        def _(options: int, key: bytes, out: int) -> None:
            c_int.from_address(out).value = key.decode() in self.config

        @slot(238, c_void_p, c_char_p, c_void_p, c_void_p)
        def _(options: int, key: bytes, value: int | None, size: int) -> None:
            text = self.config[key.decode()].encode() + b"\0"
            if value:
                _bytes(value, text)
            c_size_t.from_address(size).value = len(text)

        @slot(130, c_void_p, c_char_p, c_char_p)
        def _(options: int, key: bytes, value: bytes) -> None:
            self.config[key.decode()] = value.decode()

        @slot(244, c_void_p, c_void_p, c_void_p)
        def _(info: int, name: int | None, size: int) -> None:
            if name:
                _bytes(name, b"node\0")
            c_size_t.from_address(size).value = 5

        @slot(245, c_void_p, c_void_p)
        def _(info: int, out: int) -> None:
            _pointer(out, self.handle("logger"))

        @slot(247, c_void_p, c_int, c_char_p, c_char_p, c_int, c_char_p)
        def _(logger: int, level: int, text: bytes, *_: object) -> None:
            assert level == 2
            self.warnings.append(text.decode())

    # ---- what a session does ----
    def _raise(self, status: int | None) -> None:
        if status:
            self.live["status"] -= 1
            code, text = self.handles[status]
            raise RuntimeError(f"{code}: {text}")

    def register(self) -> None:
        function = native._library().RegisterCustomOps
        function.restype, function.argtypes = c_void_p, [c_void_p, c_void_p]
        self._raise(function(self.handle("options"), ctypes.addressof(self.base)))

    def _member(self, op: int, index: int, result: Any, *arguments: Any) -> Callable[..., Any]:
        address = c_void_p.from_address(op + 8 * index).value
        assert address
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def op(self, name: str, dtype: native.Dtype) -> int:
        for op in self.ops:
            is_named = self._member(op, 2, c_char_p, c_void_p)(op) == name.encode()
            kind = self._member(op, 4, c_int, c_void_p, c_size_t)(op, 0)
            if is_named and kind == ONNX_TYPES[dtype]:
                return op
        raise AssertionError(f"{name} for {dtype} is not registered")

    def provider(self, op: int) -> bytes:
        return bytes(self._member(op, 3, c_char_p, c_void_p)(op))

    def create(self, op: int) -> int:
        kernel = c_void_p()
        create = self._member(op, 17, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
        status = create(
            op, ctypes.addressof(self.table), self.handle("info"), ctypes.addressof(kernel)
        )
        self._raise(status)
        assert kernel.value
        return kernel.value

    def compute(self, op: int, kernel: int, context: Context) -> np.ndarray[Any, Any]:
        run = self._member(op, 18, c_void_p, c_void_p, c_void_p)
        self._raise(run(kernel, self.handle(context)))
        assert context.output is not None
        return context.output.array

    def destroy(self, op: int, kernel: int) -> None:
        self._member(op, 9, None, c_void_p)(kernel)
