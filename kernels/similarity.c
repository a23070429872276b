/* Products of the maps of every two heads: sum over queries and keys of w_a w_b.

   They need the weights of all heads at once. For ROWS queries and a few keys the weights of every head are computed
   (see statistics.c) and kept, so few that they stay in the cache, and multiplied with each other: a register tile of
   SIDE x SIDE heads, each a vector of sums. A unit of work is a part of the tiles of a batch entry; each part has its
   own sums. Sums of vectors are added up in double precision.

   Two products come from one pass: over all chosen queries and all keys, and over the ordinary ones alone. */
#include "rows.h"

/* Heads of the register tile. */
#define SIDE (ROWS == 12 ? 4 : 3)
/* Weights of all heads that are kept at once, unless a panel has more: they stay in the L1 cache. */
#define KEPT_WEIGHTS 6144
/* Keys whose products are added up in one precision. */
#define SPAN 2048

enum { UNUSED = 0, SPECIAL = 1, ORDINARY = 2 };
/* Which products: of blocks where everything is ordinary, of all weights of other blocks, of their ordinary weights. */
enum { SHARED, ALL, ORDINARY_ALONE, NUM_PRODUCTS };

/* What to compute. Sums are 0 at the start; null pointers leave something out. */
typedef struct {
    const uint8_t *queries; /* (I): UNUSED, SPECIAL or ORDINARY */
    const float *ordinary;  /* (padded J): 1 for ordinary keys, else 0; or null: all are ordinary */
    double *products;       /* (B, parts, NUM_PRODUCTS, H, H), of heads a <= b */
    float *received;        /* (B, H, parts, padded J): the weight of ordinary queries on ordinary keys */
    int64_t num_parts;
} Similarity;

/* The scratch memory of a thread: chosen queries of all heads as columns, weights, and sums of their products. */
typedef struct {
    float *queries, *weights, *sums, *vector;
} Workspace;

/* Up to ROWS chosen queries of a tile. */
typedef struct {
    int64_t queries[ROWS];
    int64_t count;
} Chosen;

INLINE int64_t padded_heads(const Call *call) { return rounded_up(call->H, SIDE); }

/* Keys of a block, in whole panels. */
INLINE int64_t block_keys(const Call *call) {
    return min(KEYS, max(PANEL, KEPT_WEIGHTS / (padded_heads(call) * ROWS) / PANEL * PANEL));
}

/* Floats of scratch memory that one thread needs. */
EXPORT int64_t NAMED(similarity_workspace)(const Call *call) {
    const int64_t heads = padded_heads(call);
    return heads * ROWS * (call->D + block_keys(call)) + heads * heads * LANES + PANEL * call->D;
}

static Workspace workspace_in(const Call *call, float *memory) {
    const int64_t heads = padded_heads(call);
    Workspace w = {memory, 0, 0, 0};
    w.weights = w.queries + heads * ROWS * call->D;
    w.sums = w.weights + heads * ROWS * block_keys(call);
    w.vector = w.sums + heads * heads * LANES;
    for (int64_t n = 0; n < heads * heads * LANES; n++) w.sums[n] = 0;
    for (int64_t n = 0; n < heads * ROWS * block_keys(call); n++) w.weights[n] = 0;
    return w;
}

/* sums[a][b] += the products of the weights of SIDE heads from a and from b on; `length` numbers a head. */
INLINE void add_products(const float *a, const float *b, int64_t stride, int64_t length, float *sums, int64_t heads) {
    Vector totals[SIDE][SIDE];
    UNROLL for (int m = 0; m < SIDE; m++) {
        UNROLL for (int n = 0; n < SIDE; n++) totals[m][n] = load(sums + (m * heads + n) * LANES);
    }
    for (int64_t l = 0; l < length; l += LANES) {
        Vector factors[SIDE];
        UNROLL for (int n = 0; n < SIDE; n++) factors[n] = load(b + n * stride + l);
        UNROLL for (int m = 0; m < SIDE; m++) {
            const Vector factor = load(a + m * stride + l);
            UNROLL for (int n = 0; n < SIDE; n++) totals[m][n] += factor * factors[n];
        }
    }
    UNROLL for (int m = 0; m < SIDE; m++) {
        UNROLL for (int n = 0; n < SIDE; n++) store(sums + (m * heads + n) * LANES, totals[m][n]);
    }
}

