/* Recurrent layers with one decay a token: outputs and states (recurrence.h says which).

   A chunk of CHUNK tokens first computes what each token writes: a triangular system, row by row. Then outputs and the
   next state are sums of n as those of values in sums.c:

       n_t = v_t - since_t w_t^T S - sum over s < t of (w_t . k_s) decay_ts n_s
       o_t = since_t q_t^T S + sum over s <= t of (q_t . k_s) decay_ts n_s

   S is the state before the chunk, since_t its decay until t, decay_ts the decay after s until t. Few tokens go one by
   one, because a chunk always computes ROWS of them. */
#include "recurrence.h"

/* Up to this number of tokens, each reads and writes the whole state. */
#define FEW 4
/* Vectors of the values that one token computes together, and their channels: at most CHUNK_KEYS. */
#define VECTORS 4
#define BLOCK (VECTORS * LANES)

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
EXPORT int64_t NAMED(recurrence_forward_workspace)(const Recurrence *call) {
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
    add_product(w->columns, 1, ROWS, w->state, width, call->W, w->sums, width, width, 0);
    add_product(w->pairs, CHUNK_KEYS, 1, w->written, width, num_keys, w->sums, width, width, factors);
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

/* Copies the state of a head from rows of whole registers. */
static void write_state(const Recurrence *call, const Workspace *w, float *state) {
    for (int64_t c = 0; c < call->W; c++)
        for (int64_t e = 0; e < call->E; e++) state[c * call->E + e] = w->state[c * w->value_width + e];
}

/* Decays the state by `whole`, and adds what `num_keys` tokens of the chunk wrote, decayed until its end. */
static void add_to_state(const Workspace *w, float whole, int64_t num_keys) {
    const int64_t width = w->value_width;
    for (int64_t key = 0; key < num_keys; key++)
        for (int64_t c = 0; c < w->key_width; c++) w->keys[key * w->key_width + c] *= w->decays[key];
    for (int64_t c = 0; c < w->key_width; c += ROWS) {
        float *state = w->state + c * width;
        for (int64_t n = 0; n < ROWS * width; n++) w->sums[n] = 0;
        add_product(w->keys + c, 1, w->key_width, w->written, width, num_keys, w->sums, width, width, 0);
        for (int64_t n = 0; n < ROWS * width; n++) state[n] = state[n] * whole + w->sums[n];
    }
}

/* Writes what a backward pass reads again: what the tokens of a chunk wrote. */
static void write_written(const Recurrence *call, const Workspace *w, int64_t entry, int64_t head, int64_t start) {
    for (int64_t token = start; token < min(start + CHUNK, call->n); token++)
        write_vector(&call->written, place(&call->written, entry, head, token), call->E,
                     w->written + (token - start) * w->value_width);
}

static void run_chunks(const Recurrence *call, const Workspace *w, int64_t unit, int64_t entry, int64_t head) {
    const int64_t size = call->W * call->E, num_chunks = (call->n + CHUNK - 1) / CHUNK;
    read_state(call, call->before + unit * size, w->key_width, w->value_width, w->state);
    for (int64_t start = 0; start < call->n; start += CHUNK) {
        float whole = 1;
        int64_t group = 0;
        if (call->states) write_state(call, w, call->states + (unit * num_chunks + start / CHUNK) * size);
        start_chunk(call, w, entry, head, start);
        for (; group < CHUNK && start + group < call->n; group += ROWS)
            whole = run_group(call, w, entry, head, start, group, whole);
        if (call->written.data && call->address.data) write_written(call, w, entry, head, start);
        add_to_state(w, whole, group);
    }
    write_state(call, w, call->state + unit * size);
}

/* The vectors of one token, and what it does to BLOCK channels of the values. */
typedef struct {
    const float *query, *key, *address; /* W numbers each */
    float decay, own;                   /* own: query . key */
} Token;

/* From the state `before` to the state `after`, rows of BLOCK channels each; they may be the same. Replaces the values
   by what the token writes, and fills its output. */
INLINE void run_block(const Token *token, int64_t W, const float *before, int64_t before_row, float *after,
                      int64_t after_row, float *value, float *output) {
    Vector erased[VECTORS] = {{0}}, read[VECTORS] = {{0}};
    for (int64_t c = 0; c < W; c++) UNROLL for (int n = 0; n < VECTORS; n++) {
            const Vector state = load(before + c * before_row + n * LANES);
            erased[n] += state * token->address[c];
            read[n] += state * token->query[c];
        }
    UNROLL for (int n = 0; n < VECTORS; n++) {
        erased[n] = load(value + n * LANES) - erased[n] * token->decay;
        store(value + n * LANES, erased[n]);
        store(output + n * LANES, read[n] * token->decay + erased[n] * token->own);
    }
    for (int64_t c = 0; c < W; c++) UNROLL for (int n = 0; n < VECTORS; n++) {
            const Vector state = load(before + c * before_row + n * LANES);
            store(after + c * after_row + n * LANES, state * token->decay + erased[n] * token->key[c]);
        }
}

/* The last `count` channels of the values, which fill no whole block: in rows of their own. */
static void run_last_block(const Token *token, int64_t W, int64_t count, const float *before, int64_t E, float *after,
                           float *rows, float *value, float *output) {
    for (int64_t c = 0; c < W; c++)
        for (int64_t n = 0; n < BLOCK; n++) rows[c * BLOCK + n] = n < count ? before[c * E + n] : 0;
    run_block(token, W, rows, BLOCK, rows, BLOCK, value, output);
    for (int64_t c = 0; c < W; c++)
        for (int64_t n = 0; n < count; n++) after[c * E + n] = rows[c * BLOCK + n];
}

/* One token of a head, from the state `before` to the state `after`. */
static void run_token(const Recurrence *call, const Workspace *w, int64_t entry, int64_t head, int64_t t,
                      const float *before, float *after) {
    const int64_t W = call->W, E = call->E, padded = rounded_up(E, BLOCK);
    float *key = w->keys, *address = key + W, *query = address + W;
    float *value = w->written, *output = value + padded;
    Token token = {query, key, address, 1, 0};
    read_vector(&call->decay, place(&call->decay, entry, head, t), 1, &token.decay);
    pack_rows(&call->key, entry, head, t, 1, call->n, W, W, key);
    pack_rows(&call->address, entry, head, t, 1, call->address.data ? call->n : 0, W, W, address);
    pack_rows(&call->query, entry, head, t, 1, call->query.data ? call->n : 0, W, W, query);
    pack_rows(&call->value, entry, head, t, 1, call->n, E, padded, value);
    for (int64_t c = 0; c < W; c++) token.own += query[c] * key[c];
    int64_t e = 0;
    for (; e + BLOCK <= E; e += BLOCK) run_block(&token, W, before + e, E, after + e, E, value + e, output + e);
    if (e < E) run_last_block(&token, W, E - e, before + e, E, after + e, w->panels, value + e, output + e);
    if (call->query.data) write_vector(&call->output, place(&call->output, entry, head, t), E, output);
}

/* All outputs and states: computes heads until none is left. */
EXPORT void NAMED(recurrence_forward)(const Recurrence *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    const int64_t units = call->B * call->H, size = call->W * call->E;
    for (int64_t unit = next_unit(call->counters); unit < units; unit = next_unit(call->counters)) {
        const int64_t entry = unit / call->H, head = unit % call->H;
        if (call->n > FEW || call->states) {
            run_chunks(call, &w, unit, entry, head);
            continue;
        }
        for (int64_t t = 0; t < call->n; t++)
            run_token(call, &w, entry, head, t, (t ? call->state : call->before) + unit * size,
                      call->state + unit * size);
    }
}
