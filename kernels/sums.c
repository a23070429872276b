/* Linear attention: sums over earlier keys without a row of weights (Katharopoulos et al. 2020, arXiv:2006.16236).

   The state is sum_j k_j v_j^T of all earlier chunks. A chunk of CHUNK tokens scores its own pairs j <= i, adds what
   the state gives, and then adds its keys to the state. The gradients are sums of the same form: of queries with the
   gradient, values and keys in place of queries, keys and values; of keys and values with time reversed. So this one
   function computes all of them. A unit of work is a key head, because its chunks follow each other. */
#include "rows.h"

/* Tokens whose pairs are scored: a multiple of ROWS for every vector width. */
#define CHUNK 48
/* Room for the panels of a chunk. */
#define CHUNK_KEYS 64

/* output_i = sum over j <= i of (query_i . key_j) value_j, plus query_i times the state before; then the state of all.
   If `averages`, values have one channel more, of ones: its sums are the denominators, and the output is divided. */
typedef struct {
    int64_t B, H, G, n, W, E, averages;
    Tensor query, key, value, output;
    float *denominators; /* (B, H, n), if `averages` */
    float *state;        /* (B, G, W, E + averages): before, and then of all tokens */
    int64_t *counters;   /* one number, 0 at the start */
} Sums;

/* The scratch memory of a thread. */
typedef struct {
    int64_t key_width, value_width; /* of rows: whole groups of channels, whole registers */
    float *state, *panels, *keys, *values, *queries, *pairs, *sums, *buffer;
} Workspace;

static Workspace workspace_in(const Sums *call, float *memory) {
    Workspace w;
    w.key_width = rounded_up(call->W, ROWS);
    w.value_width = rounded_up(call->E + call->averages, LANES);
    w.state = memory;
    w.panels = w.state + w.key_width * w.value_width;
    w.keys = w.panels + CHUNK_KEYS * call->W;
    w.values = w.keys + CHUNK * w.key_width;
    w.queries = w.values + CHUNK * w.value_width;
    w.pairs = w.queries + ROWS * call->W;
    w.sums = w.pairs + ROWS * CHUNK_KEYS;
    w.buffer = w.sums + ROWS * w.value_width;
    return w;
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(sums_workspace)(const Sums *call) {
    const Workspace w = workspace_in(call, 0);
    return (w.key_width + CHUNK + ROWS) * w.value_width + (CHUNK_KEYS + ROWS + MOST_COLUMNS) * call->W +
           CHUNK * w.key_width + ROWS * CHUNK_KEYS;
}

/* Packs the keys and values of the chunk that begins at token `start`. */
static void start_chunk(const Sums *call, const Workspace *w, int64_t entry, int64_t head, int64_t start) {
    const int64_t stop = min(start + CHUNK, call->n);
    for (int64_t key = 0; key < rounded_up(CHUNK, PANEL); key += PANEL)
        pack_columns(&call->key, entry, head, start + key, PANEL, stop, call->W, w->buffer, w->panels + key * call->W);
    pack_rows(&call->key, entry, head, start, CHUNK, stop, call->W, w->key_width, w->keys);
    pack_rows(&call->value, entry, head, start, CHUNK, stop, call->E, w->value_width, w->values);
    if (call->averages)
        for (int64_t n = 0; n < CHUNK; n++) w->values[n * w->value_width + call->E] = start + n < stop ? 1 : 0;
}

static void write_row(const Sums *call, int64_t entry, int64_t head, int64_t token, float *sums) {
    if (call->averages) {
        const float total = sums[call->E], inverse = total == 0 ? 1 : 1 / total;
        call->denominators[(entry * call->H + head) * call->n + token] = total;
        for (int64_t e = 0; e < call->E; e++) sums[e] *= inverse;
    }
    write_vector(&call->output, place(&call->output, entry, head, token), call->E, sums);
}

/* ROWS queries of a chunk from its row `group` on. */
static void run_group(const Sums *call, const Workspace *w, int64_t entry, int64_t head, int64_t start, int64_t group) {
    const int64_t width = w->value_width, stop = min(start + CHUNK, call->n);
    const int64_t num_keys = group + ROWS, num_rows = min(ROWS, stop - start - group);
    pack_columns(&call->query, entry, head, start + group, ROWS, stop, call->W, w->buffer, w->queries);
    dot_products(w->queries, w->panels, call->W, 0, rounded_up(num_keys, PANEL), w->pairs, CHUNK_KEYS);
    for (int r = 0; r < ROWS; r++)
        for (int64_t key = group + r + 1; key < num_keys; key++) w->pairs[r * CHUNK_KEYS + key] = 0;
    for (int64_t n = 0; n < ROWS * width; n++) w->sums[n] = 0;
    add_product(w->pairs, CHUNK_KEYS, 1, w->values, width, num_keys, w->sums, width, width, 0);
    add_product(w->queries, 1, ROWS, w->state, width, call->W, w->sums, width, width, 0);
    for (int64_t r = 0; r < num_rows; r++) write_row(call, entry, head, start + group + r, w->sums + r * width);
}

/* Copies the state of a key head into rows of whole registers, or back. */
static void copy_state(const Sums *call, const Workspace *w, int64_t unit, int back) {
    const int64_t channels = call->E + call->averages;
    float *state = call->state + unit * call->W * channels;
    if (!back)
        for (int64_t n = 0; n < w->key_width * w->value_width; n++) w->state[n] = 0;
    for (int64_t c = 0; c < call->W; c++)
        for (int64_t e = 0; e < channels; e++)
            if (back)
                state[c * channels + e] = w->state[c * w->value_width + e];
            else
                w->state[c * w->value_width + e] = state[c * channels + e];
}

/* Adds the keys of a chunk to the state. They are summed first: a large state would round every single product. */
static void add_to_state(const Sums *call, const Workspace *w) {
    const int64_t width = w->value_width;
    for (int64_t c = 0; c < call->W; c += ROWS) {
        float *state = w->state + c * width;
        for (int64_t n = 0; n < ROWS * width; n++) w->sums[n] = 0;
        add_product(w->keys + c, 1, w->key_width, w->values, width, CHUNK, w->sums, width, width, 0);
        for (int64_t n = 0; n < ROWS * width; n++) state[n] += w->sums[n];
    }
}

static void run_head(const Sums *call, const Workspace *w, int64_t unit) {
    const int64_t entry = unit / call->G, head = unit % call->G, shared = call->H / call->G;
    copy_state(call, w, unit, 0);
    for (int64_t start = 0; start < call->n; start += CHUNK) {
        start_chunk(call, w, entry, head, start);
        for (int64_t h = head * shared; h < (head + 1) * shared; h++)
            for (int64_t group = 0; group < CHUNK && start + group < call->n; group += ROWS)
                run_group(call, w, entry, h, start, group);
        add_to_state(call, w);
    }
    copy_state(call, w, unit, 1);
}

/* Sums of every query: computes key heads until none is left. */
EXPORT void NAMED(sums)(const Sums *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    const int64_t units = call->B * call->G;
    for (int64_t unit = next_unit(call->counters); unit < units; unit = next_unit(call->counters))
        run_head(call, &w, unit);
}
