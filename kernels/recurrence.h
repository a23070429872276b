/* Recurrent layers with one decay a token, and the delta rule: S_t = d_t S_{t-1} - k_t (w_t^T d_t S_{t-1}) + k_t v_t^T,
   o_t = S_t^T q_t.

   Without addresses w it is linear attention with decays (RetNet, Mamba-2); with them DeltaNet and Gated DeltaNet.
   Token t writes n_t = v_t - w_t^T d_t S_{t-1}, so S_t = d_t S_{t-1} + k_t n_t^T. Decays between tokens are products of
   numbers in [0, 1], so they never overflow. A unit of work is a head, because its chunks follow each other. */
#ifndef RECURRENCE_H
#define RECURRENCE_H

#include "rows.h"

/* Tokens whose pairs are computed: a multiple of ROWS for every vector width. */
#define CHUNK 48
/* Room for the panels of a chunk. */
#define CHUNK_KEYS 64

/* `before` is the state before all tokens, `state` the one after them. `written` (n) and `states`, those before each
   chunk, are null, or are kept for the backward pass. It turns `grad_state`, the gradient of the state after all
   tokens, into that of the state before them. */
typedef struct {
    int64_t B, H, n, W, E;
    Tensor query, key, value, address, decay, output, written; /* (B, H, n, ...); query and address may be null */
    const float *before;                                       /* (B, H, W, E) */
    float *state, *states;                                     /* (B, H, W, E) and (B, H, chunks, W, E) */
    int64_t *counters;                                         /* one number, 0 at the start */
    Tensor grad_output, grad_query, grad_key, grad_value, grad_address;
    Tensor grad_decay; /* of the logarithms of the decays, or null */
    float *grad_state; /* (B, H, W, E) */
} Recurrence;

/* The state of a head (W, E) as `num_rows` rows of whole registers, padded with zeros. */
INLINE void read_state(const Recurrence *call, const float *from, int64_t num_rows, int64_t width, float *state) {
    for (int64_t n = 0; n < num_rows * width; n++) state[n] = 0;
    for (int64_t c = 0; c < call->W; c++)
        for (int64_t e = 0; e < call->E; e++) state[c * width + e] = from[c * call->E + e];
}

#endif
