/* Runs calls of the kernels in a process of its own, for tests: under an emulator, or with a compiler's sanitizers.

   Standard input holds calls one after the other, written by tests/tools/kernel_harness.py, all numbers int64:

     function (its place in `functions`), number of buffers, number of pointers
     the size of each buffer in bytes
     for each pointer: where it is (buffer, byte) and where it points to (buffer, byte)
     the bytes of all buffers; the first is the Call, or what a function of another file takes in its place, and the
     second what some functions take after it

   Each buffer is allocated alone, so that a sanitizer sees every access outside of it. After each call the bytes of all
   buffers are written to standard output. */
#include "regard.h"

#if __STDC_HOSTED__
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void free_all(void) {}
/* A sanitizer watches the scratch memory. */
#define GUARD_BYTES 0
#else
#include "harness_system.h"
/* Bytes behind the scratch memory that a kernel must not change: an emulated program has no sanitizer. */
#define GUARD_BYTES (1 << 16)
#endif

int64_t NAMED(forward_workspace)(const Call *);
int64_t NAMED(backward_workspace)(const Call *);
int64_t NAMED(decode_workspace)(const Call *);
int64_t NAMED(rotate_workspace)(const Call *);
int64_t NAMED(sums_workspace)(const Call *);
int64_t NAMED(statistics_workspace)(const Call *);
int64_t NAMED(similarity_workspace)(const Call *);
int64_t NAMED(recurrence_forward_workspace)(const Call *);
int64_t NAMED(recurrence_backward_workspace)(const Call *);
int64_t NAMED(transport_workspace)(const Call *);
int64_t NAMED(chosen_workspace)(const Call *);
int64_t NAMED(chosen_backward_workspace)(const Call *);
int64_t NAMED(index_workspace)(const Call *);
int64_t NAMED(greatest_workspace)(const Call *);
void NAMED(forward)(const Call *, float *);
void NAMED(backward)(const Call *, float *);
void NAMED(decode)(const Call *, float *);
void NAMED(rotate)(const Call *, float *);
void NAMED(sums)(const Call *, float *);
void NAMED(recurrence_forward)(const Call *, float *);
void NAMED(recurrence_backward)(const Call *, float *);
void NAMED(transport)(const Call *, float *);
void NAMED(statistics)(const Call *, float *, const void *);
void NAMED(similarity)(const Call *, float *, const void *);
void NAMED(chosen)(const Call *, float *, const void *);
void NAMED(chosen_backward)(const Call *, float *, const void *);
void NAMED(index)(const Call *, float *, const void *);
void NAMED(greatest)(const Call *, float *);

static const struct {
    int64_t (*workspace)(const Call *);
    void (*compute)(const Call *, float *);
    void (*compute_wanted)(const Call *, float *, const void *); /* takes the second buffer too */
} functions[] = {
    {NAMED(forward_workspace), NAMED(forward), 0},
    {NAMED(backward_workspace), NAMED(backward), 0},
    {NAMED(decode_workspace), NAMED(decode), 0},
    {NAMED(rotate_workspace), NAMED(rotate), 0},
    {NAMED(sums_workspace), NAMED(sums), 0},
    {NAMED(statistics_workspace), 0, NAMED(statistics)},
    {NAMED(similarity_workspace), 0, NAMED(similarity)},
    {NAMED(recurrence_forward_workspace), NAMED(recurrence_forward), 0},
    {NAMED(recurrence_backward_workspace), NAMED(recurrence_backward), 0},
    {NAMED(transport_workspace), NAMED(transport), 0},
    {NAMED(chosen_workspace), 0, NAMED(chosen)},
    {NAMED(chosen_backward_workspace), 0, NAMED(chosen_backward)},
    {NAMED(index_workspace), 0, NAMED(index)},
    {NAMED(greatest_workspace), NAMED(greatest), 0},
};

static void *allocated(int64_t num_bytes) {
    void *memory = malloc(num_bytes ? num_bytes : 1);
    if (!memory) exit(2);
    return memory;
}

static void receive(void *to, int64_t num_bytes) {
    if (fread(to, 1, num_bytes, stdin) != (size_t)num_bytes) exit(3);
}

static void compute(int64_t function, const Call *call, const void *wanted) {
    const int64_t num_bytes = functions[function].workspace(call) * sizeof(float);
    unsigned char *memory = allocated(num_bytes + GUARD_BYTES);
    memset(memory, 0xff, num_bytes + GUARD_BYTES); /* NaN: a number that is read before it is written shows */
    if (functions[function].compute_wanted)
        functions[function].compute_wanted(call, (float *)memory, wanted);
    else
        functions[function].compute(call, (float *)memory);
    for (int64_t n = num_bytes; n < num_bytes + GUARD_BYTES; n++)
        if (memory[n] != 0xff) exit(5);
    free(memory);
}

static void run_call(const int64_t head[3]) {
    const int64_t num_buffers = head[1], num_pointers = head[2];
    int64_t *sizes = allocated(num_buffers * sizeof(int64_t));
    int64_t *pointers = allocated(num_pointers * 4 * sizeof(int64_t));
    char **buffers = allocated(num_buffers * sizeof(char *));
    receive(sizes, num_buffers * sizeof(int64_t));
    receive(pointers, num_pointers * 4 * sizeof(int64_t));
    for (int64_t n = 0; n < num_buffers; n++) {
        buffers[n] = allocated(sizes[n]);
        receive(buffers[n], sizes[n]);
    }
    for (int64_t *p = pointers; p < pointers + 4 * num_pointers; p += 4) {
        char *target = buffers[p[2]] + p[3];
        memcpy(buffers[p[0]] + p[1], &target, sizeof target);
    }
    compute(head[0], (const Call *)buffers[0], num_buffers > 1 ? buffers[1] : 0);
    for (int64_t n = 0; n < num_buffers; n++) {
        if (fwrite(buffers[n], 1, sizes[n], stdout) != (size_t)sizes[n]) exit(4);
        free(buffers[n]);
    }
    free(buffers), free(pointers), free(sizes);
}

int main(void) {
    int64_t head[3];
    while (fread(head, sizeof head, 1, stdin) == 1) {
        run_call(head);
        fflush(stdout);
        free_all();
    }
    return 0;
}
