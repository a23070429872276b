/* The gradients of recurrent layers (recurrence.h), chunk by chunk from the last to the first.

   S is the state before a chunk, G the gradient of the state after it, and n_t what token t wrote. decay_ts is the
   decay after s until t, since_t that of the state until t, rest_s that after s until the end of the chunk, and whole
   that of the whole chunk. With da for the gradient of a:

       dn_s = rest_s G^T k_s + sum[t >= s] (q_t . k_s) decay_ts do_t - sum[t > s] (w_t . k_s) decay_ts dn_t
       dk_s = rest_s G n_s + sum[t >= s] (do_t . n_s) decay_ts q_t - sum[t > s] (dn_t . n_s) decay_ts w_t
       dq_t = since_t S do_t + sum[s <= t] (do_t . n_s) decay_ts k_s
       dw_t = - since_t S dn_t - sum[s < t] (dn_t . n_s) decay_ts k_s
       dv_t = dn_t
       dS = whole G + sum[t] since_t (q_t do_t^T - w_t dn_t^T)

   The first is a triangular system, solved from the last token on. The log-decay of token t is an exponent of every
   vector that reads behind it, and of every earlier vector that is written. So its gradient is <G, S'>, with the state
   S' after the chunk, and the sum over r >= t of q_r . dq_r + w_r . dw_r - k_r . dk_r. */
#include "recurrence.h"

/* The scratch memory of a thread: matrices of whole registers. Vectors of tokens are rows; `..._columns` are transposed
   matrices. A group of ROWS channels may reach into the next row: what it finds there is not used. */
typedef struct {
    int64_t key_width, value_width, num_rows; /* num_rows: of a state, in groups of ROWS */
    float *query, *key, *address, *grad_query, *grad_key, *grad_address;
    float *written, *grad_output, *grad_written, *sums;
    float *state, *grad, *state_columns, *grad_columns;
    float *key_columns, *written_columns; /* CHUNK_KEYS wide, as the pairs of a token and an earlier one */
    float *between, *query_pairs, *address_pairs, *output_pairs, *written_pairs;
    float *since, *rest, *end;
} Workspace;

/* The next part of the scratch memory. */
static float *take(float **memory, int64_t count) {
    float *part = *memory;
    *memory += count;
    return part;
}

static Workspace workspace_in(const Recurrence *call, float *memory) {
    Workspace w;
    w.key_width = rounded_up(call->W, LANES), w.value_width = rounded_up(call->E, LANES);
    w.num_rows = rounded_up(call->W, ROWS);
    const int64_t keys = CHUNK * w.key_width, values = CHUNK * w.value_width, state = w.num_rows * w.value_width;
    const int64_t columns = call->E * w.key_width, pairs = CHUNK * CHUNK_KEYS;
    w.query = take(&memory, keys), w.grad_query = take(&memory, keys);
    w.key = take(&memory, keys), w.grad_key = take(&memory, keys);
    w.address = take(&memory, keys), w.grad_address = take(&memory, keys);
    w.written = take(&memory, values), w.grad_written = take(&memory, values);
    w.grad_output = take(&memory, values), w.sums = take(&memory, ROWS * w.value_width);
    w.state = take(&memory, state), w.grad = take(&memory, state);
    w.state_columns = take(&memory, columns), w.grad_columns = take(&memory, columns);
    w.key_columns = take(&memory, call->W * CHUNK_KEYS), w.written_columns = take(&memory, call->E * CHUNK_KEYS);
    w.query_pairs = take(&memory, pairs), w.address_pairs = take(&memory, pairs);
    w.output_pairs = take(&memory, pairs), w.written_pairs = take(&memory, pairs);
    w.between = take(&memory, pairs), w.since = take(&memory, CHUNK), w.rest = take(&memory, CHUNK);
    w.end = memory;
    return w;
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(recurrence_backward_workspace)(const Recurrence *call) {
    return (uintptr_t)workspace_in(call, 0).end / sizeof(float);
}

/* A chunk: its head, its tokens [start, stop), and their number in whole groups of ROWS. */
typedef struct {
    int64_t unit, entry, head, start, stop, count;
} Chunk;

static void clear(float *numbers, int64_t count) {
    for (int64_t n = 0; n < count; n++) numbers[n] = 0;
}

/* `rows` rows of `columns` numbers, `from_width` apart, as columns `to_width` apart. */
static void transpose(const float *from, int64_t rows, int64_t columns, int64_t from_width, float *to,
                      int64_t to_width) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        int64_t c = 0;
        for (; c + 4 <= columns; c += 4)
            transpose_four(from + r * from_width + c, from_width, to + c * to_width + r, to_width);
        for (; c < columns; c++)
            for (int64_t n = r; n < r + 4; n++) to[c * to_width + n] = from[n * from_width + c];
    }
    for (; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) to[c * to_width + r] = from[r * from_width + c];
}

