/* Checks: the host saves the machine, ends it, and continues it in another process. Only with
 * `saves=`. */
#include "disk.h"

/* Requests in flight; the bytes of the longest; saves for each in the middle of 100. */
enum { DEPTH = 100, LONGEST = 65536, MIDDLE = 8 };
/* Writes of 8 blocks, each to its own place after the region, so that the host can check them. */
enum { ONCE = 200, ONCE_BLOCKS = 8 };

/* Waits until the host has saved and continued the machine, after which it presses the power
 * button. This processor takes no interrupts meanwhile: answers stay where they are. */
static void save_here(void)
{
    u64 end = microseconds() + disk.seconds * 1000000ull;
    print("host: save %u\n", disk.adapter->queue.outstanding);
    while (!power_button())
        if (microseconds() > end)
            give_up("saved.button");
}

/* A request of the list: reads and writes, flushes and UNMAPs. */
static int send_one(u32 number)
{
    switch (number % 5) {
    case 3:
        return command(0, 0, 10, SCSIOP_SYNCHRONIZE_CACHE, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    case 4:
        return !disk.discard || send_unmap(number / 5 % 4, 1);
    default:
        start_random(0, disk.region, LONGEST / disk.block);
        wait_all(1);
        return 1;
    }
}

/* Saved before each request and after each has been sent. */
static void between(u32 saves)
{
    int good = 1;
    io_clear();
    for (u32 i = 0; i < (saves + 1) / 2; i++) {
        save_here();
        disk.sent = save_here;
        good = send_one(i) && good;
        disk.sent = NULL;
    }
    if (io_good())
        check(good, "saved.between", "saves=%u requests=%u status=%02x sense=%06x", saves, io.done,
              answer.status, answer.sense);
    else
        io_check("saved.between");
}

/* Saved after 100 requests have been sent at once. */
static void middle(u32 saves)
{
    u32 slice = disk.region / DEPTH;
    io_clear();
    for (u32 i = 0; i < saves; i++) {
        pause_queue(disk.adapter, 1);
        for (u32 number = 0; number < DEPTH; number++)
            start_random(number, slice, LONGEST / disk.block);
        pause_queue(disk.adapter, 0);
        disk.sent = save_here;
        wait_all(DEPTH);
        disk.sent = NULL;
    }
    io_check("saved.middle");
}

static void start_next(u32 number, u32 *once)
{
    if (!*once || random_number() & 1) {
        start_random(number, disk.region / DEPTH, LONGEST / disk.block);
        return;
    }
    Transfer it = {.write = 1, .blocks = ONCE_BLOCKS, .shape = *once % SHAPES, .max_pieces = 16};
    it.block = disk.region + ONCE_BLOCKS * *once;
    --*once;
    transfer(requests[number], it);
}

/* Keeps 100 requests in flight until the host presses the power button. It saves the machine at
 * moments of its choice. */
static void load(void)
{
    Adapter *adapter = disk.adapter;
    u32 once = ONCE;
    int more = 1, pressed = 0;
    io_clear();
    print("host: load\n");
    while (more || adapter->queue.pending) {
        int any = 0;
        pressed |= power_button();
        more = !pressed || once;
        for (u32 i = 0; i < DEPTH; i++) {
            if (requests[i]->state == DONE) {
                judge(requests[i]);
                any = 1;
            }
            if (requests[i]->state == IDLE && more) {
                start_next(i, &once);
                any = 1;
            }
        }
        allow_interrupts();
        if (!poll_adapter(adapter) && !any)
            wait_for_any("saved.load", DEPTH);
    }
    wait_all(DEPTH);
    io_check("saved.load");
}

void saved(void)
{
    u32 saves = option_number("saves", 0);
    print("host: outstanding at %llx\n", (u64)&disk.adapter->queue.outstanding);
    between(saves);
    middle((saves + MIDDLE - 1) / MIDDLE);
    load();
}
