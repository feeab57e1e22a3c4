/* The threads of the operations.
 *
 * A block under TEAM (vector.h) is a function to the compiler, which asks a library of OpenMP to run it; what
 * it asks for is defined here instead. Threads take the parts of the block's loops one by one, so a thread
 * that the system does not run takes none and nobody waits for it: beside other programs, two threads whose
 * every loop ends with a barrier take many times as long as one. A thread that was stopped within a part is
 * waited for. When that takes long, or when nobody came to help, the caller works alone for a while: twice as
 * long as the last time, half as long after each block that had help. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <time.h>

enum { SHARE = 400000, SPINS = 10000 };
#define LONG 300e-6 /* seconds: of a block in which help should have come, and of a wait */
#define SHORTEST_ALONE 1e-3
#define LONGEST_ALONE 1.0

/* What the threads share: the round's number, how many may still begin, how many are at work. */
#define ROUND (1ull << 32)
#define MAY (1ull << 16)
#define ALL_MAY (ROUND - MAY)
#define AT_WORK (MAY - 1)

typedef void block(void *);
static struct {
    uint64_t state, asked;
    block *work;
    void *with;
    int sleeping, awaited, in_use, helpers;
    long most;
    double alone_until, alone;
    pthread_mutex_t lock;
    pthread_cond_t begun, left;
} pool = {.most = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
/* Linux gives a process the registers of tiles when it asks; here, because this file is compiled once. 0 if it did. */
int permit_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}
#endif

/* How many threads an operation may use at most. */
void team_size(long threads) { pool.most = threads; }

int team_most(void) { return pool.most; }

/* Threads for so many multiplications: each has more to do than waking it costs, some ten microseconds. */
int team(long work) {
    long useful = 1 + work / SHARE;
    return useful < pool.most ? useful : pool.most;
}

static __thread int helper;
int helping(void) { return helper; }

static inline void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Begin the round if it is not the one that was `seen`, and somebody is still wanted. */
static int join(uint64_t *seen) {
    uint64_t s = __atomic_load_n(&pool.state, __ATOMIC_ACQUIRE);
    while (s & ALL_MAY && s / ROUND != *seen)
        if (__atomic_compare_exchange_n(&pool.state, &s, s - MAY + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) {
            *seen = s / ROUND;
            return 1;
        }
    return 0;
}

static void *help(void *none) {
    helper = 1;
    for (uint64_t seen = 0;;) {
        int joined = 0;
        for (int i = 0; i < SPINS && !(joined = join(&seen)); i++) rest();
        if (!joined) {
            pthread_mutex_lock(&pool.lock);
            __atomic_add_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
            while (!join(&seen)) pthread_cond_wait(&pool.begun, &pool.lock);
            __atomic_sub_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool.lock);
        }
        pool.work(pool.with);
        uint64_t s = __atomic_sub_fetch(&pool.state, 1, __ATOMIC_SEQ_CST);
        if (!(s & AT_WORK) && __atomic_load_n(&pool.awaited, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.left);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return none;
}

static int at_work(void) { return __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST) & AT_WORK; }

/* Whether others helped, and were done soon after. */
static int done_together(double began) {
    uint64_t before = __atomic_fetch_and(&pool.state, ~ALL_MAY, __ATOMIC_SEQ_CST);
    int helped = (before & ALL_MAY) / MAY < pool.asked;
    double ended = now();
    if (!helped) return ended - began < LONG;
    for (int i = 0; i < SPINS && at_work(); i++) rest();
    if (!at_work()) return 1;
    pthread_mutex_lock(&pool.lock);
    __atomic_store_n(&pool.awaited, 1, __ATOMIC_SEQ_CST);
    while (at_work()) pthread_cond_wait(&pool.left, &pool.lock);
    __atomic_store_n(&pool.awaited, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.lock);
    double waited = now() - ended;
    return waited < LONG || waited < ended - began; /* longer than this took: alone would have been as fast */
}

/* What gcc calls for a block: it runs in this thread and in up to `threads` - 1 others. */
__attribute__((visibility("hidden"))) void GOMP_parallel(block *work, void *with, unsigned threads, unsigned flags) {
    if (threads < 2 || __atomic_exchange_n(&pool.in_use, 1, __ATOMIC_ACQUIRE)) {
        work(with);
        return;
    }
    double began = now();
    if (began < pool.alone_until)
        work(with);
    else {
        pthread_t thread;
        while (pool.helpers < (int)threads - 1 && !pthread_create(&thread, NULL, help, NULL)) {
            pthread_detach(thread);
            pool.helpers++;
        }
        pool.work = work, pool.with = with, pool.asked = threads - 1;
        uint64_t round = (pool.state / ROUND + 1) * ROUND;
        __atomic_store_n(&pool.state, round + pool.asked * MAY, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&pool.lock);
            for (uint64_t i = 0; i < pool.asked; i++) pthread_cond_signal(&pool.begun);
            pthread_mutex_unlock(&pool.lock);
        }
        work(with);
        if (done_together(began))
            pool.alone /= 2;
        else {
            pool.alone = pool.alone < SHORTEST_ALONE ? SHORTEST_ALONE : pool.alone < LONGEST_ALONE / 2 ? 2 * pool.alone : LONGEST_ALONE;
            pool.alone_until = now() + pool.alone;
        }
    }
    __atomic_store_n(&pool.in_use, 0, __ATOMIC_RELEASE);
}

#ifdef __clang__
/* What clang calls: the block's variables follow as arguments. */
enum { VARIABLES = 32 };
typedef void microtask(int *, int *, ...);
struct call {
    microtask *work;
    void *with[VARIABLES];
};
static __thread unsigned asked;

__attribute__((visibility("hidden"))) int __kmpc_global_thread_num(void *where) { return 0; }
__attribute__((visibility("hidden"))) void __kmpc_push_num_threads(void *where, int thread, int count) { asked = count; }

static void run_microtask(void *from) {
    struct call *c = from;
    void **w = c->with;
    int zero = 0;
    typedef void all(int *, int *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
                     void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
                     void *, void *, void *, void *, void *, void *, void *, void *, void *);
    ((all *)c->work)(&zero, &zero, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
                     w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23], w[24], w[25], w[26], w[27],
                     w[28], w[29], w[30], w[31]);
}

__attribute__((visibility("hidden"))) void __kmpc_fork_call(void *where, int count, microtask *work, ...) {
    struct call c = {work};
    va_list with;
    va_start(with, work);
    for (int i = 0; i < count && i < VARIABLES; i++) c.with[i] = va_arg(with, void *);
    va_end(with);
    GOMP_parallel(run_microtask, &c, asked, 0);
}
#endif
