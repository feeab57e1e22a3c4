/* A decoding step's operations, run again without Python between them.
 *
 * Each computes its rows alone, so a thread takes some rows through all of the operations: it waits for the others
 * once a step, and what it has just made lies in its own cache. */
#include "vector.h"

enum { VALUES = 24, FACTORS = 4, FEW = 32 }; /* FEW: with fewer rows a thread's products are slow */

/* An operation's integers and addresses come in one order of registers and places on the stack, its floats in registers
 * of their own, in the ABIs of x86-64 and arm64: one type calls them all. What is behind an operation's own is not read. */
typedef void operation(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long,
                       long, long, long, long, long, long, long, float, float, float, float);
struct noted {
    operation *run;
    long values[VALUES], strides[VALUES]; /* bytes from a row to the next, 0 of what is the same for all rows */
    long rows_at;                         /* which value is the number of rows */
    float factors[FACTORS];
};

static void run_rows(const struct noted *o, long first, long rows) {
    long v[VALUES];
    for (long i = 0; i < VALUES; i++) v[i] = o->values[i] + first * o->strides[i];
    v[o->rows_at] = rows;
    const float *f = o->factors;
    o->run(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15], v[16], v[17],
           v[18], v[19], v[20], v[21], v[22], v[23], f[0], f[1], f[2], f[3]);
}

/* All operations in their order, for the first `rows` rows. */
void run_again(const struct noted *all, long count, long rows) {
    long threads = most(1, least(team_most(), rows / FEW));
    long parts = threads < 2 ? 1 : (rows / threads + 2 * FEW - 1) / (2 * FEW) * threads, each = (rows + parts - 1) / parts;
    SHARED_BY(threads)
    EACH(part, parts, 1) {
        long first = part * each, some = least(each, rows - first);
        for (long i = 0; i < count && some > 0; i++) run_rows(all + i, first, some);
    }
}