/* The vectors of a chunk as rows; zeros if there are none. */
static void read_rows(const Chunk *chunk, const Tensor *t, int64_t channels, int64_t width, float *rows) {
    pack_rows(t, chunk->entry, chunk->head, chunk->start, CHUNK, t->data ? chunk->stop : 0, channels, width, rows);
}

static void write_rows(const Chunk *chunk, const Tensor *t, int64_t channels, int64_t width, const float *rows) {
    for (int64_t token = chunk->start; t->data && token < chunk->stop; token++)
        write_vector(t, place(t, chunk->entry, chunk->head, token), channels, rows + (token - chunk->start) * width);
}

/* The decays of the chunk between its tokens, of the state until each token, and after each until the end. */
static void find_decays(const Recurrence *call, const Workspace *w, const Chunk *chunk) {
    float whole = 1;
    clear(w->between, CHUNK * CHUNK_KEYS);
    for (int64_t t = 0; t < CHUNK; t++) {
        float *row = w->between + t * CHUNK_KEYS, decay = 1;
        if (chunk->start + t < chunk->stop)
            read_vector(&call->decay, place(&call->decay, chunk->entry, chunk->head, chunk->start + t), 1, &decay);
        for (int64_t s = 0; t && s < CHUNK_KEYS; s += LANES) store(row + s, load(row - CHUNK_KEYS + s) * decay);
        row[t] = 1;
        w->since[t] = whole *= decay;
    }
    for (int64_t s = 0; s < CHUNK; s++) w->rest[s] = w->between[(CHUNK - 1) * CHUNK_KEYS + s];
}

/* pairs_ts = sign * (row_t . column_s) decay_ts for s <= t, or s < t without the token itself; else 0. */
static void find_pairs(const Workspace *w, const Chunk *chunk, const float *rows, int64_t width, const float *columns,
                       int64_t length, int with_own, float sign, float *pairs) {
    clear(pairs, CHUNK * CHUNK_KEYS);
    for (int64_t group = 0; group < chunk->count; group += ROWS) {
        const int64_t last = group + ROWS;
        add_product(rows + group * width, width, 1, columns, CHUNK_KEYS, length, pairs + group * CHUNK_KEYS, CHUNK_KEYS,
                    rounded_up(last, LANES), 0);
        for (int64_t t = group; t < last; t++) {
            float *row = pairs + t * CHUNK_KEYS;
            for (int64_t s = 0; s < last; s += LANES)
                store(row + s, load(row + s) * load(w->between + t * CHUNK_KEYS + s) * sign);
            if (!with_own) row[t] = 0;
        }
    }
}

/* out_t = sum over all l of a_tl b_l for the rows of a chunk. */
static void multiply(const Chunk *chunk, const float *a, int64_t a_width, const float *b, int64_t width, int64_t length,
                     float *out) {
    clear(out, CHUNK * width);
    for (int64_t group = 0; group < chunk->count; group += ROWS)
        add_product(a + group * a_width, a_width, 1, b, width, length, out + group * width, width, width, 0);
}

/* out_t = factors_t out_t + sum over s <= t of pairs_ts b_s. */
static void add_earlier(const Chunk *chunk, const float *pairs, const float *b, int64_t width, float *out,
                        const float *factors) {
    for (int64_t group = 0; group < chunk->count; group += ROWS)
        add_product(pairs + group * CHUNK_KEYS, CHUNK_KEYS, 1, b, width, group + ROWS, out + group * width, width,
                    width, factors ? factors + group : 0);
}

