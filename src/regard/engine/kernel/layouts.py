"""The structures and numbers of kernels/ that Python reads. Written by `make kernels`; do not edit."""

from __future__ import annotations

INTERFACE_VERSION = 14
TILE_QUERIES = 96
PART_KEYS = 1024
MARGIN = 64
CLIPPED_MARGIN = 16
CHUNK = 48
FEW = 4
MOST_ROWS = 1024
SPARE_KEYS = 12

#: The fields of each structure in their order, by their types.
LAYOUTS = {
    "Call": (
        ("int64_t", "B H G I J D E"),
        ("float", "scale cap"),
        ("int64_t", "low high"),
        ("pointer", "before after sink"),
        ("int64_t", "diagonals_stride"),
        ("pointer", "clipped"),
        ("int64_t", "first_clipped clipped_width"),
        ("pointer", "tiles segments allowed"),
        ("int64_t", "allowed_head_stride num_tiles tiles_have_entries dropped_words seed query_position key_position"),
        ("float", "kept_factor"),
        ("Tensor", "query key value output"),
        ("pointer", "direction logsumexp entropy distance top_weights top_keys"),
        ("int64_t", "shift"),
        ("pointer", "packed_keys packed_values counters partials"),
        ("Tensor", "grad_output"),
        ("pointer", "delta packed_value_panels packed_key_rows"),
        ("int64_t", "num_parts"),
        ("pointer", "grad_query grad_key grad_value grad_before grad_after grad_clipped grad_direction grad_entropy"),
        ("pointer", "grad_distance"),
    ),
    "Statistics": (
        ("pointer", "entropy distance received cells cell_maxima row_cells column_cells column_starts top_weights"),
        ("pointer", "top_keys numbers number_sums chosen chosen_mass chosen_entropy offsets diagonals offset_sums"),
        ("pointer", "later same key_tokens query_tokens"),
        ("int64_t", "cell_rows cell_columns k shift num_numbers num_chosen num_offsets first_sum num_sums num_parts"),
    ),
    "Similarity": (
        ("pointer", "queries ordinary products received"),
        ("int64_t", "num_parts"),
    ),
    "Choice": (
        ("pointer", "ids"),
        ("int64_t", "ids_entry_stride ids_head_stride K num_heads"),
        ("pointer", "starts"),
        ("int64_t", "starts_entry_stride num_blocks shared gathers"),
    ),
    "Index": (
        ("pointer", "weights ids"),
        ("int64_t", "k no_id"),
    ),
    "Greatest": (
        ("pointer", "numbers ids"),
        ("int64_t", "num_rows length k no_id"),
        ("pointer", "counters"),
    ),
    "Sums": (
        ("int64_t", "B H G n W E averages"),
        ("Tensor", "query key value output"),
        ("pointer", "denominators state counters"),
    ),
    "Recurrence": (
        ("int64_t", "B H n W E"),
        ("Tensor", "query key value address decay output written"),
        ("pointer", "before state states counters"),
        ("Tensor", "grad_output grad_query grad_key grad_value grad_address grad_decay"),
        ("pointer", "grad_state"),
    ),
    "Transport": (
        ("int64_t", "B H n W num_rows until"),
        ("Tensor", "query key address decay"),
        ("pointer", "tokens weights counters"),
    ),
    "Rotation": (
        ("int64_t", "B H n D num_pairs interleaved direction"),
        ("Tensor", "vectors output"),
        ("pointer", "positions frequencies counters"),
    ),
}
