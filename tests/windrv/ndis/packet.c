/* Packets: lists, their buffers and descriptors of memory; scatter-gather lists; the way to the
 * driver and back. */
#include "shim.h"

enum { MAX_KEPT = 4096, FRAME_ROOM = 68 << 10, COMPLETION_MICROSECONDS = 20000000 };
struct Sent sent;
struct Received received;
u32 keep;
int delivery_lock;
void (*on_receive)(PNET_BUFFER_LIST, const u8 *, u32);
static PNET_BUFFER_LIST kept[MAX_KEPT];

/* Pools, lists, buffers. */

NDIS_HANDLE NdisAllocateNetBufferListPool(NDIS_HANDLE, NET_BUFFER_LIST_POOL_PARAMETERS *it)
{
    NET_BUFFER_LIST_POOL_PARAMETERS *pool = pool_allocate(sizeof *pool, 16);
    *pool = *it;
    return pool;
}

VOID NdisFreeNetBufferListPool(NDIS_HANDLE pool)
{
    pool_free(pool);
}

static PNET_BUFFER buffer_new(PMDL mdl, u32 offset, u32 length)
{
    PNET_BUFFER it = pool_allocate(sizeof *it, 16);
    memset(it, 0, sizeof *it);
    it->MdlChain = it->CurrentMdl = mdl;
    it->DataOffset = it->CurrentMdlOffset = offset;
    while (it->CurrentMdl && it->CurrentMdlOffset >= it->CurrentMdl->ByteCount) {
        it->CurrentMdlOffset -= it->CurrentMdl->ByteCount;
        it->CurrentMdl = it->CurrentMdl->Next;
    }
    it->DataLength = length;
    return it;
}

static PNET_BUFFER_LIST list_new(NDIS_HANDLE pool)
{
    PNET_BUFFER_LIST list = pool_allocate(sizeof *list, 16);
    memset(list, 0, sizeof *list);
    list->NdisPoolHandle = pool;
    return list;
}

PNET_BUFFER_LIST NdisAllocateNetBufferAndNetBufferList(NDIS_HANDLE pool, USHORT, USHORT, PMDL mdl,
                                                       ULONG offset, SIZE_T length)
{
    level_at_most(DISPATCH_LEVEL, "NdisAllocateNetBufferAndNetBufferList");
    PNET_BUFFER_LIST list = list_new(pool);
    list->FirstNetBuffer = buffer_new(mdl, offset, length);
    return list;
}

VOID NdisFreeNetBufferList(PNET_BUFFER_LIST list)
{
    level_at_most(DISPATCH_LEVEL, "NdisFreeNetBufferList");
    for (PNET_BUFFER it = list->FirstNetBuffer, next; it; it = next) {
        next = it->Next;
        pool_free(it);
    }
    pool_free(list);
}

PNET_BUFFER_LIST NdisAllocateCloneNetBufferList(PNET_BUFFER_LIST from, NDIS_HANDLE pool,
                                                NDIS_HANDLE, ULONG)
{
    PNET_BUFFER it = from->FirstNetBuffer;
    return NdisAllocateNetBufferAndNetBufferList(pool, 0, 0, it->MdlChain, it->DataOffset,
                                                 it->DataLength);
}

VOID NdisFreeCloneNetBufferList(PNET_BUFFER_LIST list, ULONG)
{
    NdisFreeNetBufferList(list);
}

PMDL NdisAllocateMdl(NDIS_HANDLE, PVOID at, ULONG length)
{
    u64 offset = (u64)at % PAGE_SIZE, pages = (offset + length + PAGE_SIZE - 1) / PAGE_SIZE;
    level_at_most(DISPATCH_LEVEL, "NdisAllocateMdl");
    PMDL mdl = pool_allocate(sizeof *mdl + pages * sizeof(PFN_NUMBER), 16);
    memset(mdl, 0, sizeof *mdl);
    mdl->MdlFlags = MDL_MAPPED_TO_SYSTEM_VA | MDL_SOURCE_IS_NONPAGED_POOL;
    mdl->StartVa = (u8 *)at - offset;
    mdl->MappedSystemVa = at;
    mdl->ByteOffset = offset;
    mdl->ByteCount = length;
    for (u64 i = 0; i < pages; i++)
        MmGetMdlPfnArray(mdl)[i] = ((u64)at >> PAGE_SHIFT) + i;
    return mdl;
}

