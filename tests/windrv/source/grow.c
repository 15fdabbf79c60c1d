/* Check: the host makes the disk longer while requests are under way. Only with `host=`. */
#include "disk.h"

enum { GROWTH = 1 << 20, DEPTH = 100, SIXTEEN_BYTES = 16, READ_CAPACITY_16 = 0x10 };

u64 read_capacity(void)
{
    if (!command(FROM_DISK, 32, SIXTEEN_BYTES, SCSIOP_READ_CAPACITY16, READ_CAPACITY_16, 0, 0, 0, 0,
                 0, 0, 0, 0, 0, 0, 0, 32, 0, 0))
        return 0;
    return from_big_endian(scratch, 8) + 1;
}

static u32 changes(void)
{
    return disk.adapter->calls.bus_changes + disk.adapter->calls.state_changes;
}

/* Windows reads the capacity when the driver reports a change, and not before. */
void grow(void)
{
    if (!option("host"))
        return;
    Adapter *adapter = disk.adapter;
    u32 before = changes(), slice = disk.region / MAX_REQUESTS;
    u64 old = disk.blocks, until = microseconds() + disk.seconds * 1000000ull;
    io_clear();
    for (u32 i = 0; i < DEPTH; i++)
        transfer(requests[i], (Transfer){.write = i & 1, .block = i * slice, .blocks = 8});
    print("host: grow %s %llu\n", disk.scsi ? "scsi" : "blk", old * disk.block + GROWTH);
    while (changes() == before && microseconds() < until)
        if (!poll_adapter(adapter))
            wait_for_interrupt();
    int told = changes() > before;
    wait_all(DEPTH);
    disk.blocks = read_capacity();
    u32 grown = disk.blocks - old;
    if (grown == GROWTH / disk.block)
        one((Transfer){.write = 1, .block = disk.blocks - 8, .blocks = 8});
    check(told && grown == GROWTH / disk.block && io_good(), "grow",
          "told=%u blocks=%llu then=%llu requests=%u failed=%u status=%02x sense=%06x lost=%u "
          "twice=%u short=%u wrong_blocks=%u used_lengths=%u",
          told, old, disk.blocks, io.done, io.failed, io.last_status, io.last_sense, io.lost,
          io.twice, io.short_ones, wrong.blocks, wrong.used_lengths);
}
