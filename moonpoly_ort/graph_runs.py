"""The calls of a session that has CUDA graphs (`graph_cache.py`): which of them replay, which run
without a graph, and which are refused because they would leave results in the session's arena.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from . import dependencies
from .errors import ArgumentError
from .graph_cache import GRAPH_ID, HOST_BYTES, NO_GRAPH, GraphCache, Places
from .provider_settings import with_settings

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.InferenceSession")

ENABLE = "enable_cuda_graph"  # of the CUDA provider
SHRINKAGE = "memory.enable_memory_arena_shrinkage"
# "This session cannot use the graph capture feature as requested by the user as ..." (1.31), "...
# the CUDA Graph feature ..." before.
_REFUSAL = re.compile(
    r"session cannot use the (graph capture|CUDA Graph) feature as requested by the user"
)
INSTEAD = "Use run or bound memory, or make the session without cuda_graphs."


def capturing(
    providers: Sequence[Any] | None, provider_options: Sequence[Mapping[Any, Any]] | None
) -> list[tuple[str, dict[Any, Any]]]:
    """The `providers` of a session, with graph capture turned on for CUDA."""
    return with_settings(providers, provider_options, {ENABLE: "1"})


def is_refusal(error: Exception) -> bool:
    """Whether ONNX Runtime made no session because it cannot capture this model: it has control
    flow, or nodes that run elsewhere than on CUDA.
    """
    return _REFUSAL.search(str(error)) is not None


class GraphBinding(ort.IOBinding):  # type: ignore[misc]
    """An IOBinding of a session with CUDA graphs: it knows what is bound, which a graph belongs to.

    Inputs must be bound where the session reads them, outputs to memory that is there already: what
    ONNX Runtime would allocate for them lies in its arena, and a replay may overwrite it.
    """

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        # (is output, name) -> device, element type, shape, address; None: no such memory.
        self._memory: dict[tuple[bool, str], tuple[str, str, tuple[int, ...], int] | None] = {}
        self._values: dict[tuple[bool, str], Any] = {}  # kept for as long as they are bound
        self._bound: tuple[_MemoryKey | None, list[Any]] | None = None  # made when it is needed

    def _note(self, is_output: bool, name: str, value: Any, *memory: Any) -> None:
        self._bound = None
        self._values[is_output, name] = value
        device, element, shape, address = memory or (None,) * 4
        self._memory[is_output, name] = (
            (device.lower(), str(element), tuple(shape), address) if memory else None
        )

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        super().bind_cpu_input(name, arr_on_cpu)
        array = np.asarray(arr_on_cpu)
        self._note(False, name, array, "cpu", array.dtype, array.shape, array.ctypes.data)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:  # fmt: skip
        super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        self._note(False, name, None, device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        super().bind_ortvalue_input(name, ortvalue)
        self._note(False, name, ortvalue, *_memory_of(ortvalue))

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None,
        shape: Sequence[int] | None = None, buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        super().bind_output(name, device_type, device_id, element_type, shape, buffer_ptr)
        memory = () if buffer_ptr is None else (device_type, element_type, shape, buffer_ptr)
        self._note(True, name, None, *memory)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        super().bind_ortvalue_output(name, ortvalue)
        self._note(True, name, ortvalue, *_memory_of(ortvalue))

    def clear_binding_inputs(self) -> None:
        super().clear_binding_inputs()
        self._clear(False)

    def clear_binding_outputs(self) -> None:
        super().clear_binding_outputs()
        self._clear(True)

    def _clear(self, is_output: bool) -> None:
        self._bound = None
        for kept in (self._memory, self._values):
            for key in [key for key in kept if key[0] == is_output]:
                del kept[key]

    def key(self, places: Places) -> Hashable | None:
        """What two bound runs must have in common to share a graph; None: this one takes no part.

        Raises:
            ArgumentError: something is bound to memory that ONNX Runtime allocates.
        """
        if self._bound is None:
            self._bound = self._key_of_memory(places)
        memory, on_host = self._bound
        if memory is None or not on_host:
            return memory
        contents = []
        for value in on_host:
            array = value if isinstance(value, np.ndarray) else value.numpy()
            if array.nbytes > HOST_BYTES:
                return None
            contents.append(array.tobytes())
        return memory, *contents

    def _key_of_memory(self, places: Places) -> tuple[_MemoryKey | None, list[Any]]:
        """What `key` has of the memory that is bound, and inputs whose content it has, too."""
        parts: list[Hashable] = []
        contents: list[Any] = []
        addresses: tuple[set[int], set[int]] = set(), set()  # of inputs, of outputs
        for (is_output, name), memory in sorted(self._memory.items(), key=lambda item: item[0]):
            on_host = name in (places.host_outputs if is_output else places.host_inputs)
            wanted = "cpu" if on_host else places.device
            if memory is None or memory[0] != wanted:
                where = "memory that ONNX Runtime allocates" if memory is None else memory[0]
                raise ArgumentError(
                    f"{'output' if is_output else 'input'} {name!r} is bound to {where}; a session "
                    f"with cuda_graphs takes memory that is there already, on {wanted!r} "
                    "(bind_ortvalue_input, bind_ortvalue_output, or an address). Or use run."
                )
            addresses[is_output].add(memory[3])
            parts.append((is_output, name, *memory))
            if on_host and not is_output:
                contents.append(self._values[is_output, name])
        # A capture runs the model several times: results in an input's place would be its input.
        if addresses[False] & addresses[True] or any(value is None for value in contents):
            return None, []  # None among the values: a bare address
        return _MemoryKey(tuple(parts)), contents


class _MemoryKey:
    """Compares as a tuple; it is hashed once, and equal to itself at once. A replay begins with it,
    and models bind many tensors.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MemoryKey) and self._parts == other._parts


