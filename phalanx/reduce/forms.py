"""Whether the tensors that show places are still what they were made as: p.grad is the user's to change."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_data_pointer, _stride, _version = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("_version")


class Forms:
    """The data pointers and strides that `views` were made with. Entries of the list may be replaced; see note()."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._views = views
        self.pointers = list(map(_data_pointer, views))
        self._strides = list(map(_stride, views))
        self._seen: list[int] = []  # versions of the views when they last had these strides

    def note(self, index: int) -> None:
        """Take a view that has been made anew, with the same strides."""
        self.pointers[index] = self._views[index].data_ptr()

    def are_all_unchanged(self) -> bool:
        """Whether nobody has given a view other memory (`p.grad.data = ...`) or other strides (`p.grad.t_()`)."""
        if list(map(_data_pointer, self._views)) != self.pointers:
            return False
        versions = list(map(_version, self._views))
        if versions == self._seen:  # what changes strides in place counts as a write
            return True
        self._seen = versions
        return list(map(_stride, self._views)) == self._strides

    def is_changed(self, index: int) -> bool:
        """The same of one view."""
        view = self._views[index]
        return view.data_ptr() != self.pointers[index] or view.stride() != self._strides[index]


def pointer(gradient: torch.Tensor | None) -> int:
    """The data pointer of a gradient; 0 for none, -1 for a sparse one."""
    if gradient is None:
        return 0
    return gradient.data_ptr() if gradient.layout is torch.strided else -1


def shows(params: Sequence[torch.nn.Parameter], pointers: Sequence[int], index: int) -> bool:
    """Whether the gradient of a parameter is at its pointer."""
    return pointer(params[index].grad) == pointers[index]