VOID NdisFreeMdl(PMDL mdl)
{
    pool_free(mdl);
}

/* Scatter-gather lists: an element for each page, as if no two pages were neighbours. */

static MINIPORT_PROCESS_SG_LIST *process_list;

NDIS_STATUS NdisMRegisterScatterGatherDma(NDIS_HANDLE, NDIS_SG_DMA_DESCRIPTION *it,
                                          PNDIS_HANDLE handle)
{
    process_list = it->ProcessSGListHandler;
    it->ScatterGatherListSize = 0x1000;
    *handle = &process_list;
    return NDIS_STATUS_SUCCESS;
}

VOID NdisMDeregisterScatterGatherDma(NDIS_HANDLE)
{
    process_list = NULL;
}

/* Counts the elements of a packet, and writes them if there is a list. */
static u32 elements(PNET_BUFFER it, PSCATTER_GATHER_LIST list)
{
    u32 count = 0, offset = it->CurrentMdlOffset, left = it->DataLength;
    for (PMDL mdl = it->CurrentMdl; mdl && left; mdl = mdl->Next, offset = 0)
        while (offset < mdl->ByteCount && left) {
            u64 at = (u64)mdl->MappedSystemVa + offset;
            u32 length = PAGE_SIZE - at % PAGE_SIZE;
            if (length > mdl->ByteCount - offset)
                length = mdl->ByteCount - offset;
            if (length > left)
                length = left;
            if (list) {
                list->Elements[count].Address.QuadPart = at;
                list->Elements[count].Length = length;
            }
            count++;
            offset += length;
            left -= length;
        }
    return count;
}

NDIS_STATUS NdisMAllocateNetBufferSGList(NDIS_HANDLE, PNET_BUFFER it, PVOID context, ULONG, PVOID,
                                         ULONG)
{
    u32 count = elements(it, NULL);
    level_at_most(DISPATCH_LEVEL, "NdisMAllocateNetBufferSGList");
    PSCATTER_GATHER_LIST list =
        pool_allocate(sizeof *list + count * sizeof(SCATTER_GATHER_ELEMENT), 16);
    memset(list, 0, sizeof *list);
    list->NumberOfElements = count;
    elements(it, list);
    KIRQL before = ndis_raise(DISPATCH_LEVEL);
    process_list(NULL, NULL, list, context);
    ndis_lower(before);
    return NDIS_STATUS_SUCCESS;
}

VOID NdisMFreeNetBufferSGList(NDIS_HANDLE, PSCATTER_GATHER_LIST list, PNET_BUFFER)
{
    pool_free(list);
}

/* Packets of the checks. The memory of each piece is freed with it. */

static PMDL piece_new(const u8 *from, u32 length, u32 offset)
{
    u8 *memory = pool_allocate(offset + length, PAGE_SIZE);
    memcpy(memory + offset, from, length);
    return NdisAllocateMdl(NULL, memory + offset, length);
}

static PMDL pieces_new(const u8 *from, u32 length, const Pieces *how)
{
    PMDL first = NULL, *last = &first;
    for (u32 number = 0; length; last = &(*last)->Next) {
        u32 size = how->sizes[number] && how->sizes[number] < length ? how->sizes[number] : length;
        *last = piece_new(from, size, how->offset);
        from += size;
        length -= size;
        if (number + 1 < sizeof how->sizes / sizeof *how->sizes && how->sizes[number + 1])
            number++;
    }
    return first;
}

PNET_BUFFER_LIST packet_new(const u8 *from, u32 length, const Pieces *how)
{
    PNET_BUFFER_LIST list = list_new(NULL);
    packet_add(list, from, length, how);
    return list;
}

void packet_add(PNET_BUFFER_LIST list, const u8 *from, u32 length, const Pieces *how)
{
    PNET_BUFFER *last = &list->FirstNetBuffer;
    while (*last)
        last = &(*last)->Next;
    *last = buffer_new(pieces_new(from, length, how), 0, length);
}

void packet_free(PNET_BUFFER_LIST list)
{
    for (PNET_BUFFER it = list->FirstNetBuffer; it; it = it->Next)
        for (PMDL mdl = it->MdlChain, next; mdl; mdl = next) {
            next = mdl->Next;
            pool_free(mdl->StartVa);
            NdisFreeMdl(mdl);
        }
    NdisFreeNetBufferList(list);
}

