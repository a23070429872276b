/* Recurrent layers with one decay a token, and the delta rule: S_t = d_t S_{t-1} - k_t (w_t^T d_t S_{t-1}) + k_t v_t^T.

   Without addresses w it is linear attention with decays (RetNet, Mamba-2); with them DeltaNet and Gated DeltaNet. A
   chunk of CHUNK tokens first computes what each token writes, n_t = v_t - w_t^T d_t S_{t-1}: a triangular system, row
   by row. Then outputs and the next state are sums of n as those of values in sums.c:

       n_t = v_t - since_t w_t^T S - sum over s < t of (w_t . k_s) decay_ts n_s
       o_t = since_t q_t^T S + sum over s <= t of (q_t . k_s) decay_ts n_s

   S is the state before the chunk, since_t its decay until t, decay_ts the decay after s until t. Decays are products
   of numbers in [0, 1], so they never overflow. A unit of work is a head, because its chunks follow each other. */
#include "rows.h"

/* Tokens whose pairs are computed: a multiple of ROWS for every vector width. */
#define CHUNK 48
/* Room for the panels of a chunk. */
#define CHUNK_KEYS 64

typedef struct {
    int64_t B, H, n, W, E;
    Tensor query, key, value, address, decay, output; /* (B, H, n, ...); query and address may be null */
    float *state;                                     /* (B, H, W, E): before, and then after all tokens */
    int64_t *counters;                                /* one number, 0 at the start */
} Recurrence;

/* The scratch memory of a thread. `decays`: of the keys of the chunk until the present token. */
typedef struct {
    int64_t key_width, value_width; /* of rows: whole groups of channels, whole registers */
    float *state, *panels, *keys, *written, *columns, *pairs, *between, *sums, *buffer, *decays;
} Workspace;

