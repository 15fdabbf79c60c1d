/* The exports of storport.sys, except StorPortExtendedFunction, as Microsoft's documentation
 * describes them. Unnamed parameters are ignored. */
#include "port.h"

/* Some pauses of the drivers end only by timeout, which is shorter here. */
enum { MAX_PAUSE_SECONDS = 3 };

ULONG StorPortInitialize(PVOID, PVOID, PHW_INITIALIZATION_DATA data, PVOID)
{
    announced = *data;
    return STATUS_SUCCESS;
}

/* Configuration space, BARs, registers. */

ULONG StorPortGetBusData(PVOID extension, ULONG type, ULONG, ULONG, PVOID buffer, ULONG length)
{
    Adapter *adapter = adapter_of(extension);
    if (type != PCIConfiguration)
        return 0;
    for (u32 at = 0; at + 4 <= length && at < 256; at += 4)
        *(u32 *)((u8 *)buffer + at) = pci_read(adapter->pci, at);
    return length < 256 ? length & ~3u : 256;
}

PVOID StorPortGetDeviceBase(PVOID, INTERFACE_TYPE, ULONG, STOR_PHYSICAL_ADDRESS at, ULONG length,
                            BOOLEAN in_io_space)
{
    return in_io_space ? (PVOID)(ULONG_PTR)at.QuadPart : map_device(at.QuadPart, length);
}

#define REGISTER_ACCESS(Name, Type, port_read, port_write)                                         \
    Type StorPortReadRegister##Name(PVOID, Type *at)                                               \
    {                                                                                              \
        return *(volatile Type *)at;                                                               \
    }                                                                                              \
    VOID StorPortWriteRegister##Name(PVOID, Type *at, Type value)                                  \
    {                                                                                              \
        *(volatile Type *)at = value;                                                              \
    }                                                                                              \
    Type StorPortReadPort##Name(PVOID, Type *port)                                                 \
    {                                                                                              \
        return port_read((u16)(ULONG_PTR)port);                                                    \
    }                                                                                              \
    VOID StorPortWritePort##Name(PVOID, Type *port, Type value)                                    \
    {                                                                                              \
        port_write((u16)(ULONG_PTR)port, value);                                                   \
    }
REGISTER_ACCESS(Uchar, UCHAR, in8, out8)
REGISTER_ACCESS(Ushort, USHORT, in16, out16)
REGISTER_ACCESS(Ulong, ULONG, in32, out32)

/* Memory. */

PVOID StorPortGetUncachedExtension(PVOID extension, PPORT_CONFIGURATION_INFORMATION, ULONG length)
{
    Adapter *adapter = adapter_of(extension);
    if (!adapter->uncached) {
        adapter->uncached = allocate(length, 4096);
        adapter->uncached_length = length;
    }
    return adapter->uncached;
}

STOR_PHYSICAL_ADDRESS StorPortGetPhysicalAddress(PVOID, PSCSI_REQUEST_BLOCK, PVOID at,
                                                 ULONG *length)
{
    STOR_PHYSICAL_ADDRESS address = {.QuadPart = (LONGLONG)at};
    *length = 4096 - ((ULONG_PTR)at & 4095);
    return address;
}

PSTOR_SCATTER_GATHER_LIST StorPortGetScatterGatherList(PVOID, PSCSI_REQUEST_BLOCK srb)
{
    Request *request = ((PSTORAGE_REQUEST_BLOCK)srb)->PortContext;
    return request->list->NumberOfElements ? request->list : NULL;
}

VOID StorPortMoveMemory(PVOID to, const VOID *from, ULONG_PTR length)
{
    memmove(to, from, length);
}

/* The registry has none of the optional values, which the INF does not set. */

PUCHAR StorPortAllocateRegistryBuffer(PVOID, PULONG)
{
    static ULONG buffer[16];
    return (PUCHAR)buffer;
}

VOID StorPortFreeRegistryBuffer(PVOID, PUCHAR)
{
}

BOOLEAN StorPortRegistryRead(PVOID, PUCHAR, ULONG, ULONG, PUCHAR, PULONG length)
{
    *length = 0;
    return FALSE;
}

/* Flow control. */

VOID StorPortStallExecution(ULONG time)
{
    u64 end = microseconds() + time;
    while (microseconds() < end)
        ;
}

BOOLEAN StorPortBusy(PVOID extension, ULONG requests)
{
    Adapter *adapter = adapter_of(extension);
    Queue *queue = &adapter->queue;
    COUNT(adapter->calls.busy_calls);
    spin_lock(&queue->lock);
    queue->busy_until = requests < queue->outstanding ? requests : queue->outstanding;
    spin_unlock(&queue->lock);
    return TRUE;
}

BOOLEAN StorPortPause(PVOID extension, ULONG seconds)
{
    Adapter *adapter = adapter_of(extension);
    COUNT(adapter->calls.pauses);
    if (seconds > MAX_PAUSE_SECONDS)
        seconds = MAX_PAUSE_SECONDS;
    spin_lock(&adapter->queue.lock);
    adapter->queue.paused = TRUE;
    adapter->queue.paused_until = microseconds() + seconds * 1000000;
    spin_unlock(&adapter->queue.lock);
    return TRUE;
}

BOOLEAN StorPortResume(PVOID extension)
{
    Adapter *adapter = adapter_of(extension);
    COUNT(adapter->calls.resumes);
    spin_lock(&adapter->queue.lock);
    adapter->queue.paused = FALSE;
    spin_unlock(&adapter->queue.lock);
    return TRUE;
}

BOOLEAN StorPortSetDeviceQueueDepth(PVOID extension, UCHAR, UCHAR, UCHAR, ULONG depth)
{
    adapter_of(extension)->queue_depth = depth;
    return TRUE;
}

BOOLEAN StorPortSynchronizeAccess(PVOID extension, STOR_SYNCHRONIZED_ACCESS *routine, PVOID context)
{
    Adapter *adapter = adapter_of(extension);
    lock_interrupts(adapter);
    BOOLEAN result = routine(extension, context);
    unlock_interrupts(adapter);
    return result;
}

VOID StorPortNotification(SCSI_NOTIFICATION_TYPE type, PVOID extension, ...)
{
    Adapter *adapter = adapter_of(extension);
    va_list list;
    va_start(list, extension);
    if (type == RequestComplete)
        complete(adapter, va_arg(list, PSTORAGE_REQUEST_BLOCK));
    else if (type == BusChangeDetected)
        COUNT(adapter->calls.bus_changes);
    else
        COUNT(adapter->calls.unsupported);
    va_end(list);
}
