/* ntddk.h for sources in C++, and with what it lacks. */
#ifndef WINDRV_DDK_H
#define WINDRV_DDK_H
/* A builtin function that wants the registers of SSE. */
#define __builtin_ia32_sfence() __sync_synchronize()
#include <intrin.h>
/* wdm.h defines them once more, which C++ refuses. */
#define InterlockedBitTestAndSet wdm_InterlockedBitTestAndSet
#define InterlockedBitTestAndReset wdm_InterlockedBitTestAndReset
/* The description of an interrupt has grown. */
#define MaximumVector                                                                              \
    MaximumVector;                                                                                 \
    int AffinityPolicy;                                                                            \
    USHORT Group;                                                                                  \
    ULONGLONG TargetedProcessors
#include <ntddk.h>
#undef MaximumVector
#undef InterlockedBitTestAndSet
#undef InterlockedBitTestAndReset
#endif
