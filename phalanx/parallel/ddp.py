"""DistributedDataParallel: the module that a training script wraps its model in.

Forward watches the model's parameters and outputs and keeps buffers equal; the reducer does the rest when
backward comes. The names that other code reads of torch's class are in torch_surface.py.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm

from phalanx.group import ticket
from phalanx.group.process_group import PhalanxProcessGroup, for_process_group
from phalanx.parallel import buffers
from phalanx.parallel.groups import choose_group, find_group
from phalanx.parallel.guard import Guarded, check_inside
from phalanx.parallel.in_backward import InBackwardOptimizers
from phalanx.parallel.layers import Layers
from phalanx.parallel.mixed_precision import LowPrecision
from phalanx.parallel.options import DEFAULT_BUCKET_MB, Options, buffer_sync, check_devices, of_torch
from phalanx.parallel.structure import Structure
from phalanx.parallel.torch_surface import TorchSurface
from phalanx.parallel.uneven import Uneven
from phalanx.parallel.wrapped import attribute_of_module
from phalanx.reduce.backward import current_task
from phalanx.reduce.bucket import HookRunner
from phalanx.reduce.model import sparse_parameters
from phalanx.reduce.reducer import Reducer
from phalanx.reduce.watch import Local, hook_on_output, weakly

_TorchDDP = nn.parallel.DistributedDataParallel  # whatever takes its place there later


class DistributedDataParallel(Uneven, Layers, Guarded, TorchSurface, _TorchDDP):  # type: ignore[misc, override]
    """Wrap `module` so that its gradients are the mean over all ranks when backward ends.

    Collective: every rank of the group constructs it, with the same model. Parameters and buffers of rank 0
    are copied to all ranks. The keyword arguments are those of torch 2.13, keyword for keyword; see
    phalanx.parallel.options for what each means here. Without an initialised process group and without a
    launcher, the world is this one process.

    Raises MisuseError (a RuntimeError) on every rank, naming the first differing parameter, if models differ.
    """

    _low: LowPrecision | None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        sync_forward, sync_init = buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.module = module
        self.dim = dim
        self.process_group = choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name, _ in delay_all_reduce_named_params or ():
            self.parameters_to_ignore.add(name)
        watched = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        if not any(parameter.requires_grad for _, parameter in watched):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
                "a gradient."
            )
        devices = check_devices(watched, device_ids, output_device)
        self.options = Options(
            *devices, sync_forward, init_sync, sync_init,
            DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb,
            tuple(int(cap * (1 << 20)) for cap in bucket_cap_mb_list or ()),
            find_unused_parameters, gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params,
            batched_grad_copy, mixed_precision,
        )  # fmt: skip
        self._attach(for_process_group(self.process_group, "gradients"))
        check_inside(module, self._group.core.rank)
        self._reducer.build()
        if init_sync:
            self._broadcast_module(0, with_buffers=sync_init)
        self._finish_surface()
        if mixed_precision is not None:
            self._low = LowPrecision(mixed_precision, module, self._everything)
            self._reducer.lend_places = False
            self._reducer.before_end = self._low.restore
            self._remember_structure()

    def _attach(self, group: PhalanxProcessGroup) -> None:
        """Everything that belongs to this process and is not pickled."""
        self._group = group
        self._start_layers()
        self._low = None
        self._in_backward: InBackwardOptimizers | None = None
        self.require_forward_param_sync = True
        self.modules_buffers: list[torch.Tensor] = []
        named = self._trainable()
        self._reducer = Reducer(
            group, named, sparse_parameters(self.module), self.options.caps, weakly(self._local_now),
            self._frozen(named), weakly(self._adopt_unfrozen),
        )  # fmt: skip
        self._start_surface()
        self._remember_structure()
        self._reducer.on_build = weakly(self._make_broadcaster)
        self._start_guard()
        self._reducer.after_flush.append(weakly(self._step_synchronised))

    def _make_broadcaster(self) -> None:
        tag = self._reducer.tag // 128 * 128 + (1 << 63)
        self._broadcaster = buffers.Broadcaster(self._group, tag, self._listed_buffers())
        self._group.core.labels[self._reducer.tag & ~1] = self._reducer.plan.label(type(self.module).__name__)

    def _listed_buffers(self) -> Callable[[], list[torch.Tensor]]:
        me = weakref.ref(self)
        return lambda: me()._buffers_with("rank0")  # type: ignore[union-attr]

    # -- the model -----------------------------------------------------------------------------------

    def _trainable(self, hooked: Container[int] = ()) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if (parameter.requires_grad or id(parameter) in hooked) and name not in self.parameters_to_ignore
        ]

    def _frozen(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        """Those that may be unfrozen some day, of the parameters that are not among `named`."""
        taken = {id(parameter) for _, parameter in named}
        return [
            parameter
            for name, parameter in self.module.named_parameters()
            if id(parameter) not in taken and name not in self.parameters_to_ignore and _may_have_gradient(parameter)
        ]

    def _frozen_now(self) -> list[nn.Parameter]:
        return self._frozen(self._reducer.named)

    def _adopt_unfrozen(self) -> None:
        """Pick up parameters that got a gradient without a forward of this wrapper since they were unfrozen."""
        named = self._trainable({id(parameter) for parameter in self._reducer.parameters})
        self._reducer.adopt(named, self._frozen(named))
        self._remember_structure()

    def _remember_structure(self) -> None:
        """Look what the model is made of."""
        structure = self._structure = Structure(self.module, self.parameters_to_ignore, self._reducer.parameters)
        self.named_module_buffers = structure.buffers
        self.modules_buffers = list(structure.buffers.values())
        self._everything = structure.parameters
        self._reducer.weights.common_unit = any(isinstance(m, TorchSyncBatchNorm) for m in structure.modules)

    def _follow_model(self) -> None:
        """Pick up parameters that were frozen, unfrozen, replaced or added since the last forward."""
        structure = self._structure
        if self._guard is not None:
            self._guard.forward_since_backward = self._guard.forward_since_step = True
        if not structure.is_as_before(unconverted=self._low is None):
            if structure.is_borrowed():
                return  # for this forward
            hooked = {id(p) for p in self._reducer.parameters}
            # Those frozen meanwhile stay: what they have accumulated before may not be synchronised yet.
            named = self._trainable(hooked)
            missing = {id(p) for _, p in named} - hooked
            gone = hooked - {id(p) for p in self.module.parameters()}
            converted = self._low is None and structure.is_converted()
            if structure.is_swapped() or converted or missing or gone:
                self._reducer.forget_backward()
                self._reducer.adopt(named, self._frozen(named))
            self._remember_structure()
        elif not structure.has_its_buffers():
            self._remember_structure()

    def _broadcast_module(self, root: int, with_buffers: bool = True) -> None:
        """Copy parameters (and buffers) of rank `root` to all ranks."""
        self._remember_structure()
        tensors = [p.data for p in self._everything]
        buffers.broadcast(self._group, tensors + (self.modules_buffers if with_buffers else []), root)
        if self._guard is not None:
            self._guard.drift.begin_anew()

    def _sync_final_model(self, root: int) -> None:
        """Give every rank the model and gradients of `root`, after different numbers of steps."""
        self._broadcast_module(root, with_buffers=self.forward_sync_buffers)
        places, core = self._reducer.places, self._group.core
        said = core.exchange(ticket.bits(places.shown(), len(self._reducer.named)), "the end of join()")
        gradients = places.shown_or_room(ticket.members(said[root]), core.rank == root)
        buffers.broadcast(self._group, list(gradients.values()), root)
        places.show_only(gradients)

    def _step_synchronised(self) -> None:
        """Do what follows a synchronised step, in an order that is the same on all ranks."""
        if self._buffer_futures:
            self._wait_for_buffer_hooks()
        if self.modules_buffers:
            self._sync_buffers_after_step()
        self._logging.backward_ended()
        if self.static_graph:
            self._check_static_graph()
        if self._buffer_policies:
            self._average_buffers()
        if self._guard is not None:
            self._guard.flushed()

    # -- forward -------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; arrange for its gradients to be synchronised in backward."""
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What comes before the module; like the next two, of torch's name, for who overrides or calls them."""
        if current_task() == -1:
            self._reducer.forget_backward()
        if self._graph_changed:
            self._refuse_changed_graph()
        if self._in_backward is None:
            self._take_over_optimizers()
        self._follow_model()
        self._reducer.contexts.forward(self._reducer.parameters, self._frozen_now)
        if self.modules_buffers and self.module.training and torch.is_grad_enabled():
            if self.will_sync_module_buffers():
                self._sync_buffers()
        elif self._fetched:
            self._take_fetched_buffers()
        if self.options.device_ids is not None:
            device = torch.device("cuda", self.options.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=False)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._low is not None:
            inputs, kwargs = self._low.lower(inputs, kwargs)
        self._logging.forward_begins()
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Torch's class names itself active here, so that torch.compile cuts graphs at bucket boundaries. Nothing is
        # exchanged before backward ends here: whole graphs are better.
        return self._modules["module"](*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        self._logging.forward_ended()
        if torch.is_grad_enabled():
            self._watch(output, self._local_now())
            if self.modules_buffers:
                self._buffers_used()
        elif self._low is not None:
            self._low.restore()
        return output

    def _take_over_optimizers(self) -> None:
        self._in_backward = InBackwardOptimizers()
        if self._in_backward.take_over(self._reducer.parameters):
            self._reducer.after_flush.append(self._in_backward.step)

    def _watch(self, output: Any, local: Local) -> None:
        """Have the reducer told when the gradient of an output arrives, before any of the parameters' do."""
        arrived = self._reducer.watch.announcer(local)
        for tensor in (output,) if isinstance(output, torch.Tensor) else _tensors(output):
            if tensor.grad_fn is not None:
                hook_on_output(tensor, arrived)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set training mode on the wrapped module too."""
        nn.Module.train(self, mode)
        return self

    # -- hooks and figures ---------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Replace the averaging of gradients by hook(state, bucket), which returns a torch.futures.Future.

        The contract is torch's: see torch.distributed.algorithms.ddp_comm_hooks for ready ones. A later
        call replaces the hook; `remove_comm_hook()` goes back to averaging. Every rank registers the same.
        """
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        self._check_comm_hook(hook)
        self._reducer.comm_hook = HookRunner(state, hook, self._group.core.rank)

    def remove_comm_hook(self) -> None:
        """Go back to averaging. Every rank calls it between the same two steps."""
        self._reducer.comm_hook = None

    @property
    def sync_seconds(self) -> float:
        """Seconds this rank has spent in gradient synchronisation since the model was wrapped."""
        return self._reducer.statistics.seconds

    @property
    def transport(self) -> str:
        """How gradients travel between the ranks, in words."""
        return self._group.transport.name if self._group.core.size > 1 else "none (one rank)"

    # -- state ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__") or "_modules" not in self.__dict__ or "module" not in self._modules:
                raise
            return attribute_of_module(self, self._modules["module"], name)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the wrapped or of the plain model (with or without the `module.` prefix)."""
        if state_dict and not any(key.startswith("module.") for key in state_dict):
            state_dict = {f"module.{key}": value for key, value in state_dict.items()}
        return nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in _NOT_PICKLED:
            state.pop(name, None)
        state["_ranks"] = dist.get_process_group_ranks(self.process_group) if dist.is_initialized() else [0]
        state["options"] = dataclasses.replace(self.options, mixed_precision=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "options" not in state:  # torch's class has pickled it; it is read where ours has taken its place
            state["options"] = of_torch(state)
        ranks = state.pop("_ranks", None)
        nn.Module.__setstate__(self, state)
        self._modules = state["_modules"]
        self.process_group = choose_group(None, None) if ranks is None else find_group(ranks)
        self._attach(for_process_group(self.process_group, "gradients"))
        self._finish_surface()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = self.__getstate__()
        state.pop("_ranks")
        nn.Module.__setstate__(twin, {k: copy.deepcopy(v, memo) for k, v in state.items()})
        twin.process_group = self.process_group
        twin._attach(self._group)
        twin._finish_surface()
        return twin


_NOT_PICKLED = (
    "process_group", "device_mesh", "_group", "_reducer", "_structure", "modules_buffers",
    "named_module_buffers", "_everything", "_join_config",
    "_surface", "_broadcaster", "_local_cache", "_patterns", "_first_used", "_fetched", "_low", "_in_backward",
    "_logging", "_logger", "_guard",
)  # fmt: skip


def _may_have_gradient(parameter: nn.Parameter) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in an output: nested tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 8 or value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _tensors(item, depth + 1)
    else:
        slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
        for item in [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]:
            yield from _tensors(item, depth + 1)


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)
