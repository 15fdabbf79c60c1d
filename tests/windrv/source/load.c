/* Checks: reads and writes, one at a time and many at once. */
#include "disk.h"

static u32 at_most(u32 value, u32 limit)
{
    return value < limit ? value : limit;
}

/* Checks the host's pattern at both ends of the disk and in between. */
void original(void)
{
    /* An earlier mode may have made the disk longer. */
    static u64 first[2];
    if (!first[disk.scsi])
        first[disk.scsi] = disk.blocks;
    u64 blocks = first[disk.scsi];
    io_clear();
    for (u32 i = 0; i < 16; i++) {
        u64 block = i * (blocks / 16) + i * 3;
        one((Transfer){.block = block, .blocks = 8, .shape = i % SHAPES, .max_pieces = 16});
    }
    one((Transfer){.block = blocks - 8, .blocks = 8});
    one((Transfer){.block = blocks - 1, .blocks = 1, .shape = SHIFTED, .cdb_length = 16});
    io_check("original");
}

/* Writes the first blocks beyond the region, which the host checks afterwards. */
void final(void)
{
    io_clear();
    one((Transfer){.write = 1, .block = disk.region, .blocks = 8, .fua = 1});
    io_check("final");
}

void read_only(void)
{
    const u32 write_protected = 7; /* DATA PROTECT */
    one((Transfer){.write = 1, .block = disk.region, .blocks = 8});
    check(io.failed == 1 && io.last_sense >> 16 == write_protected, "read_only",
          "status=%02x sense=%06x", io.last_status, io.last_sense);
}

void sizes(void)
{
    static const u32 SIZES[] = {1, 2, 3, 7, 8, 9, 31, 64, 127, 128, 129, 255, 256, 1000};
    u32 most = disk.longest / disk.block, at = 0;
    io_clear();
    for (u32 i = 0; i < SHAPES * sizeof SIZES / sizeof *SIZES; i++) {
        Shape shape = i / (sizeof SIZES / sizeof *SIZES);
        Transfer it = {.block = at, .shape = shape};
        it.blocks = at_most(SIZES[i % (sizeof SIZES / sizeof *SIZES)], most);
        it.max_pieces = at_most(it.blocks * disk.block / 4, disk.max_pieces);
        it.write = 1;
        one(it);
        it.write = 0;
        it.shape = (shape + 1) % SHAPES;
        it.cdb_length = 16;
        one(it);
        at += it.blocks;
        if (at + most + 16 > disk.region)
            at = random_number() % 1000;
    }
    io_check("sizes");
}

/* The longest transfer that StorPort may request, in the maximum number of pieces. */
void longest(void)
{
    u32 most = disk.longest / disk.block, pieces = 0;
    io_clear();
    for (u32 i = 0; i < SHAPES; i++) {
        Transfer it = {.write = 1, .blocks = most, .max_pieces = disk.max_pieces};
        it.block = disk.region - most - 5;
        it.shape = i;
        it.cdb_length = i & 1 ? 16 : 10;
        transfer(requests[0], it);
        if (requests[0]->list->NumberOfElements > pieces)
            pieces = requests[0]->list->NumberOfElements;
        wait_all(1);
        it.write = 0;
        it.shape = (i + 2) % SHAPES;
        it.cdb_length = 10;
        one(it);
    }
    if (io_good())
        check(1, "longest", "requests=%u bytes=%u pieces=%u of %u", io.done, most * disk.block,
              pieces, disk.max_pieces);
    else
        io_check("longest");
}

void force_unit_access(void)
{
    io_clear();
    for (u32 i = 0; i < 8; i++) {
        Transfer it = {.block = 3000 + 16 * i, .blocks = 16, .max_pieces = 16, .fua = 1};
        it.write = 1;
        it.shape = i % SHAPES;
        it.cdb_length = i & 1 ? 16 : 10;
        one(it);
        it.write = 0;
        it.shape = WHOLE;
        it.cdb_length = 10;
        it.fua = i & 1;
        one(it);
    }
    io_check("fua");
}

