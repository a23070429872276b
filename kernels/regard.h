/* The interface of the kernels: what a caller passes, and what each function computes.

   One call computes a share of the work. Several threads call the same function with the same arguments; each takes
   the next unit of work from a counter until none is left. So the result does not depend on the number of threads.
   The library allocates nothing: every buffer, the scratch memory too, belongs to the caller. */
#ifndef REGARD_H
#define REGARD_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __attribute__((dllexport))
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define JOIN_(name, variant) name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define NAMED(name) JOIN(regard_##name, VARIANT)

/* Raise it when a structure, a function or the levels change. The loader compares it with its own number. */
#define INTERFACE_VERSION 14

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Most queries in a tile: a multiple of the rows of every register tile. */
#define TILE_QUERIES 96
/* Keys of a part of decoding: a multiple of the keys whose scores are held at once. */
#define PART_KEYS 1024
/* Elements that may be read before the first and behind the last of `before`, `after` and `allowed`. */
#define MARGIN 64
/* Equal numbers at each end of a row of `clipped`: as many as the widest vector has. */
#define CLIPPED_MARGIN 16

/* A tensor of four axes, in any strides (counted in elements): batch, head, token, channel. */
typedef struct {
    void *data;
    int64_t strides[4];
    int64_t dtype;
} Tensor;

/* Queries [first_query, stop_query) of a batch entry (-1: of every entry), and their segments of keys. */
typedef struct {
    int64_t entry, first_query, stop_query, first_segment, stop_segment;
} Tile;

/* Keys [first_key, stop_key). `allowed` is the index of a byte for the first query and the first key, or -1: all pairs
   of the segment are allowed. Rows of bytes are `stride` apart. */
typedef struct {
    int64_t first_key, stop_key, allowed, stride;
} Segment;

/* One call of attention: softmax(after(cap(scale q.k + before + clipped))) v; with a direction, direction . tanh(q + k)
   for q.k.

   Query i may attend to key j if low <= j - i < high, a segment of its tile holds j, and its byte allows it. `before`
   and `after` hold a number for each head and each j - i, or are null; index 0 is j - i = 1 - I. `clipped` holds a
   number for each row and each j - i from `first_clipped` on, or is null; its last and first numbers are also those of
   all distances beyond. */
typedef struct {
    int64_t B, H, G, I, J, D, E;
    float scale, cap; /* cap 0: none */
    int64_t low, high;
    const float *before, *after, *sink; /* sink: one number a head, or null */
    int64_t diagonals_stride;           /* from one head to the next; 0 if all heads share the numbers */
    const float *clipped;               /* (B, H, I, clipped_width) */
    int64_t first_clipped, clipped_width;
    const Tile *tiles;
    const Segment *segments;
    const uint8_t *allowed;
    int64_t allowed_head_stride;
    int64_t num_tiles, tiles_have_entries;
    /* Dropout: the weights whose hash, of 32 bits, is below `dropped_words` are dropped; 0: none. */
    int64_t dropped_words, seed, query_position, key_position; /* positions of the first query and key */
    float kept_factor;                                         /* of kept weights: 1 / (1 - rate) */
    Tensor query, key, value, output;
    const float *direction; /* of additive scores, with MARGIN zeros behind it; null: dot products */
    float *logsumexp;       /* (B, H, I) */
    /* Statistics of each row that `forward` computes beside the output, (B, H, I), or null: see folds.h. */
    float *entropy, *distance, *top_weights;
    int64_t *top_keys;
    int64_t shift; /* the position of the first key minus that of the first query */
    float *packed_keys, *packed_values;
    int64_t *counters; /* of packing, of packed blocks, of tiles: 0 at the start */
    float *partials;   /* of decoding: `decode_partials` floats; its counters are `decode_counters` numbers */
    /* of backward */
    Tensor grad_output;
    const float *delta; /* (B, H, I): sum over channels of grad_output * output */
    float *packed_value_panels, *packed_key_rows;
    int64_t num_parts;               /* parts of the queries that sum gradients of keys on their own */
    float *grad_query;               /* (B, H, I, D) */
    float *grad_key, *grad_value;    /* (B, G, parts, `backward_length`, padded D or E), 0 at the start */
    float *grad_before, *grad_after; /* (B, H, parts, I + J - 1 + 2 MARGIN), 0 at the start, or null */
    float *grad_clipped;             /* (B, H, I, clipped_width), 0 at the start, or null */
    float *grad_direction;           /* (B, G, parts, padded D), 0 at the start */
    /* Gradients of `entropy` and `distance`, or null. Then `delta` is the sum over keys of w_ij c_ij: see folds.h. */
    const float *grad_entropy, *grad_distance;
} Call;

/* A function of the kernels that every member of a team of threads calls, each with its own scratch memory. */
typedef struct {
    void *function;
    const void *call, *fields; /* its first and third argument; without a third one `fields` is null */
    void *scratch;
    int64_t scratch_bytes; /* of one member */
    int (*thread_number)(void);
} Team;

#endif
