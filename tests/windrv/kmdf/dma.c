/* DMA: common buffers, transactions, MDLs of buffers, and the bitmaps of the library. Addresses of
 * the bus are physical ones, which are equal to virtual ones. */
#include "kmdf.h"

#pragma GCC diagnostic ignored "-Wattributes"

typedef struct {
    Object object;
    void *memory;
} CommonBuffer;

NTSTATUS WdfDmaEnablerCreate(WDFDEVICE device, WDF_DMA_ENABLER_CONFIG *, PWDF_OBJECT_ATTRIBUTES it,
                             WDFDMAENABLER *handle)
{
    *handle = object_new(DMA_ENABLER, sizeof(Object), device, it);
    return STATUS_SUCCESS;
}

NTSTATUS WdfCommonBufferCreate(WDFDMAENABLER enabler, size_t length, PWDF_OBJECT_ATTRIBUTES it,
                               WDFCOMMONBUFFER *handle)
{
    level_at_most(PASSIVE_LEVEL, "WdfCommonBufferCreate");
    CommonBuffer *buffer = object_new(COMMON_BUFFER, sizeof *buffer, enabler, it);
    buffer->memory = pool_allocate(length, PAGE_SIZE);
    *handle = (WDFCOMMONBUFFER)buffer;
    return STATUS_SUCCESS;
}

PVOID WdfCommonBufferGetAlignedVirtualAddress(WDFCOMMONBUFFER handle)
{
    return ((CommonBuffer *)object_of(handle, COMMON_BUFFER))->memory;
}

PHYSICAL_ADDRESS WdfCommonBufferGetAlignedLogicalAddress(WDFCOMMONBUFFER handle)
{
    return MmGetPhysicalAddress(WdfCommonBufferGetAlignedVirtualAddress(handle));
}

/* Transactions: a scatter-gather list of the buffer's pages, built when the transaction starts. */

typedef struct {
    Object object;
    EVT_WDF_PROGRAM_DMA *program;
    WDF_DMA_DIRECTION direction;
    u8 *buffer;
    size_t length;
    SCATTER_GATHER_LIST *list;
} Transaction;

NTSTATUS WdfDmaTransactionCreate(WDFDMAENABLER enabler, PWDF_OBJECT_ATTRIBUTES it,
                                 WDFDMATRANSACTION *handle)
{
    *handle = object_new(TRANSACTION, sizeof(Transaction), enabler, it);
    return STATUS_SUCCESS;
}

NTSTATUS WdfDmaTransactionInitialize(WDFDMATRANSACTION handle, EVT_WDF_PROGRAM_DMA *program,
                                     WDF_DMA_DIRECTION direction, PMDL, PVOID buffer, size_t length)
{
    Transaction *it = object_of(handle, TRANSACTION);
    it->program = program;
    it->direction = direction;
    it->buffer = buffer;
    it->length = length;
    return STATUS_SUCCESS;
}

NTSTATUS WdfDmaTransactionInitializeUsingOffset(WDFDMATRANSACTION handle,
                                                EVT_WDF_PROGRAM_DMA *program,
                                                WDF_DMA_DIRECTION direction, PMDL mdl,
                                                ULONG_PTR offset, size_t length)
{
    return WdfDmaTransactionInitialize(handle, program, direction, mdl,
                                       (u8 *)mdl->StartVa + mdl->ByteOffset + offset, length);
}

NTSTATUS WdfDmaTransactionInitializeUsingRequest(WDFDMATRANSACTION handle, WDFREQUEST request,
                                                 EVT_WDF_PROGRAM_DMA *program,
                                                 WDF_DMA_DIRECTION direction)
{
    Request *it = object_of(request, REQUEST);
    return WdfDmaTransactionInitialize(handle, program, direction, NULL, it->buffer, it->length);
}

NTSTATUS WdfDmaTransactionExecute(WDFDMATRANSACTION handle, PVOID context)
{
    Transaction *it = object_of(handle, TRANSACTION);
    u32 pages = ((u64)it->buffer % PAGE_SIZE + it->length + PAGE_SIZE - 1) / PAGE_SIZE;
    SCATTER_GATHER_LIST *list = pool_allocate(sizeof *list + pages * sizeof list->Elements[0], 16);
    list->NumberOfElements = 0;
    for (u64 at = (u64)it->buffer, left = it->length; left;) {
        u64 here = PAGE_SIZE - at % PAGE_SIZE;
        SCATTER_GATHER_ELEMENT *element = &list->Elements[list->NumberOfElements++];
        element->Address.QuadPart = at;
        element->Length = here < left ? here : left;
        at += element->Length;
        left -= element->Length;
    }
    it->list = list;
    KIRQL before = irql;
    irql = DISPATCH_LEVEL;
    it->program(handle, (WDFDEVICE)running, context, it->direction, list);
    irql = before;
    return STATUS_SUCCESS;
}

/* The driver may have deleted the transaction before `program` returned: the list goes here. */
BOOLEAN WdfDmaTransactionDmaCompletedFinal(WDFDMATRANSACTION handle, size_t, NTSTATUS *status)
{
    Transaction *it = object_of(handle, TRANSACTION);
    pool_free(it->list);
    it->list = NULL;
    *status = STATUS_SUCCESS;
    return TRUE;
}

PMDL IoAllocateMdl(PVOID buffer, ULONG length, BOOLEAN, BOOLEAN, PIRP)
{
    PMDL mdl = pool_allocate(sizeof *mdl, 16);
    memset(mdl, 0, sizeof *mdl);
    mdl->StartVa = (PVOID)((u64)buffer & ~4095ull);
    mdl->ByteOffset = (u64)buffer & 4095;
    mdl->ByteCount = length;
    return mdl;
}

VOID IoFreeMdl(PMDL mdl)
{
    pool_free(mdl);
}

VOID MmBuildMdlForNonPagedPool(PMDL)
{
}

/* Bitmaps. */

VOID RtlInitializeBitMap(PRTL_BITMAP map, PULONG words, ULONG bits)
{
    map->SizeOfBitMap = bits;
    map->Buffer = words;
}

BOOLEAN RtlTestBit(PRTL_BITMAP map, ULONG bit)
{
    return map->Buffer[bit / 32] >> bit % 32 & 1;
}

VOID RtlClearBit(PRTL_BITMAP map, ULONG bit)
{
    map->Buffer[bit / 32] &= ~(1u << bit % 32);
}

/* The library asks for single bits. */
ULONG RtlFindClearBitsAndSet(PRTL_BITMAP map, ULONG, ULONG)
{
    for (ULONG bit = 0; bit < map->SizeOfBitMap; bit++)
        if (!RtlTestBit(map, bit)) {
            map->Buffer[bit / 32] |= 1u << bit % 32;
            return bit;
        }
    return ~0u;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(IoAllocateMdl);
IMPORT(IoFreeMdl);
IMPORT(MmBuildMdlForNonPagedPool);
IMPORT(RtlInitializeBitMap);
IMPORT(RtlTestBit);
IMPORT(RtlClearBit);
IMPORT(RtlFindClearBitsAndSet);