void synchronize(void)
{
    int good = command(0, 0, 10, SCSIOP_SYNCHRONIZE_CACHE, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    check(good, "synchronize", "status=%02x sense=%06x", answer.status, answer.sense);
    good =
        command(0, 0, 16, SCSIOP_SYNCHRONIZE_CACHE16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    /* QEMU's disks know only the short command. */
    check(good || answer.sense == 0x052000, "synchronize16", "status=%02x sense=%06x",
          answer.status, answer.sense);
}

/* viostor accepts neither of them. */
void other_cdbs(void)
{
    if (!disk.scsi)
        return;
    io_clear();
    for (int cdb_length = 6; cdb_length <= 12; cdb_length += 6) {
        Transfer it = {.block = 4000 + cdb_length, .blocks = 5, .cdb_length = cdb_length};
        it.write = 1;
        one(it);
        it.write = 0;
        it.shape = SHIFTED;
        one(it);
    }
    io_check("cdb6_12");
}

/* Starts a random request in its own slice of the region, so that requests do not overlap. */
void start_random(u32 number, u32 slice, u32 max_blocks)
{
    Transfer it = {.write = random_number() & 1, .shape = random_number() % SHAPES};
    u32 limit = random_number() % 4 ? 16 : max_blocks;
    it.blocks = at_most(1 + random_number() % limit, slice);
    it.block = number * slice + random_number() % (slice - it.blocks + 1);
    it.max_pieces = at_most(it.blocks * disk.block / 512, disk.max_pieces);
    it.cdb_length = random_number() & 1 ? 10 : 16;
    it.fua = it.write && random_number() % 16 == 0;
    transfer(requests[number], it);
}

void wait_for_any(const char *name, u32 depth)
{
    Adapter *adapter = disk.adapter;
    u64 end = microseconds() + disk.seconds * 1000000ull;
    for (int any = 0; !any;) {
        if (!adapter->mode.polled)
            wait_for_interrupt();
        any = poll_adapter(adapter);
        for (u32 i = 0; i < depth; i++)
            any |= requests[i]->state == DONE;
        if (!any && microseconds() > end) {
            io.lost = adapter->queue.outstanding;
            give_up(name);
        }
    }
}

/* Keeps `depth` requests in flight until `total` have been started. */
static void mixed(const char *name, u32 depth, u32 total, u32 max_bytes)
{
    Adapter *adapter = disk.adapter;
    u32 slice = disk.region / depth, started = 0;
    u64 start = microseconds();
    io_clear();
    adapter->queue.most_outstanding = 0;
    while (started < total || adapter->queue.pending) {
        int any = 0;
        for (u32 i = 0; i < depth; i++) {
            if (requests[i]->state == DONE) {
                judge(requests[i]);
                any = 1;
            }
            if (requests[i]->state == IDLE && started < total) {
                start_random(i, slice, max_bytes / disk.block);
                started++;
                any = 1;
            }
        }
        allow_interrupts();
        if (!poll_adapter(adapter) && !any)
            wait_for_any(name, depth);
    }
    wait_all(depth);
    if (io_good())
        check(1, name, "requests=%u at_once=%u ms=%llu", io.done, adapter->queue.most_outstanding,
              (microseconds() - start) / 1000);
    else
        io_check(name);
}

static u32 total(void)
{
    return option_number("requests", 400);
}

void mixed_polled(void)
{
    mixed("mixed1", 1, total() / 8, 32768);
}

void mixed4(void)
{
    mixed("mixed4", 4, total() / 4, disk.longest);
}

void mixed32(void)
{
    mixed("mixed32", 32, total() / 4, 32768);
}

void mixed128(void)
{
    mixed("mixed128", 128, total(), 102400);
}

/* More requests than a queue holds. */
void flood(void)
{
    Adapter *adapter = disk.adapter;
    io_clear();
    adapter->queue.most_outstanding = 0;
    adapter->calls.busy_retries = adapter->calls.busy_calls = 0;
    for (u32 i = 0; i < MAX_REQUESTS; i++) {
        Transfer it = {.write = i & 1, .blocks = 8, .shape = i % SHAPES, .max_pieces = 64};
        it.block = disk.region / 2 + i * 8;
        transfer(requests[i], it);
    }
    wait_all(MAX_REQUESTS);
    if (io_good())
        check(1, "flood", "requests=%u at_once=%u busy=%u again=%u", io.done,
              adapter->queue.most_outstanding, adapter->calls.busy_calls,
              adapter->calls.busy_retries);
    else
        io_check("flood");
}

/* All written blocks have their last content, and all others the original one. */
void everything(void)
{
    u32 step = at_most(disk.longest, 131072) / disk.block, count = 0;
    u32 depth = disk.adapter->mode.polled ? 1 : 16;
    io_clear();
    for (u64 block = 0; block + step <= disk.region; block += step) {
        transfer(requests[count++], (Transfer){.block = block, .blocks = step});
        if (count == depth) {
            wait_all(count);
            count = 0;
        }
    }
    wait_all(count);
    io_check("everything");
}
