"""Which converted weights took part in the last step: the record that every product keeps, in eager mode and in graphs.

A step is a forward of the model and the backward that follows. Each step is an object of its own, and a record points at the
step it belongs to: so nothing is cleared, and a graph holds no number that would change from step to step.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from moxie.converted import Conversion


class Clock:
    """The steps of one model."""

    def __init__(self) -> None:
        self.step: list = []  # its identity is all that counts; torch.compile makes a new list without a guard on it
        self.saw_backward = False  # in this step; the next forward begins another

    def begin(self) -> None:
        self.step = []
        if not torch.compiler.is_compiling():
            self.saw_backward = False


def _in_backward() -> bool:
    """Whether backward runs, which repeats a forward that is checkpointed."""
    return torch._C._current_graph_task_id() != -1


class BeginStep:
    """A forward pre-hook of the model: its forward begins a step."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not _in_backward():
            self.clock.begin()


class NoteForward:
    """A forward hook of a module that multiplies as a whole, such as GroupedExperts."""

    def __init__(self, conversion: "Conversion"):
        self.conversion = conversion

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
        note(self.conversion, out)


# Whether some graph has a product inside a part that torch.compile lets change nothing outside itself (activation
# checkpointing): such products keep no record.
_hidden = [False]


def has_hidden_products() -> bool:
    return _hidden[0]


@torch.compiler.assume_constant_result
def _may_record() -> bool:
    """Asked while a graph is traced: whether the code may change an object of Python."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    inside = len(InstructionTranslator.current_tx().output.tracers) > 1
    _hidden[0] = _hidden[0] or inside
    return not inside


def note(conversion: "Conversion", y: Tensor) -> None:
    """Records that the conversion multiplied, giving y; its backward is recorded when the gradient of y arrives.

    In a graph only assignments are made, which torch.compile repeats after each run, and a graph that is made with gradients
    counts as one whose backward runs.
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
        clock.begin()  # the model's own forward was not called, as by wrappers that call one of its parts
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
