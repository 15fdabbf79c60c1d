/* Checks: mode pages, and switching the write cache. */
#include "disk.h"

enum { MODE_LENGTH = 192, DISABLE_BLOCK_DESCRIPTORS = 8, PAGE_FORMAT = 0x10 };
enum { WRITE_CACHE_ENABLE = 4, WRITE_PROTECT = 0x80, HEADER = 4 };

static int sense(u8 page)
{
    return command(FROM_DISK, MODE_LENGTH, 6, SCSIOP_MODE_SENSE, DISABLE_BLOCK_DESCRIPTORS, page, 0,
                   MODE_LENGTH, 0);
}

/* The page in the last answer, after the header and the block descriptors. */
static u8 *page_of_answer(void)
{
    return scratch + HEADER + scratch[3];
}

static int cache_bit(void)
{
    return (page_of_answer()[2] & WRITE_CACHE_ENABLE) != 0;
}

void mode_pages(void)
{
    int good = sense(MODE_SENSE_RETURN_ALL);
    check(good && scratch[0] >= 3, "mode.all", "status=%02x length=%u specific=%02x", answer.status,
          answer.length, scratch[2]);
    disk.read_only = (scratch[2] & WRITE_PROTECT) != 0;
    good = sense(MODE_PAGE_CACHING);
    check(good && (page_of_answer()[0] & 0x3f) == MODE_PAGE_CACHING, "mode.caching",
          "status=%02x length=%u write_cache=%u fua=%u", answer.status, answer.length, cache_bit(),
          scratch[2] >> 4 & 1);
}

static void select_cache(const char *name, int on)
{
    u32 page_bytes = disk.scsi ? 20 : 12, length = HEADER + page_bytes;
    memset(scratch, 0, length);
    scratch[HEADER] = MODE_PAGE_CACHING;
    scratch[HEADER + 1] = page_bytes - 2;
    scratch[HEADER + 2] = on ? WRITE_CACHE_ENABLE : 0;
    int good = command(TO_DISK, length, 6, SCSIOP_MODE_SELECT, PAGE_FORMAT, 0, 0, length, 0);
    u8 status = answer.status;
    u32 reason = answer.sense;
    good = good && sense(MODE_PAGE_CACHING);
    check(good && cache_bit() == on, name, "status=%02x sense=%06x write_cache=%u wanted=%u",
          status, reason, cache_bit(), on);
}

/* Switches the write cache and switches it back, as Windows' device manager does. */
void write_cache(void)
{
    sense(MODE_PAGE_CACHING);
    int before = cache_bit();
    int good = sense(MODE_SENSE_CHANGEABLE_VALUES | MODE_PAGE_CACHING);
    int changeable = cache_bit();
    check(good, "mode.changeable", "status=%02x write_cache=%u", answer.status, changeable);
    if (!changeable)
        return;
    select_cache("mode.select", !before);
    select_cache("mode.select.back", before);
}