def _memory_of(value: Any) -> tuple[str, str, tuple[int, ...], int]:
    return value.device_name(), value.data_type(), tuple(value.shape()), value.data_ptr()


class GraphRuns:
    """Comes before onnxruntime's class among the bases of a session, whose runs it then directs.

    Without graphs every call goes straight on.
    """

    _graphs: GraphCache | None = None

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:  # fmt: skip
        graphs, plain = self._graphs, _plain(super())
        if graphs is None:
            return plain.run(output_names, input_feed, run_options)
        if run_options is not None:
            _without_graph(run_options)
            return graphs.call(plain.run, output_names, input_feed, run_options)
        names = list(output_names or (output.name for output in plain.get_outputs()))
        return graphs.run(self, plain, names, input_feed)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:  # fmt: skip
        graphs, plain = self._graphs, _plain(super())
        if graphs is not None:
            run_options = _without_graph(run_options)
            return graphs.call(
                plain.run_with_ort_values, output_names, input_dict_ort_values, run_options
            )
        return plain.run_with_ort_values(output_names, input_dict_ort_values, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> Any:
        graphs, plain = self._graphs, _plain(super())
        if graphs is None:
            return plain.run_with_iobinding(iobinding, run_options)
        if not isinstance(iobinding, GraphBinding):
            raise ArgumentError(
                f"a session with cuda_graphs takes the bindings that its io_binding() makes, not "
                f"{type(iobinding).__name__}"
            )
        key = iobinding.key(graphs.places)
        if run_options is None and key is not None:
            return graphs.run_bound(self, plain, iobinding, key)
        return graphs.call(plain.run_with_iobinding, iobinding, _without_graph(run_options))

    def io_binding(self) -> Any:
        return _plain(super()).io_binding() if self._graphs is None else GraphBinding(self)

    def run_async(self, *arguments: Any, **named: Any) -> Any:
        self._refuse("run_async")
        return _plain(super()).run_async(*arguments, **named)

    def run_with_ortvaluevector(self, *arguments: Any, **named: Any) -> Any:
        self._refuse("run_with_ortvaluevector")
        return _plain(super()).run_with_ortvaluevector(*arguments, **named)

    def create_ortvalue_from_shape_and_type(self, *arguments: Any, **named: Any) -> Any:
        self._refuse("create_ortvalue_from_shape_and_type")
        return _plain(super()).create_ortvalue_from_shape_and_type(*arguments, **named)

    def _refuse(self, call: str) -> None:
        if self._graphs is not None:
            raise ArgumentError(f"a session with cuda_graphs has no {call}. {INSTEAD}")


def _plain(parent: Any) -> Any:
    """What `super()` gives, without a type: the mixin does not know its neighbour."""
    return parent


def _without_graph(options: Any) -> Any:
    """The caller's run options, with no graph captured or replayed.

    Raises:
        ArgumentError: they ask for what cannot be beside graphs of ours.
    """
    if options is None:
        options = ort.RunOptions()
    if _entry(options, GRAPH_ID) not in ("", str(NO_GRAPH)):
        raise ArgumentError(
            f"the run options set {GRAPH_ID}; with cuda_graphs the session gives out the ids. "
            f"Leave it out, or make the session with the provider option {ENABLE} instead."
        )
    if _entry(options, SHRINKAGE):
        raise ArgumentError(
            f"the run options set {SHRINKAGE}; captured graphs use the arena's memory, which must "
            "stay. Leave it out, or make the session without cuda_graphs."
        )
    options.add_run_config_entry(GRAPH_ID, str(NO_GRAPH))
    return options


def _entry(options: Any, key: str) -> str:
    """A run config entry; empty where it is not set."""
    try:
        return str(options.get_run_config_entry(key))
    except RuntimeError:
        return ""
