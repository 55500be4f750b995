"""What a model was made of when somebody last looked, cheap to compare at every forward."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

# One pass of map() over hundreds of parameters costs a fraction of a loop's.
_identity, _requires_grad = attrgetter("_cdata"), attrgetter("requires_grad")
_address = torch.Tensor.data_ptr
_END = object()


class Structure:
    """The parameters, modules and buffers of `module`; those named in `ignored` do not count.

    `hooked` are the parameters with hooks on them, which torch.utils.swap_tensors cuts off.
    """

    def __init__(self, module: nn.Module, ignored: Container[str], hooked: Sequence[nn.Parameter]) -> None:
        self.modules = list(module.modules())
        holding = [m._parameters for m in self.modules] + [m._modules for m in self.modules]
        self._parameter_dicts = [m._parameters for m in self.modules if m._parameters]
        self._holding, self._empty = _parted(holding)
        self._sizes = list(map(len, self._holding))
        self._held = list(_values(self._holding))
        self._buffer_dicts, self._without_buffers = _parted([m._buffers for m in self.modules])
        self._buffers_held = list(_values(self._buffer_dicts))
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
        self.parameters = [p for name, p in module.named_parameters() if name not in ignored]
        self._required = list(map(_requires_grad, self.parameters))
        self._addresses = list(map(_address, self.parameters))
        self._forms = list(map(_form, self.parameters))
        self._hooked = hooked
        self._identities = list(map(_identity, hooked))

    def is_as_before(self, unconverted: bool = True) -> bool:
        """Whether the parameters and modules are the same, need gradients as before and have their hooks.

        With `unconverted`, whether they also have the dtypes, shapes and memory formats that they had.
        """
        return (
            all(map(is_, _values(self._holding), self._held))
            and not any(self._empty)
            and not self.is_swapped()
            and list(map(_requires_grad, self.parameters)) == self._required
            and not (unconverted and self.is_converted())
        )

    def has_grown(self) -> bool:
        """Whether a module holds other numbers of parameters or modules: quick to see at the end of every backward."""
        return any(self._empty) or list(map(len, self._holding)) != self._sizes

    def has_its_buffers(self) -> bool:
        """Whether the buffers are the same."""
        return not any(self._without_buffers) and (
            not self._buffer_dicts or all(map(is_, _values(self._buffer_dicts), self._buffers_held))
        )

    def is_swapped(self) -> bool:
        """Whether a hooked parameter has become another tensor under the same name and object."""
        return list(map(_identity, self._hooked)) != self._identities

    def is_converted(self) -> bool:
        """Whether a parameter has changed its dtype, shape or memory format: its gradient is to have the same.

        That comes with other memory, which is quicker to see.
        """
        addresses = list(map(_address, self.parameters))
        if addresses == self._addresses:
            return False
        if list(map(_form, self.parameters)) != self._forms:
            return True
        self._addresses = addresses
        return False

    def unhooked(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of `named` without a hook: they are new, or swapped."""
        hooked = dict(zip(map(id, self._hooked), self._identities, strict=True))
        return ((name, p) for name, p in named if hooked.get(id(p)) != p._cdata)

    def is_borrowed(self) -> bool:
        """Whether torch.func.functional_call has put tensors that are no parameters in their place."""
        held = chain.from_iterable(d.values() for d in self._parameter_dicts)
        return not all(isinstance(p, nn.Parameter) for p in held if p is not None)


def _parted(dicts: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those with something in them, and the empty ones: of these is only asked whether they have stayed so."""
    full: list[dict[str, Any]] = []
    empty: list[dict[str, Any]] = []
    for each in dicts:
        (full if each else empty).append(each)
    return full, empty


def _form(parameter: nn.Parameter) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return parameter.dtype, parameter.shape, parameter.stride()


def _values(dicts: Iterable[dict[str, Any]]) -> Iterable[object]:
    """All values, and an end mark, without which a comparison would stop at the shorter side."""
    return chain(chain.from_iterable(map(dict.values, dicts)), (_END,))
