/* Checks of viorng: random bytes. */
#include "kmdf.h"

enum { COUNT = 200, LARGEST = 3 * 4096, LIMIT = 60000000, MARGIN = 64 };
static Request *requests[COUNT];
static u8 *buffers[COUNT];
static u32 lengths[COUNT];

static int all_done(void *)
{
    for (u32 i = 0; i < COUNT; i++)
        if (requests[i]->state != DONE)
            return 0;
    return 1;
}

/* Bytes around the buffer must stay. */
static void prepare(u32 number, u32 length)
{
    lengths[number] = length;
    memset(buffers[number], 0, LARGEST + 2 * MARGIN);
}

static u32 strayed(u32 number)
{
    u32 count = 0;
    u64 end = MARGIN + requests[number]->information;
    for (u64 i = 0; i < LARGEST + 2 * MARGIN; i++)
        count += (i < MARGIN || i >= end) && buffers[number][i];
    return count;
}

/* Reads of many lengths at once. The driver answers at most a page at a time. */
static void many(const char *name)
{
    u32 failed = 0, strays = 0, twice = 0, same = 0, wrong_lengths = 0;
    u64 bytes = 0, zeros = 0;
    for (u32 i = 0; i < COUNT; i++) {
        prepare(i, i < 40 ? i + 1 : 1 + random_number() % LARGEST);
        kmdf_read(running, requests[i], buffers[i] + MARGIN, lengths[i]);
    }
    int good = wait_until(all_done, NULL, LIMIT);
    for (u32 i = 0; i < COUNT && good; i++) {
        Request *it = requests[i];
        u64 wanted = lengths[i] < 4096 ? lengths[i] : 4096;
        failed += !NT_SUCCESS(it->status);
        wrong_lengths += it->information != wanted;
        twice += it->completions != 1;
        strays += strayed(i);
        bytes += it->information;
        for (u64 at = 0; at < it->information; at++)
            zeros += !buffers[i][MARGIN + at];
        same += i && wanted >= 16 && lengths[i - 1] >= 16 &&
                !memcmp(buffers[i] + MARGIN, buffers[i - 1] + MARGIN, 16);
    }
    /* One byte in 256 is a zero: with half a million bytes, never twice as many. */
    check(good && !failed && !strays && !twice && !same && !wrong_lengths && zeros < bytes / 128,
          name, "done=%u failed=%u lengths=%u strays=%u twice=%u same=%u bytes=%llu zeros=%llu",
          good, failed, wrong_lengths, strays, twice, same, bytes, zeros);
}

/* Cancels requests in the driver and in its queue; the driver must survive late answers. */
static void cancel(void)
{
    u32 cancelled = 0, done = 0, other = 0;
    for (u32 i = 0; i < COUNT; i++) {
        prepare(i, 4096);
        kmdf_read(running, requests[i], buffers[i] + MARGIN, lengths[i]);
    }
    for (u32 i = 0; i < COUNT; i += 1 + random_number() % 3) {
        kmdf_cancel(requests[i]);
        if (i % 4 == 0)
            run_everything();
    }
    int good = wait_until(all_done, NULL, LIMIT);
    for (u32 i = 0; i < COUNT; i++) {
        int is_cancelled = requests[i]->status == STATUS_CANCELLED;
        cancelled += is_cancelled;
        done += requests[i]->status == STATUS_SUCCESS;
        other += requests[i]->completions != 1 || (is_cancelled && strayed(i));
    }
    check(good && cancelled && done && !other && cancelled + done == COUNT, "cancel",
          "done=%u cancelled=%u other=%u", done, cancelled, other);
}

/* Sleeps with requests under way, which go on after waking up. */
static void power(void)
{
    const char *failed = NULL;
    u32 bad = 0, cycles = 0;
    for (; cycles < 20 && !failed; cycles++) {
        for (u32 i = 0; i < COUNT; i++) {
            prepare(i, 1 + random_number() % 4096);
            kmdf_read(running, requests[i], buffers[i] + MARGIN, lengths[i]);
        }
        /* Some answers have come, some are on their way, some not asked for. */
        for (u32 i = random_number() % 20; i; i--)
            run_everything();
        failed = device_sleep();
        failed = failed ? failed : device_wake();
        if (!failed && !wait_until(all_done, NULL, LIMIT))
            failed = "the requests after it";
        for (u32 i = 0; i < COUNT && !failed; i++)
            bad += requests[i]->completions != 1 || requests[i]->status != STATUS_SUCCESS ||
                   requests[i]->information != lengths[i] || strayed(i);
    }
    check(!failed && !bad, "power", "%s cycles=%u bad=%u", failed ? failed : "awake", cycles, bad);
}

static int never(void *)
{
    return 0;
}

