/* Included before each source of the KMDF drivers: names of Windows' headers that mingw-w64 lacks,
 * and empty tracing. Read prelude.h for the reason why headers come first. */
#ifndef WINDRV_KERNEL_H
#define WINDRV_KERNEL_H
/* Each source defines the GUIDs that it knows. */
#define INITGUID
#include <ntddk.h>
#include <wdmguid.h>
#include <string.h>
#include <stddef.h>
#include <stdarg.h>
#include <limits.h>

#define DrvRtPoolNxOptIn 1
#define ExInitializeDriverRuntime(flags) ((void)0)
#define ExAllocatePoolUninitialized ExAllocatePoolWithTag
PVOID MmMapIoSpaceEx(PHYSICAL_ADDRESS, SIZE_T, ULONG);
#ifndef MM_DONT_ZERO_ALLOCATION
#define MM_DONT_ZERO_ALLOCATION 1
#endif
#ifndef POOL_NX_ALLOCATION
#define POOL_NX_ALLOCATION 512
#endif

#include <wdf.h>
/* It reads a register that ring 3 may not read. */
KIRQL kmdf_irql(void);
#define KeGetCurrentIrql kmdf_irql
NTSTATUS ZwWaitForSingleObject(HANDLE, BOOLEAN, PLARGE_INTEGER);
/* Prints a debug message. Those above level 0 come with every buffer, and are left out. */
void windrv_debug(int level, const char *format, ...);
#undef __forceinline
#define __forceinline __inline
#undef FORCEINLINE
#define FORCEINLINE __inline
#include <kdebugprint.h>
#undef DPrintf
#define DPrintf(level, ...) ((level) > 0 ? (void)0 : windrv_debug(0, __VA_ARGS__))
#undef KeMemoryBarrier
#define KeMemoryBarrier() __sync_synchronize()
#undef ASSERT
#define ASSERT(what) ((void)0)
#undef NT_ASSERT
#define NT_ASSERT(what) ((void)0)
#undef PAGED_CODE
#define PAGED_CODE() kmdf_paged_code(__func__)
void kmdf_paged_code(const char *function);
#ifndef __analysis_assume
#define __analysis_assume(what) ((void)0)
#endif
#define TRACE_LEVEL_INFORMATION 4
#define TRACE_LEVEL_VERBOSE 5
#define TraceEvents(...) ((void)0)
#define WPP_INIT_TRACING(...) ((void)0)
#define WPP_CLEANUP(...) ((void)0)
#endif
