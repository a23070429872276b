/* What the statistics keep of blocks of weights: the largest of a row, and sums over queries, by key and by cell. */
#ifndef CELLS_H
#define CELLS_H

#include "rows.h"

/* Statistics to compute; a null pointer or a count of 0 leaves one out. Sums and maxima are 0 at the start. */
typedef struct {
    float *entropy;  /* (B, H, I): -sum_j w log w */
    float *distance; /* (B, H, I): sum_j w |j - i + shift| */
    float *received; /* (B, H, parts, padded J): sums over queries */
    float *cells;    /* (B, H, parts, cell_rows, cell_columns): sums over queries and keys */
    float *cell_maxima;
    const int64_t *row_cells, *column_cells,
        *column_starts;                  /* the cell of each query, of each key, and its first key */
    float *top_weights;                  /* (B, H, I, k): the largest weights, the largest first */
    int64_t *top_keys;                   /* (B, H, I, k): their keys */
    const float *numbers;                /* (B, H, num_numbers, padded J) */
    float *number_sums;                  /* (B, H, num_numbers, I): sum_j w numbers_j */
    const int64_t *chosen;               /* keys, which ascend */
    float *chosen_mass, *chosen_entropy; /* (B, H, I): over chosen keys, sum w and -sum w log w */
    const int64_t *offsets;              /* distances j - i */
    float *diagonals;                    /* (B, H, num_offsets, I): the weights at these distances */
    float *offset_sums; /* (B, H, parts, num_sums): sums over queries at the distances from first_sum on */
    float *later;       /* (B, H, I): sums over the keys after the query */
    float *same;        /* (B, H, I): sums over other keys with the token of the query */
    const int32_t *key_tokens, *query_tokens; /* (B, padded J), (B, I) */
    int64_t cell_rows, cell_columns, k, shift, num_numbers, num_chosen, num_offsets, first_sum, num_sums, num_parts;
} Statistics;

/* Inserts a weight into the k largest, in descending order. */
INLINE void insert(float *weights, int64_t *keys, int64_t k, float weight, int64_t key) {
    int64_t n = k - 1;
    for (; n > 0 && weights[n - 1] < weight; n--) {
        weights[n] = weights[n - 1];
        keys[n] = keys[n - 1];
    }
    weights[n] = weight;
    keys[n] = key;
}

/* Keeps the k largest weights of a row. Most vectors hold no weight above the k-th largest so far: one comparison. */
static void keep_largest(const float *weights, int64_t first, int64_t stop, int64_t k, float *top_weights,
                         int64_t *top_keys) {
    float least = top_weights[k - 1];
    for (int64_t key = first; key < stop; key += PANEL) {
        const float *panel = weights + key - first;
        const Integers low = load(panel) > least, high = load(panel + LANES) > least;
        if (!any_of(low | high)) continue;
        for (uint64_t bits = lane_bits(low) | lane_bits(high) << LANES; bits; bits &= bits - 1) {
            const int lane = __builtin_ctzll(bits);
            if (panel[lane] > least) {
                insert(top_weights, top_keys, k, panel[lane], key + lane);
                least = top_weights[k - 1];
            }
        }
    }
}

/* Adds sums over queries, and takes their maxima, to one row of cells. */
INLINE void add_cells(const Call *call, const Statistics *wanted, int64_t row, int64_t first, int64_t stop,
                      const float *sums, const float *maxima) {
    float *cells = wanted->cells + row * wanted->cell_columns;
    stop = min(stop, call->J);
    for (int64_t key = first, cell = wanted->column_cells[first]; key < stop; cell++) {
        const int64_t end = min(stop, wanted->column_starts[cell + 1]);
        float total = 0, most = 0;
        Vector totals = broadcast(0), largest = broadcast(0);
        for (; key + LANES <= end; key += LANES) {
            totals += load(sums + key - first);
            if (wanted->cell_maxima) largest = larger(largest, load(maxima + key - first));
        }
        for (; key < end; key++) {
            total += sums[key - first];
            if (wanted->cell_maxima && maxima[key - first] > most) most = maxima[key - first];
        }
        cells[cell] += total + sum_of(totals);
        if (wanted->cell_maxima) {
            float *place = wanted->cell_maxima + row * wanted->cell_columns + cell;
            most = most > largest_of(largest) ? most : largest_of(largest);
            if (most > *place) *place = most;
        }
    }
}

/* Sums of the weights of `count` rows by key, and their maxima if these are wanted. */
INLINE void sum_rows(const Statistics *wanted, int64_t count, int64_t width, const float *weights, float *sums,
                     float *maxima) {
    for (int64_t n = 0; n < width; n += LANES) {
        Vector sum = load(weights + n);
        for (int64_t r = 1; r < count; r++) sum += load(weights + r * KEYS + n);
        store(sums + n, sum);
        if (wanted->cell_maxima) {
            Vector most = load(weights + n);
            for (int64_t r = 1; r < count; r++) most = larger(most, load(weights + r * KEYS + n));
            store(maxima + n, most);
        }
    }
}

/* Adds the weights of `count` rows to the sums over queries of a share; rows of the same cell are added first.
   `scratch`: 2 KEYS. */
static void add_columns(const Rows *rows, const Statistics *wanted, int64_t share, int64_t count, int64_t first,
                        int64_t stop, const float *weights, float *scratch) {
    const int64_t *row_cells = wanted->cells ? wanted->row_cells + rows->query : 0;
    float *maxima = scratch + KEYS;
    for (int64_t r = 0, end; r < count; r = end) {
        for (end = row_cells ? r + 1 : count; end < count && row_cells[end] == row_cells[r];) end++;
        sum_rows(wanted, end - r, stop - first, weights + r * KEYS, scratch, maxima);
        if (wanted->received) {
            float *received = wanted->received + share * padded_keys(rows->call) + first;
            for (int64_t n = 0; n < stop - first; n += LANES)
                store(received + n, load(received + n) + load(scratch + n));
        }
        if (row_cells)
            add_cells(rows->call, wanted, share * wanted->cell_rows + row_cells[r], first, stop, scratch, maxima);
    }
}

#endif