/* Adds the products of all heads' weights in a block. */
static void add_all_products(const Call *call, const Workspace *w, int64_t length) {
    const int64_t heads = padded_heads(call), stride = ROWS * block_keys(call);
    for (int64_t a = 0; a < heads; a += SIDE)
        for (int64_t b = a; b < heads; b += SIDE)
            add_products(w->weights + a * stride, w->weights + b * stride, stride, length,
                         w->sums + (a * heads + b) * LANES, heads);
}

/* Moves the sums to the products in double precision. */
static void flush_sums(const Call *call, const Workspace *w, double *products) {
    const int64_t heads = padded_heads(call);
    for (int64_t a = 0; a < call->H; a++)
        for (int64_t b = a; b < call->H; b++) {
            float *sums = w->sums + (a * heads + b) * LANES;
            products[a * call->H + b] += sum_of(load(sums));
        }
    for (int64_t n = 0; n < heads * heads * LANES; n++) w->sums[n] = 0;
}

/* The chosen queries as columns, for every head. */
static void pack_chosen(const Call *call, const Chosen *chosen, int64_t entry, const Workspace *w) {
    for (int64_t head = 0; head < call->H; head++)
        for (int64_t r = 0; r < ROWS; r++) {
            float *columns = w->queries + head * ROWS * call->D + r;
            const int64_t query = chosen->queries[min(r, chosen->count - 1)];
            read_vector(&call->query, place(&call->query, entry, head, query), call->D, w->vector);
            for (int64_t c = 0; c < call->D; c++) columns[c * ROWS] = w->vector[c];
        }
}

/* The weights of one head, `width` = stop - first numbers a row, row after row. */
static void weigh_head(const Call *call, const Tile *tile, const Segment *segment, const Chosen *chosen, int64_t entry,
                       int64_t head, int64_t first, int64_t stop, const Workspace *w) {
    const float *panels = call->packed_keys + key_unit(call, entry, head) * padded_keys(call) * call->D;
    float *weights = w->weights + head * ROWS * block_keys(call);
    const Rows rows = rows_of(call, tile, segment, entry, head, chosen->queries[0]);
    dot_products(w->queries + head * ROWS * call->D, panels, call->D, first, stop, weights, stop - first);
    for (int64_t r = 0; r < chosen->count; r++) {
        const Row row = row_of(&rows, chosen->queries[r]);
        const float logsumexp = row_logsumexp(call, row_index(call, entry, head, chosen->queries[r]));
        float *place = weights + r * (stop - first);
        for (int64_t key = first; key < stop; key += LANES, place += LANES) {
            const Vector score = final_score(&rows, &row, load(place) * call->scale, key);
            store(place, exp2_of(log_weight_of(score, logsumexp) * LOG2_E));
        }
    }
}

/* Whether every query and every key of the block is ordinary. */
static int is_ordinary(const Similarity *wanted, const Chosen *chosen, int64_t first, int64_t stop) {
    for (int64_t r = 0; r < chosen->count; r++)
        if (wanted->queries[chosen->queries[r]] == SPECIAL) return 0;
    for (int64_t key = first; wanted->ordinary && key < stop; key++)
        if (wanted->ordinary[key] == 0) return 0;
    return 1;
}

/* Sets the weights to 0 that are not of an ordinary query on an ordinary key. */
static void keep_ordinary(const Call *call, const Similarity *wanted, const Chosen *chosen, int64_t first, int64_t stop,
                          const Workspace *w) {
    for (int64_t head = 0; head < call->H; head++)
        for (int64_t r = 0; r < chosen->count; r++) {
            float *weights = w->weights + head * ROWS * block_keys(call) + r * (stop - first);
            const float kept = wanted->queries[chosen->queries[r]] == ORDINARY;
            for (int64_t n = 0; n < stop - first; n += LANES)
                store(weights + n, load(weights + n) * kept *
                                       (wanted->ordinary ? load(wanted->ordinary + first + n) : broadcast(1)));
        }
}

