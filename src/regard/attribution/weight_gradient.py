"""Weight x gradient of every layer: w_ij dL/dw_ij = w_ij (g_i . v_j).

Barkan et al. 2021 (arXiv:2204.11073) use its positive part, Chefer et al. 2021 (arXiv:2103.15679) the mean of that.
"""

from __future__ import annotations

from regard.attribution.request import AttributionRequest, MethodResult, received
from regard.attribution.traced_run import traced_run

FORMULA = "w_ij dL/dw_ij = w_ij (g_i . v_j), g_i = dL/do_i"


def weight_gradient(request: AttributionRequest) -> MethodResult:
    """The change of L, to first order, if each weight is removed.

    The relevance of a token is the sum over layers, heads and queries of its links as a key: what is lost, to first
    order, if no query reads it in any layer. It is large for tokens whose values pull L up.
    """
    run = traced_run(request.model, request.inputs, request.target.number, request.layers, with_recurrent=True)
    maps = {name: call.links() for name, call in run.calls.items()}
    return MethodResult(dict(maps), received(request, run.calls, maps), run.number, run.parts, run.missing)
