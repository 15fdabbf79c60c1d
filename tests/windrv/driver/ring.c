/* Compiled into each driver, between it and its VirtIO library: reports the chains that enter the
 * rings and the used elements that come back, whose lengths the drivers ignore. */
#include <stddef.h>
#include "osdep.h"
#include "virtio_pci.h"
#include "VirtIO.h"
#include "virtio_ring.h"
#include "windows/virtio_ring_allocation.h"

/* In used.c of the port driver. */
void used_offered(void *queue, void *opaque, ULONG writable, ULONGLONG address);
void used_returned(void *queue, void *opaque, ULONG length, ULONG number);
void used_sent(ULONG number, ULONGLONG address, ULONG length);
void used_enter(void *queue);
void used_leave(void *queue);
void used_renewed(void *queue, void *device, ULONG number);
void used_beyond(void);

/* The library's function, which `build` renames. */
struct virtqueue *library_vring_new_virtqueue_split(unsigned int index, unsigned int num,
                                                    unsigned int vring_align, VirtIODevice *vdev,
                                                    void *pages, void (*notify)(struct virtqueue *),
                                                    void *control);

/* A device cannot have used more chains than there were. Each index follows 16 bits of flags. The
 * used one is read first, because the other one may grow. */
static void compare_indices(const struct virtqueue *queue)
{
    enum { INDEX = 1 };
    const volatile u16 *available = queue->avail_va, *used = queue->used_va;
    u16 used_index = used[INDEX], in_flight = available[INDEX] - used_index;
    if (in_flight > 0x7fff)
        used_beyond();
}

static proc_virtqueue_add_buf library_add_buf;
static proc_virtqueue_get_buf library_get_buf;

static int add_buf(struct virtqueue *queue, struct VirtIOBufferDescriptor list[], unsigned int out,
                   unsigned int in, void *opaque, void *indirect, ULONGLONG physical)
{
    ULONG writable = 0;
    for (unsigned int i = out; i < out + in; i++)
        writable += list[i].length;
    used_enter(queue);
    int added = library_add_buf(queue, list, out, in, opaque, indirect, physical);
    if (added >= 0)
        used_offered(queue, opaque, writable, in ? list[out].physAddr.QuadPart : 0);
    if (added >= 0 && out)
        used_sent(queue->index, list[0].physAddr.QuadPart, list[0].length);
    used_leave(queue);
    return added;
}

static void *get_buf(struct virtqueue *queue, unsigned int *length)
{
    used_enter(queue);
    compare_indices(queue);
    void *opaque = library_get_buf(queue, length);
    if (opaque)
        used_returned(queue, opaque, *length, queue->index);
    used_leave(queue);
    return opaque;
}

struct virtqueue *vring_new_virtqueue_split(unsigned int index, unsigned int num,
                                            unsigned int vring_align, VirtIODevice *vdev,
                                            void *pages, void (*notify)(struct virtqueue *),
                                            void *control)
{
    struct virtqueue *queue =
        library_vring_new_virtqueue_split(index, num, vring_align, vdev, pages, notify, control);
    if (queue) {
        used_renewed(queue, vdev, index);
        library_add_buf = queue->add_buf;
        library_get_buf = queue->get_buf;
        queue->add_buf = add_buf;
        queue->get_buf = get_buf;
    }
    return queue;
}
