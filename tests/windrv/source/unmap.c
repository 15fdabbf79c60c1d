/* Checks: UNMAP. Unmapped blocks may read as zeros; their neighbors keep their content. */
#include "disk.h"

enum { STRIPES = 6, LIST_HEADER = 8, DESCRIPTOR = 16, MARGIN = 16 };

/* Length of a written stripe in blocks. Stripes begin at a multiple of 64 blocks. */
static u32 stripe_blocks(void)
{
    return (256 << 10) / disk.block;
}

static u64 stripe(u32 number)
{
    u64 start = (10 << 20) / disk.block / 64 * 64;
    return start + number * stripe_blocks();
}

int send_unmap(u32 first, u32 ranges)
{
    u32 length = LIST_HEADER + DESCRIPTOR * ranges;
    memset(scratch, 0, length);
    big_endian(scratch, length - 2, 2);
    big_endian(scratch + 2, DESCRIPTOR * ranges, 2);
    for (u32 i = 0; i < ranges; i++) {
        u8 *descriptor = scratch + LIST_HEADER + DESCRIPTOR * i;
        u64 from = stripe(first + i) + MARGIN;
        u32 blocks = stripe_blocks() - 2 * MARGIN;
        big_endian(descriptor, from, 8);
        big_endian(descriptor + 8, blocks, 4);
        memset(disk.zeroed + from, 1, blocks);
    }
    return command(TO_DISK, length, 10, SCSIOP_UNMAP, 0, 0, 0, 0, 0, 0, 0, length, 0);
}

static void read_stripes(Shape shape)
{
    for (u32 i = 0; i < STRIPES; i++)
        one((Transfer){.block = stripe(i), .blocks = stripe_blocks(), .shape = shape});
}

void unmap(void)
{
    if (!disk.discard) {
        print("# no UNMAP: the disk does not offer it\n");
        return;
    }
    io_clear();
    for (u32 i = 0; i < STRIPES; i++)
        one((Transfer){.write = 1, .block = stripe(i), .blocks = stripe_blocks()});
    int good = send_unmap(0, 1);
    good = send_unmap(1, disk.unmap_ranges) && good;
    u8 status = answer.status;
    u32 sense = answer.sense;
    read_stripes(SHIFTED);
    check(good && io_good(), "unmap", "ranges=%u status=%02x sense=%06x wrong_blocks=%u first=%u",
          1 + disk.unmap_ranges, status, sense, wrong.blocks, wrong.first);

    io_clear();
    for (u32 i = 0; i < STRIPES; i++) {
        Transfer it = {.write = 1, .block = stripe(i) + 3, .blocks = stripe_blocks() - 7};
        one(it);
    }
    read_stripes(WHOLE);
    io_check("unmap.again");
}
