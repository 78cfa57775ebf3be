"""Records which converted weights took part in the last step, in eager mode and in graphs.

A step is a forward of the model and the backward that follows. Each step is a new object, and every conversion refers to the last
step in which it multiplied. Nothing needs to be cleared between steps, and a graph contains no step number that would change.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from moxie.converted import Conversion


class Clock:
    """The steps of one model."""

    def __init__(self) -> None:
        self.step: list = []  # only its identity matters; a list, because torch.compile can make a new one without a guard
        self.saw_backward = False  # whether backward has run in this step; if so, the next forward begins a new step

    def begin(self) -> None:
        self.step = []
        if not torch.compiler.is_compiling():
            self.saw_backward = False


def _in_backward() -> bool:
    """Whether backward is running. Activation checkpointing repeats forwards during backward; these begin no step."""
    return torch._C._current_graph_task_id() != -1


class BeginStep:
    """A forward pre-hook of the model that begins a new step."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not _in_backward():
            self.clock.begin()


class NoteForward:
    """A forward hook that records the step for a module that is converted as a whole, such as GroupedExperts."""

    def __init__(self, conversion: "Conversion"):
        self.conversion = conversion

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
        note(self.conversion, out)


# Whether some graph has a product inside activation checkpointing. torch.compile allows no side effects there, so such products
# keep no record.
_hidden = [False]


def has_hidden_products() -> bool:
    return _hidden[0]


@torch.compiler.assume_constant_result
def _may_record() -> bool:
    """Whether the code that torch.compile is tracing may assign to attributes of Python objects."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    inside = len(InstructionTranslator.current_tx().output.tracers) > 1
    _hidden[0] = _hidden[0] or inside
    return not inside


def note(conversion: "Conversion", y: Tensor) -> None:
    """Records that a product used this converted weight, with the result y. Backward is recorded when the gradient of y arrives.

    A graph can only repeat assignments after each run, not register hooks: if it was traced with gradients, its backward is
    recorded together with its forward.
    """
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling() and _may_record():
            conversion.used = True
            conversion.forward_step = conversion.clock.step
            if y.requires_grad:
                conversion.backward_step = conversion.clock.step
        return
    clock = conversion.clock
    if clock.saw_backward and not _in_backward():
        clock.begin()  # a wrapper calls parts of the model and not the model's forward, whose pre-hook begins steps
    conversion.used = True
    conversion.forward_step = clock.step
    if y.requires_grad and y.grad_fn is not None:
        y.grad_fn.register_prehook(_NoteBackward(conversion))


class _NoteBackward:
    def __init__(self, conversion: "Conversion"):
        self.conversion, self.step = conversion, conversion.clock.step

    def __call__(self, grads: Any) -> None:
        self.conversion.backward_step = self.step
        self.conversion.clock.saw_backward = True
