/* Included before each source of the drivers. VirtIO/linux/types.h defines __attribute__ as
 * nothing, so mingw-w64's headers must be read before it; FORCEINLINE must then do without it. */
#ifndef WINDRV_PRELUDE_H
#define WINDRV_PRELUDE_H
#include <ntddk.h>
#include <string.h>
#include <stddef.h>
#include <stdarg.h>
#include <limits.h>
#include <storport.h>
#include <ntddscsi.h>
#include "missing.h"
#undef __forceinline
#define __forceinline __inline
#undef FORCEINLINE
#define FORCEINLINE static __inline
#include <kdebugprint.h>
#undef DPrintf
#define DPrintf windrv_debug
#undef KeMemoryBarrier
#define KeMemoryBarrier() __sync_synchronize()
#undef ASSERT
#define ASSERT(what) ((void)0)
#undef NT_ASSERT
#define NT_ASSERT(what) ((void)0)
#ifndef _Analysis_assume_
#define _Analysis_assume_(what) ((void)0)
#endif
#endif
