/* Lengths of used elements: a device must report the number of bytes that it wrote. A successful
 * read or write fills the whole buffer: data, and status or response (VIRTIO 1.3, 2.7.8). */
#include "disk.h"

enum { MAX_RINGS = 40, MAX_OFFERED = 1024 };

/* A chain in a ring. The driver's number or pointer (`opaque`) identifies it. */
typedef struct {
    void *opaque;
    u32 writable;
    u64 address; /* of the first writable piece */
} Offered;

/* The driver's lock of a ring protects it here, too: `inside` shows whether the driver has one. */
static struct Ring {
    void *queue, *device;
    u32 number; /* of the device's queue */
    int inside;
    u32 count;
    Offered offered[MAX_OFFERED];
} rings[MAX_RINGS];

static struct Ring *ring_of(void *queue)
{
    for (u32 i = 0; i < MAX_RINGS; i++)
        if (rings[i].queue == queue)
            return &rings[i];
    return NULL;
}

static Offered *find(struct Ring *ring, void *opaque)
{
    for (u32 i = 0; i < ring->count; i++)
        if (ring->offered[i].opaque == opaque)
            return &ring->offered[i];
    return NULL;
}

/* Called by driver/ring.c before and after each call of the library. */
void used_enter(void *queue)
{
    struct Ring *ring = ring_of(queue);
    if (ring && __atomic_exchange_n(&ring->inside, 1, __ATOMIC_ACQUIRE))
        COUNT(wrong.collisions);
}

void used_leave(void *queue)
{
    struct Ring *ring = ring_of(queue);
    if (ring)
        __atomic_store_n(&ring->inside, 0, __ATOMIC_RELEASE);
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

/* Before a driver starts, or after its queues are gone. */
void used_forget(void)
{
    for (u32 i = 0; i < MAX_RINGS; i++) {
        rings[i].queue = NULL;
        rings[i].count = 0;
    }
}

static struct Ring *earlier_ring_of(void *device, u32 number)
{
    for (u32 i = 0; i < MAX_RINGS; i++)
        if (rings[i].queue && rings[i].device == device && rings[i].number == number)
            return &rings[i];
    return NULL;
}

/* Called by driver/ring.c for a new ring. The device's reset has discarded the old ring's chains.
 */
void used_renewed(void *queue, void *device, u32 number)
{
    struct Ring *ring = ring_of(queue);
    if (!ring)
        ring = earlier_ring_of(device, number);
    if (!ring && !(ring = ring_of(NULL))) {
        print("fail used: there are more than %u rings\n", MAX_RINGS);
        machine_end();
    }
    ring->queue = queue;
    ring->device = device;
    ring->number = number;
    ring->inside = 0;
    ring->count = 0;
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
    COUNT(wrong.used_indices);
}

u32 used_wrong_indices(void)
{
    u32 found = wrong.used_indices;
    wrong.used_indices = 0;
    return found;
}

u32 used_collisions(void)
{
    u32 found = wrong.collisions;
    wrong.collisions = 0;
    return found;
}

u32 used_pending(void)
{
    u32 count = 0;
    for (u32 i = 0; i < MAX_RINGS; i++)
        count += rings[i].queue ? rings[i].count : 0;
    return count;
}

/* Called by driver/ring.c. After a reset the same chain may be offered again. */
void used_offered(void *queue, void *opaque, u32 writable, u64 address)
{
    struct Ring *ring = ring_of(queue);
    Offered *chain = ring ? find(ring, opaque) : NULL;
    if (!ring || (!chain && ring->count == MAX_OFFERED)) {
        print("fail used: a ring has more than %u chains or is unknown\n", MAX_OFFERED);
        machine_end();
    }
    if (!chain)
        chain = &ring->offered[ring->count++];
    *chain = (Offered){opaque, writable, address};
}

/* Called by driver/ring.c. The answers of other commands may be shorter: see `io_clear`. */
void used_returned(void *queue, void *opaque, u32 length, u32 number)
{
    struct Ring *ring = ring_of(queue);
    Offered *chain = ring ? find(ring, opaque) : NULL;
    if (!chain)
        return;
    if (is_wrong(length, chain->writable))
        COUNT(wrong.used_lengths);
    if (watch && chain->writable && length <= chain->writable)
        watch(number, (const u8 *)chain->address, length);
    *chain = ring->offered[--ring->count];
}