/* Adds the weights to the sums over queries, of each head. */
static void add_received(const Call *call, const Similarity *wanted, const Chosen *chosen, int64_t entry, int64_t part,
                         int64_t first, int64_t stop, const Workspace *w) {
    for (int64_t head = 0; head < call->H; head++) {
        const float *weights = w->weights + head * ROWS * block_keys(call);
        const int64_t share = (entry * call->H + head) * wanted->num_parts + part;
        float *received = wanted->received + share * padded_keys(call) + first;
        for (int64_t n = 0; n < stop - first; n += LANES) {
            Vector sum = load(received + n);
            for (int64_t r = 0; r < chosen->count; r++) sum += load(weights + r * (stop - first) + n);
            store(received + n, sum);
        }
    }
}

/* Adds the products over the keys [first, stop). */
static void add_keys(const Call *call, const Similarity *wanted, const Tile *tile, const Segment *segment,
                     const Chosen *chosen, int64_t entry, int64_t part, int64_t first, int64_t stop,
                     const Workspace *w) {
    double *products = wanted->products + (entry * wanted->num_parts + part) * NUM_PRODUCTS * call->H * call->H;
    const int64_t length = chosen->count * (stop - first), squares = call->H * call->H;
    for (int64_t head = 0; head < call->H; head++) weigh_head(call, tile, segment, chosen, entry, head, first, stop, w);
    if (!is_ordinary(wanted, chosen, first, stop)) {
        flush_sums(call, w, products + SHARED * squares);
        add_all_products(call, w, length);
        flush_sums(call, w, products + ALL * squares);
        keep_ordinary(call, wanted, chosen, first, stop, w);
        add_all_products(call, w, length);
        flush_sums(call, w, products + ORDINARY_ALONE * squares);
    } else {
        add_all_products(call, w, length);
        if (first / SPAN != stop / SPAN) flush_sums(call, w, products + SHARED * squares);
    }
    if (wanted->received) add_received(call, wanted, chosen, entry, part, first, stop, w);
}

/* Adds the products of the weights of chosen queries. */
static void add_queries(const Call *call, const Similarity *wanted, const Tile *tile, const Chosen *chosen,
                        int64_t entry, int64_t part, const Workspace *w) {
    const int64_t last_query = chosen->queries[chosen->count - 1], size = block_keys(call);
    pack_chosen(call, chosen, entry, w);
    for (int64_t s = tile->first_segment; s < tile->stop_segment; s++) {
        const Segment *segment = call->segments + s;
        const int64_t first = max(segment->first_key, chosen->queries[0] + call->low) / PANEL * PANEL;
        const int64_t stop = rounded_up(min(segment->stop_key, last_query + call->high), PANEL);
        for (int64_t key = max(0, first); key < stop; key += size)
            add_keys(call, wanted, tile, segment, chosen, entry, part, key, min(key + size, stop), w);
    }
    flush_sums(call, w, wanted->products + (entry * wanted->num_parts + part) * NUM_PRODUCTS * call->H * call->H);
}

static void run_tile(const Call *call, const Similarity *wanted, const Tile *tile, int64_t entry, int64_t part,
                     const Workspace *w) {
    Chosen chosen = {{0}, 0};
    for (int64_t query = tile->first_query; query < tile->stop_query; query++) {
        if (wanted->queries[query] != UNUSED) chosen.queries[chosen.count++] = query;
        if (chosen.count == ROWS || (chosen.count && query == tile->stop_query - 1)) {
            add_queries(call, wanted, tile, &chosen, entry, part, w);
            chosen.count = 0;
        }
    }
}

static void pack_block(const Call *call, int64_t unit, int64_t first, int64_t stop, float *buffer) {
    pack_panels(call, &call->key, unit, first, stop, call->D, buffer, call->packed_keys);
}

/* The products of all heads: packs, then computes parts until none is left. */
EXPORT void NAMED(similarity)(const Call *call, float *memory, const Similarity *wanted) {
    const Workspace w = workspace_in(call, memory);
    pack_all(call, pack_block, w.vector);
    const int64_t units = call->B * wanted->num_parts;
    for (int64_t n = next_unit(call->counters + 2); n < units; n = next_unit(call->counters + 2)) {
        const int64_t part = n % wanted->num_parts, entry = n / wanted->num_parts;
        for (int64_t t = part; t < call->num_tiles; t += wanted->num_parts) {
            const Tile *tile = call->tiles + t;
            if (!call->tiles_have_entries || tile->entry == entry) run_tile(call, wanted, tile, entry, part, &w);
        }
    }
}
