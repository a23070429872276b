/* Runs a function of the kernels on a team of threads that somebody else keeps.

   torch computes on the threads of an OpenMP runtime. After each of its operations they wait in a loop for some
   milliseconds, and take the processor from every other thread. So the caller lets the same runtime start the team
   (libgomp's GOMP_parallel(run_member, team, num_threads, 0)), and these threads compute our shares. */
#include "regard.h"

EXPORT void regard_run_member(void *team) {
    const Team *t = team;
    char *scratch = (char *)t->scratch + t->scratch_bytes * t->thread_number();
    if (t->fields)
        ((void (*)(const void *, void *, const void *))t->function)(t->call, scratch, t->fields);
    else
        ((void (*)(const void *, void *))t->function)(t->call, scratch);
}
