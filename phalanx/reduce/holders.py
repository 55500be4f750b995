"""Who else holds a gradient that is about to be written to.

What a user keeps of p.grad from an earlier step must keep its values. Holders are counted in two ways: of the
tensor object (numpy's arrays hold it too), and of its memory (through other tensors: detach(), a view; DLPack; or as
an object of its own: untyped_storage()).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import add
from sys import getrefcount

import torch


def _references_to_a_gradient() -> int:
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    return max(map(getrefcount, [leaf.grad]))


OURS_ALONE = _references_to_a_gradient()
"""References to a gradient that only its parameter and a list of ours hold."""


def are_ours_alone(gradients: list[torch.Tensor]) -> bool:
    """Whether nobody but their parameters and this list holds these gradients."""
    return max(map(getrefcount, gradients)) <= OURS_ALONE


class Holders:
    """The holders of some of `views`, those numbered in `indices`.

    `in_use(i)` says whether the parameter shows the place itself now: what is written there is then meant
    for whoever holds it.
    """

    def __init__(self, views: list[torch.Tensor], indices: Sequence[int], in_use: Callable[[int], bool]) -> None:
        self._views, self.indices = views, indices
        self._in_use = in_use
        self._storages: list[torch.UntypedStorage] = []  # kept alive: they are counted by address
        self._addresses: list[int] = []
        self._objects: list[int] = []
        self._memories: list[int] = []
        self.count_from_now()

    def count_from_now(self) -> None:
        """Note how many hold each place while nobody but us does."""
        views = self._mine()
        self._storages = [view.untyped_storage() for view in views]
        self._addresses = [storage._cdata for storage in self._storages]
        del views
        self._objects, self._memories = self._counts()

    def are_left(self, indices: Sequence[int], shown: Callable[[int], bool]) -> bool:
        """Whether nobody holds the memory of these places, whose views have been given other memory.

        `shown(i)` says whether the parameter's gradient is that view all the same.
        """
        objects, memories = self._counts()
        places = [self.indices.index(index) for index in indices]
        gone = Counter(self._addresses[place] for place in places)
        return all(
            objects[place] <= self._objects[place] + shown(index)
            and memories[place] <= self._memories[place] - gone[self._addresses[place]]
            for index, place in zip(indices, places, strict=True)
        )

    def count_anew(self, index: int) -> None:
        """Note it for a place whose view has just been made anew."""
        place = self.indices.index(index)
        self._storages[place] = self._views[index].untyped_storage()
        self._addresses[place] = self._storages[place]._cdata
        objects, memories = self._counts()
        self._objects[place], self._memories[place] = objects[place], memories[place]

    def _mine(self) -> list[torch.Tensor]:
        views = self._views
        return views if len(self.indices) == len(views) else [views[index] for index in self.indices]

    def _counts(self) -> tuple[list[int], list[int]]:
        memories = map(add, map(torch._C._storage_Use_Count, self._addresses), map(getrefcount, self._storages))
        return list(map(getrefcount, self._mine())), list(memories)

    def kept(self) -> Sequence[int]:
        """The numbers of places that somebody keeps from an earlier step. Where they share a storage, all of it."""
        objects, memories = self._counts()
        if objects == self._objects and memories == self._memories:
            return ()
        return [
            index
            for place, index in enumerate(self.indices)
            if (objects[place] > self._objects[place] or memories[place] > self._memories[place])
            and not self._in_use(index)
        ]