static Workspace workspace_in(const Recurrence *call, float *memory) {
    Workspace w;
    w.key_width = rounded_up(call->W, ROWS);
    w.value_width = rounded_up(call->E, LANES);
    w.state = memory;
    w.panels = w.state + w.key_width * w.value_width;
    w.keys = w.panels + CHUNK_KEYS * call->W;
    w.written = w.keys + CHUNK * w.key_width;
    w.columns = w.written + CHUNK * w.value_width;
    w.pairs = w.columns + ROWS * call->W;
    w.between = w.pairs + ROWS * CHUNK_KEYS;
    w.sums = w.between + ROWS * CHUNK_KEYS;
    w.buffer = w.sums + ROWS * w.value_width;
    w.decays = w.buffer + MOST_COLUMNS * call->W;
    return w;
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(recurrence_workspace)(const Recurrence *call) {
    const Workspace w = workspace_in(call, 0);
    return (w.key_width + CHUNK + ROWS) * w.value_width + (CHUNK_KEYS + ROWS + MOST_COLUMNS) * call->W +
           CHUNK * w.key_width + 2 * ROWS * CHUNK_KEYS + CHUNK_KEYS;
}

/* Packs the keys and values of the chunk that begins at token `start`. */
static void start_chunk(const Recurrence *call, const Workspace *w, int64_t entry, int64_t head, int64_t start) {
    const int64_t stop = min(start + CHUNK, call->n);
    for (int64_t key = 0; key < rounded_up(CHUNK, PANEL); key += PANEL)
        pack_columns(&call->key, entry, head, start + key, PANEL, stop, call->W, w->buffer, w->panels + key * call->W);
    pack_rows(&call->key, entry, head, start, CHUNK, stop, call->W, w->key_width, w->keys);
    pack_rows(&call->value, entry, head, start, CHUNK, stop, call->E, w->value_width, w->written);
    for (int64_t key = 0; key < CHUNK_KEYS; key++) w->decays[key] = 0;
}

/* The decays of ROWS tokens: of the keys of the chunk until each, and of the state until each (`since`, from `whole`
   on, which is that of all tokens so far). */
static float decay_rows(const Recurrence *call, const Workspace *w, int64_t entry, int64_t head, int64_t token,
                        int64_t group, float whole, float *since) {
    for (int64_t r = 0; r < ROWS; r++) {
        float decay = 1;
        if (token + r < call->n) read_vector(&call->decay, place(&call->decay, entry, head, token + r), 1, &decay);
        for (int64_t key = 0; key < CHUNK_KEYS; key += LANES) store(w->decays + key, load(w->decays + key) * decay);
        w->decays[group + r] = 1;
        for (int64_t key = 0; key < CHUNK_KEYS; key += LANES)
            store(w->between + r * CHUNK_KEYS + key, load(w->decays + key));
        since[r] = whole *= decay;
    }
    return whole;
}

/* sums = factors * (rows of t)^T S + sum over the keys below `num_keys` of pairs * what they wrote. The pairs of row r
   are signs * dot products * decays, of keys before the token `group + r`, and of itself if `with_own`. */
static void read_rows(const Recurrence *call, const Workspace *w, const Tensor *t, int64_t entry, int64_t head,
                      int64_t start, int64_t group, int64_t num_keys, int with_own, float sign, const float *since) {
    const int64_t width = w->value_width, stop = min(start + CHUNK, call->n), last = group + ROWS;
    float factors[ROWS];
    pack_columns(t, entry, head, start + group, ROWS, stop, call->W, w->buffer, w->columns);
    dot_products(w->columns, w->panels, call->W, 0, rounded_up(last, PANEL), w->pairs, CHUNK_KEYS);
    for (int r = 0; r < ROWS; r++) {
        float *pairs = w->pairs + r * CHUNK_KEYS;
        for (int64_t key = 0; key < rounded_up(last, PANEL); key += LANES)
            store(pairs + key, load(pairs + key) * load(w->between + r * CHUNK_KEYS + key) * sign);
        for (int64_t key = group + r + with_own; key < last; key++) pairs[key] = 0;
        factors[r] = sign * since[r];
    }
    for (int64_t n = 0; n < ROWS * width; n++) w->sums[n] = 0;
    add_product(w->columns, 1, ROWS, w->state, width, call->W, w->sums, width, 0);
    add_product(w->pairs, CHUNK_KEYS, 1, w->written, width, num_keys, w->sums, width, factors);
}

/* What ROWS tokens write: their values less what they erase. Each sees what the tokens of the group before it wrote. */
static void write_group(const Workspace *w, int64_t group) {
    const int64_t width = w->value_width;
    for (int64_t r = 0; r < ROWS; r++) {
        float *row = w->written + (group + r) * width;
        for (int64_t e = 0; e < width; e += LANES) {
            Vector sum = load(row + e) + load(w->sums + r * width + e);
            for (int64_t s = 0; s < r; s++)
                sum += load(w->written + (group + s) * width + e) * w->pairs[r * CHUNK_KEYS + group + s];
            store(row + e, sum);
        }
    }
}

/* ROWS tokens of a chunk from its row `group` on; the decay of the state until the last of them. */
static float run_group(const Recurrence *call, const Workspace *w, int64_t entry, int64_t head, int64_t start,
                       int64_t group, float whole) {
    const int64_t num_rows = min(ROWS, call->n - start - group);
    float since[ROWS];
    whole = decay_rows(call, w, entry, head, start + group, group, whole, since);
    if (call->address.data) {
        read_rows(call, w, &call->address, entry, head, start, group, group, 0, -1, since);
        write_group(w, group);
    }
    if (call->query.data) {
        read_rows(call, w, &call->query, entry, head, start, group, group + ROWS, 1, 1, since);
        for (int64_t r = 0; r < num_rows; r++)
            write_vector(&call->output, place(&call->output, entry, head, start + group + r), call->E,
                         w->sums + r * w->value_width);
    }
    return whole;
}

/* Copies the state of a head into rows of whole registers, or back. */
static void copy_state(const Recurrence *call, const Workspace *w, int64_t unit, int back) {
    float *state = call->state + unit * call->W * call->E;
    if (!back)
        for (int64_t n = 0; n < w->key_width * w->value_width; n++) w->state[n] = 0;
    for (int64_t c = 0; c < call->W; c++)
        for (int64_t e = 0; e < call->E; e++)
            if (back)
                state[c * call->E + e] = w->state[c * w->value_width + e];
            else
                w->state[c * w->value_width + e] = state[c * call->E + e];
}

/* Decays the state by `whole`, and adds what `num_keys` tokens of the chunk wrote, decayed until its end. */
static void add_to_state(const Workspace *w, float whole, int64_t num_keys) {
    const int64_t width = w->value_width;
    for (int64_t key = 0; key < num_keys; key++)
        for (int64_t c = 0; c < w->key_width; c++) w->keys[key * w->key_width + c] *= w->decays[key];
    for (int64_t c = 0; c < w->key_width; c += ROWS) {
        float *state = w->state + c * width;
        for (int64_t n = 0; n < ROWS * width; n++) w->sums[n] = 0;
        add_product(w->keys + c, 1, w->key_width, w->written, width, num_keys, w->sums, width, 0);
        for (int64_t n = 0; n < ROWS * width; n++) state[n] = state[n] * whole + w->sums[n];
    }
}

static void run_head(const Recurrence *call, const Workspace *w, int64_t unit) {
    const int64_t entry = unit / call->H, head = unit % call->H;
    copy_state(call, w, unit, 0);
    for (int64_t start = 0; start < call->n; start += CHUNK) {
        float whole = 1;
        int64_t group = 0;
        start_chunk(call, w, entry, head, start);
        for (; group < CHUNK && start + group < call->n; group += ROWS)
            whole = run_group(call, w, entry, head, start, group, whole);
        add_to_state(w, whole, group);
    }
    copy_state(call, w, unit, 1);
}

/* All outputs and states: computes heads until none is left. */
EXPORT void NAMED(recurrence)(const Recurrence *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    const int64_t units = call->B * call->H;
    for (int64_t unit = next_unit(call->counters); unit < units; unit = next_unit(call->counters))
        run_head(call, &w, unit);
}
