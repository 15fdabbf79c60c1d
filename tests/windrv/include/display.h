/* Included before the source of stdvga and before its checks: what Windows' headers have and those
 * of mingw-w64 lack. */
#ifndef WINDRV_DISPLAY_H
#define WINDRV_DISPLAY_H
#include "ddk.h"
extern "C" PVOID MmMapIoSpaceEx(PHYSICAL_ADDRESS, SIZE_T, ULONG);
#define min(a, b) ((a) < (b) ? (a) : (b))
/* It reads a register that ring 3 may not read. */
#undef PAGED_CODE
#define PAGED_CODE() ((void)0)
#endif
