"""The forward and the backward pass of the decoder over a micro-batch of packs as two CUDA graphs: recorded once, then
replayed.

A pass of a small model launches thousands of kernels, which takes the host longer than the GPU takes to run them. A
graph is one launch. It computes at the addresses that it was recorded at, so a micro-batch is copied into tensors that
stay; the boundaries of its documents too, of which there are always as many: those that it lacks are empty. What
follows the decoder is launched as ever: the losses pick the supervised tokens, whose number varies.
Gradients are parts of one tensor, to which the replays add. Several ranks sum that tensor after their last pass,
without DDP, which learns of gradients from autograd.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from finetune.data.packs import MAX_PADDING_SEGMENT
from finetune.engine.kernels import by_document
from finetune.engine.sharding import shard
from finetune.engine.training.recompute import EVERYTHING_KEPT
from finetune.errors import RunError
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

ALIGNMENT = 64  # elements between the beginnings of two gradients: vectorized kernels want 16 bytes
LENGTHS = "packed_seq_lengths"  # of the documents, as Unsloth's decoder gets them, on the host
BOUNDS, LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")  # as transformers' gets them
SETTINGS = (type(None), bool, int, float, str)  # what a recording takes for granted


def why_not(trainer: Any) -> str | None:
    """Why the passes of an `SFTTrainer` cannot be recorded, as far as its settings tell; None if they may be."""
    args = trainer.args
    if args.device.type != "cuda":
        return "there is no GPU"
    if trainer.layout.packs.pack_length is None:
        return "rows are not packed: the shapes of micro-batches differ"
    if trainer.context.size > 1:
        return "GPUs share each row"
    if trainer.sharded:
        return "the model is sharded"
    if trainer.statistics.expert_load is not None:
        return "the experts of a mixture get other numbers of tokens in each pass"
    if args.fp16:
        return "float16 scales its losses"
    if trainer.recomputation != EVERYTHING_KEPT:
        return (
            "activations are computed again in the backward pass (training.gradient_checkpointing: auto keeps them if "
            "they fit)"
        )
    if (why := by_document.carries_state(trainer.model)) is not None:
        return why
    full = getattr(trainer.model, "peft_config", None) is None
    if full and args.world_size > 1:
        return "DDP reduces the gradients of full fine-tuning during the backward pass"
    if full and trainer.stack.backend == "unsloth":
        return "the layers that Unsloth compiles for full fine-tuning look for the documents on the host"
    if any(isinstance(one, torch.nn.modules.dropout._DropoutNd) and one.p for one in trainer.model.modules()):
        return "dropout draws other numbers in each pass: the results could not be compared"
    return None


class FlatGradients:
    """The gradients of trained weights, each a part of one tensor per dtype: zeroed, and summed over ranks, at once."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [one for one in parameters if one.requires_grad]
        places, sizes = [], dict[tuple[torch.dtype, torch.device], int]()
        for one in self.parameters:
            kind = one.dtype, one.device
            places.append(sizes.get(kind, 0))
            sizes[kind] = places[-1] + -(-one.numel() // ALIGNMENT) * ALIGNMENT
        self.tensors = {
            (dtype, device): torch.zeros(size, dtype=dtype, device=device) for (dtype, device), size in sizes.items()
        }
        for one, place in zip(self.parameters, places, strict=True):
            whole = self.tensors[one.dtype, one.device]
            one.grad = whole[place : place + one.numel()].view_as(one)
        self._places = [(one.data_ptr(), one.grad.data_ptr()) for one in self.parameters if one.grad is not None]

    def check(self) -> None:
        """Check that weights and gradients are where the graphs read and write them. Every step ends with it.

        Raises:
            RunError: an optimizer or a callback has put others in their place.
        """
        for one, places in zip(self.parameters, self._places, strict=True):
            if (one.data_ptr(), None if one.grad is None else one.grad.data_ptr()) != places:
                raise RunError(
                    "The optimizer or a callback has replaced weights or gradients, which CUDA graphs read and write "
                    "where they were. Set training.cuda_graphs: false."
                )

    def zero(self, set_to_none: bool = True) -> None:
        """In place of a model's `zero_grad`: the gradients stay where they are."""
        for whole in self.tensors.values():
            whole.zero_()

    def average(self) -> None:
        """The mean over ranks, as DDP computes it: divided before the sum."""
        for whole in self.tensors.values():
            whole.div_(distributed.ranks().world_size)
            torch.distributed.all_reduce(whole)

    def free(self) -> None:
        """Leave the weights without gradients."""
        for one in self.parameters:
            one.grad = None


class CudaRecorder:
    """Records what a function launches on the GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run a function as it is recorded, twice: kernels are compiled and chosen at first.

        Raises:
            RuntimeError: it waits for the GPU, which a graph cannot.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What replays the launches of a function."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins the loader's batches, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


def stand_in(lengths: torch.Tensor, most: int, longest: int) -> torch.Tensor:
    """Lengths of as many tokens as these, int32 [most]: the longest that there may be first, for kernels are chosen by
    the longest and by the mean; and empty documents last."""
    left, found = int(lengths.sum()), list[int]()
    for one in [longest, *lengths.tolist()]:
        found.append(min(one, left))
        left -= found[-1]
    found = [one for one in found if one]
    return torch.tensor(found + [0] * (most - len(found)), dtype=torch.int32)


class Boundaries:
    """Where the documents of a micro-batch begin, on the device, for as many documents as there may be. `arguments` are
    those of the decoder."""

    def __init__(self, most: int, longest: int, given: Mapping[str, Any], device: torch.device) -> None:
        """
        Args:
            most: documents of a micro-batch, with the segments of padding.
            longest: tokens of one.
            given: the decoder's arguments for a micro-batch, with `LENGTHS` or with `BOUNDS`.
        """
        self._most, self._longest = most, longest
        self.arguments: JsonObject
        if LENGTHS in given:
            from unsloth.utils.packing import get_packed_info_from_kwargs

            lengths = stand_in(given[LENGTHS], most, longest).to(device)
            self.arguments = {LENGTHS: lengths}
            # Unsloth keeps what it finds for the tensor that it was given last: while passes are recorded, this one.
            _, bounds, _ = get_packed_info_from_kwargs(self.arguments, device)  # type: ignore[misc]
            self._tensors = [lengths, bounds]
        else:
            lengths = stand_in(given[BOUNDS[0]].diff().cpu(), most, longest)
            bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]).to(device)
            self.arguments = dict.fromkeys(BOUNDS, bounds) | dict.fromkeys(LONGEST, longest)
            self._tensors = [bounds]

    def fill(self, given: Mapping[str, Any]) -> bool:
        """Take those of a micro-batch, without waiting for the device. False if it has more or longer documents."""
        if LENGTHS in self.arguments:
            lengths = given[LENGTHS]
            if len(lengths) > self._most or int(lengths.max()) > self._longest:
                return False
            staged = torch.zeros(2 * self._most + 1, dtype=torch.int32, pin_memory=self._tensors[0].is_cuda)
            own, bounds = staged[: self._most], staged[self._most :]
            own[: len(lengths)] = lengths
            torch.cumsum(own, 0, dtype=torch.int32, out=bounds[1:])
            self._tensors[0].copy_(own, non_blocking=True)
            self._tensors[1].copy_(bounds, non_blocking=True)
            return True
        bounds, whole = given[BOUNDS[0]], self._tensors[0]
        if len(bounds) > len(whole) or given[LONGEST[0]] > self._longest:
            return False
        whole[: len(bounds)].copy_(bounds)
        whole[len(bounds) :] = bounds[-1]
        return True


class DecoderGraphs:
    """The recorded passes of a trainer's decoder over micro-batches of one shape."""

    def __init__(self, trainer: Any, recorder: Any = None) -> None:
        """From now on the decoder records its next pass with gradients, and replays it in those that follow, those
        of evaluations included. Passes of another shape are launched.

        Args:
            trainer: an `SFTTrainer`.
            recorder: CudaRecorder by default.
        """
        self._trainer, self._recorder = trainer, recorder or CudaRecorder()
        self._decoder = shard.base_model(trainer.model).get_decoder()
        self._device = trainer.args.device
        self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        self._boundaries: Boundaries | None = None
        self._inputs: JsonObject | None = None  # of the recording
        self._output: Any = None
        self._gradient: torch.Tensor | None = None  # of the last hidden state
        self._columns: list[tuple[Any, Any]] = []
        self.bytes = 0  # of the GPU's memory that the recording holds
        self.replays = 0
        self.gradients = FlatGradients(trainer.model.parameters())
        self._own = vars(self._decoder).get("forward")
        self._launch = self._decoder.forward
        self._decoder.forward = self._call

    def remove(self) -> None:
        """Leave the decoder and the gradients as they were."""
        if self._own is None:
            del self._decoder.forward
        else:
            self._decoder.forward = self._own
        self.gradients.free()
        self._output = self._inputs = None

    def _call(self, *args: Any, **given: Any) -> Any:
        learns = torch.is_grad_enabled()
        if args or (not self._decoder.training if learns else self._inputs is None):
            return self._launch(*args, **given)
        if self._inputs is None:
            self._record(given)
        if not self._fill(given):
            return self._launch(**given)
        self.replays += 1
        hidden = _Replay.apply(self._anchor, self) if learns else self.replay_forward()
        return type(self._output)(last_hidden_state=hidden)

    def _record(self, given: JsonObject) -> None:
        held = torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
        inputs = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
        if LENGTHS in given or BOUNDS[0] in given:
            layout = self._trainer.layout
            _, most = layout.packs.segments(self._trainer.args.per_device_train_batch_size)
            longest = max(int(layout.rows.lengths.max()), MAX_PADDING_SEGMENT)
            self._boundaries = Boundaries(most, longest, given, self._device)
            inputs |= self._boundaries.arguments
        for name, one in given.items():
            if isinstance(one, torch.Tensor) and one.requires_grad:
                raise NotImplementedError(f"{name} has a gradient")
            if not isinstance(one, (torch.Tensor, *SETTINGS)):
                raise NotImplementedError(f"{name} is a {type(one).__name__}")
        modules = list(self._trainer.model.modules())
        for module in modules:
            vars(module).pop("columns_in_room", None)  # else the zeros beside them would not be written in the graph

        def compute() -> None:
            with _casts_not_kept(self._device.type):
                self._output = self._launch(**inputs)

        def differentiate() -> None:
            torch.autograd.backward(self._output.last_hidden_state, self._gradient)

        def both() -> None:
            compute()
            if self._gradient is None:
                self._gradient = torch.zeros_like(self._output.last_hidden_state)
            differentiate()

        self._recorder.warm_up(both)
        self._forward = self._recorder.record(compute)
        self._backward = self._recorder.record(differentiate)
        # Evaluations and samples write other columns.
        self._columns = [(module, module.columns_in_room) for module in modules if hasattr(module, "columns_in_room")]
        # A model may drop a table that the graphs read, as Unsloth does with its rotations when it meets a longer row.
        tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
        self._read = [one for one in tensors if one.device == self._device]
        self.bytes = torch.cuda.memory_reserved(self._device) - held if self._device.type == "cuda" else 0
        self._inputs = inputs

    def _fill(self, given: JsonObject) -> bool:
        """Take a micro-batch. False if it is of another shape than the recorded one."""
        assert self._inputs is not None
        if given.keys() != self._inputs.keys():
            return False
        own = () if self._boundaries is None else self._boundaries.arguments
        copied = []
        for name, one in given.items():
            recorded = self._inputs[name]
            if name in own:
                continue
            if not isinstance(one, torch.Tensor):
                if one != recorded:
                    return False
            elif not isinstance(recorded, torch.Tensor) or one.shape != recorded.shape or one.requires_grad:
                return False
            else:
                copied.append((recorded, one))
        if self._boundaries is not None and not self._boundaries.fill(given):
            return False
        for recorded, one in copied:
            recorded.copy_(one, non_blocking=True)
        return True

    def replay_forward(self) -> torch.Tensor:
        """The last hidden state, without a gradient."""
        self._forward()
        for module, columns in self._columns:
            module.columns_in_room = columns
        return self._output.last_hidden_state.detach()  # type: ignore[no-any-return]

    def replay_backward(self, gradient: torch.Tensor) -> None:
        """Add the gradients of the weights, from that of the last hidden state."""
        assert self._gradient is not None
        self._gradient.copy_(gradient)
        self._backward()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the trainer trains with them."""
        trainer, model = self._trainer, self._trainer.model
        accelerator = trainer.accelerator
        prepare = accelerator.prepare_model
        if trainer.args.world_size > 1:  # as DDP does when it takes a model
            for one in self.gradients.parameters:
                torch.distributed.broadcast(one.data, 0)
        # Without DDP, and without moving the model, which would copy its gradients.
        accelerator.prepare_model = lambda model, *_, **__: prepare(model, False, True)
        model.zero_grad = self.gradients.zero
        trainer.graphs = self
        try:
            yield
        finally:
            trainer.graphs, accelerator.prepare_model = None, prepare
            del model.zero_grad
            self.remove()


def _casts_not_kept(device: str) -> contextlib.AbstractContextManager[object]:
    """Context in which autocast casts a weight in each pass: a cast that is kept would not follow the weight."""
    torch.clear_autocast_cache()
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)


class _Replay(torch.autograd.Function):
    """A hidden state whose backward pass is a replay. Autograd calls it for the sake of `anchor`."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graphs: DecoderGraphs) -> torch.Tensor:
        ctx.graphs = graphs
        return graphs.replay_forward()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.graphs.replay_backward(gradients[0])
        return None, None
