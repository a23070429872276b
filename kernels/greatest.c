/* The places of the greatest numbers of each row, in ascending order; of equal numbers the first. */
#include "ordered.h"

/* What to compute. -inf is never among the greatest; `no_id` stands behind the last place of a row. */
typedef struct {
    const float *numbers; /* (num_rows, length) */
    int32_t *ids;         /* (num_rows, k) */
    int64_t num_rows, length, k, no_id;
    int64_t *counters; /* one number, 0 at the start */
} Greatest;

/* Rows of a unit of work. */
#define UNIT 64

/* Floats of scratch memory that one thread needs: a row in whole panels. */
EXPORT int64_t NAMED(greatest_workspace)(const Greatest *call) { return rounded_up(call->length, PANEL); }

/* Computes rows until none is left. */
EXPORT void NAMED(greatest)(const Greatest *call, float *memory) {
    const int64_t length = call->length, padded = rounded_up(length, PANEL), units = (call->num_rows + UNIT - 1) / UNIT;
    for (int64_t unit = next_unit(call->counters); unit < units; unit = next_unit(call->counters)) {
        for (int64_t row = unit * UNIT; row < min((unit + 1) * UNIT, call->num_rows); row++) {
            for (int64_t n = 0; n < length; n++) memory[n] = call->numbers[row * length + n] + 0.0f; /* -0 becomes 0 */
            for (int64_t n = length; n < padded; n++) memory[n] = -INFINITE;
            const Ordered numbers = ordered(memory, padded);
            write_greatest(&numbers, call->k, 0, call->ids + row * call->k, (int32_t)call->no_id);
        }
    }
}
