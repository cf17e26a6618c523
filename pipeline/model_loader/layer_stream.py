"""Running a checkpoint's decoder layers one after another: one layer's weights in memory at a time.

The model's own forward runs for a few sequences at a time, with every layer but one replaced: so each layer
gets the masks, positions and other arguments that its architecture passes. The statistics of a layer's inputs
are computed in `calibration.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ...base.errors import UserError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..conventions.declared import stored_weights
from ..machine.malloc_trim import return_freed_memory
from .hidden_states import AnyStates, HiddenStates, StatesPart
from .input_rounding import InputRounding
from .skeleton import build_skeleton
from .weight_loader import LayoutPicker, WeightLoader
from .weight_map import Assignment

SEQUENCES_AT_ONCE = 8

Slot = tuple[str, int | None]
"""A parameter of the model, and the index of an expert's slice in it, if it holds experts."""


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """What the classes around any decoder read of its output."""

    cache_params: None = None
    """Read by Mamba's and xLSTM's classes."""
    state: None = None
    """Read by RWKV's class."""


class LayerStream:
    """A model whose weights are on disk, and the hidden states of `sequences` int64 [S, T] within it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        sequences: Tensor,
        device: torch.device,
        spill: Path | None = None,
        round_inputs: bool = False,
    ):
        """round_inputs: whether to round inputs as the checkpoint says; otherwise a checkpoint that quantizes
        activations is refused
        """
        self.checkpoint, self.sequences, self.device = checkpoint, sequences, device
        few = len(sequences) <= SEQUENCES_AT_ONCE
        # In two parts at least, so that one can be held aside while rounding is learned from the other.
        self._at_once = max(1, (len(sequences) + 1) // 2) if few else SEQUENCES_AT_ONCE
        self.model = build_skeleton(checkpoint, default_dtype(checkpoint), device)
        self.model.config._experts_implementation = "eager"
        stored = stored_weights(checkpoint)
        self.loader = WeightLoader(
            checkpoint,
            stored,
            self.model,
            device,
            LayoutPicker(None, None),
            rounded_elsewhere=round_inputs,
        )
        self.rounding = InputRounding() if round_inputs else None
        self.assignments = self.loader.assignments()
        self.layers = _decoder_layers(checkpoint, self.model)
        self._forwards = {name: layer.forward for name, layer in self.layers.items()}
        for assignment in self.assignments:
            if not any(assignment.target.startswith(f"{name}.") for name in self.layers):
                self._place(assignment)
        hidden = self.model.config.get_text_config().hidden_size
        self._spill, self._shape = spill, (*sequences.shape, hidden)
        self._as_output = self._form_of_outputs()
        self.states = self.empty_states()
        first = next(iter(self.layers))
        for start in self.starts():
            self.states.write(start, self._through(start, first, lambda hidden, *_, **__: hidden)[0])

    def starts(self) -> range:
        """Return the index of the first sequence in each batch of sequences."""
        return range(0, len(self.sequences), self._at_once)

    def place(self, name: str) -> nn.Module:
        """Read the weights of the layer of that name, and return the layer."""
        for assignment in self.assignments:
            if assignment.target.startswith(f"{name}."):
                self._place(assignment)
        return self.layers[name]

    def _place(self, assignment: Assignment) -> None:
        self.loader.place_plain(assignment)
        if self.rounding is not None and (parts := self.loader.inputs_of(assignment)):
            self.rounding.add(assignment.target, self.model.get_parameter(assignment.target), parts)

    def tensor_of(self, target: str) -> str | None:
        """Return the checkpoint's tensor that is stored exactly as this parameter; None if there is no single
        one."""
        return next(
            (
                assignment.names[0]
                for assignment in self.assignments
                if assignment.target == target and assignment.converter is None and len(assignment.names) == 1
            ),
            None,
        )

    def put(self, tensor: str, value: Tensor) -> None:
        """Put `value`, a tensor in the checkpoint's form, into the layer, whose weights are loaded."""
        for assignment in self.assignments:
            if assignment.names == [tensor]:
                parameter = self.model.get_parameter(assignment.target)
                parameter.data = value.to(parameter)

    def drop(self, name: str) -> None:
        """Free the layer's memory. Raise UserError if a layer whose inputs must be rounded was never
        called.
        """
        if self.rounding is not None and (missed := self.rounding.drop(f"{name}.")):
            raise UserError(
                f"{self.checkpoint.source}: {missed[0]} rounds its input too, but "
                f"{type(self.model).__name__} does not call it as a linear layer, so it cannot be "
                "calibrated one layer at a time"
            )
        for module in self.layers[name].modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta")
                    module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        return_freed_memory()

    def run(self, name: str, start: int, states: AnyStates | None = None) -> Tensor:
        """Return the layer's outputs for the sequences from `start` on: [n, T, hidden] on the device.

        states: hidden states to use in place of the stream's own
        """
        hidden = self.hidden(start, states)
        forward = self._forwards[name]
        return self._through(start, name, lambda _, *args, **kwargs: forward(hidden, *args, **kwargs))[0]

    def after(self, name: str, states: AnyStates | None = None) -> HiddenStates:
        """Return the hidden states after the layer, computed with its present weights."""
        after = self.empty_states()
        self.carry(name, states, after)
        return after

    def carry(self, name: str, states: AnyStates | None, after: AnyStates) -> None:
        """Write the hidden states after the layer to `after`, which may be the same object as `states`."""
        for start in self.starts():
            after.write(start, self.run(name, start, states))

    def advance(self, name: str) -> None:
        """Run the layer, so that its outputs become the stream's hidden states."""
        self.states = self.after(name)

    def outputs(self, states: AnyStates | None = None) -> Iterator[Tensor]:
        """Yield the inputs of the output projection, [n, T, hidden] each; after the last layer."""
        first = next(iter(self.layers))
        for start in self.starts():
            hidden = self.hidden(start, states)
            yield self._through(start, first, lambda _, *__, hidden=hidden, **___: hidden)[1]

    def predictions(self, hidden: Tensor) -> Tensor:
        """Return logits [n, T, vocab] from the tensors of `outputs`, with the model's own scaling and
        capping.
        """
        self.loader.tie()
        decoder = self.model.get_decoder()
        ids = self.sequences[: len(hidden)].to(self.device)
        try:
            decoder.forward = lambda *_, **__: _DecoderOutput(last_hidden_state=hidden)
            with self.rounding or nullcontext():
                return self.model(input_ids=ids, use_cache=False).logits
        finally:
            # Its class has the real one; one of its own would be a cycle that keeps the embeddings in memory.
            del decoder.forward

    def hidden(self, start: int, states: AnyStates | None = None) -> Tensor:
        """Return the next layer's inputs for the sequences from `start` on: [n, T, hidden] on the device."""
        return (states or self.states).read(start, start + self._at_once).to(self.device)

    def empty_states(self) -> HiddenStates:
        """Make room for the hidden states of the sequences."""
        return HiddenStates(self._shape, self.model.dtype, self._spill, self.device)

    def variants(self, count: int) -> list[StatesPart]:
        """Make room for this many variants of the states, all in one file if there are many."""
        each, *rest = self._shape
        shape = (count * each, *rest)
        whole = HiddenStates(shape, self.model.dtype, self._spill, self.device, for_variants=True)
        return [StatesPart(whole, index * each, each) for index in range(count)]

    def _form_of_outputs(self) -> Callable[[Tensor], Any]:
        """Return a layer's output in the form that the model expects: hidden states, or hidden states and
        something else, as in Bamba and Falcon-H1. Raise UserError if the model expects any other form.
        """
        first, why = next(iter(self.layers)), ""
        for form in OUTPUT_FORMS:
            self._as_output = form
            try:
                output = self._through(0, first, lambda hidden, *_, **__: hidden)[1]
            except Exception as error:
                why = why or f": {type(error).__name__}: {error}"
                continue
            if output.ndim == 3 and len(output) == min(self._at_once, len(self.sequences)):
                return form
        raise UserError(
            f"{self.checkpoint.source}: the layers of {type(self.model).__name__} cannot be calibrated one "
            f"by one; use a recipe that reads no text{why}"
        )

    def _through(self, start: int, name: str, forward: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        """Return the output of `forward` in place of layer `name`, and the decoder's output as if it were the
        last layer.
        """
        found: list[Tensor] = []
        # Layers keep the functions below: these must not hold the stream, or its model outlives it.
        as_output = self._as_output

        def taken(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not isinstance(output, Tensor):
                found.append(output[0])
                return output
            found.append(output)
            return as_output(output)

        def passed(hidden: Tensor, *_: Any, **__: Any) -> Any:
            return as_output(hidden)

        for other, layer in self.layers.items():
            layer.forward = taken if other == name else passed  # type: ignore[method-assign]
        ids = self.sequences[start : start + self._at_once].to(self.device)
        with self.rounding or nullcontext():
            output = self.model.get_decoder()(ids, use_cache=False).last_hidden_state
        return found[0], output


def _alone(hidden: Tensor) -> Tensor:
    return hidden


def _first_of_two(hidden: Tensor) -> tuple[Tensor, None]:
    return hidden, None


OUTPUT_FORMS: tuple[Callable[[Tensor], Any], ...] = (_alone, _first_of_two)
"""What a model may expect of a layer, made from its hidden states."""


def _decoder_layers(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, nn.Module]:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(
            f"{checkpoint.source}: {type(model).__name__} has no list of decoder layers to calibrate one by "
            "one; use a recipe that reads no text"
        )
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(layer)]: layer for layer in layers}


class InputObserver(TorchFunctionMode):
    """Intercepts every `F.linear` of a layer, and recognizes its linear layer or expert by the weight's
    address.
    """

    def __init__(self, name: str, layer: nn.Module, see: Callable[[Slot, Tensor], None]):
        super().__init__()
        self.see = see
        self.slots: dict[int, Slot] = {}
        for leaf, parameter in layer.named_parameters():
            self.slots[parameter.data_ptr()] = (f"{name}.{leaf}", None)
            if parameter.dim() == 3:
                for expert, part in enumerate(parameter):
                    self.slots[part.data_ptr()] = (f"{name}.{leaf}", expert)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            slot = self.slots.get(args[1].data_ptr())
            if slot is not None and args[0].numel():
                self.see(slot, args[0])
        return func(*args, **(kwargs or {}))
