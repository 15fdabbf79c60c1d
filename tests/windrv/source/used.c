/* Lengths of used elements: a device must report the number of bytes that it wrote. A successful
 * read or write fills the whole buffer: data, and status or response (VIRTIO 1.3, 2.7.8). */
#include "disk.h"

enum { MAX_OFFERED = 4096 };

/* Chains in the rings. The driver's number or pointer (`opaque`) identifies a chain in its queue.
 */
static struct Offered {
    void *queue, *opaque;
    u32 writable;
    u64 address; /* of the first writable piece */
} offered[MAX_OFFERED];
static u32 count;

static struct Offered *find(void *queue, void *opaque)
{
    for (u32 i = 0; i < count; i++)
        if (offered[i].queue == queue && offered[i].opaque == opaque)
            return &offered[i];
    return NULL;
}

/* QEMU reports a write's length as if it were a read: `used=any` accepts that. */
int used_lengths_matter(void)
{
    const char *word = option("used");
    return !word || memcmp(word, "any", 3);
}

/* Receive buffers of networks and ports are longer than most of what comes, so that their used
 * elements may say any length from `least` on. What the device does not write has length 0, the
 * answer of a command length 1: both are exact. */
static u32 least_length;

void used_may_be_shorter(u32 least)
{
    least_length = least;
}

static int is_wrong(u32 length, u32 writable)
{
    if (least_length && writable > least_length)
        return length < least_length || length > writable;
    return length != writable;
}

static Watch *watch;

void used_watch(Watch *it)
{
    watch = it;
}

/* Called by driver/ring.c. Physical and virtual addresses are equal. */
void used_sent(u32 number, u64 address, u32 length)
{
    if (watch)
        watch(number, (const u8 *)address, length);
}

void used_forget(void)
{
    count = 0;
}

/* Called by driver/ring.c for a new ring. The device's reset has discarded the old chains. */
void used_renewed(void *queue)
{
    for (u32 i = 0; i < count;)
        if (offered[i].queue == queue)
            offered[i] = offered[--count];
        else
            i++;
}

u32 used_wrong_lengths(void)
{
    u32 found = used_lengths_matter() ? wrong.used_lengths : 0;
    wrong.used_lengths = 0;
    return found;
}

/* Called by driver/ring.c. */
void used_beyond(void)
{
    wrong.used_indices++;
}

u32 used_wrong_indices(void)
{
    u32 found = wrong.used_indices;
    wrong.used_indices = 0;
    return found;
}

u32 used_pending(void)
{
    return count;
}

/* Called by driver/ring.c. After a reset the same chain may be offered again. */
void used_offered(void *queue, void *opaque, u32 writable, u64 address)
{
    struct Offered *chain = find(queue, opaque);
    if (!chain && count == MAX_OFFERED) {
        print("fail used: more than %u chains are in the rings\n", MAX_OFFERED);
        machine_end();
    }
    if (!chain)
        chain = &offered[count++];
    *chain = (struct Offered){queue, opaque, writable, address};
}

/* Called by driver/ring.c. The answers of other commands may be shorter: see `io_clear`. */
void used_returned(void *queue, void *opaque, u32 length, u32 number)
{
    struct Offered *chain = find(queue, opaque);
    if (!chain)
        return;
    if (is_wrong(length, chain->writable))
        wrong.used_lengths++;
    if (watch && chain->writable && length <= chain->writable)
        watch(number, (const u8 *)chain->address, length);
    *chain = offered[--count];
}
