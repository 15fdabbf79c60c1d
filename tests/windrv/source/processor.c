/* Several processors: their start, their work, and locks. */
#include "machine.h"

extern u8 trampoline[], trampoline_end[], ring3_stacks[];
extern volatile u32 processors_present;

/* A page of RAM below 1 MiB that the machine's tables do not use. */
enum { TRAMPOLINE = 0x8000 };
/* As in entry.S. */
enum { STACK = 262144 };
/* The limits for the start of processors and for a lock, in microseconds. */
enum { START_LIMIT = 10000000, LOCK_LIMIT = 60000000 };

u32 processors_running = 1;
static struct {
    Task *volatile task;
    volatile int ready, held;
} processors[PROCESSORS];
static Idle *volatile idle;
static volatile int hold;

u32 this_processor(void)
{
    u64 at = (u64)__builtin_frame_address(0) - (u64)ring3_stacks;
    return at < STACK * PROCESSORS ? at / STACK : 0;
}

void processors_start(u32 count)
{
    if (count > PROCESSORS)
        count = PROCESSORS;
    if (count < 2)
        return;
    memcpy((void *)TRAMPOLINE, trampoline, trampoline_end - trampoline);
    processors_awaken(TRAMPOLINE);
    u64 end = microseconds() + START_LIMIT;
    while (processors_running < count && microseconds() < end)
        processors_running += processors[processors_running].ready;
    print("# %u processors are running\n", processors_running);
}

static void wait_while_held(u32 me)
{
    processors[me].held = 1;
    while (hold)
        wait_for_interrupt();
    processors[me].held = 0;
}

/* Called by entry.S on each further processor. */
void windrv_processor(u32 me)
{
    processor_prepare();
    processors[me].ready = 1;
    for (;;) {
        Task *task = processors[me].task;
        if (task) {
            task();
            processors[me].task = NULL;
        } else if (hold) {
            wait_while_held(me);
        } else if (!idle || !idle()) {
            wait_for_interrupt();
        }
    }
}

void processors_idle(Idle *function)
{
    idle = function;
}

void processors_run(u32 count, Task *task)
{
    for (u32 i = 1; i < count; i++) {
        processors[i].task = task;
        processor_wake(i);
    }
    task();
    for (u32 i = 1; i < count; i++)
        while (processors[i].task)
            if (!idle || !idle())
                wait_for_interrupt();
}

void processors_hold(void)
{
    hold = 1;
    for (u32 i = 1; i < processors_running; i++) {
        processor_wake(i);
        while (!processors[i].held)
            ;
    }
}

void processors_release(void)
{
    hold = 0;
    for (u32 i = 1; i < processors_running; i++) {
        processor_wake(i);
        while (processors[i].held)
            ;
    }
}

/* The owner's number plus 1 is in a lock; 0 is a free one. */
int spin_lock(int *lock)
{
    int me = this_processor() + 1, found = 0;
    u64 end = 0;
    while (!__atomic_compare_exchange_n(lock, &found, me, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        if (found == me)
            return 0;
        found = 0;
        __builtin_ia32_pause();
        if (!end)
            end = microseconds() + LOCK_LIMIT;
        if (microseconds() > end) {
            print("fail lock: processor %u waits for one of processor %u\n", me - 1, *lock - 1);
            machine_end();
        }
    }
    return 1;
}

int spin_unlock(int *lock)
{
    if (*lock != (int)this_processor() + 1)
        return 0;
    __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
    return 1;
}