/* A message that is masked comes when it is no longer masked. */
static void masked(void)
{
    Interrupts *it = &running->interrupts;
    if (!it->messages)
        return;
    message_mask(it, 0, 1);
    u32 before = it->fired[0];
    prepare(0, 100);
    kmdf_read(running, requests[0], buffers[0] + MARGIN, 100);
    wait_until(never, NULL, 100000);
    u32 early = it->fired[0] - before;
    int waits = requests[0]->state != DONE;
    message_mask(it, 0, 0);
    int good = wait_until(all_done, NULL, LIMIT);
    check(!early && waits && good, "masked", "early=%u waits=%u done=%u", early, waits, good);
}

/* The indices of the ring have 16 bits. */
static void wrap(void)
{
    enum { ROUNDS = 66000 / COUNT };
    u32 round = 0, bad = 0;
    for (int good = 1; round < ROUNDS && good; round++) {
        for (u32 i = 0; i < COUNT; i++)
            kmdf_read(running, requests[i], buffers[i], 1);
        good = wait_until(all_done, NULL, LIMIT / 4);
        for (u32 i = 0; i < COUNT; i++)
            bad += !good || requests[i]->status != STATUS_SUCCESS || requests[i]->information != 1;
    }
    check(!bad, "wrap", "rounds=%u bad=%u", round, bad);
}

/* Each processor has its own requests. */

enum { SHARE = COUNT / PROCESSORS, ROUNDS = 40, SLEEPS = 20, CANCELLED = 1 };
static struct {
    u32 rounds, done, cancelled, bad;
} together[PROCESSORS];
static volatile int sleeps, over;

static void judge_own(u32 me, const u8 *marks)
{
    for (u32 i = 0; i < SHARE; i++) {
        Request *it = requests[me * SHARE + i];
        u64 wanted = lengths[me * SHARE + i] < 4096 ? lengths[me * SHARE + i] : 4096;
        int gone = it->status == STATUS_CANCELLED && marks[i] == CANCELLED;
        int good = gone || (it->status == STATUS_SUCCESS && it->information == wanted);
        together[me].bad += it->completions != 1 || !good || strayed(me * SHARE + i);
        together[me].done += !gone;
        together[me].cancelled += gone;
    }
}

/* Sends requests, cancels some of them, and waits for all. */
static void read_own(u32 me)
{
    u8 marks[SHARE] = {0};
    for (u32 i = 0; i < SHARE; i++) {
        prepare(me * SHARE + i, 1 + random_number() % LARGEST);
        kmdf_read(running, requests[me * SHARE + i], buffers[me * SHARE + i] + MARGIN,
                  lengths[me * SHARE + i]);
    }
    for (u32 i = random_number() % 8; i < SHARE; i += 1 + random_number() % 16) {
        marks[i] = CANCELLED;
        kmdf_cancel(requests[me * SHARE + i]);
    }
    if (!kmdf_await(requests + me * SHARE, SHARE, LIMIT)) {
        together[me].bad++;
        return;
    }
    judge_own(me, marks);
    together[me].rounds++;
}

static const char *sleep_and_wake(void)
{
    const char *failed = NULL;
    for (u32 i = 0; i < SLEEPS && !failed; i++) {
        wait_until(never, NULL, random_number() % 5000);
        failed = device_sleep();
        wait_until(never, NULL, random_number() % 2000);
        failed = failed ? failed : device_wake();
    }
    return failed;
}

static const char *problem;

static void read_together(void)
{
    u32 me = this_processor();
    if (sleeps && !me) {
        problem = sleep_and_wake();
        over = 1;
    }
    while (sleeps ? me && !over && !together[me].bad : together[me].rounds < ROUNDS) {
        read_own(me);
        if (together[me].bad)
            break;
    }
}

static void run_together(const char *name, int with_sleeps)
{
    u32 processors = running->interrupts.processors, rounds = 0, done = 0, cancelled = 0, bad = 0;
    memset(together, 0, sizeof together);
    sleeps = with_sleeps;
    over = 0;
    problem = NULL;
    processors_run(processors, read_together);
    for (u32 i = 0; i < processors; i++) {
        rounds += together[i].rounds;
        done += together[i].done;
        cancelled += together[i].cancelled;
        bad += together[i].bad;
    }
    check(!problem && !bad && done && cancelled, name, "%s rounds=%u done=%u cancelled=%u bad=%u",
          problem ? problem : "done", rounds, done, cancelled, bad);
}

void kmdf_check_rng(void)
{
    for (u32 i = 0; i < COUNT; i++) {
        requests[i] = kmdf_request();
        if (!buffers[i])
            buffers[i] = allocate(LARGEST + 2 * MARGIN, 16);
    }
    many("read");
    cancel();
    power();
    many("read.again");
    masked();
    if (running->interrupts.processors == 1) {
        wrap();
    } else {
        run_together("together", 0);
        run_together("together.power", 1);
    }
    /* The removal that follows finds requests under way. */
    for (u32 i = 0; i < COUNT; i++)
        kmdf_read(running, requests[i], buffers[i] + MARGIN, 4096);
}
