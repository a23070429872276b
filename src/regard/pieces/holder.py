"""`HoldsPieces`: the base of modules that hold pieces. A parameter inside a piece is a parameter of the module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from regard.pieces.contents import HELD, learned_parts, with_exchanged
from regard.pieces.piece import Piece


@dataclass(frozen=True, eq=False)
class Held:
    """A piece, or a tuple of pieces, and what was registered of it, by name."""

    piece: Any
    registered: dict[str, nn.Parameter | nn.Module]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: part for name, part in self.registered.items() if isinstance(part, nn.Parameter)}


class HoldsPieces(nn.Module):
    """A module whose attributes may be pieces, or tuples of pieces.

    The one rule: each parameter inside an attribute is registered by its path: `score_factor` or `bias_0.table`.
    If torch exchanges a parameter (`load_state_dict(assign=True)`, `functional_call`, a parametrization), the attribute
    gives the piece around the new one.
    """

    #: Attributes whose pieces are registered under another name.
    registered_as: ClassVar[dict[str, str]] = {}
    #: The attributes that hold pieces, in the order in which their tensors are listed.
    piece_order: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and register the parameters and modules inside a piece or a tuple of pieces.

        A piece with parameters is no plain attribute: it is kept in HELD, and `__getattr__` returns it.
        """
        self._release(name)
        is_piece = isinstance(value, Piece | tuple) and not isinstance(value, nn.Module)
        if not is_piece and value is not None:
            super().__setattr__(name, value)  # type: ignore[arg-type]
            return
        self._modules.pop(name, None)
        learned = learned_parts(self.registered_as.get(name, name), value) if is_piece else {}
        if learned:
            vars(self).setdefault(HELD, {})[name] = held = Held(value, learned)
            for path, part in learned.items():
                owner: dict[str, Any] = self._parameters if isinstance(part, nn.Parameter) else self._modules
                owner[path] = part
            if held.parameters:
                vars(self).pop(name, None)
                return
        if name in self._parameters or name in self._buffers:
            super().__setattr__(name, value)  # type: ignore[arg-type]
        else:
            object.__setattr__(
                self, name, value
            )  # the last line of nn.Module.__setattr__, without the checks before it

    def _release(self, name: str) -> None:
        """Unregister the parameters and modules of the piece that the attribute held before."""
        if name in vars(self).get(HELD, ()):
            for path in vars(self)[HELD].pop(name).registered:
                self._parameters.pop(path, None)
                self._modules.pop(path, None)

    def __getattr__(self, name: str) -> Any:
        """A piece that holds parameters, around the parameters that are registered now."""
        held = vars(self).get(HELD)
        if not held or name not in held:
            return super().__getattr__(name)
        piece, old = held[name].piece, held[name].parameters
        now = {path: getattr(self, path, part) for path, part in old.items()}
        new: dict[Tensor, Tensor] = {part: now[path] for path, part in old.items() if now[path] is not part}
        if new:
            piece = with_exchanged(piece, new)
            if all(type(part) is nn.Parameter for part in now.values()):
                held[name] = Held(piece, held[name].registered | now)
        return piece

    def with_held(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """These entries of `vars(self)` and the pieces that hold parameters, which `vars` has not; by `piece_order`.

        Attributes without a place in `piece_order` come first.
        """
        held = {name: getattr(self, name) for name in vars(self)[HELD] if name not in attributes}
        if not held:
            return attributes
        order = {name: number for number, name in enumerate(self.piece_order)}
        return dict(sorted((attributes | held).items(), key=lambda item: order.get(item[0], -1)))

    def without_registered(self, owned: dict[str, Any]) -> dict[str, Any]:
        """Parameters, buffers or modules, by name, without those registered for a piece that holds parameters."""
        held = {name for slot, each in vars(self)[HELD].items() if slot not in vars(self) for name in each.registered}
        return {name: part for name, part in owned.items() if name not in held}
