/* Dropout: whether a weight is dropped is a hash of the seed, batch entry, head, and positions of query and key.

   These are the integers of regard/pieces/dropout.py, so every engine drops the same weights. A hash needs no memory,
   and the backward pass computes it again. Each coordinate is added to a word, and the word is mixed by the finalizer
   of MurmurHash3 (Appleby, public domain). A vector of keys takes 10 instructions, its products some hundred. */
#ifndef DROPOUT_H
#define DROPOUT_H

#include "vector.h"

INLINE Bits mixed(Bits x) {
    x += 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

INLINE uint32_t mixed_word(uint32_t x) { return mixed(x + (Bits){0})[0]; }

/* The word of a batch entry and a head. */
INLINE uint32_t head_word(const Call *call, int64_t entry, int64_t head) {
    return mixed_word(mixed_word(mixed_word((uint32_t)call->seed) + (uint32_t)entry) + (uint32_t)head);
}

/* The word of a query of this head, as a vector; the first position of the keys is added to it. */
INLINE Bits query_word(const Call *call, uint32_t head_word, int64_t query) {
    return mixed(head_word + (uint32_t)(call->query_position + query) + (Bits){0}) + (uint32_t)call->key_position;
}

/* Whether the weights of LANES keys from `key` on are kept. */
INLINE Integers kept(const Call *call, Bits query_word, int64_t key) {
    return mixed(query_word + (uint32_t)key + (Bits)lane_numbers()) > (uint32_t)(call->dropped_words - 1);
}

/* Sets the dropped weights of the keys [first, stop) to 0. */
INLINE void drop(const Call *call, uint32_t head_word, int64_t query, int64_t first, int64_t stop, float *weights) {
    const Bits word = query_word(call, head_word, query);
    for (int64_t key = first; key < stop; key += LANES) {
        const Vector weight = load(weights + key - first);
        store(weights + key - first, choose(kept(call, word, key), weight, broadcast(0)));
    }
}

#endif
