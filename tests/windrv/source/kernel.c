/* The functions that the drivers import from the kernel and from WMI's library. */
#include "port.h"

/* The headers declare these functions as imported from another image, so that the compiler warns of
 * the definitions here, and calls go through the pointers that `IMPORT` makes. */
#pragma GCC diagnostic ignored "-Wattributes"

ULONG KeQueryActiveProcessorCountEx(USHORT)
{
    return active_processors;
}

ULONG KeQueryMaximumProcessorCountEx(USHORT)
{
    return active_processors;
}

VOID KeBugCheckEx(ULONG code, ULONG_PTR a, ULONG_PTR b, ULONG_PTR c, ULONG_PTR d)
{
    print("fail bugcheck: %x %llx %llx %llx %llx\n", code, a, b, c, d);
    machine_end();
    for (;;)
        ;
}

VOID KeBugCheck(ULONG code)
{
    KeBugCheckEx(code, 0, 0, 0, 0);
}

/* Virtual and physical addresses are equal. */
PHYSICAL_ADDRESS MmGetPhysicalAddress(PVOID at)
{
    PHYSICAL_ADDRESS address = {.QuadPart = (LONGLONG)at};
    return address;
}

ULONG DbgPrint(PCCH format, ...)
{
    va_list list;
    va_start(list, format);
    print("# ");
    print_list(format, list);
    va_end(list);
    return 0;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(KeBugCheckEx);
IMPORT(KeBugCheck);
IMPORT(MmGetPhysicalAddress);
IMPORT(DbgPrint);
IMPORT(KeQueryActiveProcessorCountEx);
IMPORT(KeQueryMaximumProcessorCountEx);

BOOLEAN ScsiPortWmiDispatchFunction(PSCSI_WMILIB_CONTEXT, UCHAR, PVOID, PSCSIWMI_REQUEST_CONTEXT,
                                    PVOID, ULONG, PVOID)
{
    return FALSE;
}

VOID ScsiPortWmiPostProcess(PSCSIWMI_REQUEST_CONTEXT context, UCHAR status, ULONG size)
{
    context->ReturnStatus = status;
    context->ReturnSize = size;
}
