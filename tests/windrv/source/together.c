/* Checks: each processor starts its own requests, and takes their messages. */
#include "disk.h"

/* Requests in flight of each processor, and the bytes of the longest. */
enum { DEPTH = 24, LONGEST = 16384, SHARE = MAX_REQUESTS / PROCESSORS };
/* Loops of the first processor for each message that it moves. */
enum { LOOPS = 8 };

static int moving;

/* Windows moves messages to other processors while requests are in flight. */
static void move_a_message(void)
{
    Interrupts *it = &disk.adapter->interrupts;
    static u32 loops;
    if (moving && ++loops % LOOPS == 0)
        message_move(it, random_number() % it->messages, random_number() % it->processors);
}

/* Judges the ended requests of a processor and starts the next ones. */
static u32 go_on(u32 first, u32 *to_start)
{
    u32 in_flight = 0;
    for (u32 i = first; i < first + DEPTH; i++) {
        if (requests[i]->state == DONE)
            judge(requests[i]);
        if (requests[i]->state == IDLE && *to_start) {
            start_random(i, disk.region / MAX_REQUESTS, LONGEST / disk.block);
            --*to_start;
        }
        in_flight += requests[i]->state != IDLE;
    }
    return in_flight;
}

/* Runs on each processor at the same time. */
static void load(void)
{
    Adapter *adapter = disk.adapter;
    u32 me = this_processor(), to_start = option_number("requests", 400) / 4;
    u64 end = microseconds() + disk.seconds * 1000000ull;
    while (go_on(SHARE * me, &to_start) || to_start) {
        if (!me)
            move_a_message();
        allow_interrupts();
        if (poll_adapter(adapter))
            continue;
        if (microseconds() > end) {
            COUNT(io.lost);
            give_up("together");
        }
        wait_for_interrupt();
    }
}

static void handle_pending(void)
{
    allow_interrupts();
    while (poll_adapter(disk.adapter))
        ;
}

static void run(const char *name, int moves)
{
    Adapter *adapter = disk.adapter;
    u32 processors = adapter->mode.processors, before = adapter->interrupts.misrouted;
    Together *it = &adapter->together;
    io_clear();
    memset(it, 0, sizeof *it);
    memset(adapter->interrupts.taken, 0, sizeof adapter->interrupts.taken);
    adapter->queue.own = 1;
    moving = moves;
    processors_run(processors, load);
    processors_run(processors, handle_pending);
    adapter->queue.own = 0;
    messages_moved(&adapter->interrupts);
    u32 idle = 0, misrouted = adapter->interrupts.misrouted - before;
    const u32 *taken = adapter->interrupts.taken;
    for (u32 i = 0; i < processors; i++)
        idle += !it->started[i] || (!moves && !taken[i]);
    if (!io_good())
        io_check(name);
    else
        check(!idle && it->most_inside > 1 && !misrouted && !wrong.collisions, name,
              "requests=%u started=%u/%u/%u/%u messages=%u/%u/%u/%u at_once=%u misrouted=%u "
              "collisions=%u",
              io.done, it->started[0], it->started[1], it->started[2], it->started[3], taken[0],
              taken[1], taken[2], taken[3], it->most_inside, misrouted, wrong.collisions);
}

/* In the end, each request's message is taken by another processor than the one that started it. */
void together(void)
{
    Interrupts *it = &disk.adapter->interrupts;
    run("together", 0);
    run("together.moves", 1);
    for (u32 message = 0; message < it->messages; message++)
        message_move(it, message, (message + 1) % it->processors);
    processors_run(it->processors, handle_pending);
    messages_moved(it);
    run("together.moved", 0);
}
