"""`changing` changes the attention calls of one module while a block runs, before or after its backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from regard.attribution.traced_run import TracedCall
from regard.base.errors import RegardError
from regard.hf.calls import AttentionCall
from regard.hf.capture.transformers_interface import backend_calls
from regard.hf.edited_calls import CallEditor, editors


class CallChange(CallEditor):
    """Changes the calls of one `module`. A subclass overrides `call` or `output`, or both.

    The three methods after them are those of `CallEditor` (hf/edited_calls.py). `num_calls` counts the changed calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.num_calls = module, 0

    def call(self, call: AttentionCall) -> AttentionCall:
        """The call that the backend computes in place of this one."""
        return call

    def output(self, call: AttentionCall, output: Tensor) -> Tensor:
        """The output (B, I, H, E) that the module gets in place of what the backend computed."""
        return output

    def selects(self, module: nn.Module) -> bool:
        return module is self.module

    def edited(self, call: AttentionCall) -> AttentionCall:
        """The call before the backend runs: changed if it is one of `module`."""
        if call.module is not self.module:
            return call
        self.num_calls += 1
        return self.call(call)

    def patched(self, call: AttentionCall, output: Tensor) -> Tensor:
        """The output after the backend has run: changed if the call is one of `module`."""
        return self.output(call, output) if call.module is self.module else output


@contextmanager
def changing(change: CallChange) -> Iterator[None]:
    """A block in which the calls of one module are changed."""
    with backend_calls.replaced(), editors.adding(change):
        yield


def need_backend(method: str, calls: Iterable[TracedCall]) -> None:
    """Refuse attention that does not go through transformers' attention interface: it cannot be changed."""
    for call in calls:
        if not call.is_backend:
            raise RegardError(
                f"attribute(method={method!r}): this method changes attention calls while the model runs, and "
                f"{call.name} does not call transformers' attention interface. method='weight-gradient' and 'chefer' "
                "change nothing."
            )
