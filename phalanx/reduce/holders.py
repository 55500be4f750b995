"""Who else holds a gradient that is about to be written to.

What a user keeps of p.grad from an earlier step must keep its values. Holders are counted in two ways: of the
tensor object, and of its memory (through other tensors: detach(), a view). A place with more of either
than when nobody but us had it is given up to them, and made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

import torch

_ONLY_HERE = 1  # holders of a storage that only a local variable still names


class Holders:
    """The holders of some of `views`, those numbered in `indices`.

    `in_use(i)` says whether the parameter shows the place itself now: what is written there is then meant
    for whoever holds it. `renew(i)` makes the place anew; `apart(i)` says whether it has a storage of its own.
    """

    def __init__(
        self,
        views: list[torch.Tensor],
        indices: Sequence[int],
        in_use: Callable[[int], bool],
        apart: Callable[[int], bool],
        renew: Callable[[int], torch.Tensor],
    ) -> None:
        self._views, self._indices = views, indices
        self._in_use, self._apart, self._renew = in_use, apart, renew
        self._storages: list[int] = []
        self._objects: list[int] = []
        self._memories: list[int] = []
        self.count_from_now()

    def count_from_now(self) -> None:
        """Note how many hold each place while nobody but us does."""
        views = self._mine()
        self._storages = [view.untyped_storage()._cdata for view in views]
        del views
        self._objects, self._memories = self._counts()

    def _mine(self) -> list[torch.Tensor]:
        views = self._views
        return views if len(self._indices) == len(views) else [views[index] for index in self._indices]

    def _counts(self) -> tuple[list[int], list[int]]:
        return list(map(getrefcount, self._mine())), list(map(torch._C._storage_Use_Count, self._storages))

    def leave_kept(self) -> None:
        """Let gradients that the user has kept from an earlier step keep their values, away from their places."""
        objects, memories = self._counts()
        if objects == self._objects and memories == self._memories:
            return
        kept = [
            index
            for place, index in enumerate(self._indices)
            if objects[place] > self._objects[place] or memories[place] > self._memories[place]
        ]
        for index in kept:
            if not self._in_use(index):
                self._leave(index)
        if kept:
            self.count_from_now()

    def _leave(self, index: int) -> None:
        view = self._views[index]
        storage = view.untyped_storage()
        view.data = view.clone()  # whoever holds this very tensor
        # Where the storage is shared with other places, its users cannot be told from theirs.
        if self._apart(index) and torch._C._storage_Use_Count(storage._cdata) > _ONLY_HERE:
            storage.share_memory_()  # whoever holds another tensor on its memory: moves them all
        self._views[index] = self._renew(index)
