#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

namespace {

struct Job {
    Work work;
    void* context;
    int64_t items;
    int64_t next;    // the first item not started
    int64_t active;  // helpers that have not finished
    pthread_mutex_t mutex;
    pthread_cond_t done;
};

struct Worker {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    Job* job;
};

constexpr int64_t MOST = 255;
constexpr size_t STACK = 1 << 20;
pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;  // held by the one call that uses the workers
Worker* workers[MOST];
int64_t count = 0;
Team team = nullptr;   // read without the lock
bool forked = false;   // this process is a fork's child

void run_items(Job& job) {
    for (;;) {
        int64_t item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
        if (item >= job.items) return;
        job.work(job.context, item);
    }
}

void run_items_in_team(void* job) { run_items(*static_cast<Job*>(job)); }

void* worker_main(void* worker) {
    Worker& self = *static_cast<Worker*>(worker);
    for (;;) {
        pthread_mutex_lock(&self.mutex);
        while (self.job == nullptr) pthread_cond_wait(&self.wake, &self.mutex);
        Job& job = *self.job;
        self.job = nullptr;
        pthread_mutex_unlock(&self.mutex);
        run_items(job);
        pthread_mutex_lock(&job.mutex);
        if (--job.active == 0) pthread_cond_signal(&job.done);
        pthread_mutex_unlock(&job.mutex);
    }
}

// A forked child has one thread: no workers, and no holder of the lock.
void reset_after_fork() {
    pthread_mutex_init(&owner, nullptr);
    count = 0;
    forked = true;
    team = nullptr;
}

bool register_fork_handler() {
    static bool registered = false;  // under `owner`
    if (!registered) registered = pthread_atfork(nullptr, nullptr, reset_after_fork) == 0;
    return registered;
}

bool start_worker() {
    if (!register_fork_handler()) return false;
    Worker* w = static_cast<Worker*>(malloc(sizeof(Worker)));
    if (w == nullptr) return false;
    pthread_mutex_init(&w->mutex, nullptr);
    pthread_cond_init(&w->wake, nullptr);
    w->job = nullptr;
    // Workers block signals: they are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    bool made = pthread_create(&thread, &attributes, worker_main, w) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (made)
        workers[count++] = w;
    else
        free(w);
    return made;
}

struct Memory {
    void* start[USES];
    size_t bytes[USES];
};
constexpr size_t KEPT = 32 << 20;  // a larger buffer is freed when a call needs less

pthread_key_t memory_key;
pthread_once_t memory_once = PTHREAD_ONCE_INIT;

void free_buffers_of_thread(void* buffers) {
    Memory* m = static_cast<Memory*>(buffers);
    for (void* start : m->start) free(start);
    free(m);
}

void make_key() { pthread_key_create(&memory_key, free_buffers_of_thread); }

}  // namespace

void parallel_for(int64_t items, int64_t max_useful_threads, int64_t openmp_team_threads, Work work, void* context) {
    Job job{work, context, items, 0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};
    int64_t helpers = (max_useful_threads < items ? max_useful_threads : items) - 1;
    // If another call has the workers, the caller works alone: OpenMP would create another team for it.
    if (helpers <= 0 || pthread_mutex_trylock(&owner) != 0) return run_items(job);
    if (team != nullptr) {
        // The whole team, as PyTorch uses it: GNU's runtime ends the threads that a smaller team leaves out.
        team(run_items_in_team, &job, static_cast<unsigned>(openmp_team_threads), 0);
        pthread_mutex_unlock(&owner);
        return;
    }
    if (helpers > MOST) helpers = MOST;
    while (count < helpers && start_worker()) {}
    if (helpers > count) helpers = count;
    job.active = helpers;
    for (int64_t i = 0; i < helpers; i++) {
        pthread_mutex_lock(&workers[i]->mutex);
        workers[i]->job = &job;
        pthread_cond_signal(&workers[i]->wake);
        pthread_mutex_unlock(&workers[i]->mutex);
    }
    run_items(job);
    pthread_mutex_lock(&job.mutex);
    while (job.active > 0) pthread_cond_wait(&job.done, &job.mutex);
    pthread_mutex_unlock(&job.mutex);
    pthread_mutex_unlock(&owner);
}

void use_team(Team openmp_parallel) {
    pthread_mutex_lock(&owner);
    __atomic_store_n(&team, register_fork_handler() && !forked ? openmp_parallel : nullptr, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&owner);
}

bool has_team() { return __atomic_load_n(&team, __ATOMIC_RELAXED) != nullptr; }

char* cached_buffer(Use use, size_t bytes) {
    pthread_once(&memory_once, make_key);
    Memory* m = static_cast<Memory*>(pthread_getspecific(memory_key));
    if (m == nullptr) {
        m = static_cast<Memory*>(calloc(1, sizeof(Memory)));
        if (m == nullptr || pthread_setspecific(memory_key, m) != 0) return nullptr;
    }
    if (m->bytes[use] < bytes || m->bytes[use] > KEPT) {
        free(m->start[use]);
        m->bytes[use] = 0;
        m->start[use] = nullptr;
        if (posix_memalign(&m->start[use], 64, bytes) != 0) return nullptr;
        m->bytes[use] = bytes;
    }
    return static_cast<char*>(m->start[use]);
}
