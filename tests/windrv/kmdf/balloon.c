/* Checks of the balloon. The host obeys lines of the serial port:
 *
 *     host: set N          ask for a balloon of N pages
 *     host: pages N        the same, and wait until the device says that it has N pages
 *     host: statistics NAME=VALUE…
 */
#include "kmdf.h"

enum { LIMIT = 60000000, MOMENT = 300000, ROUNDS = 8 };
/* The offered buffer of statistics waits for the host. */
enum { STATISTICS_CHAINS = 1 };

static int has_pages(void *wanted)
{
    return pages_given() == *(u64 *)wanted && used_pending() <= STATISTICS_CHAINS;
}

static int never(void *)
{
    return 0;
}

static int is_settled(void *)
{
    Pages it = pages_look();
    return !it.not_zero && !it.changed;
}

/* The number of pages that the checks may ask for. */
static u64 most(void)
{
    u64 all = pages_look().free + pages_given();
    return all < 10000 ? all : 10000;
}

/* Asks for a balloon of this size. Its pages must be empty, and all others as they were. */
static void reach(const char *name, u64 pages)
{
    u32 causes = configuration_causes;
    int changes = pages != pages_given();
    print("host: pages %llu\n", pages);
    int reached = wait_until(has_pages, &pages, LIMIT);
    int settled = wait_until(is_settled, NULL, LIMIT / 6);
    Pages it = pages_look();
    /* Pages come from below and from above 4 GiB by turns. */
    int both = !it.high || pages < 2 || (it.given_high && it.given_high < it.given);
    /* The host also asks for statistics, whose interrupt wakes the driver, too. */
    causes = configuration_causes - causes;
    check(reached && settled && both && (causes || !changes), name,
          "pages=%llu of %llu high=%llu free=%llu not_zero=%llu changed=%llu interrupts=%u",
          it.given, pages, it.given_high, it.free, it.not_zero, it.changed, causes);
}

static void statistics(void)
{
    u64 start, length, total = 0, free = pages_look().free << 12;
    for (u32 i = 0; machine_memory(i, &start, &length); i++)
        total += length >> 12 << 12;
    print("host: statistics free-memory=%llu total-memory=%llu disk-caches=%u "
          "available-memory=%llu major-faults=%u minor-faults=%u\n",
          free, total, FILE_CACHE, free + FILE_CACHE / 2, PAGE_READS, DEMAND_ZERO);
}

/* With Windows' event of low memory, the driver must not take more. */
static void low_memory(void)
{
    u64 before = pages_given();
    pages_low(1);
    print("host: set %llu\n", before + 1000);
    wait_until(never, NULL, 3 * MOMENT);
    check(pages_given() == before, "low", "pages=%llu before=%llu", pages_given(), before);
    pages_low(0);
}

/* Sleeps while the balloon changes. It goes on after waking up. */
static void power(void)
{
    const char *failed = NULL;
    u32 cycles = 0;
    for (; cycles < ROUNDS && !failed; cycles++) {
        print("host: set %llu\n", random_number() % most());
        wait_until(never, NULL, random_number() % MOMENT);
        failed = device_sleep();
        failed = failed ? failed : device_wake();
    }
    check(!failed, "power", "%s cycles=%u pages=%llu", failed ? failed : "awake", cycles,
          pages_given());
}

void kmdf_check_balloon(void)
{
    reach("inflate.one", 1);
    reach("inflate", most() / 2);
    statistics();
    reach("inflate.more", most());
    reach("deflate", most() / 3);
    statistics();
    low_memory();
    reach("inflate.again", most() / 2 + 77);
    power();
    reach("after.power", most() / 4);
    reach("empty", 0);
    reach("inflate.last", most() / 2);
    /* The removal that follows meets a balloon that grows. */
    print("host: set %llu\n", most());
    wait_until(never, NULL, random_number() % MOMENT);
}

/* After its removal, the driver has given all pages back. */
void kmdf_removed_balloon(void)
{
    Pages it = pages_look();
    check(!it.given && !it.changed, "returned", "pages=%llu free=%llu changed=%llu", it.given,
          it.free, it.changed);
}