u32 packet_copy(PNET_BUFFER it, u8 *to, u32 room)
{
    u32 offset = it->CurrentMdlOffset, left = it->DataLength, done = 0;
    for (PMDL mdl = it->CurrentMdl; mdl && left; mdl = mdl->Next, offset = 0) {
        u32 length = mdl->ByteCount - offset < left ? mdl->ByteCount - offset : left;
        if (done + length > room)
            break;
        memcpy(to + done, (u8 *)mdl->MappedSystemVa + offset, length);
        done += length;
        left -= length;
    }
    return left ? 0 : done;
}

/* The way to the driver. */

void packets_send(PNET_BUFFER_LIST chain)
{
    for (PNET_BUFFER_LIST it = chain; it; it = it->Next) {
        it->Status = NDIS_STATUS_PENDING;
        COUNT(sent.sent);
    }
    nic.driver.SendNetBufferListsHandler(nic.context, chain, 0, 0);
}

VOID NdisMSendNetBufferListsComplete(NDIS_HANDLE, PNET_BUFFER_LIST chain, ULONG flags)
{
    level_at_most(DISPATCH_LEVEL, "NdisMSendNetBufferListsComplete");
    if (flags & NDIS_SEND_COMPLETE_FLAGS_DISPATCH_LEVEL)
        count_if(irql != DISPATCH_LEVEL, &mistakes.levels);
    for (PNET_BUFFER_LIST it = chain, next; it; it = next) {
        next = it->Next;
        int failed = it->Status != NDIS_STATUS_SUCCESS;
        if (failed)
            sent.status = it->Status;
        packet_free(it);
        count_if(failed, &sent.failed);
        COUNT(sent.completed);
    }
}

static int all_completed(void *)
{
    return sent.completed == sent.sent;
}

int packets_completed(void)
{
    return wait_until(all_completed, NULL, COMPLETION_MICROSECONDS);
}

/* The way back. */

/* Whether the checks keep the list. */
static int look_at(PNET_BUFFER_LIST list, int may_be_kept)
{
    static u8 frames[PROCESSORS][FRAME_ROOM];
    u8 *frame = frames[this_processor()];
    for (PNET_BUFFER it = list->FirstNetBuffer; it; it = it->Next) {
        u32 length = packet_copy(it, frame, FRAME_ROOM);
        spin_lock(&delivery_lock);
        if (on_receive)
            on_receive(list, frame, length);
        spin_unlock(&delivery_lock);
    }
    spin_lock(&delivery_lock);
    received.lists++;
    received.by_processor[current_processor() % PROCESSORS]++;
    received.with_resources += !may_be_kept;
    int keeps = may_be_kept && received.kept < keep && received.kept < MAX_KEPT;
    if (keeps)
        kept[received.kept++] = list;
    spin_unlock(&delivery_lock);
    return keeps;
}

static void give_back(PNET_BUFFER_LIST list, KIRQL level)
{
    ULONG flags = level == DISPATCH_LEVEL ? NDIS_RETURN_FLAGS_DISPATCH_LEVEL : 0;
    list->Next = NULL;
    nic.driver.ReturnNetBufferListsHandler(nic.context, list, flags);
}

VOID NdisMIndicateReceiveNetBufferLists(NDIS_HANDLE, PNET_BUFFER_LIST chain, NDIS_PORT_NUMBER,
                                        ULONG count, ULONG flags)
{
    level_at_most(DISPATCH_LEVEL, "NdisMIndicateReceiveNetBufferLists");
    int resources = (flags & NDIS_RECEIVE_FLAGS_RESOURCES) != 0;
    if (flags & NDIS_RECEIVE_FLAGS_DISPATCH_LEVEL)
        count_if(irql != DISPATCH_LEVEL, &mistakes.levels);
    count_if(!nic.running, &mistakes.requests);
    for (PNET_BUFFER_LIST it = chain, next; it; it = next, count--) {
        next = it->Next;
        if (!look_at(it, !resources) && !resources)
            give_back(it, irql);
    }
    count_if(count != 0, &mistakes.requests);
}

/* The last ones first, which is another order than that of their arrival. */
void packets_return(void)
{
    while (received.kept)
        give_back(kept[--received.kept], irql);
}