/* out_s = factors_s out_s + sum over t >= s of pairs_ts b_t. */
static void add_later(const Chunk *chunk, const float *pairs, const float *b, int64_t width, float *out,
                      const float *factors) {
    for (int64_t group = 0; group < chunk->count; group += ROWS)
        add_product(pairs + group * CHUNK_KEYS + group, 1, CHUNK_KEYS, b + group * width, width, chunk->count - group,
                    out + group * width, width, width, factors ? factors + group : 0);
}

/* Adds to the gradients of what tokens wrote those that later tokens of the chunk erased, from the last token on. */
static void solve_written(const Workspace *w, const Chunk *chunk) {
    const int64_t width = w->value_width;
    for (int64_t group = chunk->count - ROWS; group >= 0; group -= ROWS) {
        const int64_t last = group + ROWS;
        float *rows = w->grad_written + group * width;
        add_product(w->address_pairs + last * CHUNK_KEYS + group, 1, CHUNK_KEYS, w->grad_written + last * width, width,
                    chunk->count - last, rows, width, width, 0);
        for (int64_t s = last - 2; s >= group; s--)
            for (int64_t e = 0; e < width; e += LANES) {
                float *row = w->grad_written + s * width + e;
                Vector sum = load(row);
                for (int64_t t = s + 1; t < last; t++)
                    sum += load(w->grad_written + t * width + e) * w->address_pairs[t * CHUNK_KEYS + s];
                store(row, sum);
            }
    }
}

/* Gradients of what the tokens of a chunk wrote, and so of their values. */
static void find_grad_written(const Recurrence *call, const Workspace *w, const Chunk *chunk) {
    const int64_t width = w->value_width;
    transpose(w->key, CHUNK, call->W, w->key_width, w->key_columns, CHUNK_KEYS);
    multiply(chunk, w->key, w->key_width, w->grad, width, call->W, w->grad_written);
    find_pairs(w, chunk, w->query, w->key_width, w->key_columns, call->W, 1, 1, w->query_pairs);
    add_later(chunk, w->query_pairs, w->grad_output, width, w->grad_written, w->rest);
    if (!call->address.data) return;
    find_pairs(w, chunk, w->address, w->key_width, w->key_columns, call->W, 0, -1, w->address_pairs);
    solve_written(w, chunk);
}

/* Gradients of queries, keys and addresses of a chunk. */
static void find_grad_vectors(const Recurrence *call, const Workspace *w, const Chunk *chunk) {
    const int64_t width = w->key_width, of_values = w->value_width;
    float since[CHUNK];
    transpose(w->written, CHUNK, call->E, of_values, w->written_columns, CHUNK_KEYS);
    transpose(w->state, call->W, call->E, of_values, w->state_columns, width);
    transpose(w->grad, call->W, call->E, of_values, w->grad_columns, width);
    find_pairs(w, chunk, w->grad_output, of_values, w->written_columns, call->E, 1, 1, w->output_pairs);
    multiply(chunk, w->grad_output, of_values, w->state_columns, width, call->E, w->grad_query);
    add_earlier(chunk, w->output_pairs, w->key, width, w->grad_query, w->since);
    multiply(chunk, w->written, of_values, w->grad_columns, width, call->E, w->grad_key);
    add_later(chunk, w->output_pairs, w->query, width, w->grad_key, w->rest);
    if (!call->address.data) return;
    find_pairs(w, chunk, w->grad_written, of_values, w->written_columns, call->E, 0, -1, w->written_pairs);
    add_later(chunk, w->written_pairs, w->address, width, w->grad_key, 0);
    for (int64_t t = 0; t < CHUNK; t++) since[t] = -w->since[t];
    multiply(chunk, w->grad_written, of_values, w->state_columns, width, call->E, w->grad_address);
    add_earlier(chunk, w->written_pairs, w->key, width, w->grad_address, since);
}

static float dot(const float *a, const float *b, int64_t count) {
    Vector sum = broadcast(0);
    for (int64_t n = 0; n < count; n += LANES) sum += load(a + n) * load(b + n);
    return sum_of(sum);
}

