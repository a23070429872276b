"""Written by scripts/catalog_types.py."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from regard.attention import Attention
from regard.catalog.entry import CatalogEntry as CatalogEntry
from regard.composites import Grouped, Nystrom, Sum, ThroughLatents
from regard.encodings import Scaling

__all__ = ["CatalogEntry", "mechanism", "mechanisms"]

def mechanisms() -> dict[str, CatalogEntry]: ...

class _Alibi(CatalogEntry):
    @staticmethod
    def build(num_heads: int, is_causal: bool = True) -> Attention: ...

class _AxialRope(CatalogEntry):
    @staticmethod
    def build(
        coordinates: Tensor | None,
        head_dim: int,
        base: float = 10_000.0,
        alternate: bool = False,
    ) -> Attention: ...

class _Bahdanau(CatalogEntry):
    @staticmethod
    def build(
        query_dim: int,
        key_dim: int,
        hidden: int = 256,
        bias: bool = False,
    ) -> Attention: ...

class _Bigbird(CatalogEntry):
    @staticmethod
    def build(
        length: int,
        block: int = 64,
        window_blocks: int = 3,
        global_blocks: int = 1,
        num_random: int = 3,
        seed: int = 0,
    ) -> Attention: ...

class _BlockLocal(CatalogEntry):
    @staticmethod
    def build(
        size: int = 64,
        before: int = 0,
        after: int = 0,
        is_causal: bool = False,
    ) -> Attention: ...

class _Cosine(CatalogEntry):
    @staticmethod
    def build(factor: float = 10.0) -> Attention: ...

class _Cross(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _DeepseekSparse(CatalogEntry):
    @staticmethod
    def build(k: int = 2048) -> Attention: ...

class _Deltanet(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _Differential(CatalogEntry):
    @staticmethod
    def build(
        head_dim: int,
        initial: float = 0.8,
        is_causal: bool = True,
    ) -> Sum: ...

class _Dilated(CatalogEntry):
    @staticmethod
    def build(size: int = 64, dilation: int = 2, is_causal: bool = False) -> Attention: ...

class _Fire(CatalogEntry):
    @staticmethod
    def build(
        num_heads: int,
        hidden: int = 32,
        threshold: int = 512,
        fixed_length: int | None = None,
    ) -> Attention: ...

class _Forgetting(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _GatedDeltanet(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _GatedOutput(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _Gla(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _GroupedQuery(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _Hgrn2(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _Infini(CatalogEntry):
    @staticmethod
    def build(num_heads: int, size: int = 2048) -> Sum: ...

class _Kerple(CatalogEntry):
    @staticmethod
    def build(
        num_heads: int,
        power: bool = False,
        is_causal: bool = True,
    ) -> Attention: ...

class _KimiDelta(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _LearnedPositions(CatalogEntry):
    @staticmethod
    def build(length: int, head_dim: int) -> Attention: ...

class _Lightning(CatalogEntry):
    @staticmethod
    def build(num_heads: int, layer: int = 0, num_layers: int = 2) -> Attention: ...

class _Linear(CatalogEntry):
    @staticmethod
    def build(is_causal: bool = True) -> Attention: ...

class _Linformer(CatalogEntry):
    @staticmethod
    def build(
        length: int,
        num_groups: int = 256,
        is_shared: bool = False,
    ) -> Grouped: ...

class _LongConvolution(CatalogEntry):
    @staticmethod
    def build(num_heads: int, length: int = 2048) -> Attention: ...

class _Longformer(CatalogEntry):
    @staticmethod
    def build(size: int = 257, global_positions: Sequence[int] = (0,)) -> Attention: ...

class _Longrope(CatalogEntry):
    @staticmethod
    def build(
        factors: Sequence[float],
        extension: float = 1.0,
        trained_length: int = 4096,
    ) -> Attention: ...

class _LuongConcat(CatalogEntry):
    @staticmethod
    def build(
        query_dim: int,
        key_dim: int,
        hidden: int = 256,
        bias: bool = False,
    ) -> Attention: ...

class _LuongDot(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _LuongGeneral(CatalogEntry):
    @staticmethod
    def build(query_dim: int, key_dim: int, num_heads: int = 1) -> Attention: ...

class _Mamba1(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int, skip: bool = True) -> Attention: ...

class _Mamba2(CatalogEntry):
    @staticmethod
    def build(num_heads: int, skip: bool = True) -> Attention: ...

class _Masked(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _MinimaxSparse(CatalogEntry):
    @staticmethod
    def build(size: int = 128, k: int = 16, local: int = 1) -> Attention: ...

class _Mla(CatalogEntry):
    @staticmethod
    def build(
        num_heads: int,
        query_dim: int,
        key_dim: int,
        rotary_dim: int = 0,
        base: float = 10_000.0,
    ) -> Attention: ...

class _Moba(CatalogEntry):
    @staticmethod
    def build(size: int = 512, k: int = 3) -> Attention: ...

class _MultiHead(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _MultiQuery(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _MultimodalRope(CatalogEntry):
    @staticmethod
    def build(
        coordinates: Tensor | None,
        sections: Sequence[int],
        base: float = 10_000.0,
        alternate: bool = False,
    ) -> Attention: ...

class _Neighborhood(CatalogEntry):
    @staticmethod
    def build(
        shape: Sequence[int],
        size: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
    ) -> Attention: ...

class _Nsa(CatalogEntry):
    @staticmethod
    def build(
        size: int = 64,
        k: int = 16,
        near: int = 512,
        initial: int = 1,
        local: int = 2,
    ) -> Sum: ...

class _Nystrom(CatalogEntry):
    @staticmethod
    def build(num_landmarks: int = 64, iterations: int = 6) -> Nystrom: ...

class _Perceiver(CatalogEntry):
    @staticmethod
    def build(head_dim: int, num_heads: int, num_latents: int = 64) -> ThroughLatents: ...

class _Performer(CatalogEntry):
    @staticmethod
    def build(
        head_dim: int,
        num_features: int = 256,
        seed: int = 0,
        is_causal: bool = False,
    ) -> Attention: ...

class _PooledKeys(CatalogEntry):
    @staticmethod
    def build(
        size: int = 16,
        stride: int | None = None,
        is_causal: bool = True,
    ) -> Grouped: ...

class _Pope(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int, base: float = 10_000.0) -> Attention: ...

class _PositionTemperature(CatalogEntry):
    @staticmethod
    def build(floor: int = 8192, factor: float = 0.1) -> Attention: ...

class _QkNorm(CatalogEntry):
    @staticmethod
    def build(
        head_dim: int,
        num_heads: int = 1,
        num_key_value_heads: int | None = None,
        joint: bool = False,
    ) -> Attention: ...

class _Reformer(CatalogEntry):
    @staticmethod
    def build(
        num_buckets: int = 64,
        rounds: int = 4,
        seed: int = 0,
        is_causal: bool = True,
    ) -> Attention: ...

class _Retnet(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int) -> Attention: ...

class _Rope(CatalogEntry):
    @staticmethod
    def build(
        head_dim: int,
        base: float = 10_000.0,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ) -> Attention: ...

class _Rwkv6(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int) -> Attention: ...

class _Rwkv7(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int) -> Attention: ...

class _ScalableSoftmax(CatalogEntry):
    @staticmethod
    def build(num_heads: int) -> Attention: ...

class _SelfAttention(CatalogEntry):
    @staticmethod
    def build() -> Attention: ...

class _SharedPrefix(CatalogEntry):
    @staticmethod
    def build(prefix: int, lengths: Sequence[int]) -> Attention: ...

class _Shaw(CatalogEntry):
    @staticmethod
    def build(head_dim: int, reach: int = 16) -> Attention: ...

class _ShortConvolution(CatalogEntry):
    @staticmethod
    def build(num_heads: int, size: int = 3) -> Attention: ...

class _Sigmoid(CatalogEntry):
    @staticmethod
    def build(offset: float | None = None, is_causal: bool = True) -> Attention: ...

class _Sinks(CatalogEntry):
    @staticmethod
    def build(num_heads: int) -> Attention: ...

class _Sinusoidal(CatalogEntry):
    @staticmethod
    def build(base: float = 10_000.0) -> Attention: ...

class _SlidingTiles(CatalogEntry):
    @staticmethod
    def build(
        shape: Sequence[int],
        tile: int | Sequence[int],
        size: int | Sequence[int],
    ) -> Attention: ...

class _SlidingWindow(CatalogEntry):
    @staticmethod
    def build(size: int = 256, is_causal: bool = True) -> Attention: ...

class _SoftLookup(CatalogEntry):
    @staticmethod
    def build(temperature: float = 1.0) -> Attention: ...

class _Softcap(CatalogEntry):
    @staticmethod
    def build(cap: float = 50.0, is_causal: bool = True) -> Attention: ...

class _Sparse(CatalogEntry):
    @staticmethod
    def build(alpha: float = 1.5) -> Attention: ...

class _T5(CatalogEntry):
    @staticmethod
    def build(
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> Attention: ...

class _TokenShift(CatalogEntry):
    @staticmethod
    def build(num_heads: int) -> Attention: ...

class _TopK(CatalogEntry):
    @staticmethod
    def build(k: int = 32) -> Attention: ...

class _TransformerXl(CatalogEntry):
    @staticmethod
    def build(num_heads: int, head_dim: int, base: float = 10_000.0) -> Attention: ...

class _Tree(CatalogEntry):
    @staticmethod
    def build(parents: Sequence[int], context: int = 0) -> Attention: ...

class _Yarn(CatalogEntry):
    @staticmethod
    def build(
        head_dim: int,
        factor: float,
        trained_length: int,
        base: float = 10_000.0,
    ) -> Attention: ...

@overload
def mechanism(name: Literal["alibi"]) -> _Alibi: ...
@overload
def mechanism(name: Literal["axial_rope"]) -> _AxialRope: ...
@overload
def mechanism(name: Literal["bahdanau"]) -> _Bahdanau: ...
@overload
def mechanism(name: Literal["bigbird"]) -> _Bigbird: ...
@overload
def mechanism(name: Literal["block_local"]) -> _BlockLocal: ...
@overload
def mechanism(name: Literal["cosine"]) -> _Cosine: ...
@overload
def mechanism(name: Literal["cross"]) -> _Cross: ...
@overload
def mechanism(name: Literal["deepseek_sparse"]) -> _DeepseekSparse: ...
@overload
def mechanism(name: Literal["deltanet"]) -> _Deltanet: ...
@overload
def mechanism(name: Literal["differential"]) -> _Differential: ...
@overload
def mechanism(name: Literal["dilated"]) -> _Dilated: ...
@overload
def mechanism(name: Literal["fire"]) -> _Fire: ...
@overload
def mechanism(name: Literal["forgetting"]) -> _Forgetting: ...
@overload
def mechanism(name: Literal["gated_deltanet"]) -> _GatedDeltanet: ...
@overload
def mechanism(name: Literal["gated_output"]) -> _GatedOutput: ...
@overload
def mechanism(name: Literal["gla"]) -> _Gla: ...
@overload
def mechanism(name: Literal["grouped_query"]) -> _GroupedQuery: ...
@overload
def mechanism(name: Literal["hgrn_2"]) -> _Hgrn2: ...
@overload
def mechanism(name: Literal["infini"]) -> _Infini: ...
@overload
def mechanism(name: Literal["kerple"]) -> _Kerple: ...
@overload
def mechanism(name: Literal["kimi_delta"]) -> _KimiDelta: ...
@overload
def mechanism(name: Literal["learned_positions"]) -> _LearnedPositions: ...
@overload
def mechanism(name: Literal["lightning"]) -> _Lightning: ...
@overload
def mechanism(name: Literal["linear"]) -> _Linear: ...
@overload
def mechanism(name: Literal["linformer"]) -> _Linformer: ...
@overload
def mechanism(name: Literal["long_convolution"]) -> _LongConvolution: ...
@overload
def mechanism(name: Literal["longformer"]) -> _Longformer: ...
@overload
def mechanism(name: Literal["longrope"]) -> _Longrope: ...
@overload
def mechanism(name: Literal["luong_concat"]) -> _LuongConcat: ...
@overload
def mechanism(name: Literal["luong_dot"]) -> _LuongDot: ...
@overload
def mechanism(name: Literal["luong_general"]) -> _LuongGeneral: ...
@overload
def mechanism(name: Literal["mamba_1"]) -> _Mamba1: ...
@overload
def mechanism(name: Literal["mamba_2"]) -> _Mamba2: ...
@overload
def mechanism(name: Literal["masked"]) -> _Masked: ...
@overload
def mechanism(name: Literal["minimax_sparse"]) -> _MinimaxSparse: ...
@overload
def mechanism(name: Literal["mla"]) -> _Mla: ...
@overload
def mechanism(name: Literal["moba"]) -> _Moba: ...
@overload
def mechanism(name: Literal["multi_head"]) -> _MultiHead: ...
@overload
def mechanism(name: Literal["multi_query"]) -> _MultiQuery: ...
@overload
def mechanism(name: Literal["multimodal_rope"]) -> _MultimodalRope: ...
@overload
def mechanism(name: Literal["neighborhood"]) -> _Neighborhood: ...
@overload
def mechanism(name: Literal["nsa"]) -> _Nsa: ...
@overload
def mechanism(name: Literal["nystrom"]) -> _Nystrom: ...
@overload
def mechanism(name: Literal["perceiver"]) -> _Perceiver: ...
@overload
def mechanism(name: Literal["performer"]) -> _Performer: ...
@overload
def mechanism(name: Literal["pooled_keys"]) -> _PooledKeys: ...
@overload
def mechanism(name: Literal["pope"]) -> _Pope: ...
@overload
def mechanism(name: Literal["position_temperature"]) -> _PositionTemperature: ...
@overload
def mechanism(name: Literal["qk_norm"]) -> _QkNorm: ...
@overload
def mechanism(name: Literal["reformer"]) -> _Reformer: ...
@overload
def mechanism(name: Literal["retnet"]) -> _Retnet: ...
@overload
def mechanism(name: Literal["rope"]) -> _Rope: ...
@overload
def mechanism(name: Literal["rwkv_6"]) -> _Rwkv6: ...
@overload
def mechanism(name: Literal["rwkv_7"]) -> _Rwkv7: ...
@overload
def mechanism(name: Literal["scalable_softmax"]) -> _ScalableSoftmax: ...
@overload
def mechanism(name: Literal["self_attention"]) -> _SelfAttention: ...
@overload
def mechanism(name: Literal["shared_prefix"]) -> _SharedPrefix: ...
@overload
def mechanism(name: Literal["shaw"]) -> _Shaw: ...
@overload
def mechanism(name: Literal["short_convolution"]) -> _ShortConvolution: ...
@overload
def mechanism(name: Literal["sigmoid"]) -> _Sigmoid: ...
@overload
def mechanism(name: Literal["sinks"]) -> _Sinks: ...
@overload
def mechanism(name: Literal["sinusoidal"]) -> _Sinusoidal: ...
@overload
def mechanism(name: Literal["sliding_tiles"]) -> _SlidingTiles: ...
@overload
def mechanism(name: Literal["sliding_window"]) -> _SlidingWindow: ...
@overload
def mechanism(name: Literal["soft_lookup"]) -> _SoftLookup: ...
@overload
def mechanism(name: Literal["softcap"]) -> _Softcap: ...
@overload
def mechanism(name: Literal["sparse"]) -> _Sparse: ...
@overload
def mechanism(name: Literal["t5"]) -> _T5: ...
@overload
def mechanism(name: Literal["token_shift"]) -> _TokenShift: ...
@overload
def mechanism(name: Literal["top_k"]) -> _TopK: ...
@overload
def mechanism(name: Literal["transformer_xl"]) -> _TransformerXl: ...
@overload
def mechanism(name: Literal["tree"]) -> _Tree: ...
@overload
def mechanism(name: Literal["yarn"]) -> _Yarn: ...
@overload
def mechanism(name: str) -> CatalogEntry: ...
