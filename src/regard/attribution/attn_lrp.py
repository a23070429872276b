"""AttnLRP (Achtibat et al. 2024, arXiv:2402.05602): layer-wise relevance propagation as a modified gradient.

The relevance of a tensor x is x . g, where g is a gradient with these rules:

- a linear layer and a sum keep their gradient (the epsilon rule with epsilon 0);
- a norm divides by its standard deviation, which is a constant (identity rule);
- an activation f(x) has the derivative f(x) / x (identity rule);
- a product x y of two tensors of the text gives half of its relevance to each (uniform rule): weights times values, and
  the gate of a gated layer; queries times keys halve once more;
- a softmax keeps its gradient: this is its Taylor decomposition.

Every node of the graph must have one of these rules; a model with another is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.attribution.request import DECODER, INPUT, AttributionRequest, MethodResult
from regard.attribution.traced_run import Rules, traced_run
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32
from regard.hf.calls import AttentionCall
from regard.maps import GradientMap

FORMULA = "R(w_ij) = w_ij (g_i . v_j) / 2, R(token) = x . g, with gradients of the rules of AttnLRP"
#: Names of graph nodes (without Backward0) that are linear in what passes through them.
LINEAR = """Add Sub Neg View UnsafeView ReshapeAlias Transpose T Permute Expand Slice Select Index IndexSelect Gather
Cat Stack Split SplitWithSizes Unbind Chunk Clone Contiguous ToCopy Copy CopySlices Squeeze Unsqueeze Sum Mean
Embedding AsStrided Alias Roll Flip Repeat MaskedFill Where ConstantPadNd Unfold Narrow Detach AccumulateGrad"""
#: Activations of torch that work element by element; those of transformers all do.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip


def attn_lrp(request: AttributionRequest) -> MethodResult:
    """The relevance of each weight, R(w_ij) = w_ij (g_i . v_j) / 2, and of each token, x . g of its embedding.

    Embeddings of positions and biases keep their own share, so the tokens need not sum to L.
    """
    rules = _LrpRules(request.model)
    run = traced_run(request.model, request.inputs, request.target.number, request.layers, rules)
    maps = {name: GradientMap(call.weights, call.gradient, call.value / 2) for name, call in run.calls.items()}
    texts = (INPUT, DECODER) if request.has_decoder else (INPUT,)
    # an encoder embeds its tokens before the decoder does, so the order is that of `texts`; further calls are left out
    pairs = zip(texts, rules.embedded, run.gradients, strict=False)
    relevance = {text: (at_least_float32(x.detach()) * g).sum(-1).float().cpu() for text, x, g in pairs}
    return MethodResult(dict(maps), relevance, run.number, run.parts, run.missing)


class _LrpRules(Rules):
    """Gives norms and activations their rules while the model runs, and products theirs in the graph.

    `embedded` are the embeddings (B, n, C) in the order of their calls: the tensors whose gradients are wanted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.embedded: list[Tensor] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        """A block in which norms and activations have their rules, and the outputs of embeddings are kept."""
        with ExitStack() as stack:
            for module in self.model.modules():
                rule = _rule(module)
                if rule is not None:
                    stack.callback(module.register_forward_hook(rule).remove)
            for module in _embeddings(self.model):
                stack.callback(module.register_forward_hook(self._keep).remove)
            yield

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A hook of an embedding: its output is kept, and the graph ends there, because relevance stops at tokens."""
        output = output.detach().requires_grad_()
        self.embedded.append(output)
        return output

    def before_gradients(self, number: Tensor, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        """Let products halve the gradients that pass through them, and refuse nodes without a rule.

        `number` is L, and `calls` are the calls of attention, each with its output.

        In attention: weights times values gives half to the values; of the other half, which reaches the scores,
        queries and keys get one half each. So their gradients are divided by 2, 4 and 4.
        """
        inside = {output.grad_fn: call for call, output in calls if output.grad_fn is not None}
        for call, _ in calls:
            if call.options.get("softcap"):
                self._refuse("caps scores (softcap) inside its attention")
            for tensor, share in ((call.query, 4), (call.key, 4), (call.value, 2)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient, share=share: gradient / share)
        for node in _nodes(number, inside):
            kind = _kind(node)
            if kind == "Mul" and sum(_is_of_text(other) for other, _ in node.next_functions) == 2:
                node.register_prehook(lambda gradients: tuple(None if g is None else g / 2 for g in gradients))
            elif not _is_linear(kind, node):
                self._refuse(f"computes {kind} outside of its norms, activations and attention")

    def _refuse(self, reason: str) -> NoReturn:
        """Refuse the model because of an operation without a rule."""
        raise RegardError(
            f"attribute(method='attn-lrp'): {type(self.model).__name__} {reason}, and AttnLRP has no rule for it here. "
            "method='weight-gradient' and 'chefer' take any model."
        )

    def tensors(self) -> list[Tensor]:
        return self.embedded


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """The modules that embed the tokens; encoder and decoder may have one each, with one table."""
    try:
        first = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        first = None
    if not isinstance(first, nn.Embedding):
        raise RegardError(
            f"attribute(method='attn-lrp'): {type(model).__name__} has no get_input_embeddings, so the relevance of "
            "tokens has no end. Give a model of transformers that reads token ids."
        )
    return [part for part in model.modules() if isinstance(part, nn.Embedding) and part.weight is first.weight]


def _nodes(number: Tensor, inside: dict[Any, AttentionCall]) -> Iterator[Any]:
    """All nodes of the graph of L (`number`), without those inside the attention calls.

    `inside` maps the last node of a call to the call. The walk continues at the tensors that the call was given.
    """
    waiting, visited = [number.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node in inside:
            call = inside[node]
            given = (call.query, call.key, call.value, call.mask, *call.options.values())
            waiting += [tensor.grad_fn for tensor in given if isinstance(tensor, Tensor)]
            continue
        yield node
        waiting += [other for other, _ in node.next_functions]


def _kind(node: Any) -> str:
    """The operation of a node: AddBackward0 -> Add."""
    return node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _is_of_text(node: Any) -> bool:
    """Whether a factor depends on the text.

    Constants have no node, and views of a parameter are a chain of nodes that ends at it. A node with several inputs
    counts as one of the text.
    """
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    is_parameter = node is not None and _kind(node) == "AccumulateGrad" and isinstance(node.variable, nn.Parameter)
    return node is not None and not is_parameter


def _is_linear(kind: str, node: Any) -> bool:
    """Whether a node of this kind (`_kind`) is linear in the text.

    A product `Mul` of two factors of the text has its own rule before.
    """
    if kind in ("Mul", "Div"):
        factors = [other for other, _ in node.next_functions]
        return not _is_of_text(factors[1] if kind == "Div" and len(factors) > 1 else None)
    if kind in ("Mm", "Bmm", "Addmm", "Matmul"):  # the last two inputs are the factors; Addmm has its bias before them
        return sum(_is_of_text(other) for other, _ in node.next_functions[-2:]) < 2
    return kind in LINEAR.split()


def _rule(module: nn.Module) -> Callable[..., Tensor] | None:
    """The rule of a norm or an activation, or None.

    A rule is a forward hook: it returns the output with the same numbers and another gradient.
    """
    if isinstance(module, nn.LayerNorm):
        return _layer_norm
    if "RMSNorm" in type(module).__name__ or type(module).__name__.endswith("LayerNorm"):
        return _scaled_norm
    is_activation = type(module).__module__ == "transformers.activations" or isinstance(module, ELEMENTWISE)
    return _activation if is_activation else None


def _with_gradient_of(output: Tensor, linear: Tensor) -> Tensor:
    """The numbers of `output` with the gradient of `linear`. A difference of 0 carries the gradient."""
    return output.detach() + (linear - linear.detach())


def _layer_norm(module: nn.LayerNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The rule of LayerNorm: its standard deviation and its weight are constants. The bias gets no relevance."""
    x, axes = args[0], tuple(range(-len(module.normalized_shape), 0))
    centered = x - x.mean(axes, keepdim=True)
    deviation = (centered.detach().square().mean(axes, keepdim=True) + module.eps).sqrt()
    weight = 1.0 if module.weight is None else module.weight.detach()
    return _with_gradient_of(output, centered / deviation * weight)


