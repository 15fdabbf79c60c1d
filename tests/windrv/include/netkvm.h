/* Included before each source of NetKVM and its copy of the library: names of Windows' headers that
 * mingw-w64 lacks, and tracing as a function. Read prelude.h for the reason why headers come first.
 */
#ifndef WINDRV_NETKVM_H
#define WINDRV_NETKVM_H
#include "ndis/ndis.h"
#include <string.h>
#include <stddef.h>
#include <stdarg.h>
#include <limits.h>
#include <stdint.h>
#include "ndis/linux/types.h"

#ifdef __cplusplus
extern "C" {
#endif
/* These read registers that ring 3 may not read. */
KIRQL kmdf_irql(void);
KIRQL ndis_raise(KIRQL);
void ndis_lower(KIRQL);
ULONG ndis_processor(PPROCESSOR_NUMBER);
void ndis_debug(int level, const char *format, ...);
void ndis_bugcheck(const char *file, int line);
#ifdef __cplusplus
}
#endif
#define KeGetCurrentIrql kmdf_irql
#define KeRaiseIrqlToDpcLevel() ndis_raise(DISPATCH_LEVEL)
#define KeRaiseIrqlToSynchLevel() ndis_raise(DISPATCH_LEVEL)
#define KeLowerIrql ndis_lower
#define KeGetCurrentProcessorNumberEx ndis_processor
#undef KeGetCurrentProcessorNumber
#define KeGetCurrentProcessorNumber() ndis_processor(NULL)

/* Annotations for Microsoft's analyser. */
#define _IRQL_saves_global_(...)
#define _IRQL_restores_global_(...)
#define _Acquires__lock_(...)
#define __drv_interlocked
#define __in
#define __inout
#define __out

#undef __forceinline
#define __forceinline __inline
#undef FORCEINLINE
#define FORCEINLINE __inline
#include <kdebugprint.h>
#undef DPrintf
#define DPrintf ndis_debug
#define TraceNoPrefix ndis_debug
#undef KeMemoryBarrier
#define KeMemoryBarrier() __sync_synchronize()
#undef ASSERT
#define ASSERT(what) ((what) ? (void)0 : ndis_bugcheck(__FILE__, __LINE__))
#undef NT_ASSERT
#define NT_ASSERT ASSERT
#ifndef __analysis_assume
#define __analysis_assume(what) ((void)0)
#endif
#undef UNREFERENCED_PARAMETER
#define UNREFERENCED_PARAMETER(it) ((void)(it))
#undef KeInitializeCallbackRecord
#define KeInitializeCallbackRecord(it) ((it)->State = 0)
#define __sdv_save_adapter_context(context) ((void)0)
#ifdef __cplusplus
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
constexpr long long operator"" i64(unsigned long long value)
{
    return value;
}
#endif
typedef struct {
    USHORT sin6_port;
    ULONG sin6_flowinfo;
    USHORT sin6_addr[8];
    ULONG sin6_scope_id;
} NETWORK_ADDRESS_IP6, *PNETWORK_ADDRESS_IP6;

/* Ethernet's addresses. */
#define ETH_IS_BROADCAST(at) (!memcmp(at, "\377\377\377\377\377\377", 6))
#define ETH_IS_MULTICAST(at) (((UCHAR *)(at))[0] & 1)
#define ETH_COPY_NETWORK_ADDRESS(to, from) memcpy(to, from, 6)
#define ETH_COMPARE_NETWORK_ADDRESSES_EQ(a, b, differ) (*(differ) = memcmp(a, b, 6) != 0)
#define BitScanForward64(index, mask) ((mask) ? (*(index) = __builtin_ctzll(mask), TRUE) : FALSE)
/* Only for trace messages, which `ndis_debug` makes. */
#define STRSAFE_FILL_ON_FAILURE 0x400
#define RtlStringCbCatA(...) STATUS_UNSUCCESSFUL
#define RtlStringCbPrintfExA(...) STATUS_UNSUCCESSFUL
#define _vsnprintf_s(...) 0
#define WPP_INIT_TRACING(...) ((void)0)
#define WPP_CLEANUP(...) ((void)0)
#endif
