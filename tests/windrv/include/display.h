/* Included before the source of stdvga and before its checks: what Windows' headers have and those
 * of mingw-w64 lack. */
#ifndef WINDRV_DISPLAY_H
#define WINDRV_DISPLAY_H
/* A builtin function that wants the registers of SSE. */
#define __builtin_ia32_sfence() __sync_synchronize()
#include <intrin.h>
/* wdm.h defines them once more, which C++ refuses. */
#define InterlockedBitTestAndSet wdm_InterlockedBitTestAndSet
#define InterlockedBitTestAndReset wdm_InterlockedBitTestAndReset
extern "C" {
#include <ntddk.h>
PVOID MmMapIoSpaceEx(PHYSICAL_ADDRESS, SIZE_T, ULONG);
}
#undef InterlockedBitTestAndSet
#undef InterlockedBitTestAndReset
#define min(a, b) ((a) < (b) ? (a) : (b))
/* It reads a register that ring 3 may not read. */
#undef PAGED_CODE
#define PAGED_CODE() ((void)0)
#endif