def _scaled_norm(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The rule of other norms: y = x c w, where c = 1 / sqrt(mean x^2 + eps) is a constant.

    Classes differ in two ways: x may be centered first, and w may be stored as w - 1. The form that gives the output is
    taken.
    """
    x, weight = args[0], getattr(module, "weight", None)
    given = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in given if isinstance(value, float)), 0.0)
    scales = [torch.ones((), dtype=x.dtype)] if weight is None else [weight.detach(), 1 + weight.detach()]
    for centered in (x, x - x.mean(-1, keepdim=True)):
        constant = (centered.detach().double().square().mean(-1, keepdim=True) + eps).rsqrt()
        for scale in scales:
            wide = at_least_float32(centered)
            linear = (wide * (constant * scale).to(wide.dtype)).to(x.dtype)
            if torch.allclose(linear, output, rtol=max(1e-3, 4 * torch.finfo(x.dtype).eps), atol=1e-5):
                return _with_gradient_of(output, linear)
    raise RegardError(
        f"attribute(method='attn-lrp'): {type(module).__name__} is no norm x / sqrt(mean x^2 + eps) w, and AttnLRP has "
        "no other rule for norms here. method='weight-gradient' and 'chefer' take any model."
    )


def _activation(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The rule of an activation: f(x) has the derivative f(x) / x. At x = 0 the relevance x . g is 0 for any
    derivative.
    """
    x = args[0]
    ratio = output.detach() / torch.where(x == 0, torch.ones_like(x), x).detach()
    return _with_gradient_of(output, x * ratio)