/* Gradients of the log-decays of a chunk; `later` is <G, S'>. */
static void write_grad_decays(const Recurrence *call, const Workspace *w, const Chunk *chunk, float later) {
    const int64_t width = w->key_width;
    for (int64_t token = chunk->stop - 1; token >= chunk->start; token--) {
        const int64_t row = (token - chunk->start) * width;
        later -= dot(w->key + row, w->grad_key + row, width);
        if (call->query.data) later += dot(w->query + row, w->grad_query + row, width);
        if (call->address.data) later += dot(w->address + row, w->grad_address + row, width);
        write_vector(&call->grad_decay, place(&call->grad_decay, chunk->entry, chunk->head, token), 1, &later);
    }
}

/* grad = factors * grad + sum over the tokens of since_t vector_t values_t^T. */
static void add_reads(const Workspace *w, const Chunk *chunk, float *vectors, const float *values, float sign,
                      float whole) {
    const int64_t width = w->value_width;
    for (int64_t t = 0; t < chunk->count; t++)
        for (int64_t c = 0; c < w->key_width; c++) vectors[t * w->key_width + c] *= sign * w->since[t];
    for (int64_t c = 0; c < w->num_rows; c += ROWS) {
        float *grad = w->grad + c * width;
        clear(w->sums, ROWS * width);
        add_product(vectors + c, 1, w->key_width, values, width, chunk->count, w->sums, width, width, 0);
        for (int64_t n = 0; n < ROWS * width; n++) grad[n] = grad[n] * whole + w->sums[n];
    }
}

/* The gradients of a chunk. The workspace holds the state after it, and the gradient of that state. */
static void run_chunk(const Recurrence *call, const Workspace *w, const Chunk *chunk, const float *before) {
    const float later = dot(w->state, w->grad, call->W * w->value_width);
    const int64_t W = call->W, E = call->E;
    read_state(call, before, w->num_rows, w->value_width, w->state);
    read_rows(chunk, &call->key, W, w->key_width, w->key);
    read_rows(chunk, &call->query, W, w->key_width, w->query);
    read_rows(chunk, &call->address, W, w->key_width, w->address);
    read_rows(chunk, &call->written, E, w->value_width, w->written);
    read_rows(chunk, &call->grad_output, E, w->value_width, w->grad_output);
    find_decays(call, w, chunk);
    find_grad_written(call, w, chunk);
    find_grad_vectors(call, w, chunk);
    write_rows(chunk, &call->grad_value, E, w->value_width, w->grad_written);
    write_rows(chunk, &call->grad_query, W, w->key_width, w->grad_query);
    write_rows(chunk, &call->grad_key, W, w->key_width, w->grad_key);
    write_rows(chunk, &call->grad_address, W, w->key_width, w->grad_address);
    if (call->grad_decay.data) write_grad_decays(call, w, chunk, later);
    add_reads(w, chunk, w->query, w->grad_output, 1, w->since[CHUNK - 1]);
    if (call->address.data) add_reads(w, chunk, w->address, w->grad_written, -1, 1);
}

static void run_head(const Recurrence *call, const Workspace *w, int64_t unit) {
    const int64_t size = call->W * call->E, num_chunks = (call->n + CHUNK - 1) / CHUNK;
    float *grad = call->grad_state + unit * size;
    read_state(call, call->state + unit * size, w->num_rows, w->value_width, w->state);
    read_state(call, grad, w->num_rows, w->value_width, w->grad);
    clear(w->state_columns, call->E * w->key_width);
    clear(w->grad_columns, call->E * w->key_width);
    for (int64_t n = num_chunks - 1; n >= 0; n--) {
        const int64_t start = n * CHUNK, stop = min(start + CHUNK, call->n);
        const Chunk chunk = {unit, unit / call->H, unit % call->H, start, stop, rounded_up(stop - start, ROWS)};
        run_chunk(call, w, &chunk, call->states + (unit * num_chunks + n) * size);
    }
    for (int64_t c = 0; c < call->W; c++)
        for (int64_t e = 0; e < call->E; e++) grad[c * call->E + e] = w->grad[c * w->value_width + e];
}

/* All gradients: computes heads until none is left. */
EXPORT void NAMED(recurrence_backward)(const Recurrence *call, float *memory) {
    const Workspace w = workspace_in(call, memory);
    const int64_t units = call->B * call->H;
    for (int64_t unit = next_unit(call->counters); unit < units; unit = next_unit(call->counters))
        run_head(call, &w, unit);
}
