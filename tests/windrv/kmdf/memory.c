/* Pages of the machine for MDLs, what the kernel says of memory, and bitmaps. */
#include "kmdf.h"

#pragma GCC diagnostic ignored "-Wattributes"

/* Pages have stamps, so that a page that the host took is known by its content. Each eighth page is
 * never given away: it must keep its stamp. */
enum { HEAP_END = 240 << 20, MAX_RANGES = 4, KEEP = 8 };
enum { NEVER, KEPT, RETURNED, GIVEN };
static struct Range {
    u64 first, count, next;
    u8 *states;
} ranges[MAX_RANGES];
static u32 range_count, next_range;
static u64 free_pages, given_pages;
static KEVENT low_memory;

static u64 stamp(u64 page)
{
    return (page + 1) * 0x9e3779b97f4a7c15ull;
}

static void set_stamp(u64 page)
{
    u64 *words = (u64 *)(page << 12);
    words[0] = words[255] = words[511] = stamp(page);
}

static int has(u64 page, u64 value)
{
    u64 *words = (u64 *)(page << 12);
    return words[0] == value && words[255] == value && words[511] == value;
}

void pages_find(void)
{
    u64 start, length;
    for (u32 i = 0; machine_memory(i, &start, &length) && range_count < MAX_RANGES; i++) {
        u64 end = (start + length) >> 12;
        u64 first = (start > HEAP_END ? start + 4095 : HEAP_END) >> 12;
        if (end <= first)
            continue;
        struct Range *range = &ranges[range_count++];
        map_memory(first << 12, (end - first) << 12);
        *range = (struct Range){first, end - first, 0, allocate(end - first, 16)};
        free_pages += (end - first) - (end - first) / KEEP;
    }
}

/* A page of the next range, so that pages of all ranges are given away. */
static u64 page_allocate(void)
{
    for (u32 tries = 0; tries < range_count; tries++) {
        struct Range *range = &ranges[next_range++ % range_count];
        for (u64 i = 0; i < range->count; i++) {
            u64 at = range->next++ % range->count;
            u8 *state = &range->states[at];
            if (*state == NEVER)
                set_stamp(range->first + at);
            if (*state == NEVER && at % KEEP == KEEP - 1)
                *state = KEPT;
            if (*state != NEVER && *state != RETURNED)
                continue;
            *state = GIVEN;
            free_pages--;
            given_pages++;
            return range->first + at;
        }
    }
    return 0;
}

static void page_free(u64 page)
{
    for (u32 i = 0; i < range_count; i++) {
        struct Range *range = &ranges[i];
        if (page < range->first || page >= range->first + range->count)
            continue;
        if (range->states[page - range->first] != GIVEN)
            break;
        range->states[page - range->first] = RETURNED;
        set_stamp(page);
        free_pages++;
        given_pages--;
        return;
    }
    print("fail pages: page %llx is freed, but is not in use\n", page);
    machine_end();
}

Pages pages_look(void)
{
    Pages it = {.free = free_pages};
    for (u32 i = 0; i < range_count; i++)
        for (u64 at = 0; at < ranges[i].count; at++) {
            u64 page = ranges[i].first + at;
            u8 state = ranges[i].states[at];
            it.high += page >= 1 << 20;
            it.given += state == GIVEN;
            it.given_high += state == GIVEN && page >= 1 << 20;
            it.not_zero += state == GIVEN && !has(page, 0);
            it.changed += (state == KEPT || state == RETURNED) && !has(page, stamp(page));
        }
    return it;
}

u64 pages_given(void)
{
    return given_pages;
}

/* MDLs. */

static PMDL mdl_new(u64 pages)
{
    PMDL mdl = pool_allocate(sizeof *mdl + pages * sizeof(PFN_NUMBER), 16);
    memset(mdl, 0, sizeof *mdl);
    return mdl;
}

PMDL MmAllocatePagesForMdlEx(PHYSICAL_ADDRESS, PHYSICAL_ADDRESS, PHYSICAL_ADDRESS, SIZE_T bytes,
                             MEMORY_CACHING_TYPE, ULONG)
{
    level_at_most(APC_LEVEL, "MmAllocatePagesForMdlEx");
    u64 count = (bytes + 4095) >> 12, got = 0;
    if (!free_pages)
        return NULL;
    PMDL mdl = mdl_new(count);
    for (; got < count && free_pages; got++)
        MmGetMdlPfnArray(mdl)[got] = page_allocate();
    mdl->ByteCount = got << 12;
    return mdl;
}

VOID MmFreePagesFromMdl(PMDL mdl)
{
    for (u64 i = 0; i < mdl->ByteCount >> 12; i++)
        page_free(MmGetMdlPfnArray(mdl)[i]);
}

/* What the kernel says of memory. */

void pages_low(int low)
{
    low_memory.Header.Type = NotificationEvent;
    low_memory.Header.SignalState = low;
}

PKEVENT IoCreateNotificationEvent(PUNICODE_STRING, PHANDLE handle)
{
    *handle = &low_memory;
    return &low_memory;
}

/* The start of SYSTEM_PERFORMANCE_INFORMATION, as 4-byte fields, and known values in it. */
NTSTATUS ZwQuerySystemInformation(ULONG class, PVOID to, ULONG length, PULONG needed)
{
    enum { BASIC = 0, BASIC_PAGES = 3 };
    enum { PERFORMANCE = 2, AVAILABLE_AT = 11, DEMAND_ZERO_AT = 19, PAGE_READS_AT = 20 };
    enum { FILE_CACHE_EX = 81 };
    u64 total = 0, start, bytes;
    for (u32 i = 0; machine_memory(i, &start, &bytes); i++)
        total += bytes >> 12;
    level_at_most(PASSIVE_LEVEL, "ZwQuerySystemInformation");
    memset(to, 0, length);
    *needed = length;
    if (class == BASIC)
        ((u32 *)to)[BASIC_PAGES] = total;
    if (class == PERFORMANCE) {
        ((u32 *)to)[AVAILABLE_AT] = free_pages;
        ((u32 *)to)[DEMAND_ZERO_AT] = DEMAND_ZERO;
        ((u32 *)to)[PAGE_READS_AT] = PAGE_READS;
    }
    if (class == FILE_CACHE_EX)
        *(u64 *)to = FILE_CACHE;
    return STATUS_SUCCESS;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(MmAllocatePagesForMdlEx);
IMPORT(MmFreePagesFromMdl);
IMPORT(IoCreateNotificationEvent);
